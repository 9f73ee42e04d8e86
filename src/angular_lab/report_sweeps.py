"""A sweep as a report reads it: which run is what, and which may be compared.

`sweep.json` says what was planned, the run folders what there is. Everything that keeps a number
out of a comparison ends up in `warnings`.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from angular_lab.report_runs import DIVERGED, SWEEP, Run, read_run
from angular_lab.statistics import BestRate, Side, best_rate


@dataclass(frozen=True)
class Member:
    """A line at a value with a seed: its trunk, where it has one, and its ends by horizon."""

    label: str
    axis: str
    value: float
    seed: int
    ends: dict[int, Run]
    trunk: Run | None
    diverged: bool

    def final(self, horizon: int) -> tuple[int, float] | None:
        """Tokens and cooled-down loss; None where it did not get there."""
        run = self.ends.get(horizon)
        return None if run is None or self.diverged else run.final

    @property
    def runs(self) -> list[Run]:
        return [*([self.trunk] if self.trunk else []), *self.ends.values()]

    @property
    def name(self) -> str:
        return f"{self.label}, {short(self.axis)} {self.value:g}, seed {self.seed}"


@dataclass
class SweepData:
    folder: Path
    experiment: str
    scale: str
    title: str
    lines: list[str]
    horizons: list[int]
    seeds: list[int]
    members: list[Member] = field(default_factory=list)
    best: dict[str, BestRate] = field(default_factory=dict)  # by line, where one can be told
    warnings: list[str] = field(default_factory=list)
    key: str = ""  # of its files and ids, set where two folders have one name
    excluded: set[str] = field(default_factory=set)  # run folders, by name

    @property
    def name(self) -> str:
        return f"{self.experiment}, scale {self.scale}"

    @property
    def chose(self) -> bool:
        """Whether a value had to be chosen: then the seed that chose it cannot judge it."""
        return any(self.has_grid(label) for label in self.lines)

    @property
    def judges(self) -> list[int]:
        """Seeds that count in means and verdicts."""
        return self.seeds[1:] if self.chose and len(self.seeds) > 1 else self.seeds

    def has_grid(self, label: str) -> bool:
        return len({member.value for member in self.of_line(label)}) > 1

    def at_edge(self, label: str) -> bool:
        """The best value lies at the edge of its grid: the optimum may lie outside."""
        return label in self.best and self.best[label].at_edge and self.has_grid(label)

    def of_line(self, label: str) -> list[Member]:
        return [member for member in self.members if member.label == label]

    def at_best(self, label: str) -> dict[int, Member]:
        """The line's members at its best value, by seed."""
        if label not in self.best:
            return {}
        found = {m.seed: m for m in self.of_line(label) if m.value == self.best[label].lr}
        return {seed: found[seed] for seed in sorted(found)}

    def judged(self, label: str, horizon: int) -> dict[int, float]:
        """Cooled-down losses by seed, from the judging seeds."""
        finals = {seed: m.final(horizon) for seed, m in self.at_best(label).items()}
        return {s: end[1] for s, end in finals.items() if end is not None and s in self.judges}

    def shown(self, label: str, horizon: int) -> dict[int, float]:
        """The judged losses; before there are any, those of the seed that chose the value."""
        finals = {seed: m.final(horizon) for seed, m in self.at_best(label).items()}
        return self.judged(label, horizon) or {s: e[1] for s, e in finals.items() if e is not None}

    def tokens(self, horizon: int) -> float | None:
        """Tokens at a horizon, as the runs say."""
        ends = (m.ends[horizon] for m in self.members if horizon in m.ends)
        return next((float(r.spec.steps * r.spec.tokens_per_step) for r in ends), None)

    def optimizer(self, label: str) -> str:
        runs = (run for member in self.of_line(label) for run in member.runs)
        return next((run.spec.optim.name for run in runs), label)

    @property
    def ours(self) -> str | None:
        """The line that the paper is about."""
        return next((x for x in self.lines if x.startswith("angular_muown")), None)


def short(axis: str) -> str:
    """optim.aux_lr is shown as aux_lr."""
    return axis.rpartition(".")[2]


def read_sweep(folder: Path, warnings: list[str]) -> SweepData | None:
    path = folder / SWEEP
    try:
        content = json.loads(path.read_text())
        sweep = SweepData(
            folder=folder,
            experiment=content["experiment"],
            scale=content["scale"],
            title=content["title"],
            lines=list(content["lines"]),
            horizons=sorted(int(h) for h in content["horizons"]),
            seeds=[int(seed) for seed in content["seeds"]],
        )
        if not (sweep.lines and sweep.horizons and sweep.seeds):
            raise ValueError("it has no lines, no horizons or no seeds")
        sweep.members = [_member(folder, entry, sweep.warnings) for entry in content["entries"]]
        chosen = {label: best["value"] for label, best in content["chosen"].items()}
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        warnings.append(f"{path} cannot be read ({error!r}): its runs are shown one by one")
        return None
    _exclude_others(sweep)
    _find_best(sweep, chosen)
    _note_gaps(sweep)
    return sweep


def _member(folder: Path, entry: dict[str, Any], warnings: list[str]) -> Member:
    ends, trunk = {}, None
    root = folder
    for horizon, name in entry["folders"].items():
        root = folder / name.removesuffix(f"-to{horizon}")
        if (folder / name).is_dir():
            run = read_run(folder / name, warnings)
            if run is not None:
                ends[int(horizon)] = run
        elif not (root / DIVERGED).exists() and entry["status"] == "done":
            warnings.append(f"{folder / name} is named in {SWEEP} as done, but it is not there")
    if len(entry["folders"]) > 1 and root.is_dir():
        trunk = read_run(root, warnings)
    diverged = entry["status"] == "diverged" or (root / DIVERGED).exists()
    values = entry["label"], entry["axis"], float(entry["value"]), int(entry["seed"])
    return Member(*values, ends=ends, trunk=trunk, diverged=diverged)


def _exclude_others(sweep: SweepData) -> None:
    """Losses on other tokens, or over another vocabulary, are other quantities: they go."""
    kinds = Counter(run.comparable for member in sweep.members for run in member.runs)
    if len(kinds) < 2:
        return
    (data, vocabulary), _ = kinds.most_common(1)[0]
    kept: list[Member] = []
    for member in sweep.members:
        wrong = next((r for r in member.runs if r.comparable != (data, vocabulary)), None)
        if wrong is None:
            kept.append(member)
            continue
        sweep.excluded |= {run.name for run in member.runs}
        sweep.warnings.append(
            f"{member.name} is left out of the comparison: data {wrong.data[:12] or 'unknown'} and "
            f"vocabulary {wrong.spec.model.vocabulary:,}, where most runs have "
            f"{data[:12] or 'unknown'} and {vocabulary:,}"
        )
    sweep.members = kept


def _find_best(sweep: SweepData, chosen: dict[str, float]) -> None:
    """The value that the sweep chose; where it has not yet, the best so far."""
    last = sweep.horizons[-1]
    for label in sweep.lines:
        losses: dict[float, float] = {}
        for member in sweep.of_line(label):
            if member.seed == sweep.seeds[0]:
                end = member.final(last)
                if end is not None or member.diverged:
                    losses[member.value] = inf if end is None else end[1]
        try:
            best = best_rate(losses)
        except ValueError:
            sweep.warnings.append(f"{label}: no finished run, so no best value yet")
            continue
        value = chosen.get(label, best.lr)
        if value != best.lr:
            known = value in losses
            sweep.warnings.append(
                f"{label}: {SWEEP} chose {value:g}, but {best.lr:g} has the lowest loss of what is "
                f"here; {value if known else best.lr:g} is used"
            )
            best = _at(value, losses) if known else best
        elif label not in chosen:
            sweep.warnings.append(f"{label}: not chosen yet, {best.lr:g} is the best so far")
        sweep.best[label] = best


def _at(value: float, losses: dict[float, float]) -> BestRate:
    edge: tuple[Side, ...] = ("below",) if value == min(losses) else ()
    edge += ("above",) if value == max(losses) else ()
    return BestRate(value, losses[value], bool(edge), edge)


def _note_gaps(sweep: SweepData) -> None:
    for member in sweep.members:
        if member.diverged:
            sweep.warnings.append(f"{member.name} diverged: it counts as the worst of its grid")
        elif missing := [h for h in sweep.horizons if member.final(h) is None]:
            steps = ", ".join(f"{h:,}" for h in missing)
            sweep.warnings.append(f"{member.name} is unfinished: no final loss at step {steps}")
    for label, best in sweep.best.items():
        for seed in sweep.seeds:
            if seed not in sweep.at_best(label):
                sweep.warnings.append(f"{label} at {best.lr:g}: seed {seed} is missing")
        if sweep.at_edge(label):
            sweep.warnings.append(
                f"{label}: the best value {best.lr:g} lies at the edge of its grid; the optimum "
                f"may lie {best.extend[0]} it"
            )
    for label in sweep.lines:
        if not sweep.of_line(label):
            sweep.warnings.append(f"{label}: planned, but it has no usable run")
