"""A sweep's runs as jobs of their own, through submitit: an array of Slurm's, or here.

They write the same folders and manifest as `sweep`; a folder's lock keeps two from making the
same run. A round takes what can run now; when it is done, the next one judges on further seeds.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angular_lab.experiments.comparison import planned
from angular_lab.run_folder import RunDir
from angular_lab.sweeps.reuse import reuse
from angular_lab.sweeps.sweep import AGAIN, Sweep
from angular_lab.sweeps.trials import Entry, make_entry, run_entry
from angular_lab.training.signals import Preempted, Sigterm, WorkerDied

EXECUTORS = ("local", "slurm")
# submitit sends it before the time is over. Its own handler would leave at once, nothing saved.
WARNING = signal.SIGUSR2


@dataclass(frozen=True)
class Job:
    """An entry by plain values: what another process needs to make it again."""

    experiment: str
    scale: str
    root: Path
    data: str
    device: str
    label: str
    value: float
    seed: int

    def __call__(self) -> str:
        plan = planned(self.experiment, self.scale, self.data)
        line = next(line for line in plan.lines if line.label == self.label)
        entry = make_entry(plan, line, self.value, self.seed, self.root, self.data)
        sweep, run = Sweep(plan, self.root, self.data, self.device), RunDir(entry.folder)
        sweep.check()  # the package, or the data, may be others by now
        run.claim()
        try:
            # somebody may have made it since the job was submitted
            if not entry.done and not reuse(entry, self.device):
                sweep.write()
                with Sigterm(WARNING):
                    run_entry(entry, run, self.device, models=sweep.models)
        finally:
            run.release()
            sweep.write()
        return str(entry.folder)


def parameter(text: str) -> tuple[str, Any]:
    """submitit's `slurm_partition:gpu` or `timeout_min:120` from the command line."""
    key, colon, value = text.partition(":")
    if not colon:
        raise ValueError(f"--set {text}: write PARAMETER:VALUE, such as slurm_partition:gpu")
    return key, int(value) if value.isdigit() else value


def jobs(sweep: Sweep) -> list[Job]:
    plan = sweep.experiment
    common = (plan.name, plan.scale, sweep.root.resolve(), sweep.data, sweep.device)

    def job(entry: Entry) -> Job:
        return Job(*common, entry.line.label, entry.value, entry.seed)

    return [job(entry) for entry in sweep.pending()]


def described(found: Sequence[Job], settings: dict[str, Any]) -> str:
    """What would be submitted, for a look before it is."""
    lines = [f"{job.label:30} {job.value:<10g} seed {job.seed}" for job in found]
    chosen = ", ".join(f"{key}={value}" for key, value in settings.items())
    return "\n".join([*lines, f"{len(found)} jobs; {chosen}"])


def attempt(job: Callable[[], str]) -> str | Preempted:
    """What a job raises reaches `wait` as a text; that it saved and left is told by a value."""
    try:
        return job()
    except Preempted as stopped:
        return stopped


def submit(
    found: Sequence[Callable[[], str]], folder: Path, executor: str, settings: dict[str, Any]
) -> list[Any]:
    """Start the jobs through submitit; `settings` are its parameters (slurm_partition, ...)."""
    if executor not in EXECUTORS:
        raise ValueError(f"--executor {executor}: it must be {' or '.join(EXECUTORS)}")
    try:
        import submitit
    except ImportError:
        raise ImportError("submitting wants submitit: pip install submitit") from None
    try:
        machine = submitit.AutoExecutor(folder=folder, cluster=executor)
    except RuntimeError as error:  # no srun
        why = f"--executor {executor}: {error} --executor local starts them here"
        raise ValueError(why) from None
    machine.update_parameters(**settings)
    with machine.batch():
        if executor == "local":
            return [machine.submit(attempt, job) for job in found]
        # Nobody waits for them, and Slurm should not call a run that is not finished COMPLETED.
        return [machine.submit(job) for job in found]


def wait(started: Sequence[Any]) -> list[str]:
    """The folders that the jobs made, when all have ended. One that failed does not hide the
    others' results; where none did, those that saved and left raise Preempted."""
    folders: list[str] = []
    failed: list[str] = []
    saved: list[str] = []
    for job in started:
        if error := job.exception():
            failed.append(f"job {job.job_id} failed, see {job.paths.stderr}:\n{error}")
        elif isinstance(result := job.result(), Preempted):
            saved.append(f"job {job.job_id} saved its run and left")
        else:
            folders.append(result)
    if saved:
        saved.append(f"{len(saved)} of {len(started)} jobs are unfinished; {AGAIN}")
    if failed:
        raise WorkerDied("\n".join([*failed, *saved]))
    if saved:
        raise Preempted("\n".join(saved))
    return folders
