"""Statistics of losses: speed-ups, paired verdicts, intervals, the speedrun's rule.

The rule of every verdict is here: in the report, in the README and in the documentation. Only
losses after the cooldown are compared, and in pairs of the same seed, because a seed moves both
sides alike. What cannot be computed is returned as such (None, "inconclusive", the missing seeds),
so that a report can show it. No torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Literal

from angular_lab.experiments.published import SPEEDRUN_MARGIN, SPEEDRUN_TARGET
from angular_lab.text import counted

Point = tuple[float, float]  # tokens, cooled-down loss
Curve = Sequence[Point]  # by tokens
# missed: the measured size of an effect is below the claimed one
Outcome = Literal["holds", "reversed", "inconclusive", "missed"]
Side = Literal["below", "above"]

LEAST = 0.005  # nats; smaller differences do not matter
FEWEST = 4  # seeds of one sign that decide where the interval does not
FURTHER = 100  # seeds that an estimate looks ahead
NEARLY = 0.9  # "about half the tokens" holds from nine tenths of the claimed speed-up

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
    label: str  # the outcome for a table's cell, with what an open one shows so far
    reason: str  # for a report to print
    paired: PairedDifferences
    interval: tuple[float, float] | None  # 95%, of the mean difference; None below two seeds
    settled: bool  # decided, or known to be too small to matter
    further_seeds: int | None  # that would settle it; None: unknown, or not within FURTHER

    @property
    def to_settle(self) -> str | None:
        """How many more seeds would settle the pair; None if it is settled."""
        if self.settled:
            return None
        if self.interval is None:
            return f"at least {counted(2 - len(self.paired.seeds), 'more seed')}"
        if self.further_seeds is None:
            return f"not within {FURTHER}"
        return counted(self.further_seeds, "more seed")


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
            return tokens_on_line(curve[i - 1], (tokens, reached), loss)
    return None


def tokens_on_line(a: Point, b: Point, loss: float) -> float:
    """Return the tokens at which the line through two points of a curve has this loss, linear in
    log(tokens). Outside of the two, this is extrapolation."""
    (tokens, higher), (later, lower) = a, b
    return tokens * (later / tokens) ** ((higher - loss) / (higher - lower))


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


def verdict(a: Mapping[int, float], b: Mapping[int, float], threshold: float = LEAST) -> Verdict:
    """Judge "a is below b": it holds if the mean difference is at least `threshold` and its 95%
    interval excludes zero, or at least four seeds have one sign."""
    _check_positive("threshold", threshold)
    paired = paired_differences(a, b)
    interval = student_interval(paired.differences) if paired.differences else None
    outcome, label, reason = _judge(paired, interval, threshold)
    if missing := sorted(paired.missing_in_a + paired.missing_in_b):
        reason += f"; only one side has seeds {', '.join(map(str, missing))}"
    settled = outcome != "inconclusive" or _is_within(interval, threshold)
    further = 0 if settled else seeds_to_settle(paired.differences, threshold)
    return Verdict(outcome, label, reason, paired, interval, settled, further)


def seeds_to_settle(differences: Sequence[float], threshold: float = LEAST) -> int | None:
    """Return how many more seeds would settle a pair if mean and variance stayed as they are.

    A pair is settled where the interval excludes zero or, for a mean below `threshold`, lies within
    it. None if that takes more than 100 seeds, or if fewer than two give no variance.
    """
    if len(differences) < 2:
        return None
    mean, deviation = fmean(differences), stdev(differences)
    for further in range(FURTHER + 1):
        half = _half_width(deviation, len(differences) + further)
        ends = mean - half, mean + half
        matters = abs(mean) >= threshold - ROUNDING
        if _excludes_zero(ends) if matters else _is_within(ends, threshold):
            return further
    return None


def sign_test(seeds: int) -> float:
    """Return the two-sided p-value of `seeds` differences that all have one sign."""
    return 0.5 ** (seeds - 1)


def speed_up_outcome(interval: tuple[float, float], claimed: float) -> Outcome:
    """Judge a claimed speed-up by the interval of the measured one: it is missed if it lies above
    the interval, and nine tenths of it suffice to hold."""
    low, high = interval
    if low >= NEARLY * claimed:
        return "holds"
    if high < 1:
        return "reversed"
    return "missed" if high < claimed else "inconclusive"


def judging_seeds(seeds: Sequence[int], choosing: int | None) -> list[int]:
    """Return the seeds that judge: not the one that chose, unless it is the only one."""
    return [seed for seed in seeds if seed != choosing] or list(seeds)


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
    half = _half_width(stdev(values), len(values))
    return fmean(values) - half, fmean(values) + half


def _half_width(deviation: float, count: int) -> float:
    quantile = STUDENT_95[min(count - 1, len(STUDENT_95)) - 1]
    return quantile * deviation / sqrt(count)


def _excludes_zero(interval: tuple[float, float]) -> bool:
    return interval[0] > 0 or interval[1] < 0


def _is_within(interval: tuple[float, float] | None, threshold: float) -> bool:
    return interval is not None and max(map(abs, interval)) < threshold - ROUNDING


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


def _judge(
    paired: PairedDifferences, interval: tuple[float, float] | None, threshold: float
) -> tuple[Outcome, str, str]:
    """Return the outcome, its label and the reason."""
    seeds, mean = len(paired.seeds), paired.mean
    if interval is None or mean is None:
        reason = f"{counted(seeds, 'common seed')}: it takes at least two"
        return "inconclusive", f"inconclusive: {'one' if seeds else 'no'} seed", reason
    lower, higher = (sum(sign * d > 0 for d in paired.differences) for sign in (-1, 1))
    has_one_sign = seeds in (lower, higher)
    shown = f"mean difference {mean:+.4f} over {seeds} seeds, "
    shown += f"95% interval {interval[0]:+.4f} to {interval[1]:+.4f}"
    if abs(mean) >= threshold - ROUNDING:
        outcome: Outcome = "holds" if mean < 0 else "reversed"
        if _excludes_zero(interval):
            return outcome, outcome, f"{shown} excludes zero"
        if has_one_sign and seeds >= FEWEST:
            test = f"sign test: {seeds} of {seeds} seeds, p = {sign_test(seeds):.3g}"
            return outcome, f"{outcome} ({test})", f"{shown} includes zero; {test}"
        if has_one_sign:
            label = f"{'leads' if lower else 'trails'} on {seeds} of {seeds} seeds"
            return "inconclusive", label, f"{shown} includes zero"
    elif has_one_sign or _excludes_zero(interval) or _is_within(interval, threshold):
        small = f"less than {threshold:g}"
        return "inconclusive", f"inconclusive: {small}", f"{shown}; the mean is {small}"
    label = f"inconclusive: lower on {lower} of {seeds} seeds"
    return "inconclusive", label, f"{shown}, not of one sign"


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
