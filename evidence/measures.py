"""What is computed from losses: leads, speed-ups, training losses at the end of a run."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from angular_lab.experiments.statistics import student_interval, tokens_to_reach, verdict
from evidence.kept import BySeed, Losses

Facts = dict[str, Any]
CHOOSER = 0  # the seed that chose the learning rates; the others judge
TOKENS = {"22.5M": 22495232, "45M": 45006848, "67.5M": 67502080, "90M": 89997312}
COOLDOWN = 4944  # the step at which the cooldown to 90M tokens begins
LAST = 14  # logged training losses: single batches scatter by more than methods differ


def by_seed(losses: Losses, method: str, value: float, horizon: str) -> BySeed:
    trials = {seed: x for (name, v, seed), x in losses.items() if (name, v) == (method, value)}
    return {seed: x[horizon] for seed, x in trials.items()}


def grids(losses: Losses, horizon: str) -> dict[str, dict[float, float]]:
    """Return the losses of the seed that chose by method and learning rate."""
    grids: dict[str, dict[float, float]] = {}
    for (name, value, seed), x in sorted(losses.items()):
        if seed == CHOOSER:
            grids.setdefault(name, {})[value] = x[horizon]
    return grids


def best(grid: Mapping[float, float]) -> float:
    return min(grid, key=grid.__getitem__)


def is_inside(grid: Mapping[float, float]) -> bool:
    """True if the best learning rate is not at an edge of its grid."""
    return min(grid) < best(grid) < max(grid)


def judged(values: BySeed) -> float:
    """Return the mean over the seeds that judge."""
    return fmean(value for seed, value in values.items() if seed != CHOOSER)


def spread(values: Iterable[float]) -> Facts:
    listed = list(values)
    return {"min": min(listed), "max": max(listed)}


def summary(values: BySeed) -> Facts:
    """Return every seed's value, the smallest and the largest, and the mean of those that judge."""
    each: Facts = {f"seed{seed}": value for seed, value in values.items()}
    return each | spread(values.values()) | {"mean": judged(values)}


def lead(ours: BySeed, other: BySeed) -> Facts:
    """Return how far `ours` is below `other`, with Student's 95% interval of the mean."""
    gaps = {seed: other[seed] - ours[seed] for seed in ours}
    return summary(gaps) | _interval([gap for seed, gap in gaps.items() if seed != CHOOSER])


def _interval(values: Sequence[float]) -> Facts:
    ends = student_interval(values)
    return {"low": ends[0], "high": ends[1]} if ends else {}


def outcome(ours: BySeed, other: BySeed) -> str:
    """Return the verdict on "ours is below other", by the report's rule."""
    a, b = ({seed: x[seed] for seed in x if seed != CHOOSER} for x in (ours, other))
    return verdict(a, b).outcome


def speed_up(ours: Mapping[int, Mapping[str, float]], others_at_90m: BySeed) -> Facts:
    """Return how many times fewer tokens `ours` needs for another method's loss at 90M tokens, on
    the seeds that judge: nothing if it reaches that loss on no seed."""
    ratios: BySeed = {}
    for seed, losses in ours.items():
        curve = [(TOKENS[horizon], x) for horizon, x in losses.items() if horizon in TOKENS]
        needed = tokens_to_reach(curve, others_at_90m[seed])
        if seed != CHOOSER and needed is not None:
            ratios[seed] = TOKENS["90M"] / needed
    if not ratios:
        return {}
    logs = [log(ratio) for ratio in ratios.values()]
    ends = {name: exp(end) for name, end in _interval(logs).items()}
    return summary(ratios) | ends | {"mean": exp(fmean(logs))}


def training_loss(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean of the last logged training losses of a run."""
    return fmean(line["loss"] for line in metrics[-LAST:])
