"""Statistics of losses: speed-ups, paired verdicts, intervals, the speedrun's rule.

Only losses after the cooldown are compared, and in pairs of the same seed, because a seed moves
both sides alike. What cannot be computed is returned as such (None, "inconclusive", the missing
seeds), so that a report can show it. No torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Literal

from angular_lab.experiments.published import SPEEDRUN_MARGIN, SPEEDRUN_TARGET

Curve = Sequence[tuple[float, float]]  # (tokens, cooled-down loss), by tokens
# missed: an effect of a claimed size that every seed shows, but too small
Outcome = Literal["holds", "reversed", "inconclusive", "missed"]
Side = Literal["below", "above"]

# Losses with three digits that are 0.005 apart differ by 0.00499999999999989 in binary.
ROUNDING = 1e-9

# t with P(|T| <= t) = 0.95, by degrees of freedom from 1 on.
STUDENT_95 = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157,
    2.228139, 2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922,
    2.093024, 2.085963, 2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831,
    2.048407, 2.045230, 2.042272,
)  # fmt: skip


@dataclass(frozen=True)
class PairedDifferences:
    """The differences a - b by seed: negative where a is better."""

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float | None  # None without a common seed
    missing_in_a: tuple[int, ...]
    missing_in_b: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reason: str  # for a report to print
    paired: PairedDifferences


@dataclass(frozen=True)
class SpeedUps:
    by_seed: dict[int, float]
    mean: float | None  # None without a seed
    interval: tuple[float, float] | None  # None with fewer than two seeds
    missing: dict[int, str]  # the reason, by seed


@dataclass(frozen=True)
class SpeedrunResult:
    statistic: float  # (target - mean) * sqrt(runs)
    passes: bool
    further_runs: int | None  # needed at the same mean; None: no number is enough


@dataclass(frozen=True)
class BestRate:
    lr: float
    loss: float
    at_edge: bool
    extend: tuple[Side, ...]  # sides on which the grid ends at the best; both for a single value


def tokens_to_reach(curve: Curve, loss: float) -> float | None:
    """Return the tokens at which the curve first falls to `loss`, linear in log(tokens).

    None where that would be extrapolation: the curve never reaches it, or starts below it.
    """
    _check_curve(curve)
    _check_finite("the loss to reach", loss)
    if curve[0][1] < loss:
        return None
    for i, (tokens, reached) in enumerate(curve):
        if reached == loss:
            return tokens
        if reached < loss:
            before, higher = curve[i - 1]
            share = (higher - loss) / (higher - reached)
            return before * (tokens / before) ** share
    return None


def speed_up(ours: Curve, reference: Curve) -> float | None:
    """Return the reference's tokens over those our curve needs for the reference's final loss."""
    _check_curve(reference)
    final_tokens, final_loss = reference[-1]
    needed = tokens_to_reach(ours, final_loss)
    return None if needed is None else final_tokens / needed


def paired_differences(a: Mapping[int, float], b: Mapping[int, float]) -> PairedDifferences:
    """Compare the seeds that both have; list the others as missing."""
    for name, losses in (("a", a), ("b", b)):
        for seed, loss in losses.items():
            _check_finite(f"{name}'s loss of seed {seed}", loss)
    seeds = tuple(sorted(a.keys() & b.keys()))
    differences = tuple(a[seed] - b[seed] for seed in seeds)
    return PairedDifferences(
        seeds=seeds,
        differences=differences,
        mean=fmean(differences) if differences else None,
        missing_in_a=tuple(sorted(b.keys() - a.keys())),
        missing_in_b=tuple(sorted(a.keys() - b.keys())),
    )


def verdict(a: Mapping[int, float], b: Mapping[int, float], threshold: float = 0.005) -> Verdict:
    """Judge "a is below b": by `threshold` on average, with the same sign on all seeds."""
    _check_positive("threshold", threshold)
    paired = paired_differences(a, b)
    outcome, reason = _judge(paired, threshold)
    if missing := sorted(paired.missing_in_a + paired.missing_in_b):
        reason += f"; only one side has seeds {', '.join(map(str, missing))}"
    return Verdict(outcome, reason, paired)


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95% interval of the mean, or None for one value.

    It assumes that seeds are normally distributed. For two values it is wide, 12.7 standard errors
    to each side; for more than 31 it is up to 4% too wide, because the table ends there.
    """
    if not values:
        raise ValueError("no values: give at least one")
    for value in values:
        _check_finite("a value", value)
    if len(values) < 2:
        return None
    quantile = STUDENT_95[min(len(values) - 1, len(STUDENT_95)) - 1]
    half = quantile * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def speed_up_interval(
    ours_by_seed: Mapping[int, Curve], reference_by_seed: Mapping[int, Curve]
) -> SpeedUps:
    """Return each seed's speed-up, their geometric mean and its 95% interval.

    The interval is Student's, of the logarithms: speed-ups multiply, and none is below zero.
    Without the seeds that never reach the reference the mean is too high: show `missing` with it.
    """
    by_seed: dict[int, float] = {}
    missing: dict[int, str] = {}
    for seed in sorted(ours_by_seed.keys() | reference_by_seed.keys()):
        ours, reference = ours_by_seed.get(seed), reference_by_seed.get(seed)
        if ours is None or reference is None:
            missing[seed] = "we have no curve" if ours is None else "the reference has no curve"
            continue
        try:
            ratio = speed_up(ours, reference)
        except ValueError as error:  # the other seeds are still worth reporting
            missing[seed] = str(error)
            continue
        if ratio is None:
            how = "starts below it" if ours[0][1] < reference[-1][1] else "never reaches it"
            missing[seed] = f"the reference ends at {reference[-1][1]:.4f}, our curve {how}"
        else:
            by_seed[seed] = ratio
    if not by_seed:
        return SpeedUps(by_seed, None, None, missing)
    logs = [log(ratio) for ratio in by_seed.values()]
    ends = student_interval(logs)
    interval = None if ends is None else (exp(ends[0]), exp(ends[1]))
    return SpeedUps(by_seed, exp(fmean(logs)), interval, missing)


def speedrun_passes(losses: Sequence[float], target: float = SPEEDRUN_TARGET) -> SpeedrunResult:
    """Apply the speedrun's rule: (target - mean) * sqrt(runs) of at least 0.004."""
    if not losses:
        raise ValueError("no losses to judge: give one per run")
    for loss in losses:
        _check_finite("a run's loss", loss)
    _check_positive("target", target)
    gap, runs, needed = target - fmean(losses), len(losses), SPEEDRUN_MARGIN - ROUNDING
    statistic = gap * sqrt(runs)
    if statistic >= needed:
        return SpeedrunResult(statistic, True, 0)
    if gap <= 0:
        return SpeedrunResult(statistic, False, None)
    # At least one: it has not passed, even where rounding gives none.
    return SpeedrunResult(statistic, False, max(1, ceil((needed / gap) ** 2) - runs))


def best_rate(by_rate: Mapping[float, float]) -> BestRate:
    """Return the value with the lowest loss, the smaller of two equal ones.

    A loss that is not finite belongs to a run that diverged: it is never the best.
    """
    for rate in by_rate:
        _check_positive("a learning rate", rate)
    finite = {rate: loss for rate, loss in sorted(by_rate.items()) if isfinite(loss)}
    if not finite:
        raise ValueError(f"no finite loss in {dict(by_rate)}: try smaller learning rates")
    lr = min(finite, key=finite.__getitem__)
    # All values, not only the finite ones: one that diverged bounds the grid as a bad one does.
    ends: tuple[tuple[Side, float], ...] = (("below", min(by_rate)), ("above", max(by_rate)))
    extend = tuple(side for side, end in ends if lr == end)
    return BestRate(lr, finite[lr], bool(extend), extend)


def _judge(paired: PairedDifferences, threshold: float) -> tuple[Outcome, str]:
    runs, mean = len(paired.seeds), paired.mean
    if runs < 2 or mean is None:
        return "inconclusive", f"{runs} common seed{'s' * (runs != 1)}: it takes at least two"
    shown = f"mean difference {mean:+.4f} over {runs} seeds"
    if not (all(d < 0 for d in paired.differences) or all(d > 0 for d in paired.differences)):
        return "inconclusive", f"{shown}, not of one sign"
    if abs(mean) < threshold - ROUNDING:
        return "inconclusive", f"{shown}, less than {threshold:g}"
    return "holds" if mean < 0 else "reversed", f"{shown}, of one sign, at least {threshold:g}"


def _check_curve(curve: Curve) -> None:
    if len(curve) < 2:
        raise ValueError(f"a curve of {len(curve)} points: it takes at least two, (tokens, loss)")
    for tokens, loss in curve:
        _check_positive("a curve's tokens", tokens)
        _check_finite(f"the loss at {tokens:g} tokens", loss)
    for (tokens, _), (following, _) in pairwise(curve):
        if following <= tokens:
            raise ValueError(f"{following:g} tokens follow {tokens:g}: sort the curve by tokens")


def _check_finite(name: str, value: float) -> None:
    if not isfinite(value):
        raise ValueError(f"{name} is {value}: leave out runs that diverged, and report them")


def _check_positive(name: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}: it must be positive and finite")
