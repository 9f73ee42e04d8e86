"""Sweeps in other processes, through submitit's own local executor."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.cli.main import main
from angular_lab.config.spec import Spec
from angular_lab.data.prepare import prepare
from angular_lab.data.tokenizer import train_tokenizer
from angular_lab.experiments import comparison as experiments
from angular_lab.experiments.comparison import EXPERIMENTS, planned
from angular_lab.experiments.definition import Experiment, Line, trained_by
from angular_lab.run_folder import RunDir
from angular_lab.sweeps import slurm as launch
from angular_lab.sweeps.sweep import Sweep
from angular_lab.training import build, checkpoint
from angular_lab.training.signals import Preempted, WorkerDied
from angular_lab.training.trainer import Trainer
from tests.lab.runs import tiny
from tests.lab.sweeps.sweeps import manifest, metrics


@pytest.fixture
def plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    spec = tiny(data, save_every=0)
    line = Line("adamw", trained_by(spec, "adamw"), (1e-3, 2e-3))
    made = Experiment("small", "nano", "A test", (line,), (4,), (0, 1))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda scale: replace(made, scale=scale))
    return made


def test_rounds_of_jobs_make_what_a_sweep_makes(plan: Experiment, tmp_path: Path) -> None:
    """Here in this process, job by job; what a process of its own does is the next test."""
    there, here = (Sweep(plan, tmp_path / name, device="cpu") for name in ("jobs", "sweep"))
    assert [(job.value, job.seed) for job in launch.jobs(there)] == [(1e-3, 0), (2e-3, 0)]
    for job in launch.jobs(there):
        assert RunDir(job()).done
    here.run()
    (last,) = launch.jobs(there)
    assert (last.value, last.seed) == (here.chosen["adamw"].lr, 1)
    last()
    assert launch.jobs(there) == []
    for folder in (tmp_path / "sweep").glob("*/metrics.jsonl"):
        assert (
            folder.read_bytes()
            == (tmp_path / "jobs" / folder.parent.name / folder.name).read_bytes()
        )


def test_jobs_write_the_manifest_of_a_sweep(plan: Experiment, tmp_path: Path) -> None:
    there, here = (Sweep(plan, tmp_path / name, device="cpu") for name in ("jobs", "sweep"))
    here.run()
    while found := launch.jobs(there):
        for job in found:
            job()
            assert manifest(tmp_path / "jobs")["entries"][-1]["status"] == "done"
    assert manifest(tmp_path / "jobs") == manifest(tmp_path / "sweep")


def test_a_job_fits_the_model_to_the_text_as_the_sweep_does(
    plan: Experiment, tmp_path: Path
) -> None:
    texts = [f"document {i} of a text with more kinds of tokens than bytes" for i in range(400)]
    prepare(texts, train_tokenizer(texts, 300), tmp_path / "data", val_fraction=0.2, progress=False)
    data = str(tmp_path / "data")
    assert plan.lines[0].spec.model.vocabulary < 300
    sweep = Sweep(planned("small", "nano", data), tmp_path / "runs", data, "cpu")
    wanted = sweep.pending()[0].folder.resolve()
    job, _ = launch.jobs(sweep)
    assert Path(job()) == wanted
    assert RunDir(wanted).read_spec().model.vocabulary == 300


def test_a_job_does_not_hide_what_is_finished(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package may be another one by the time that it starts."""
    first, second = launch.jobs(Sweep(plan, tmp_path, device="cpu"))
    first()
    before = manifest(tmp_path)
    (line,) = plan.lines
    changed = replace(plan, lines=(replace(line, spec=replace(line.spec, batch=8)),))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: changed)
    with pytest.raises(ValueError, match=r"leave out 1 finished run, .*the plan has changed"):
        second()
    assert manifest(tmp_path) == before


def test_a_job_is_one_process_with_one_model(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cool-downs start from memory, with the trunk's model."""
    cooled = replace(plan, horizons=(4, 8))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: cooled)
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("it read a checkpoint"))
    made: list[Spec] = []
    make = build.make_model
    monkeypatch.setattr(build, "make_model", lambda s, r: made.append(s) or make(s, r))
    launch.jobs(Sweep(cooled, tmp_path, device="cpu"))[0]()
    assert len(made) == 1


def test_a_job_leaves_a_run_to_who_has_it(plan: Experiment, tmp_path: Path) -> None:
    job = launch.jobs(Sweep(plan, tmp_path, device="cpu"))[0]
    other = RunDir(Sweep(plan, tmp_path).pending()[0].folder)
    other.claim()
    with pytest.raises(ValueError, match="is in use by another process"):
        job()
    other.release()


@pytest.mark.parametrize("how", ["done", "diverged"])
def test_a_job_does_not_make_what_another_finished_since(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Between submitting and starting, a sweep may have come by."""
    sweep = Sweep(plan, tmp_path, device="cpu")
    job, entry = launch.jobs(sweep)[0], sweep.pending()[0]
    if how == "done":
        job()
    else:
        entry.folder.mkdir(parents=True)
        (entry.folder / "DIVERGED").touch()
    monkeypatch.setattr(launch, "run_entry", lambda *_, **__: pytest.fail("it trained"))
    assert job() == str(entry.folder)
    assert manifest(tmp_path)["entries"][0]["status"] == how
    again = RunDir(entry.folder)
    assert again.try_claim(), "it was let go"
    again.release()


def test_a_job_whose_time_is_over_saves_and_goes_on_later(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit warns with SIGUSR2."""
    there, here = (Sweep(plan, tmp_path / name, device="cpu") for name in ("jobs", "sweep"))
    update = Trainer.update

    def warned(self: Trainer) -> None:
        update(self)
        if self.step == 1:
            signal.raise_signal(signal.SIGUSR2)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", warned)
        with pytest.raises(Preempted, match="saved at step 2"):
            launch.jobs(there)[0]()
    assert manifest(tmp_path / "jobs")["entries"][0]["status"] == "unfinished"
    there.run()
    here.run()
    assert metrics(tmp_path / "jobs") == metrics(tmp_path / "sweep")


def test_submitits_local_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real experiment, because another process does not see a test's own; its data is made in
    the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    plan = experiments.experiment("speedrun", "nano")
    found = launch.jobs(Sweep(plan, tmp_path / "runs", device="cpu"))[:1]
    bad = replace(found[0], data=str(tmp_path / "nowhere"))
    started = launch.submit([bad, *found], tmp_path / "jobs", "local", {"timeout_min": 5})
    with pytest.raises(WorkerDied, match=r"(?s)job \d+ failed, see .*nowhere: no such folder"):
        launch.wait(started)
    folder = launch.wait(started[1:])[0]
    assert RunDir(folder).done
    assert [e["status"] for e in manifest(tmp_path / "runs")["entries"]] == ["done"]


def test_a_job_that_saved_and_left_is_not_dead(tmp_path: Path) -> None:
    """In processes of submitit's: what they raise comes back as text only."""

    def saved() -> str:
        raise Preempted("saved at step 2; go on with --resume auto")

    def broken() -> str:
        try:
            saved()
        finally:
            raise OSError("the disk is full")

    started = launch.submit([saved, lambda: "made"], tmp_path, "local", {"timeout_min": 5})
    wanted = r"job \d+ saved its run.*1 of 2 jobs.*the same command goes on"
    with pytest.raises(Preempted, match=f"(?s){wanted}"):
        launch.wait(started)
    started += launch.submit([broken], tmp_path, "local", {"timeout_min": 5})
    with pytest.raises(WorkerDied, match=r"(?s)job \d+ failed, see .*disk is full.*saved its run"):
        launch.wait(started)


def test_submit_leaves_like_a_job_that_saved(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Started:
        job_id = "7"

        def exception(self) -> None:
            return None

        def result(self) -> Preempted:
            return Preempted("saved at step 2")

    monkeypatch.setattr(launch, "submit", lambda *_: [Started()])
    assert main(["submit", "small", "--out", str(tmp_path), "--executor", "local"]) == 75
    assert "the same command goes on" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_done(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "small", "--out", str(tmp_path / "runs"), "--dry-run"]
    assert main([*words, "--set", "slurm_partition:gpu", "--set", "timeout_min:120"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("seed 0") == 2
    assert "2 jobs; executor=slurm" in shown
    assert "slurm_partition=gpu, timeout_min=120" in shown
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_an_extended_grid(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(plan, tmp_path, device="cpu")
    sweep.run()
    edge = sweep.chosen["adamw"].extend
    words = ["submit", "small", "--out", str(tmp_path), "--dry-run"]
    assert main(words) == 0
    assert "0 jobs" in capsys.readouterr().out
    assert main([*words, "--extend", "1"]) == 0
    assert {"above": "0.004", "below": "0.0005"}[edge[0]] in capsys.readouterr().out


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
