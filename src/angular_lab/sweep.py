"""A sweep: an experiment's runs, what is finished skipped, what was broken off resumed.

The first seed runs every value of every line; the best value is judged on the other seeds. Folders
are named by what is in them, so the same run is never made twice, and `sweep.json` says which run
is what: the one thing that a report needs to know.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from angular_lab.build import Models
from angular_lab.experiments import Experiment, Line
from angular_lab.health import NotFinite
from angular_lab.overrides import override
from angular_lab.rundir import RunDir, write_atomically
from angular_lab.runs import branch_spec, train, trunk_spec
from angular_lab.spec import Spec
from angular_lab.statistics import BestRate, best_rate

MANIFEST = "sweep.json"
DIVERGED = "DIVERGED"


@dataclass(frozen=True)
class Entry:
    """One run of a sweep, with its cool-downs: a line at a value with a seed."""

    line: Line
    value: float
    seed: int
    spec: Spec
    folder: Path
    horizons: tuple[int, ...]

    @property
    def ends(self) -> dict[int, Path]:
        """The folder whose last evaluation counts, for every horizon."""
        if len(self.horizons) == 1:
            return {self.horizons[0]: self.folder}
        return {h: self.folder.with_name(f"{self.folder.name}-to{h}") for h in self.horizons}

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).exists()

    @property
    def done(self) -> bool:
        return self.diverged or all(RunDir(folder).done for folder in self.ends.values())

    @property
    def loss(self) -> float:
        """At the longest horizon; infinite where training broke down."""
        if self.diverged:
            return inf
        lines = RunDir(self.ends[self.horizons[-1]]).read_metrics()
        return next(line["val_loss"] for line in reversed(lines) if "val_loss" in line)


def make_entry(
    experiment: Experiment, line: Line, value: float, seed: int, root: Path, data: str = ""
) -> Entry:
    spec = override(line.spec, [f"{line.axis}={value!r}"])
    spec = replace(spec, seed=seed, steps=experiment.horizons[-1], data=data or spec.data)
    content = json.dumps([spec.to_dict(), experiment.horizons], sort_keys=True)
    label = "".join(c if c.isalnum() else "-" for c in line.label).strip("-")
    short = hashlib.sha256(content.encode()).hexdigest()[:8]
    name = f"{label}-{line.axis.rpartition('.')[2]}{value:g}-seed{seed}-{short}"
    return Entry(line, value, seed, spec, root / name, experiment.horizons)


class Sweep:
    """Runs in this process, within a time: `until` on the monotonic clock."""

    def __init__(
        self, experiment: Experiment, root: Path, data: str = "", device: str = ""
    ) -> None:
        self.experiment, self.root, self.data, self.device = experiment, root, data, device
        self.until = inf
        self.models = Models()
        self.entries: list[Entry] = []
        self.chosen: dict[str, BestRate] = {}

    def run(self, budget: float = inf, extend: int = 0) -> None:
        """All of it. Raises Preempted when the budget is spent, with everything saved; the same
        call goes on. `extend`: how often a grid may grow at the edge where its best value lies."""
        self.until = time.monotonic() + budget
        for line in self.experiment.lines:
            first, *others = self.experiment.seeds
            values = list(line.values)
            for _ in range(extend + 1):
                best = self._choose(line, values, first)
                if len(best.extend) != 1:  # inside, or a single value: there is no grid to extend
                    break
                values = _extended(values, best.extend[0])
            self.chosen[line.label] = best
            for seed in others:
                self._run_one(self._entry(line, best.lr, seed))
            self._write()

    def _entry(self, line: Line, value: float, seed: int) -> Entry:
        return make_entry(self.experiment, line, value, seed, self.root, self.data)

    def _choose(self, line: Line, values: list[float], seed: int) -> BestRate:
        entries = [self._entry(line, value, seed) for value in values]
        for entry in entries:
            self._run_one(entry)
        return best_rate({entry.value: entry.loss for entry in entries})

    def pending(self) -> list[Entry]:
        """What could run now, each by itself: values on the first seed, and where all of a line's
        are done, its best value on the others."""
        found: list[Entry] = []
        first, *others = self.experiment.seeds
        for line in self.experiment.lines:
            tried = [self._entry(line, value, first) for value in line.values]
            if all(entry.done for entry in tried):
                best = best_rate({entry.value: entry.loss for entry in tried})
                tried = [self._entry(line, best.lr, seed) for seed in others]
            found += [entry for entry in tried if not entry.done]
        return found

    def _run_one(self, entry: Entry) -> None:
        if entry.folder not in [known.folder for known in self.entries]:
            self.entries.append(entry)
            self._write()
        if not entry.done:
            run_entry(entry, self.device, self.until, self.models)
        self._write()

    def _write(self) -> None:
        experiment = self.experiment
        content = {
            "experiment": experiment.name,
            "scale": experiment.scale,
            "title": experiment.title,
            "lines": [line.label for line in experiment.lines],
            "horizons": experiment.horizons,
            "seeds": experiment.seeds,
            "entries": [_described(entry, self.root) for entry in self.entries],
            "chosen": {
                label: {"value": best.lr, "edge": list(best.extend)}
                for label, best in self.chosen.items()
            },
        }
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomically(self.root / MANIFEST, json.dumps(content, indent=1) + "\n")


def run_entry(
    entry: Entry, device: str = "", until: float = inf, models: Models | None = None
) -> None:
    try:
        for spec, folder in _stages(entry):
            train(spec, folder, True, device, until, models)
    except NotFinite as error:  # a rate too high is a result, not a failure of the sweep
        write_atomically(entry.folder / DIVERGED, f"{error}\n")
        print(f"{entry.folder.name} diverged: {error}", file=sys.stderr)


def _stages(entry: Entry) -> Iterator[tuple[Spec, Path]]:
    """Specs and folders to train, in order; a branch's spec needs its trunk to be there."""
    if len(entry.horizons) == 1:
        yield entry.spec, entry.folder
        return
    share = entry.spec.schedule.decay
    trunk, branches = trunk_spec(entry.spec, list(entry.horizons), share)
    yield trunk, entry.folder
    for start, length in branches:
        yield (
            branch_spec(RunDir(entry.folder), start, length),
            entry.ends[start + length],
        )


def _extended(values: list[float], edge: str) -> list[float]:
    """One more value at the edge, as far from it as its neighbour is, in ratio."""
    ordered = sorted(values)
    if edge == "below":
        return [ordered[0] ** 2 / ordered[1], *ordered]
    return [*ordered, ordered[-1] ** 2 / ordered[-2]]


def _described(entry: Entry, root: Path) -> dict[str, Any]:
    status = "diverged" if entry.diverged else "done" if entry.done else "unfinished"
    return {
        "label": entry.line.label,
        "axis": entry.line.axis,
        "value": entry.value,
        "seed": entry.seed,
        "status": status,
        "folders": {str(h): str(path.relative_to(root)) for h, path in entry.ends.items()},
    }
