"""The trials of a sweep as jobs, through submitit: a Slurm array, or processes of this machine.

A submission is a round: the trials that can run now, one array task for each. A task is one process
on one GPU. It makes its own trial, then trials of the round that no other task has begun, and ends
when nothing is left to take: it never waits on a GPU. Before the time limit it saves its run and
puts itself back into the queue. Trials on further seeds are the next round.
"""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any

from angular_lab.config.spec import ModelSpec
from angular_lab.errors import UserError
from angular_lab.experiments.cost import model_size
from angular_lab.experiments.definition import Experiment
from angular_lab.log import configure_logging
from angular_lab.run_folder import is_locked
from angular_lab.sweeps.progress import SweepProgress
from angular_lab.sweeps.sweep import AGAIN, WAIT, Sweep
from angular_lab.sweeps.trials import PlannedRun, Trial
from angular_lab.text import counted
from angular_lab.training.signals import Preempted, Sigterm, WorkerDied

EXECUTORS = ("local", "slurm")
# submitit sends it before the time limit. Its own handler would exit at once, without saving.
WARNING = signal.SIGUSR2
NOTICE = 120  # seconds before the limit: the step is finished, and the run saved
SHORTEST = 5  # minutes: a shorter limit leaves no time between start and notice
PATIENCE = 6  # looks at trials that other tasks hold, before a task ends
FOLLOWER_MINUTES = 30
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resources:
    """What a job asks for. None: the cluster's default."""

    minutes: int
    memory: int  # GB
    gpus: int
    cpus: int
    max_requeues: int
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    max_parallel: int | None = None  # tasks that run at the same time
    more: tuple[tuple[str, Any], ...] = ()  # submitit's own parameters

    def check(self) -> None:
        if self.gpus > 1:
            raise UserError(
                f"--gpus {self.gpus}: a trial is one process on one GPU, so a job has one; for "
                "more GPUs at the same time raise --max-parallel, and train a single run on "
                "several with torchrun"
            )
        for option, value, least in (
            ("--gpus", self.gpus, 0),
            ("--cpus", self.cpus, 1),
            ("--memory", self.memory, 1),
            ("--max-requeues", self.max_requeues, 0),
            ("--max-parallel", 1 if self.max_parallel is None else self.max_parallel, 1),
        ):
            if value < least:
                raise UserError(f"{option} {value}: it must be at least {least}")
        if self.minutes < SHORTEST:
            raise UserError(
                f"--time {self.minutes}m: it must be at least {SHORTEST}m, because a job saves its "
                f"run {NOTICE} seconds before the end"
            )

    def parameters(self, name: str) -> dict[str, Any]:
        """Return them as submitit names them."""
        wanted: dict[str, Any] = {
            "name": name,
            "timeout_min": self.minutes,
            "mem_gb": self.memory,
            "nodes": 1,
            "tasks_per_node": 1,
            "cpus_per_task": self.cpus,
            "gpus_per_node": self.gpus or None,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_qos": self.qos,
            "slurm_array_parallelism": self.max_parallel,
            "slurm_signal_delay_s": NOTICE,
            # some clusters do not requeue unless the job allows it
            "slurm_additional_parameters": {"requeue": True},
            **dict(self.more),
        }
        return {key: value for key, value in wanted.items() if value is not None}

    def __str__(self) -> str:
        names = ("partition", "account", "qos")
        chosen = [f"{name} {x}" for name in names if (x := getattr(self, name))]
        chosen += [f"{self.gpus} GPU", f"{self.cpus} CPUs", f"{self.memory} GB", self.limits]
        return ", ".join([*chosen, *(f"{key}={value}" for key, value in self.more)])

    @property
    def limits(self) -> str:
        """What holds with every executor, as text."""
        hours, minutes = divmod(self.minutes, 60)
        limit = (
            f"{minutes}m" if not hours else f"{hours}h{minutes:02d}m" if minutes else f"{hours}h"
        )
        parallel = f", at most {self.max_parallel} at a time" if self.max_parallel else ""
        return f"limit {limit}{parallel}, up to {counted(self.max_requeues, 'requeue')}"


def default_memory(models: Sequence[ModelSpec]) -> int:
    """Return the GB of host memory for a job: 8, and twice the weights and state in float32, which
    are 16 bytes per parameter; in steps of 8, at least 16."""
    largest = max(model_size(model)[0] for model in {*models})
    return max(16, 8 * ceil((8 + 2 * 16 * largest / 1e9) / 8))


@dataclass(frozen=True)
class Round:
    """A sweep by plain values, and where a submission of it writes."""

    plan: Experiment
    name: str  # of the sweep
    out: Path
    device: str
    extend: int
    max_seeds: int
    folder: Path  # for logs, and marks of what failed

    @staticmethod
    def of(sweep: Sweep, stamp: str | None = None) -> "Round":
        out = sweep.path.parent.parent.resolve()
        stamp = stamp or time.strftime("%Y%m%d-%H%M%S")
        folder = sweep.path.parent.resolve() / "jobs" / f"{sweep.name}-{stamp}"
        options = (sweep.device, sweep.extend, sweep.max_seeds)
        return Round(sweep.experiment, sweep.name, out, *options, folder)

    def sweep(self) -> Sweep:
        sweep = Sweep(self.plan, self.out, None, self.device, self.name)
        sweep.extend, sweep.max_seeds, sweep.marks = self.extend, self.max_seeds, self.folder
        return sweep


class TimeLimit(Sigterm):
    """Graceful shutdown that knows whether the notice before the time limit has come."""

    def __init__(self) -> None:
        super().__init__(WARNING)
        self.warned = False

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.warned = True
        super()._pass_on(number, _frame)


@dataclass(frozen=True)
class Job:
    """A task of the array: all trials of the round, its own first."""

    round: Round
    trials: tuple[tuple[str, float, int], ...]  # arm, value, seed

    def __call__(self) -> str:
        """Make what is left of the round and not taken by another task; return what was made."""
        configure_logging()
        sweep = self.round.sweep()
        sweep.check()  # the data may have changed since
        self.round.folder.mkdir(parents=True, exist_ok=True)
        made, stop = list[str](), TimeLimit()
        try:
            with stop:
                self._make(sweep, stop, made)
        except Preempted as stopped:
            if not stop.warned:
                raise  # cancelled; a job that Slurm preempts is requeued by Slurm itself
            log.info("%s; the time is over", stopped)
            _requeue()
        left = sum(not trial.done for trial in self._trials(sweep))
        of_others = f"{counted(left, 'trial')} of the round {'is' if left == 1 else 'are'}"
        rest = f"; {of_others} made by other jobs, or failed" if left else ""
        return f"made {counted(len(made), 'run')}{rest}"

    def checkpoint(self) -> Any:
        """submitit asks for what to run after a requeue: the same, as all is in the store."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def _make(self, sweep: Sweep, stop: TimeLimit, made: list[str]) -> None:
        looks = 0
        while (runs := self._runs(sweep)) and looks < PATIENCE:
            if stop.received:
                raise Preempted("a signal arrived between two runs")
            run = next((run for run in runs if sweep.try_make(run)), None)
            if run is None:
                looks += 1
                time.sleep(WAIT)
            else:
                looks = 0
                made.append(run.folder.name)

    def _trials(self, sweep: Sweep) -> list[Trial]:
        arms = {arm.label: arm for arm in sweep.experiment.arms}
        return [sweep.trial(arms[label], value, seed) for label, value, seed in self.trials]

    def _runs(self, sweep: Sweep) -> list[PlannedRun]:
        runs = (run for trial in self._trials(sweep) for run in trial.next_runs)
        return [run for run in runs if not sweep.has_failed(run)]


def _requeue() -> None:
    """Let submitit put the job back into the queue: its handler does, and exits. It raises if the
    job was requeued too often. Without submitit there is no handler."""
    if not callable(signal.getsignal(WARNING)):
        raise Preempted("the time is over; everything is saved")
    signal.raise_signal(WARNING)


@dataclass(frozen=True)
class Attempt:
    """A job that returns Preempted as a value: its exceptions reach `wait` as text only."""

    job: Callable[[], str]

    def __call__(self) -> str | Preempted:
        try:
            return self.job()
        except Preempted as stopped:
            return stopped

    def checkpoint(self) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass(frozen=True)
class Follower:
    """A small job that starts when a round has ended, and submits the next one."""

    round: Round
    resources: Resources
    partition: str | None  # of the follower
    done: int  # trials when the round was submitted

    def __call__(self) -> str:
        import submitit

        configure_logging()
        sweep = self.round.sweep()
        sweep.check()
        done, total = sweep.counts()
        if not free_trials(sweep):
            state = f"{done} of {counted(total, 'trial')} done"
            return f"{sweep.name}: {state}; nothing is left to submit"
        if done <= self.done:
            raise WorkerDied(
                f"the last round finished no trial, so no other one is submitted: see the logs in "
                f"{self.round.folder}, then {AGAIN}"
            )
        with submitit.helpers.clean_env():  # or the new jobs inherit the options of this one
            started = start_round(sweep, self.resources, self.partition, follow=True)
        return f"submitted {', '.join(str(job.job_id) for job in started)}"


def free_trials(sweep: Sweep) -> list[Trial]:
    """Return the unfinished trials of which no process makes a run now."""
    trials = sweep.pending()
    return [t for t in trials if not any(is_locked(run.folder) for run in t.next_runs)]


def jobs(round_: Round, trials: Sequence[Trial], tasks: int | None = None) -> list[Job]:
    """Return a job for each trial, or `tasks` jobs that share them."""
    keys = [(trial.arm.label, trial.value, trial.seed) for trial in trials]
    count = len(keys) if tasks is None else min(tasks, len(keys))
    return [Job(round_, tuple(keys[i:] + keys[:i])) for i in range(count)]


def start_round(
    sweep: Sweep, resources: Resources, follower_partition: str | None, follow: bool = False
) -> list[Any]:
    """Submit what can run now to Slurm; with `follow`, also the job that submits the next round."""
    round_ = Round.of(sweep)
    done = sweep.counts()[0]
    sweep.write()
    batch = jobs(round_, free_trials(sweep))
    started = submit(batch, round_.folder, "slurm", resources, sweep.name)
    if follow:
        array = str(started[0].job_id).partition("_")[0]
        small = replace(
            resources, minutes=FOLLOWER_MINUTES, memory=8, gpus=0, cpus=1, max_parallel=None,
            partition=follower_partition or resources.partition,
            more=(
                ("slurm_use_srun", False),  # a job step cannot submit jobs on every cluster
                ("slurm_additional_parameters", {"dependency": f"afterany:{array}"}),
            ),
        )  # fmt: skip
        then = Follower(round_, resources, follower_partition, done)
        started += submit([then], round_.folder, "slurm", small, f"{sweep.name}-next")
    return started


def submit(
    jobs: Sequence[Callable[[], str]],
    folder: Path,
    executor: str,
    resources: Resources,
    name: str = "angular-lab",
) -> list[Any]:
    """Start the jobs through submitit."""
    if executor not in EXECUTORS:
        raise UserError(f"--executor {executor}: it must be {' or '.join(EXECUTORS)}")
    try:
        import submitit
    except ImportError:
        raise ImportError("submitting needs submitit: pip install submitit") from None
    try:
        limit = {f"{executor}_max_num_timeout": resources.max_requeues}
        machine = submitit.AutoExecutor(folder=folder, cluster=executor, **limit)
    except RuntimeError as error:  # no srun
        why = f"--executor {executor}: {error} --executor local starts them here"
        raise UserError(why) from None
    try:
        machine.update_parameters(**resources.parameters(name))
        with machine.batch():
            # No one waits for those of Slurm, which should not report a stopped run as COMPLETED.
            return [machine.submit(Attempt(job) if executor == "local" else job) for job in jobs]
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"sbatch refused the jobs: {error}") from None
    except (AssertionError, NameError, ValueError) as error:  # a parameter that --set names
        raise UserError(f"--set: {error}") from None


def wait(started: Sequence[Any], progress: SweepProgress | None = None) -> list[str]:
    """Wait for the jobs and return their results. A failed job does not hide the results of
    others. Raises WorkerDied if one failed, Preempted if one stopped before its end."""
    while progress and not all(job.done() for job in started):
        progress.update()
        time.sleep(WAIT)
    if progress:
        progress.update(last=True)
    results: list[str] = []
    failed: list[str] = []
    saved: list[str] = []
    for job in started:
        if error := job.exception():
            failed.append(f"job {job.job_id} failed, see {job.paths.stderr}:\n{error}")
        elif isinstance(result := job.result(), Preempted):
            saved.append(f"job {job.job_id} saved its run and stopped")
        else:
            results.append(f"job {job.job_id} {result}")
    if saved:
        saved.append(f"unfinished: {len(saved)} of {counted(len(started), 'job')}; {AGAIN}")
    if failed:
        raise WorkerDied("\n".join([*failed, *saved]))
    if saved:
        raise Preempted("\n".join(saved))
    return results


def parameter(text: str) -> tuple[str, Any]:
    """submitit's `slurm_constraint:a100` from the command line."""
    key, colon, value = text.partition(":")
    if not colon:
        raise UserError(f"--set {text}: write PARAMETER:VALUE, such as slurm_constraint:a100")
    return key, int(value) if value.isdigit() else value
