"""The trials of a sweep as jobs, through submitit: a Slurm array, or processes of this machine.

Jobs write the same run folders and sweep file as `sweep`; the lock of a run folder keeps two of
them from making the same run. A round submits what can run now; once it is done, the next one
judges on further seeds.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angular_lab.errors import UserError
from angular_lab.experiments.comparison import planned
from angular_lab.sweeps.sweep import AGAIN, WAIT, Sweep
from angular_lab.training.signals import Preempted, Sigterm, WorkerDied

EXECUTORS = ("local", "slurm")
# submitit sends it before the time limit. Its own handler would exit at once, without saving.
WARNING = signal.SIGUSR2


@dataclass(frozen=True)
class Job:
    """A trial by plain values: what another process needs to make it."""

    experiment: str
    scale: str
    name: str  # of the sweep
    out: Path
    data: str | None
    device: str
    arm: str
    value: float
    seed: int

    def __call__(self) -> str:
        """Make the runs of the trial that are left, and return the folder of the last one."""
        plan = planned(self.experiment, self.scale, self.data)
        sweep = Sweep(plan, self.out, self.data, self.device, self.name)
        sweep.check()  # the package or the data may have changed since
        arm = next(arm for arm in sweep.experiment.arms if arm.label == self.arm)
        trial = sweep.trial(arm, self.value, self.seed)
        with Sigterm(WARNING) as stop:
            while runs := trial.next_runs:
                if not any(sweep.try_make(run) for run in runs):
                    if stop.received:
                        raise Preempted("a signal arrived while another job made the run")
                    time.sleep(WAIT)  # another job makes what they share, such as a trunk
        return str(trial.runs[-1].folder)


def parameter(text: str) -> tuple[str, Any]:
    """submitit's `slurm_partition:gpu` or `timeout_min:120` from the command line."""
    key, colon, value = text.partition(":")
    if not colon:
        raise UserError(f"--set {text}: write PARAMETER:VALUE, such as slurm_partition:gpu")
    return key, int(value) if value.isdigit() else value


def jobs(sweep: Sweep, data: str | None) -> list[Job]:
    plan, out = sweep.experiment, sweep.path.parent.parent.resolve()
    common = (plan.name, plan.scale, sweep.name, out, data, sweep.device)
    return [Job(*common, trial.arm.label, trial.value, trial.seed) for trial in sweep.pending()]


def describe(jobs: Sequence[Job], settings: dict[str, Any]) -> str:
    """Describe what would be submitted."""
    lines = [f"{job.arm:30} {job.value:<10g} seed {job.seed}" for job in jobs]
    chosen = ", ".join(f"{key}={value}" for key, value in settings.items())
    return "\n".join([*lines, f"{len(jobs)} jobs; {chosen}"])


def attempt(job: Callable[[], str]) -> str | Preempted:
    """Return Preempted as a value: an exception of a job reaches `wait` as text only."""
    try:
        return job()
    except Preempted as stopped:
        return stopped


def submit(
    jobs: Sequence[Callable[[], str]], folder: Path, executor: str, settings: dict[str, Any]
) -> list[Any]:
    """Start the jobs through submitit; `settings` are its parameters (slurm_partition, ...)."""
    if executor not in EXECUTORS:
        raise UserError(f"--executor {executor}: it must be {' or '.join(EXECUTORS)}")
    try:
        import submitit
    except ImportError:
        raise ImportError("submitting needs submitit: pip install submitit") from None
    try:
        machine = submitit.AutoExecutor(folder=folder, cluster=executor)
    except RuntimeError as error:  # no srun
        why = f"--executor {executor}: {error} --executor local starts them here"
        raise UserError(why) from None
    machine.update_parameters(**settings)
    with machine.batch():
        if executor == "local":
            return [machine.submit(attempt, job) for job in jobs]
        # No one waits for these, and Slurm should not report an unfinished run as COMPLETED.
        return [machine.submit(job) for job in jobs]


def wait(started: Sequence[Any]) -> list[str]:
    """Wait for the jobs and return the folders they made. A failed job does not hide the results
    of others. Raises WorkerDied if one failed, Preempted if one stopped before its end."""
    folders: list[str] = []
    failed: list[str] = []
    saved: list[str] = []
    for job in started:
        if error := job.exception():
            failed.append(f"job {job.job_id} failed, see {job.paths.stderr}:\n{error}")
        elif isinstance(result := job.result(), Preempted):
            saved.append(f"job {job.job_id} saved its run and stopped")
        else:
            folders.append(result)
    if saved:
        saved.append(f"{len(saved)} of {len(started)} jobs are unfinished; {AGAIN}")
    if failed:
        raise WorkerDied("\n".join([*failed, *saved]))
    if saved:
        raise Preempted("\n".join(saved))
    return folders
