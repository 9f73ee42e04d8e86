"""From losses to statements: speed-ups, paired verdicts, intervals, the speedrun's rule.

Only cooled-down losses are compared, and seeds in pairs, because the seed moves both sides alike.
What cannot be said is returned as such (None, "inconclusive", a list of missing seeds), so that
a report shows it. Plain Python: nothing here needs torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, isfinite, log, sqrt
from statistics import fmean
from typing import Literal

from angular_lab.experiments.intervals import student_interval
from angular_lab.experiments.published import SPEEDRUN_MARGIN, SPEEDRUN_TARGET

Curve = Sequence[tuple[float, float]]  # (tokens, cooled-down loss), by tokens
# missed: of a size that is claimed, when every seed has some of it, and too little
Outcome = Literal["holds", "reversed", "inconclusive", "missed"]
Side = Literal["below", "above"]

# Losses with three digits that are 0.005 apart differ by 0.00499999999999989 in binary.
ROUNDING = 1e-9


@dataclass(frozen=True)
class PairedDifferences:
    """a - b, seed by seed: negative where a is better."""

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
    interval: tuple[float, float] | None  # None with less than two seeds
    missing: dict[int, str]  # why a seed has none


@dataclass(frozen=True)
class SpeedrunResult:
    statistic: float  # (target - mean) * sqrt(runs)
    passes: bool
    further_runs: int | None  # at the same mean, until it passes; None: no number is enough


@dataclass(frozen=True)
class BestRate:
    lr: float
    loss: float
    at_edge: bool
    extend: tuple[Side, ...]  # where the grid ends at the best rate; both sides for one rate


def tokens_to_reach(curve: Curve, loss: float) -> float | None:
    """Tokens at which the curve first comes down to `loss`, linear in log(tokens) between points.

    None where that would be a guess: the curve never gets there, or it starts below.
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
    """The reference's tokens over those that our curve needs for the reference's final loss."""
    _check_curve(reference)
    final_tokens, final_loss = reference[-1]
    needed = tokens_to_reach(ours, final_loss)
    return None if needed is None else final_tokens / needed


def wall_clock_speed_up(
    token_speed_up: float, our_tokens_per_second: float, reference_tokens_per_second: float
) -> float:
    """Fewer tokens are worth less when each takes longer."""
    _check_positive("token_speed_up", token_speed_up)
    _check_positive("our_tokens_per_second", our_tokens_per_second)
    _check_positive("reference_tokens_per_second", reference_tokens_per_second)
    return token_speed_up * our_tokens_per_second / reference_tokens_per_second


def paired_differences(a: Mapping[int, float], b: Mapping[int, float]) -> PairedDifferences:
    """Over the seeds that both have; the others are listed as missing."""
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
    """Whether "a is below b" holds: by `threshold` on average, and with one sign on all seeds."""
    _check_positive("threshold", threshold)
    paired = paired_differences(a, b)
    outcome, reason = _judge(paired, threshold)
    if missing := sorted(paired.missing_in_a + paired.missing_in_b):
        reason += f"; only one side has seeds {', '.join(map(str, missing))}"
    return Verdict(outcome, reason, paired)


def speed_up_interval(
    ours_by_seed: Mapping[int, Curve],
    reference_by_seed: Mapping[int, Curve],
    confidence: float = 0.95,
) -> SpeedUps:
    """The speed-up of every seed, their geometric mean, and Student's interval of it: of their
    logarithms, because speed-ups multiply and none is below zero.

    Without the seeds that never reach the reference, the mean is too high: show `missing` with it.
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
        except ValueError as error:  # a seed that diverged must not cost the report of the others
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
    ends = student_interval(logs, confidence)
    interval = None if ends is None else (exp(ends[0]), exp(ends[1]))
    return SpeedUps(by_seed, exp(fmean(logs)), interval, missing)


def speedrun_passes(losses: Sequence[float], target: float = SPEEDRUN_TARGET) -> SpeedrunResult:
    """The speedrun's rule: (target - mean) * sqrt(runs) of at least 0.004."""
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
    # One more even where rounding says none: it has not passed.
    return SpeedrunResult(statistic, False, max(1, ceil((needed / gap) ** 2) - runs))


def best_rate(by_rate: Mapping[float, float]) -> BestRate:
    """The rate with the lowest loss, the smaller of two alike. A run that diverged is the worst."""
    for rate in by_rate:
        _check_positive("a learning rate", rate)
    finite = {rate: loss for rate, loss in sorted(by_rate.items()) if isfinite(loss)}
    if not finite:
        raise ValueError(f"no finite loss in {dict(by_rate)}: try smaller learning rates")
    lr = min(finite, key=finite.__getitem__)
    # All rates, not only the finite: one that diverged bounds the grid as well as a bad one.
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
        raise ValueError(f"{name} is {value}: leave out what diverged, and report it")


def _check_positive(name: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}: it must be positive and finite")
