"""A sweep: an experiment's runs, what is finished skipped, what was broken off resumed.

The first seed runs every value of every line; the best value is judged on the other seeds. Folders
are named by what is in them, so the same run is never made twice, and `sweep.json` says which run
is what: the one thing that a report needs to know.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

from angular_lab.experiments.definition import Experiment, Line
from angular_lab.experiments.statistics import BestRate
from angular_lab.run_folder import SWEEP, RunDir, alone, write_atomically
from angular_lab.sweeps.grid import Grid, make_grid, with_added
from angular_lab.sweeps.kept import kept, would_hide
from angular_lab.sweeps.reuse import reuse
from angular_lab.sweeps.trials import Entry, make_entry, run_entry
from angular_lab.training.build import Models
from angular_lab.training.signals import Preempted, Sigterm
from angular_lab.training.start import STDLIB, check_place

FAILED = ".failed"
WAIT = 0.5  # seconds between looks at runs that other processes make
AGAIN = "the same command goes on"
STDLIB_TEXT = f"{STDLIB} (the Python standard library, as bytes)"


class Sweep:
    """An experiment in a folder. What is done and what is left is read from the run folders each
    time, never remembered: other processes may work on them."""

    def __init__(
        self, experiment: Experiment, root: Path, data: str = "", device: str = ""
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                "a sweep under torchrun: each of its runs is one process; start it without, with "
                "sweep --processes N or as jobs with submit"
            )
        self.experiment, self.root, self.device = experiment, root, device
        self.data = os.path.normpath(data) if data else ""  # data/ is data: names hold the path
        self.until, self.extend = inf, 0
        self.models = Models()
        self.marks: Path | None = None  # where processes that share the work note what failed
        self.say: Callable[[str], None] = _say

    def run(self, budget: float = inf, extend: int = 0) -> None:
        run_together([self], budget, extend)

    def check(self) -> None:
        """Raises ValueError where finished runs that the manifest lists would be in it no more,
        or where there is something to make and no tokens to make it of."""
        lines, first = self.experiment.lines, self.experiment.seeds[0]
        known = {entry.folder for line in lines for entry in self._of(line)}
        hidden = [run for run in kept(self.root) if run.folder not in known]
        if hidden:
            for line in lines:  # without its text, a plan does not know the names of its runs
                check_place(self._entry(line, line.values[0], first).spec)
            raise would_hide(self.experiment, self.data, hidden)
        for entry in self.pending():
            check_place(entry.spec)

    def state(self) -> str:
        """For the start of a command: nobody should train on the default text unknowingly."""
        plan, (done, total) = self.experiment, self.counts()
        data = dict.fromkeys(self.data or line.spec.data for line in plan.lines)
        text = ", ".join(STDLIB_TEXT if name == STDLIB else name for name in data)
        return f"{plan.name}, scale {plan.scale}: {done} of {total} runs done; data: {text}"

    def _of(self, line: Line) -> list[Entry]:
        """All its values on all seeds, with what was added at an edge once, as the folders tell:
        also while a value of the grid itself is to be made again."""
        make, seeds = self._entry, self.experiment.seeds
        values = with_added(line.values, lambda v: any(make(line, v, seed).there for seed in seeds))
        return [make(line, value, seed) for seed in seeds for value in values]

    def left(self) -> list[Entry]:
        """What could run now and has not failed."""
        return [entry for entry in self.pending() if not self._failed(entry)]

    def grid(self, line: Line, extend: int = 0) -> Grid:
        first = self.experiment.seeds[0]
        return make_grid(line, lambda value: self._entry(line, value, first), extend)

    def pending(self) -> list[Entry]:
        """What could run now, each by itself: values on the first seed, and where all of a line's
        are done, its best value on the others. A line with one value has nothing to wait for."""
        return [entry for _, wanted in self._wanted() for entry in wanted if not entry.done]

    def counts(self) -> tuple[int, int]:
        """Runs that are done, and all: also those that wait until their line's value is chosen."""
        done = total = 0
        for waiting, wanted in self._wanted():
            done += sum(entry.done for entry in wanted)
            total += waiting + len(wanted)
        return done, total

    def _wanted(self) -> Iterator[tuple[int, list[Entry]]]:
        """Of every line what could run now or has, and how many seeds wait for a choice."""
        others = self.experiment.seeds[1:]
        for line in self.experiment.lines:
            grid = self.grid(line, self.extend)
            judged = grid.best.lr if grid.best else line.values[0]
            if grid.best or len(line.values) == 1:
                yield 0, [*grid.entries, *(self._entry(line, judged, seed) for seed in others)]
            else:
                made = [entry for entry in self._of(line) if entry.seed in others and entry.done]
                judged_by = {entry.seed: entry for entry in made}  # one counts, once one is chosen
                waiting = 0 if grid.done else len(others) - len(judged_by)
                yield waiting, [*grid.entries, *judged_by.values()]

    @property
    def entries(self) -> list[Entry]:
        """The runs that have begun."""
        lines = self.experiment.lines
        return [entry for line in lines for entry in self._of(line) if entry.there]

    @property
    def chosen(self) -> dict[str, BestRate]:
        grids = ((line.label, self.grid(line)) for line in self.experiment.lines)
        return {label: grid.best for label, grid in grids if grid.best}

    def write(self) -> None:
        """The manifest. What it says is read under the lock, so that the last writer is right."""
        self.root.mkdir(parents=True, exist_ok=True)
        with alone(self.root / f"{SWEEP}.lock"):
            content = json.dumps(self._content(), indent=1)
            write_atomically(self.root / SWEEP, content + "\n")

    def _content(self) -> dict[str, Any]:
        experiment = self.experiment
        return {
            "experiment": experiment.name,
            "scale": experiment.scale,
            "title": experiment.title,
            "lines": [line.label for line in experiment.lines],
            "horizons": experiment.horizons,
            "seeds": experiment.seeds,
            "settled_by": experiment.settled_by,
            "entries": [entry.described() for entry in self.entries],
            "chosen": {
                label: {"value": best.lr, "edge": list(best.extend)}
                for label, best in self.chosen.items()
            },
        }

    def _entry(self, line: Line, value: float, seed: int) -> Entry:
        return make_entry(self.experiment, line, value, seed, self.root, self.data)

    def make_one(self, entries: list[Entry]) -> bool:
        """Make one of these; False where others are at work on all of them."""
        if taken := self._claim(entries):
            self._make(*taken)
        return bool(taken)

    def _claim(self, entries: list[Entry]) -> tuple[Entry, RunDir] | None:
        """The first that nobody else makes; first of all one that needs no new model."""
        for entry in sorted(entries, key=lambda entry: not self.models.fits(entry.spec)):
            run = RunDir(entry.folder)
            if run.try_claim():
                if not entry.done:
                    return entry, run
                run.release()  # somebody finished it since we looked
        return None

    def _make(self, entry: Entry, run: RunDir) -> None:
        try:
            self.say(f"{self.root.name}/{entry.folder.name}")
            self.write()
            if source := reuse(entry, self.device):
                self.say(f"  as {source}")
            else:
                run_entry(entry, run, self.device, self.until, self.models)
        except Preempted:
            raise Preempted(f"{entry.folder.name} is saved") from None
        except Exception:
            if self.marks:
                self._mark(self.marks, entry).touch()
            raise
        finally:
            run.release()
            self.write()

    def _failed(self, entry: Entry) -> bool:
        return self.marks is not None and self._mark(self.marks, entry).exists()

    def _mark(self, marks: Path, entry: Entry) -> Path:
        return marks / f"{self.root.name}.{entry.folder.name}{FAILED}"


def run_together(sweeps: Sequence[Sweep], budget: float = inf, extend: int = 0) -> None:
    """All of them, with one compiled model for all that have its shape. Raises Preempted when the
    budget is spent or at SIGTERM and Ctrl-C, with everything saved; the same call goes on.
    `extend`: how often a grid may grow at the edge where its best value lies. Runs that other
    processes make are waited for once nothing else is left, of any sweep."""
    until = time.monotonic() + budget
    begin(sweeps, extend)
    try:
        make_all(sweeps, until, extend)
    except Preempted as stopped:
        parts = (str(stopped), unfinished(sweeps), AGAIN)  # others may have made the rest
        raise Preempted("; ".join(filter(None, parts))) from None


def begin(sweeps: Sequence[Sweep], extend: int) -> None:
    """Once for a command of however many processes. All are looked at before one is written."""
    for sweep in sweeps:
        sweep.extend = extend
        sweep.check()
    for sweep in sweeps:
        sweep.write()
        sweep.say(sweep.state())


def unfinished(sweeps: Sequence[Sweep]) -> str:
    """Those of which something is left, and how much; "" where all are done."""
    counted = [(sweep.root, *sweep.counts()) for sweep in sweeps]
    return "; ".join(
        f"{root}: {done} of {total} runs done, {total - done} left"
        for root, done, total in counted
        if done < total
    )


def make_all(sweeps: Sequence[Sweep], until: float, extend: int) -> None:
    """What `run_together` does after it has begun."""
    models, waiting = sweeps[0].models, False
    for sweep in sweeps:
        sweep.models, sweep.until, sweep.extend = models, until, extend
    with Sigterm(signal.SIGINT) as stop:
        while left := [(sweep, entries) for sweep in sweeps if (entries := sweep.left())]:
            if stop.received or time.monotonic() >= until:
                raise Preempted("a signal came" if stop.received else "the budget is spent")
            made = any(sweep.make_one(entries) for sweep, entries in left)  # the first that can
            if not made:
                if not waiting:
                    sweeps[0].say("waiting: other processes make all that can be made now")
                time.sleep(WAIT)
            waiting = not made


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
