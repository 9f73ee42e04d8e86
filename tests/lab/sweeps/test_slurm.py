"""Sweeps as jobs, through submitit's own local executor."""

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.config.spec import Spec
from angular_lab.data.prepare import prepare
from angular_lab.data.tokenizer import train_tokenizer
from angular_lab.experiments.comparison import EXPERIMENTS, experiment, planned
from angular_lab.experiments.definition import Experiment, cooldown_variant
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps import slurm
from angular_lab.sweeps import sweep as sweep_module
from angular_lab.sweeps.sweep import Sweep
from angular_lab.training import build, checkpoint
from angular_lab.training.signals import Preempted, WorkerDied
from angular_lab.training.trainer import Trainer
from tests.lab.sweeps.small import metrics, record, small, sweep


@pytest.fixture
def plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    arm = replace(small(data).arms[0], values=(1e-3, 2e-3))
    tiny = small(data, arms=(arm,), horizons=(4,))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda scale: replace(tiny, scale=scale))
    return tiny


def jobs(plan: Experiment, out: Path) -> list[slurm.Job]:
    return slurm.jobs(Sweep(plan, out, device="cpu"), None)


def test_rounds_of_jobs_make_what_a_sweep_makes(plan: Experiment, tmp_path: Path) -> None:
    """Here in this process, job by job; submitit's processes come below."""
    sweep(plan, tmp_path / "sweep")
    rounds = []
    while batch := jobs(plan, tmp_path / "jobs"):
        rounds.append([(job.value, job.seed) for job in batch])
        for job in batch:
            assert RunFolder(job()).done
    assert rounds == [[(1e-3, 0), (2e-3, 0)], [(record(tmp_path / "sweep").chosen["adamw"], 1)]]
    assert metrics(tmp_path / "jobs") == metrics(tmp_path / "sweep")
    assert record(tmp_path / "jobs") == record(tmp_path / "sweep")


def test_a_job_fits_the_model_to_the_vocabulary(plan: Experiment, tmp_path: Path) -> None:
    texts = [f"document {i} of a corpus with more kinds of tokens than bytes" for i in range(400)]
    prepare(texts, train_tokenizer(texts, 300), tmp_path / "data", val_fraction=0.2, progress=False)
    data = str(tmp_path / "data")
    assert plan.arms[0].spec.model.vocabulary < 300
    runner = Sweep(planned("small", "nano", data), tmp_path, data, "cpu")
    expected = runner.next_runs()[0].folder.resolve()
    job, _ = slurm.jobs(runner, data)
    assert Path(job()) == expected
    assert RunFolder(expected).read_spec().model.vocabulary == 300


def test_a_job_is_one_process_with_one_model(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cooldowns start from memory, with the trunk's model."""
    cooled = replace(plan, horizons=(4, 8))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: cooled)
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("it read a checkpoint"))
    specs: list[Spec] = []
    make = build.make_model
    monkeypatch.setattr(build, "make_model", lambda s, r: specs.append(s) or make(s, r))
    jobs(cooled, tmp_path)[0]()
    assert len(specs) == 1


def test_jobs_that_share_a_trunk_wait_for_each_other(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test holds the lock of the trunk for a while."""
    arm = plan.arms[0]
    shared = replace(plan, horizons=(8, 16), arms=(arm, cooldown_variant(arm, 0.5, 16)))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: shared)
    first, second = (job for job in jobs(shared, tmp_path) if job.value == 1e-3)
    runner = Sweep(shared, tmp_path, device="cpu")
    trunk = RunFolder(runner.next_runs()[0].folder)
    trunk.claim()
    timer = threading.Timer(1.0, trunk.release)
    timer.start()
    began = time.monotonic()
    assert RunFolder(first()).done
    assert time.monotonic() - began > 0.9
    assert RunFolder(second()).done
    assert runner.counts()[0] == 2


def test_a_job_does_not_repeat_what_was_finished_since(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(plan, tmp_path)[0]
    folder = job()
    monkeypatch.setattr(sweep_module, "train", lambda *_: pytest.fail("it trained"))
    assert job() == folder


def test_a_job_out_of_time_saves_and_continues_later(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit warns with SIGUSR2."""
    update = Trainer.update

    def warned(self: Trainer) -> None:
        update(self)
        if self.step == 1:
            signal.raise_signal(signal.SIGUSR2)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", warned)
        with pytest.raises(Preempted, match="is saved"):
            jobs(plan, tmp_path / "jobs")[0]()
    sweep(plan, tmp_path / "jobs")
    sweep(plan, tmp_path / "sweep")
    assert metrics(tmp_path / "jobs") == metrics(tmp_path / "sweep")


def test_submitits_local_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real experiment, because another process does not see one that a test defines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    good = jobs(experiment("speedrun", "nano"), tmp_path)[:1]
    bad = replace(good[0], data=str(tmp_path / "nowhere"))
    started = slurm.submit([bad, *good], tmp_path / "jobs", "local", {"timeout_min": 5})
    with pytest.raises(WorkerDied, match=r"(?s)job \d+ failed, see .*nowhere: no such folder"):
        slurm.wait(started)
    assert RunFolder(slurm.wait(started[1:])[0]).done
    assert len(record(tmp_path, "speedrun-nano").trials) == 1


def test_a_job_that_saved_and_stopped_is_not_dead(tmp_path: Path) -> None:
    """In submitit's processes: an exception comes back as text only."""

    def saved() -> str:
        raise Preempted("saved at step 2")

    def broken() -> str:
        raise OSError("the disk is full")

    started = slurm.submit([saved, lambda: "made"], tmp_path, "local", {"timeout_min": 5})
    expected = r"job \d+ saved its run.*1 of 2 jobs.*run the same command"
    with pytest.raises(Preempted, match=f"(?s){expected}"):
        slurm.wait(started)
    started += slurm.submit([broken], tmp_path, "local", {"timeout_min": 5})
    with pytest.raises(WorkerDied, match=r"(?s)job \d+ failed, see .*disk is full.*saved its run"):
        slurm.wait(started)


def test_a_dry_run_prints_what_would_be_submitted(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "small", "--out", str(tmp_path / "store"), "--dry-run"]
    assert main([*words, "--set", "slurm_partition:gpu", "--set", "timeout_min:120"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("seed 0") == 2
    assert "2 jobs; executor=slurm" in printed
    assert "slurm_partition=gpu, timeout_min=120" in printed
    assert not (tmp_path / "store").exists()


def test_bad_input(
    plan: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["submit", "small", "--out", str(tmp_path), "--executor", "cloud"]) == 2
    assert "--executor cloud: it must be local or slurm" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert main(["submit", "small", "--out", str(tmp_path)]) == 2
    assert "--executor slurm: Could not detect" in capsys.readouterr().err
    assert main(["submit", "small", "--dry-run", "--set", "partition"]) == 2
    assert "write PARAMETER:VALUE" in capsys.readouterr().err
