"""The progress of sweeps: which runs are done, which are being trained, how long it will take.

All of it is read from the run folders, so it covers every process that works on the store. On a
terminal a few lines are redrawn in place; elsewhere a line is printed when a run ends, and the
state once a minute. No torch here.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from angular_lab.run_folder import RunFolder, is_locked
from angular_lab.sweeps.trials import PlannedRun, Trial
from angular_lab.text import clock, short_number

if TYPE_CHECKING:  # it imports this module
    from angular_lab.sweeps.sweep import Sweep

TAIL = 8192  # bytes at the end of a log in which its last line is
REDRAW, LOOK, STATE = 1.0, 5.0, 60.0  # seconds: on a terminal; elsewhere; between two state lines
SHARE = 0.1  # of the time at most for looking at the folders


@dataclass(frozen=True)
class Training:
    """A run that a process works on now."""

    label: str
    step: int
    steps: int
    loss: float | None
    speed: float | None  # tokens per second; None if the last logged step was not timed

    def __str__(self) -> str:
        loss = f"loss {self.loss:.4f}" if self.loss is not None else ""
        waiting = "starting" if self.loss is None else ""  # some steps are not timed
        speed = f"{short_number(self.speed)} tokens/s" if self.speed else waiting
        return f"{self.label:36} step {f'{self.step:,}/{self.steps:,}':15} {loss:12} {speed}"


@dataclass(frozen=True)
class Ended:
    """A run that is done or diverged."""

    label: str
    loss: float | None  # of validation
    seconds: float
    diverged: bool

    def __str__(self) -> str:
        end = "diverged" if self.diverged else "no loss" if self.loss is None else ""
        return f"{self.label:36} {end or f'loss {self.loss:.4f}'}  in {clock(self.seconds)}"


@dataclass(frozen=True)
class Snapshot:
    """The runs of some sweeps at one moment; a run that several trials share counts once."""

    total: int  # with those of trials that are not chosen yet
    ended: dict[str, Path]  # folders by name
    labels: dict[str, str]  # of all runs, by name
    training: tuple[Training, ...]
    diverged: int
    failed: int
    tokens_done: int
    tokens_left: float

    @property
    def speed(self) -> float:
        return sum(run.speed or 0.0 for run in self.training)


def take_snapshot(sweeps: "Sequence[Sweep]") -> Snapshot:
    """Read the state of all runs, planned so far and to come."""
    labels: dict[str, str] = {}
    ended: dict[str, Path] = {}
    training: list[Training] = []
    total, diverged, failed, tokens, left = 0, 0, 0, 0, 0.0
    for sweep in sweeps:
        for waiting, trials in sweep.planned():
            total += waiting * len(trials[0].runs)
            left += waiting * sum(_tokens(run, run.spec.steps) for run in trials[0].runs)
            for label, run in _labelled(trials):
                name = run.folder.name
                if name in labels:
                    continue
                labels[name], total = label, total + 1
                folder = RunFolder(run.folder)
                step = _step(run, folder)
                tokens += _tokens(run, step)
                if run.finished:
                    ended[name] = run.folder
                    diverged += folder.diverged
                else:
                    left += _tokens(run, run.spec.steps) - _tokens(run, step)
                    failed += sweep.has_failed(run)
                    if is_locked(run.folder):
                        training.append(_training(label, run, folder, step))
    return Snapshot(total, ended, labels, tuple(training), diverged, failed, tokens, left)


def announcement(sweeps: "Sequence[Sweep]", planned: PlannedRun) -> str:
    """Return run 3 of 12: its label, for a run that starts."""
    now = take_snapshot(sweeps)
    name = planned.folder.name
    return f"run {len(now.ended) + 1} of {now.total}: {now.labels.get(name, name)} ({name})"


def label(trial: Trial, run: PlannedRun) -> str:
    """Return the arm, the value and the seed; where there is a trunk, also which run it is."""
    text = f"{trial.arm.label} {trial.value:g} seed {trial.seed}"
    if trial.trunk is None:
        return text
    return f"{text} trunk" if run is trial.trunk else f"{text} to {run.spec.steps:,}"


def _labelled(trials: Sequence[Trial]) -> Iterator[tuple[str, PlannedRun]]:
    for trial in trials:
        # A trunk may have been removed since; one that diverged has no cooldowns.
        runs = [run for run in trial.runs if run.exists] if trial.done else trial.runs
        yield from ((label(trial, run), run) for run in runs)


def _tokens(run: PlannedRun, step: int) -> int:
    return max(0, step - run.spec.parent_step) * run.spec.tokens_per_step


def _step(run: PlannedRun, folder: RunFolder) -> int:
    if folder.done:
        return run.spec.steps
    last = last_line(folder.metrics_path)
    return min(run.spec.steps, last["step"]) if last else run.spec.parent_step


def _training(label: str, run: PlannedRun, folder: RunFolder, step: int) -> Training:
    metrics, timing = last_line(folder.metrics_path), last_line(folder.timing_path)
    loss = metrics.get("loss") if metrics else None
    speed = timing.get("tokens_per_second") if timing else None
    return Training(label, step, run.spec.steps, loss, speed)


def last_line(path: Path) -> dict[str, Any] | None:
    """Return the last complete line of a log; None if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            return values
    return None


def ended_run(label: str, folder: Path) -> Ended:
    """Return how a run ended. Its time is the sum over all times it was started."""
    run = RunFolder(folder)
    last = last_line(run.metrics_path) or {}
    seconds, before = 0.0, 0.0
    for line in run.timing_path.read_text().splitlines() if run.timing_path.exists() else ():
        try:
            now = float(json.loads(line)["seconds"])
        except (ValueError, KeyError, TypeError):
            continue
        seconds += now - before if now > before else now
        before = now
    return Ended(label, last.get("val_loss", last.get("loss")), seconds, run.diverged)


class SweepProgress:
    """Shows the progress of sweeps while other processes work on them: call `update` often."""

    def __init__(
        self,
        sweeps: "Sequence[Sweep]",
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sweeps, self.now = sweeps, now
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        first = take_snapshot(sweeps)
        self.shown = {*first.ended}
        self.tokens = first.tokens_done
        self.began = self.stated = now()
        self.next = self.began
        self.drawn = 0  # lines of the block on the terminal

    def update(self, last: bool = False) -> None:
        """Print the runs that have ended since, and the state if it is due."""
        began = self.now()
        if began < self.next and not last:
            return
        snapshot = take_snapshot(self.sweeps)
        took = self.now() - began
        self.next = began + max(REDRAW if self.terminal else LOOK, took / SHARE)
        lines = self._ended(snapshot)
        state = [self.state(snapshot), *(f"  {run}" for run in snapshot.training)]
        if self.terminal:
            self._redraw(lines, [] if last else state)
        else:
            if (began - self.stated >= STATE or lines) and not last:
                lines += state if began - self.stated >= STATE else state[:1]
                self.stated = began
            for line in lines:
                print(line, file=self.stream, flush=True)

    def state(self, snapshot: Snapshot) -> str:
        """Return the line about all runs. The remaining time is extrapolated from the tokens that
        were trained on since this process looks, compilation and evaluation included."""
        names = ", ".join(sweep.name for sweep in self.sweeps)
        elapsed = self.now() - self.began
        rate = (snapshot.tokens_done - self.tokens) / elapsed if elapsed > 0 else 0.0
        is_known = rate > 0 and snapshot.tokens_left > 0
        left = f"about {clock(snapshot.tokens_left / rate)} left" if is_known else ""
        counts = {"training": len(snapshot.training), "diverged": snapshot.diverged}
        counts["failed"] = snapshot.failed
        others = [f"{count} {what}" for what, count in counts.items() if count]
        done = f"{len(snapshot.ended)} of {snapshot.total} runs done"
        speed = f"{short_number(snapshot.speed)} tokens/s" if snapshot.speed else ""
        parts = (", ".join([done, *others]), speed, f"{clock(elapsed)} elapsed", left)
        return f"{names}: {'; '.join(filter(None, parts))}"

    def clear(self) -> None:
        """Remove the block from the terminal, before something else is printed there."""
        if self.drawn:
            print(f"\033[{self.drawn}A\033[J", end="", file=self.stream, flush=True)
            self.drawn = 0

    def _ended(self, snapshot: Snapshot) -> list[str]:
        new = [name for name in snapshot.ended if name not in self.shown]
        lines = []
        for name in new:
            self.shown.add(name)
            run = ended_run(snapshot.labels[name], snapshot.ended[name])
            lines.append(f"run {len(self.shown)} of {snapshot.total}: {run}")
        return lines

    def _redraw(self, lines: list[str], block: list[str]) -> None:
        self.clear()
        width = shutil.get_terminal_size().columns - 1
        for line in (*lines, *(text[:width] for text in block)):
            print(line, file=self.stream)
        self.stream.flush()
        self.drawn = len(block)
