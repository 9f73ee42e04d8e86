"""A sweep as it is read: `sweep.json` says what was planned, the run folders what there is.

Everything that keeps a number out of a comparison ends up in `warnings`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from angular_lab.experiments.statistics import BestRate, Side, best_rate
from angular_lab.report.runs import DIVERGED, SWEEP, Run, read_run
from angular_lab.report.sweeps import Member, SweepData
from angular_lab.run_folder import trunk_name


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
            settled_by=content.get("settled_by"),
        )
        if not (sweep.lines and sweep.horizons and sweep.seeds):
            raise ValueError("it has no lines, no horizons or no seeds")
        sweep.members = [_member(folder, entry, sweep.warnings) for entry in content["entries"]]
        sweep.named = {name for entry in content["entries"] for name in _names(entry)}
        chosen = {label: best["value"] for label, best in content["chosen"].items()}
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        warnings.append(f"{path} cannot be read ({error!r}): its runs are shown one by one")
        return None
    _exclude_others(sweep)
    _find_best(sweep, chosen)
    _note_gaps(sweep)
    return sweep


def _names(entry: dict[str, Any]) -> list[str]:
    longer = [entry["longer"]] if "longer" in entry else []
    return [trunk_name(entry), *entry["folders"].values(), *longer]


def _member(folder: Path, entry: dict[str, Any], warnings: list[str]) -> Member:
    root = folder / trunk_name(entry)
    broke = (root / DIVERGED).exists()

    def read(name: str) -> Run | None:
        if (folder / name).is_dir():
            return read_run(folder / name, warnings)
        if entry["status"] == "done" and not broke:
            warnings.append(f"{folder / name} is named in {SWEEP} as done, but it is not there")
        return None

    found = {int(horizon): read(name) for horizon, name in entry["folders"].items()}
    return Member(
        entry["label"],
        entry["axis"],
        float(entry["value"]),
        int(entry["seed"]),
        ends={horizon: run for horizon, run in found.items() if run is not None},
        trunk=read_run(root, warnings) if len(found) > 1 and root.is_dir() else None,
        diverged=entry["status"] == "diverged" or broke,
        longer=read(entry["longer"]) if "longer" in entry else None,
        plans_longer="longer" in entry,
    )


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
        sweep.warnings.append(
            f"{member.name} is left out of the comparison: data {wrong.data[:12] or 'unknown'} and "
            f"vocabulary {wrong.spec.model.vocabulary:,}, where most runs have "
            f"{data[:12] or 'unknown'} and {vocabulary:,}"
        )
    sweep.members = kept


def _find_best(sweep: SweepData, chosen: dict[str, float]) -> None:
    """The value that the sweep chose; where it has not yet, the best so far."""
    for label in sweep.lines:
        losses = sweep.first_losses(label)
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


def _gaps(member: Member, horizons: list[int]) -> Iterator[str]:
    """What it has no loss for, and why."""
    if member.diverged:
        yield f"{member.name} diverged: it counts as the worst of its grid"
        return
    if member.longer is not None and member.longer.diverged:
        yield f"{member.name} diverged in the longer cool-down"
    steps = [f"{h:,}" for h in horizons if member.final(h) is None]
    if member.lacks_longer(horizons[-1]):
        steps.append(f"{horizons[-1]:,} (the longer cool-down)")
    if steps:
        yield f"{member.name} is unfinished: no final loss at step {', '.join(steps)}"


def _note_gaps(sweep: SweepData) -> None:
    for member in sweep.members:
        sweep.warnings += _gaps(member, sweep.horizons)
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
