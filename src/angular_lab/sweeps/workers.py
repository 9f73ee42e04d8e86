"""A sweep by several processes of this machine, which share its folder and nothing else.

Each is a `Sweep` like the one that runs alone, with a compiled model of its own. The lock of a run
folder decides who makes which run; with a worker dies its lock, and another goes on with the
run. What workers print goes to files; which runs they take is said here.
"""

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
from typing import Any

import torch

from angular_lab.data.prepare import cores
from angular_lab.experiments.definition import Experiment
from angular_lab.sweeps.sweep import AGAIN, WAIT, Sweep, begin, make_all, unfinished
from angular_lab.training.signals import PREEMPTED, Preempted, Sigterm, WorkerDied

FOLDER = "workers"  # with a folder for each machine that works on the sweep, and call on it
EVERY = "every run is done"
TAIL = 12  # lines of a dead worker's output
# spawn: CUDA and torch's threads do not survive a fork. Not a subprocess of the command line: an
# experiment is passed as the value it is, and waiting for several ends comes with the library.
CONTEXT: Any = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Task:
    """What a worker is started with: plain values."""

    number: int
    experiments: tuple[tuple[Experiment, Path], ...]  # with the folders of their runs
    data: str
    device: str
    until: float  # on the monotonic clock, which the processes of a machine share
    extend: int
    threads: int  # on the CPU; 0: as torch likes
    owner: int  # the process that started it

    @property
    def log(self) -> Path:
        here = self.experiments[0][1] / FOLDER / platform.node()
        return here / str(self.owner) / f"worker{self.number}.log"


def run_in_processes(
    sweeps: Sequence[Sweep], processes: int, budget: float = inf, extend: int = 0
) -> None:
    """As `run_together`, by `processes` workers. Raises WorkerDied at the end where one died; the
    others have gone on without it."""
    if processes < 1:
        raise ValueError(f"--processes {processes}: it must be at least 1")
    until, first = time.monotonic() + budget, sweeps[0]
    begin(sweeps, extend)
    if not any(sweep.pending() for sweep in sweeps):
        return
    plans = tuple((sweep.experiment, sweep.root) for sweep in sweeps)
    common = (until, extend, _threads(processes, first.device), os.getpid())
    devices = spread(first.device, processes, torch.cuda.device_count())
    tasks = [Task(i, plans, first.data, device, *common) for i, device in enumerate(devices)]
    logs = tasks[0].log.parent
    _clear(logs.parent)
    logs.mkdir(parents=True, exist_ok=True)
    first.say(f"{processes} workers; what they print is in {logs}")
    with Sigterm(signal.SIGINT) as stop:
        died = _watch(tasks, stop)
    for sweep in sweeps:
        sweep.write()
    left = unfinished(sweeps)
    end = f"{left}; {AGAIN}" if left else EVERY
    if died:
        raise WorkerDied(f"{len(died)} of {processes} workers died: {', '.join(died)}; {end}")
    if left:
        raise Preempted(end)


def _clear(machine: Path) -> None:
    """Remove logs and marks of what failed of calls that are over; others may be at work."""
    for folder in machine.glob("*"):
        if folder.name.isdigit() and not _is_another(int(folder.name)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_another(process: int) -> bool:
    """Whether there is such a process, and it is not this one."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return process != os.getpid()


def spread(device: str, processes: int, gpus: int) -> list[str]:
    """A device for every worker: where there are several GPUs and none is named, in turn."""
    if gpus > 1 and device in ("", "cuda"):
        return [f"cuda:{i % gpus}" for i in range(processes)]
    return [device] * processes


def _threads(processes: int, device: str) -> int:
    """Cores are divided: threads that wait for a core spin, and all get slow."""
    if "OMP_NUM_THREADS" in os.environ or (device != "cpu" and torch.cuda.is_available()):
        return 0
    return max(1, cores() // processes)


def _watch(tasks: list[Task], stop: Sigterm) -> list[str]:
    """Start all and wait for their ends; pass a signal on. Who died, and how."""
    running: dict[Any, Task] = {}
    died: dict[int, str] = {}
    asked = False
    try:
        # Ctrl-C reaches all processes of a terminal: they are born deaf to it, and get SIGTERM.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for task in tasks:
            process = CONTEXT.Process(target=_work, args=(task,), name=f"worker {task.number}")
            process.start()
            running[process] = task
        signal.signal(signal.SIGINT, before)
        while running:
            connection.wait([process.sentinel for process in running], WAIT)
            if stop.received and not asked:
                asked = True
                for process in running:
                    process.terminate()
            for process in [process for process in running if not process.is_alive()]:
                task = running.pop(process)
                if not _is_clean(process.exitcode, asked):
                    died[task.number] = _obituary(task, process.exitcode)
    finally:  # nothing is left running, whatever happened here
        for process in running:
            process.kill()
            process.join()
    return [died[number] for number in sorted(died)]  # not as the clock had it


def _is_clean(code: int, asked: bool) -> bool:
    """One that was asked to leave before it could listen has lost nothing."""
    return code in (0, PREEMPTED) or (asked and code == -signal.SIGTERM)


def _obituary(task: Task, code: int) -> str:
    """To the screen at once, with the last lines of the log; the rest may go on for hours."""
    how = f"worker {task.number} with exit code {code}"
    with suppress(ValueError):
        how += f" ({signal.Signals(-code).name})"
    lines = task.log.read_text(errors="replace").splitlines() if task.log.exists() else []
    print(f"{how} died. The last lines of {task.log}:", file=sys.stderr)
    for line in lines[-TAIL:]:
        print(f"  {line}", file=sys.stderr)
    sys.stderr.flush()
    return how


def _work(task: Task) -> None:
    """What a worker does."""
    screen = os.dup(2)
    log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)  # the descriptors, so that what libraries and the interpreter say goes there
    os.dup2(log, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if task.threads:
        torch.set_num_threads(task.threads)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError):  # a screen that is gone is no reason to stop
            os.write(screen, f"worker {task.number}: {text}\n".encode())

    sweeps = [Sweep(plan, root, task.data, task.device) for plan, root in task.experiments]
    for sweep in sweeps:
        sweep.say, sweep.marks = say, task.log.parent
    try:
        make_all(sweeps, task.until, task.extend)
    except Preempted as stopped:
        say(f"{stopped}; {AGAIN}")
        sys.exit(PREEMPTED)


def _end_with_parent() -> None:
    """Without a parent nobody would pass on a signal, or tell of a death: save and leave."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
