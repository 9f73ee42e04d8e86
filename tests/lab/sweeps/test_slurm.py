"""Sweeps as jobs: on a fake Slurm, and through submitit's own local executor."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core.job_environment import JobEnvironment

from angular_lab.cli.main import main
from angular_lab.config.spec import ModelSpec, Spec
from angular_lab.data.prepare import prepare
from angular_lab.data.tokenizer import train_tokenizer
from angular_lab.experiments.comparison import EXPERIMENTS, planned
from angular_lab.experiments.definition import Experiment, cooldown_variant
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps import slurm
from angular_lab.sweeps import sweep as sweep_module
from angular_lab.sweeps.sweep import Sweep
from angular_lab.training import build, checkpoint
from angular_lab.training.signals import Preempted, WorkerDied
from angular_lab.training.trainer import Trainer
from tests.lab.runs import LIMIT
from tests.lab.sweeps.fake_slurm import FakeSlurm
from tests.lab.sweeps.small import metrics, record, small, sweep

RESOURCES = slurm.Resources(minutes=10, memory=16, gpus=1, cpus=8, max_requeues=2)
pytestmark = pytest.mark.timeout(2 * LIMIT)


@pytest.fixture
def plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    arm = replace(small(data).arms[0], values=(1e-3, 2e-3))
    tiny = small(data, arms=(arm,), horizons=(4,))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda scale: replace(tiny, scale=scale))
    return tiny


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def jobs(plan: Experiment, out: Path) -> list[slurm.Job]:
    runner = Sweep(plan, out, device="cpu")
    return slurm.jobs(slurm.Round.of(runner), runner.pending())


def warned_at(step: int) -> Any:
    """Return an update of the trainer after which the notice of the time limit comes."""
    update = Trainer.update

    def warned(self: Trainer) -> None:
        update(self)
        if self.step == step - 1:
            signal.raise_signal(signal.SIGUSR2)

    return warned


# -- jobs in this process ----------------------------------------------------------------------


def test_rounds_of_jobs_make_what_a_sweep_makes(plan: Experiment, tmp_path: Path) -> None:
    sweep(plan, tmp_path / "sweep")
    rounds = []
    while batch := jobs(plan, tmp_path / "jobs"):
        rounds.append([job.trials[0][1:] for job in batch])
        for job in batch:
            assert "made" in job()
    assert rounds == [[(1e-3, 0), (2e-3, 0)], [(record(tmp_path / "sweep").chosen["adamw"], 1)]]
    assert metrics(tmp_path / "jobs") == metrics(tmp_path / "sweep")
    assert record(tmp_path / "jobs") == record(tmp_path / "sweep")


def test_a_job_takes_what_no_other_has_begun(plan: Experiment, tmp_path: Path) -> None:
    """Its own trial first; it leaves the next round alone, and never waits for another job."""
    first, second = jobs(plan, tmp_path)
    assert [key[1] for key in second.trials] == [2e-3, 1e-3]
    runner = Sweep(plan, tmp_path, device="cpu")
    taken = RunFolder(runner.next_runs()[0].folder)
    taken.claim()
    result = second()
    assert result == "made 1 run; 1 trial of the round is made by other jobs, or failed"
    taken.release()
    assert second() == "made 1 run"
    assert first() == "made 0 runs"
    assert runner.counts() == (2, 3)


def test_a_run_that_fails_is_not_tried_by_the_other_jobs(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = jobs(plan, tmp_path)
    train = sweep_module.train

    def broken(spec: Spec, *arguments: Any) -> RunFolder:
        if spec.optim.lr == 1e-3:
            raise OSError("the disk is full")
        return train(spec, *arguments)

    monkeypatch.setattr(sweep_module, "train", broken)
    with pytest.raises(OSError, match="the disk is full"):
        first()
    assert second().startswith("made 1 run; 1 trial")


def test_a_job_fits_the_model_to_the_vocabulary(plan: Experiment, tmp_path: Path) -> None:
    texts = [f"document {i} of a corpus with more kinds of tokens than bytes" for i in range(400)]
    prepare(texts, train_tokenizer(texts, 300), tmp_path / "data", val_fraction=0.2, progress=False)
    data = str(tmp_path / "data")
    assert plan.arms[0].spec.model.vocabulary < 300
    runner = Sweep(planned("small", "nano", data), tmp_path, data, "cpu")
    expected = runner.next_runs()[0].folder.resolve()
    job, _ = slurm.jobs(slurm.Round.of(runner), runner.pending())
    job()
    assert RunFolder(expected).read_spec().model.vocabulary == 300


def test_a_job_is_one_process_with_one_model(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cooldowns start from memory, with the trunk's model."""
    cooled = replace(plan, horizons=(4, 8))
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("it read a checkpoint"))
    specs: list[Spec] = []
    make = build.make_model
    monkeypatch.setattr(build, "make_model", lambda s, r: specs.append(s) or make(s, r))
    jobs(cooled, tmp_path)[0]()
    assert len(specs) == 1


def test_jobs_that_share_a_trunk_make_it_once(plan: Experiment, tmp_path: Path) -> None:
    """The test holds the lock of the trunk for a moment; then the job takes it."""
    arm = plan.arms[0]
    shared = replace(plan, horizons=(8, 16), arms=(arm, cooldown_variant(arm, 0.5, 16)))
    first, second = (job for job in jobs(shared, tmp_path) if job.trials[0][1] == 1e-3)
    first, second = (replace(job, trials=job.trials[:1]) for job in (first, second))
    runner = Sweep(shared, tmp_path, device="cpu")
    trunk = RunFolder(runner.next_runs()[0].folder)
    trunk.claim()
    timer = threading.Timer(1.0, trunk.release)
    timer.start()
    began = time.monotonic()
    assert first() == "made 3 runs"
    assert time.monotonic() - began > 0.9
    assert second() == "made 1 run"


def test_a_job_out_of_time_saves_and_continues_later(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without submitit, so nothing requeues it."""
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", warned_at(2))
        with pytest.raises(Preempted, match="everything is saved"):
            jobs(plan, tmp_path / "jobs")[0]()
    sweep(plan, tmp_path / "jobs")
    sweep(plan, tmp_path / "sweep")
    assert metrics(tmp_path / "jobs") == metrics(tmp_path / "sweep")


# -- Slurm -------------------------------------------------------------------------------------


def test_the_batch_script_asks_for_what_the_command_says(
    plan: Experiment, cluster: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "small", "--out", str(tmp_path / "store"), "--partition", "gpu"]
    words += ["--time", "4h", "--memory", "64G", "--cpus", "6", "--account", "lab", "--qos", "low"]
    words += ["--max-parallel", "1", "--set", "slurm_constraint:a100"]
    assert main(words) == 0
    (job,) = cluster.submitted
    options = cluster.options(job)
    expected = {
        "partition": "gpu", "time": "240", "mem": "64GB", "cpus-per-task": "6", "account": "lab",
        "qos": "low", "gpus-per-node": "1", "ntasks-per-node": "1", "nodes": "1", "requeue": "",
        "signal": "USR2@120", "array": "0-1%1", "constraint": "a100", "job-name": "small-nano",
    }  # fmt: skip
    assert expected.items() <= options.items()
    printed = capsys.readouterr().out
    assert "submitted 1; logs are in " in printed
    assert f"for the 1 trial on the other seeds: angular-lab {' '.join(words)}\n" in printed


def test_defaults_of_the_resources(plan: Experiment, cluster: FakeSlurm, tmp_path: Path) -> None:
    assert main(["submit", "small", "--out", str(tmp_path / "store"), "--time", "5m"]) == 0
    options = cluster.options(1)
    assert (options["gpus-per-node"], options["cpus-per-task"], options["mem"]) == (
        "1",
        "8",
        "16GB",
    )
    assert "partition" not in options
    wide = ModelSpec(vocabulary=50_280, sequence=1024, layers=36, width=1280, heads=20)
    assert slurm.default_memory([wide, ModelSpec()]) == 40  # 806M parameters: 8 + 26, in steps of 8


def test_a_job_that_reaches_its_limit_is_requeued_and_loses_nothing(
    plan: Experiment, cluster: FakeSlurm, tmp_path: Path
) -> None:
    """With processes as on a cluster: batch script, srun, submitit, signal, scontrol, again."""
    plan = replace(plan, horizons=(120,), seeds=(0,))
    out = tmp_path / "store"
    runner = Sweep(plan, out, device="cpu")
    first = RunFolder(runner.next_runs()[0].folder)
    slurm.start_round(runner, RESOURCES, None)

    def has_begun() -> bool:
        return first.metrics_path.exists() and len(first.metrics_path.read_bytes()) > 500

    codes = cluster.run(1, 0, has_begun)
    log = next(out.glob("sweeps/jobs/*/1_0_0_log.err")).read_text()
    assert codes == [255, 0], log
    assert cluster.requeued == ["requeue 1_0"]
    assert "is saved; the time is over" in log
    assert runner.counts() == (2, 2), "it also took the other trial"
    sweep(plan, tmp_path / "sweep")
    assert metrics(out) == metrics(tmp_path / "sweep")
    for path in out.glob("runs/*/timing.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == sorted({*steps}), "a step was repeated"


@contextmanager
def as_task(cluster: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Load the first task of job 1 as submitit does, with its signal handlers, in this process."""
    environment = {**cluster.environment(1, 0), "SUBMITIT_EXECUTOR": "slurm"}
    for key, value in {**environment, "SUBMITIT_FOLDER": str(folder)}.items():
        monkeypatch.setenv(key, value)
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT)
    before = {number: signal.getsignal(number) for number in numbers}
    paths = JobEnvironment().paths
    delayed = submitit.core.utils.DelayedSubmission.load(paths.submitted_pickle)
    JobEnvironment()._handle_signals(paths, delayed)
    try:
        yield delayed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_job_is_requeued_so_often_and_not_more(
    plan: Experiment, cluster: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 10 minutes, of which submitit guarantees none: each notice is a time-out."""
    runner = Sweep(plan, tmp_path / "store", device="cpu")
    started = slurm.start_round(runner, RESOURCES, None)
    with monkeypatch.context() as patch:
        for step in (1, 2, 3):
            patch.setattr(Trainer, "update", warned_at(step))
            error = SystemExit if step < 3 else submitit.core.utils.UncompletedJobError
            with as_task(cluster, started[0].paths.folder, patch) as delayed, pytest.raises(error):
                delayed.result()
            patch.undo()
            patch.setenv("PATH", str(cluster.folder / "bin"))
            patch.setenv("FAKE_SLURM", str(cluster.folder))
    assert cluster.requeued == ["requeue 1_0"] * 2
    run = RunFolder(Sweep(plan, tmp_path / "store", device="cpu").next_runs()[0].folder)
    assert max(checkpoint.steps(run.checkpoints)) == 3, "the last attempt is saved as well"


def test_a_cancelled_job_is_saved_and_not_requeued(
    plan: Experiment, cluster: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Sweep(plan, tmp_path / "store", device="cpu")
    started = slurm.start_round(runner, RESOURCES, None)
    update = Trainer.update
    monkeypatch.setattr(
        Trainer, "update", lambda self: (update(self), signal.raise_signal(signal.SIGTERM))
    )
    folder = started[0].paths.folder
    with as_task(cluster, folder, monkeypatch) as delayed, pytest.raises(Preempted, match="saved"):
        delayed.result()
    assert cluster.requeued == []


def test_until_done_submits_the_next_round(
    plan: Experiment, cluster: FakeSlurm, tmp_path: Path
) -> None:
    """The follower depends on the round, has no GPU, and stops when nothing is left."""
    runner = Sweep(plan, tmp_path / "store", device="cpu")
    resources = replace(RESOURCES, partition="gpu")
    *tasks, follower = slurm.start_round(runner, resources, "cpu", follow=True)
    assert [str(job.job_id) for job in tasks] == ["1_0", "1_1"]
    options = cluster.options(2)
    assert options["dependency"] == "afterany:1"
    assert (options["partition"], options.get("gpus-per-node")) == ("cpu", None)
    assert "srun" not in (cluster.folder / "job-2").read_text()
    load = submitit.core.utils.DelayedSubmission.load
    then = load(follower.paths.submitted_pickle)
    with pytest.raises(WorkerDied, match="the last round finished no trial"):
        then.function()
    for job in tasks:
        load(job.paths.submitted_pickle).result()
    assert then.result() == "submitted 3, 4"
    assert cluster.options(3)["partition"] == "gpu"
    assert cluster.options(4)["dependency"] == "afterany:3"
    for job in jobs(plan, tmp_path / "store"):
        job()
    assert then.function() == "small-nano: 3 of 3 trials done; nothing is left to submit"
    assert cluster.submitted == [1, 2, 3, 4]


def test_what_slurm_refuses_is_an_error_in_one_line(
    plan: Experiment, cluster: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "small", "--out", str(tmp_path / "store"), "--time", "1h"]
    assert main([*words, "--partition", "nowhere"]) == 2
    expected = "error: sbatch refused the jobs: sbatch: error: invalid partition specified: nowhere"
    assert expected in capsys.readouterr().err
    assert main([*words, "--set", "slurm_colour:red"]) == 2
    assert "--set: Unknown argument 'colour'" in capsys.readouterr().err


# -- this machine ------------------------------------------------------------------------------


def test_submitits_local_executor(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, with the progress of its runs."""
    words = ["submit", "small", "--out", str(tmp_path), "--executor", "local", "--device", "cpu"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "made 2 runs" in printed.out
    assert f"next, with 1 trial left: angular-lab {' '.join(words)}\n" in printed.out
    assert "run 2 of 3: adamw" in printed.err
    assert Sweep(plan, tmp_path).counts() == (2, 3)


def test_until_done_runs_all_rounds_here(
    plan: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(slurm, "submit", lambda jobs, *_: [job() for job in jobs])
    monkeypatch.setattr(slurm, "wait", lambda results, _: results)
    words = ["submit", "small", "--out", str(tmp_path), "--executor", "local", "--device", "cpu"]
    assert main([*words, "--until-done"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("made ") == 2
    assert "next, with" not in printed
    assert Sweep(plan, tmp_path).counts() == (3, 3)
    assert main(words) == 0
    assert "0 trials on this machine" in capsys.readouterr().out


def test_a_job_that_saved_and_stopped_is_not_dead(tmp_path: Path) -> None:
    """In submitit's processes: an exception comes back as text only."""

    def saved() -> str:
        raise Preempted("saved at step 2")

    def broken() -> str:
        raise OSError("the disk is full")

    started = slurm.submit([saved, lambda: "made"], tmp_path, "local", RESOURCES)
    expected = r"job \d+ saved its run.*1 of 2 jobs.*run the same command"
    with pytest.raises(Preempted, match=f"(?s){expected}"):
        slurm.wait(started)
    started += slurm.submit([broken], tmp_path, "local", RESOURCES)
    with pytest.raises(WorkerDied, match=r"(?s)job \d+ failed, see .*disk is full.*saved its run"):
        slurm.wait(started)


# -- the command -------------------------------------------------------------------------------


def test_a_dry_run_prints_what_would_be_submitted(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "small", "--out", str(tmp_path / "store"), "--dry-run", "--time", "90m"]
    assert main([*words, "--partition", "gpu", "--seeds", "3..6"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("seed 3") == 2
    assert (
        "2 jobs (slurm), each with partition gpu, 1 GPU, 8 CPUs, 16 GB, limit 1h30m" in printed.out
    )
    assert "3 more trials, on the other seeds" in printed.out
    assert "longest trial: " in printed.out
    assert "passes over" in printed.err
    assert not (tmp_path / "store").exists()
    assert main([*words, "--executor", "local", "--memory", "64G", "--partition", "gpu"]) == 0
    expected = "\n2 trials on this machine: limit 1h30m, at most 1 at a time, up to 10 requeues\n"
    assert expected in capsys.readouterr().out


def test_the_status_of_a_sweep_and_what_is_left_to_submit(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial of which another process makes a run is not submitted again."""
    words = ["submit", "small", "--out", str(tmp_path), "--status"]
    run = RunFolder(Sweep(plan, tmp_path).next_runs()[0].folder)
    run.claim()
    assert main(words) == 0
    state, counts, training = capsys.readouterr().out.splitlines()
    assert state.startswith("small, scale nano: 0 of 3 trials done; ")
    assert counts == "0 of 3 runs done, 0 diverged; 1.54e+03 tokens left"
    assert training.startswith("  adamw 0.001 seed 0")
    assert main([*words[:-1], "--dry-run", "--time", "1h"]) == 0
    printed = capsys.readouterr().out
    assert "1 job (slurm)" in printed
    assert "1 further trial is being made by other processes now" in printed


def test_the_estimate_is_compared_with_the_time_that_is_allowed(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paper's teaser: 20 jobs of hours each."""
    words = ["submit", "teaser", "--scale", "paper", "--data", str(data), "--passes", "10000"]
    words += ["--dry-run", "--max-requeues", "1", "--out", str(tmp_path)]
    assert main([*words, "--time", "1h"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("seed 0") == 20
    assert (
        "hours on an H100 at 40% of its peak; --time and --max-requeues allow 2.0 hours" in printed
    )
    assert main([*words, "--time", "8h"]) == 0
    assert "not enough" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--executor", "cloud"], "--executor cloud: it must be local or slurm"),
        ([], "--time is missing: give the time limit of a job, as in --time 4h"),
        (["--time", "1h", "--gpus", "2"], "--gpus 2: a trial is one process on one GPU"),
        (["--time", "2m"], "--time 2m: it must be at least 5m"),
        (["--time", "1h", "--cpus", "0"], "--cpus 0: it must be at least 1"),
        (["--time", "1h", "--max-parallel", "-1"], "--max-parallel -1: it must be at least 1"),
        (["--time", "1h", "--max-parallel", "0"], "--max-parallel 0: it must be at least 1"),
        (["--time", "1h"], "--executor slurm: Could not detect"),
        (["--time", "1h", "--dry-run", "--set", "partition"], "write PARAMETER:VALUE"),
        (["--time", "1h", "--until", "settled"], "--until settled without --max-seeds N"),
    ],
)
def test_bad_input(
    plan: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["submit", "small", "--out", str(tmp_path), *words]) == 2
    assert expected in capsys.readouterr().err


def test_memory_and_seeds_are_parsed(plan: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--memory", "much"], ["--memory", "0G"], ["--seeds", "3..1"], ["--seeds", "a"]):
        with pytest.raises(SystemExit):
            main(["submit", "small", "--time", "1h", *words])
        assert "write memory as in 64G" in (err := capsys.readouterr().err) or "0..2" in err
