"""Sweeps by several processes of this machine, which share the store and nothing else.

Each worker is a `Sweep` like one that runs alone, with a compiled model of its own. The lock of a
run folder decides which worker makes which run; when a worker dies, its lock is dropped, and
another one continues the run. What workers print goes to files; which runs they take is logged
here.
"""

import logging
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing import connection
from pathlib import Path
from typing import Any, TextIO

import torch

from angular_lab.data.prepare import cores
from angular_lab.errors import UserError
from angular_lab.experiments.definition import Experiment
from angular_lab.log import configure_logging
from angular_lab.sweeps.progress import SweepProgress
from angular_lab.sweeps.sweep import AGAIN, WAIT, Sweep, begin, make_all, unfinished
from angular_lab.training.signals import PREEMPTED, Preempted, Sigterm, WorkerDied

FOLDER = "workers"  # next to the sweeps' files, with a folder for each machine and call
TAIL = 12  # lines of a dead worker's output
CONTEXT: Any = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What a worker is started with: plain values."""

    number: int
    sweeps: tuple[tuple[Experiment, str], ...]  # with the sweeps' names
    out: Path
    device: str
    until: float  # on the monotonic clock, which the processes of a machine share
    extend: int
    threads: int | None  # on the CPU; None: torch's default
    logs: Path
    max_seeds: int = 0  # of an open pair
    quiet: bool = False  # the parent draws on the terminal, and reports what ends

    @property
    def log(self) -> Path:
        return self.logs / f"worker{self.number}.log"


def run_in_processes(
    sweeps: Sequence[Sweep], processes: int, budget: float = inf, extend: int = 0
) -> None:
    """Run the sweeps as `run_sweeps` does, by `processes` workers. Raises WorkerDied at the end if
    one died; the others continue without it."""
    if processes < 1:
        raise UserError(f"--processes {processes}: it must be at least 1")
    until, first = time.monotonic() + budget, sweeps[0]
    begin(sweeps, extend)
    if not any(sweep.pending() for sweep in sweeps):
        return
    plans = tuple((sweep.experiment, sweep.name) for sweep in sweeps)
    logs = first.path.parent / FOLDER / platform.node() / str(os.getpid())
    threads, quiet = _threads(processes, first.device), sys.stderr.isatty()
    common = (until, extend, threads, logs, first.max_seeds, quiet)
    devices = assign_devices(first.device, processes, torch.cuda.device_count())
    out = first.path.parent.parent
    tasks = [Task(i, plans, out, device, *common) for i, device in enumerate(devices)]
    _clear(logs.parent)
    logs.mkdir(parents=True, exist_ok=True)
    for sweep in sweeps:
        sweep.marks = logs
    log.info("%d workers; their output is in %s", processes, logs)
    with Sigterm(signal.SIGINT) as stop:
        died = _watch(tasks, stop, SweepProgress(sweeps))
    for sweep in sweeps:
        sweep.write()
    left = unfinished(sweeps)
    end = f"{left}; {AGAIN}" if left else "every run is done"
    if died:
        raise WorkerDied(f"{len(died)} of {processes} workers died: {', '.join(died)}; {end}")
    if left:
        raise Preempted(end)


def _clear(machine: Path) -> None:
    """Remove the logs and marks of calls that have ended; others may be at work."""
    for folder in machine.glob("*"):
        if folder.name.isdigit() and not _is_another(int(folder.name)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_another(process: int) -> bool:
    """True if there is such a process, and it is not this one."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return process != os.getpid()


def assign_devices(device: str, processes: int, gpus: int) -> list[str]:
    """Return a device for every worker: several GPUs in turn, unless one is named."""
    if gpus > 1 and device in ("", "cuda"):
        return [f"cuda:{i % gpus}" for i in range(processes)]
    return [device] * processes


def _threads(processes: int, device: str) -> int | None:
    """Divide the cores among the workers: threads that wait for a core spin and slow all down."""
    if "OMP_NUM_THREADS" in os.environ or (device != "cpu" and torch.cuda.is_available()):
        return None
    return max(1, cores() // processes)


def _watch(tasks: list[Task], stop: Sigterm, progress: SweepProgress) -> list[str]:
    """Start all workers, wait for them, pass on a signal. Return which died, and how."""
    running: dict[Any, Task] = {}
    died: dict[int, str] = {}
    asked = False
    try:
        # Ctrl-C reaches all processes of a terminal: workers ignore it, and get SIGTERM from us.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for task in tasks:
            process = CONTEXT.Process(target=_work, args=(task,), name=f"worker {task.number}")
            process.start()
            running[process] = task
        signal.signal(signal.SIGINT, before)
        while running:
            connection.wait([process.sentinel for process in running], WAIT)
            progress.update()
            if stop.received and not asked:
                asked = True
                for process in running:
                    process.terminate()
            for process in [process for process in running if not process.is_alive()]:
                task = running.pop(process)
                if not _is_clean(process.exitcode, asked):
                    progress.clear()
                    died[task.number] = _obituary(task, process.exitcode)
        progress.update(last=True)
    finally:  # leave nothing running, whatever happened here
        for process in running:
            process.kill()
            process.join()
    return [died[number] for number in sorted(died)]


def _is_clean(code: int, asked: bool) -> bool:
    """True if it ended as it should: a worker stopped before it could listen has lost nothing."""
    return code in (0, PREEMPTED) or (asked and code == -signal.SIGTERM)


def _obituary(task: Task, code: int) -> str:
    """Report a death at once, with the last lines of the log; the others may take hours more."""
    how = f"worker {task.number} with exit code {code}"
    with suppress(ValueError):
        how += f" ({signal.Signals(-code).name})"
    lines = task.log.read_text(errors="replace").splitlines() if task.log.exists() else []
    tail = "\n".join(f"  {line}" for line in lines[-TAIL:])
    log.error("%s died. The last lines of %s:\n%s", how, task.log, tail)
    return how


def _work(task: Task) -> None:
    """Run in a worker."""
    terminal = os.fdopen(os.dup(2), "w")
    file = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)  # the descriptors, so that output of libraries and the interpreter goes there
    os.dup2(file, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if task.threads:
        torch.set_num_threads(task.threads)
    configure_logging()
    if not task.quiet:
        _copy_to(terminal, task.number)
    sweeps = [Sweep(plan, task.out, None, task.device, name) for plan, name in task.sweeps]
    for sweep in sweeps:
        sweep.marks, sweep.max_seeds = task.logs, task.max_seeds
    try:
        make_all(sweeps, task.until, task.extend)
    except Preempted as stopped:
        log.info("%s; %s", stopped, AGAIN)
        sys.exit(PREEMPTED)


def _copy_to(terminal: TextIO, number: int) -> None:
    """Log to the terminal as well what is about the sweep, not about the steps of a run."""
    handler = logging.StreamHandler(terminal)
    handler.setFormatter(logging.Formatter(f"worker {number}: %(message)s"))
    logging.getLogger("angular_lab.sweeps").addHandler(handler)


def _end_with_parent() -> None:
    """Save and exit without the parent: no one would pass on a signal or report a death."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
