"""One run of a sweep, with its cool-downs: what it is called, how far it is, and how it is made."""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

from angular_lab.config.overrides import keys, override
from angular_lab.config.spec import Spec
from angular_lab.experiments.definition import Experiment, Line
from angular_lab.run_folder import DIVERGED, RunDir
from angular_lab.training.build import Models
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.start import branch_spec, train, trunk_spec

# What may differ between an entry and its finished folders: what trunks and cool-downs set
# themselves (the name holds the horizons), and what no loss depends on. A new setting counts.
FREE = {
    "recipe", "steps", "micro_batch", "eval_every", "save_every", "keep", "pins", "log_every",
    "angle_every", "compile", "deterministic", "parallel", "loggers", "parent",
    "parent_step", "schedule.kind", "schedule.decay_steps",
    "dashboard.project", "dashboard.entity", "dashboard.group", "dashboard.tags",
}  # fmt: skip
COMPARED = {key: attrgetter(key) for key in keys(Spec()) if key not in FREE}
# What a name stands for. Trunks have another schedule in their folders, but it is the entry's that
# decides.
NAMED = COMPARED | {key: attrgetter(key) for key in ("schedule.kind", "schedule.decay_steps")}


@dataclass(frozen=True)
class Entry:
    """One run of a sweep, with its cool-downs: a line at a value with a seed."""

    line: Line
    value: float
    seed: int
    spec: Spec
    folder: Path
    horizons: tuple[int, ...]
    longer: float = 0.0  # share of one more cool-down to the last horizon; 0: none

    @property
    def longer_end(self) -> Path | None:
        """The folder of that cool-down."""
        last = self.ends[self.horizons[-1]]
        return last.with_name(f"{last.name}-longer") if self.longer else None

    @property
    def finals(self) -> list[Path]:
        """All folders that have to be done."""
        return [*self.ends.values(), *([self.longer_end] if self.longer_end else [])]

    @property
    def there(self) -> bool:
        """Whether it has begun; a trunk may be gone when its cool-downs are done."""
        return self.folder.exists() or any(folder.exists() for folder in self.finals)

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
        """Raises ValueError where a finished folder holds another run than this one."""
        if self.diverged:
            if RunDir(self.folder).started:
                self.check(self.folder)
            return True
        finals = [folder for folder in self.finals if not self._longer_diverged(folder)]
        if not all(RunDir(folder).done for folder in finals):
            return False
        for folder in finals:
            self.check(folder)
        return True

    def _longer_diverged(self, folder: Path) -> bool:
        """A longer cool-down that broke down is done, and the normal ones count all the same."""
        return folder == self.longer_end and (folder / DIVERGED).exists()

    def check(self, folder: Path) -> None:
        """Names leave defaults out, so that new settings rename nothing. The price: when a default
        changes, a run that was made under the old one has the name of one under the new."""
        stored = RunDir(folder).read_spec()
        for key, get in COMPARED.items():
            if get(stored) != get(self.spec):
                raise ValueError(
                    f"{folder} was made with {key}={get(stored)!r}, and this sweep wants "
                    f"{get(self.spec)!r}: choose another --out, or remove the folder"
                )

    @property
    def loss(self) -> float:
        """At the longest horizon; infinite where training broke down."""
        if self.diverged:
            return inf
        run = RunDir(self.ends[self.horizons[-1]])
        for line in reversed(run.read_metrics()):
            if "val_loss" in line:
                return line["val_loss"]
        raise ValueError(
            f"{run.path} is done, but its metrics.jsonl has no val_loss: remove the folder, and "
            "the run is made again; eval_every must not be 0"
        )

    def described(self) -> dict[str, Any]:
        """As the manifest has it."""
        status = "diverged" if self.diverged else "done" if self.done else "unfinished"
        root = self.folder.parent
        return {
            "label": self.line.label,
            "axis": self.line.axis,
            "value": self.value,
            "seed": self.seed,
            "status": status,
            "folders": {str(h): str(path.relative_to(root)) for h, path in self.ends.items()},
            **({"longer": str(self.longer_end.relative_to(root))} if self.longer_end else {}),
        }


def make_entry(
    experiment: Experiment, line: Line, value: float, seed: int, root: Path, data: str = ""
) -> Entry:
    spec = override(line.spec, [f"{line.axis}={value!r}"])
    spec = replace(spec, seed=seed, steps=experiment.horizons[-1], data=data or spec.data)
    plan = [experiment.horizons, *([experiment.longer] if experiment.longer else [])]
    content = json.dumps([decisive(spec), *plan], sort_keys=True)
    label = "".join(c if c.isalnum() else "-" for c in line.label).strip("-")
    short = hashlib.sha256(content.encode()).hexdigest()[:8]
    name = f"{label}-{line.axis.rpartition('.')[2]}{value:g}-seed{seed}-{short}"
    return Entry(line, value, seed, spec, root / name, experiment.horizons, experiment.longer)


def decisive(spec: Spec) -> dict[str, Any]:
    """What a run's name stands for: settings that a loss depends on, so that to log or evaluate at
    other steps makes no other run of it; without defaults, so that a new setting does not rename
    the runs that never heard of it."""
    usual = Spec()
    return {key: value for key, get in NAMED.items() if (value := get(spec)) != get(usual)}


def run_entry(
    entry: Entry,
    run: RunDir,
    device: str = "",
    until: float = inf,
    models: Models | None = None,
) -> None:
    """`run` is the entry's folder, claimed by the caller: whoever has it makes the cool-downs too,
    so that no other process starts them in between."""
    folder = entry.folder
    try:
        for wanted, folder in _stages(entry):
            spec = wanted
            if RunDir(folder).started:  # it goes on as it began, whatever no loss depends on
                entry.check(folder)
                spec = RunDir(folder).read_spec()
            train(spec, run if folder == entry.folder else folder, True, device, until, models)
    except NotFinite as error:  # a rate too high is a result, not a failure of the sweep
        place = folder if folder == entry.longer_end else entry.folder
        RunDir(place).record_divergence(str(error))
        print(f"{place.name} diverged: {error}", file=sys.stderr)


def _stages(entry: Entry) -> Iterator[tuple[Spec, Path]]:
    """Specs and folders to train, in order; a branch's spec needs its trunk to be there."""
    if len(entry.horizons) == 1:
        yield entry.spec, entry.folder
        return
    share = entry.spec.schedule.decay
    ends = [(horizon, share) for horizon in entry.horizons]
    ends += [(entry.horizons[-1], entry.longer)] if entry.longer else []
    trunk, branches = trunk_spec(entry.spec, ends)
    yield trunk, entry.folder
    for (start, length), folder in zip(branches, entry.finals, strict=True):
        yield branch_spec(RunDir(entry.folder), start, length), folder
