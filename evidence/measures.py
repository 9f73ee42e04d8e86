"""What is computed from the losses of a sweep: leads, speed-ups, training losses."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from angular_lab.experiments.statistics import (
    Curve,
    student_interval,
    tokens_to_reach,
    verdict,
)
from angular_lab.report.read import SweepResults
from angular_lab.report.results import final_training_loss
from angular_lab.run_folder import Run

Facts = dict[str, Any]
BySeed = dict[int, float]
CHOOSER = 0  # the seed that chose the learning rates; the others judge
TOKENS = 16384  # of a step of model S
EARLY, HALF, LATE = 1373, 2747, 5493  # steps to 22.5M, 45M and 90M tokens
COOLDOWN = 4944  # the step at which the cooldown to 90M tokens begins


def judging(values: BySeed) -> BySeed:
    """Return the values of the seeds that judge."""
    return {seed: value for seed, value in values.items() if seed != CHOOSER}


def judged(values: BySeed) -> float:
    """Return the mean over the seeds that judge."""
    return fmean(judging(values).values())


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
    return summary(gaps) | _interval([*judging(gaps).values()])


def _interval(values: Sequence[float]) -> Facts:
    ends = student_interval(values)
    return {"low": ends[0], "high": ends[1]} if ends else {}


def outcome(ours: BySeed, other: BySeed) -> str:
    """Return the verdict on "ours is below other", by the report's rule."""
    return verdict(judging(ours), judging(other)).outcome


def speed_up(ours: Mapping[int, Curve], others_at_90m: BySeed) -> Facts:
    """Return how many times fewer tokens `ours` needs for another method's loss at 90M tokens, on
    the seeds of `ours`: nothing if it reaches that loss on no seed."""
    needed = {seed: tokens_to_reach(curve, others_at_90m[seed]) for seed, curve in ours.items()}
    ratios = {seed: LATE * TOKENS / tokens for seed, tokens in needed.items() if tokens}
    if not ratios:
        return {}
    logs = [log(ratio) for ratio in ratios.values()]
    ends = {name: exp(end) for name, end in _interval(logs).items()}
    return summary(ratios) | ends | {"mean": exp(fmean(logs))}


def training_loss(run: Run) -> float:
    """Return the mean of the last logged training losses of a run."""
    loss = final_training_loss(run)
    assert loss is not None, f"{run.folder} has too few losses"
    return loss


def training_losses(sweep: SweepResults, arm: str, horizon: int) -> BySeed:
    """Return the training losses at the end, at the arm's best value, by seed."""
    trials = sweep.at_best(arm)
    return {seed: training_loss(trial.ends[horizon]) for seed, trial in trials.items()}


def grid(sweep: SweepResults, arm: str) -> dict[float, float]:
    """Return the losses of the seed that chose, by learning rate in ascending order."""
    return dict(sorted(sweep.first_losses(arm).items()))
