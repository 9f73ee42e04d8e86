"""Verdicts: the paper's claims, each with its check, and comparisons of two methods.

The rule of a verdict is in `experiments.statistics`. One seed is never enough for a verdict: then
the reason says what was measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, median

from angular_lab.experiments import published as paper
from angular_lab.experiments.definition import OURS
from angular_lab.experiments.statistics import (
    FEWEST,
    LEAST,
    NEARLY,
    Curve,
    Outcome,
    sign_test,
    speed_up,
    speed_up_outcome,
    speedrun_passes,
    student_interval,
    verdict,
)
from angular_lab.report.read import SweepResults
from angular_lab.report.results import added_note, curves, key_of
from angular_lab.report.tables import (
    Mark,
    Row,
    Table,
    difference,
    seeds_form,
    token_count,
    tokens_form,
)
from angular_lab.run_folder import Run

FLAT = (0.8, 1.25)  # an angle that changes by a factor in this range is constant
SHARP = 0.05  # nats by which a loss must rise to rise sharply

Ruling = tuple[Outcome, str]  # and the reason
Check = Callable[[SweepResults], Ruling]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and what a sweep must show for it to hold."""

    experiment: str
    text: str
    check: Check
    source: paper.Source = "P"


def unchecked(reason: str) -> Ruling:
    return "inconclusive", f"cannot be checked: {reason}"


def _by_seed(flags: dict[int, bool], measured: str) -> Ruling:
    """Judge a claim that every seed answers with yes or no: by the sign test."""
    if not flags:
        return unchecked(measured)
    seeds, agreeing = len(flags), sum(flags.values())
    counted = f"agrees on {agreeing} of {seeds} seed{'s' * (seeds != 1)}"
    if 0 < agreeing < seeds:
        return "inconclusive", f"{counted}: {measured}"
    if seeds < FEWEST:
        return "inconclusive", f"{counted}, and it takes at least {FEWEST}: {measured}"
    test = f"{counted}, sign test p = {sign_test(seeds):.3g}: {measured}"
    return ("holds" if agreeing else "reversed"), test


def lowest(ours: Sequence[str], others: Sequence[str] = ()) -> Check:
    """Check that our methods are below the others, by default all, at every horizon."""

    def check(sweep: SweepResults) -> Ruling:
        outcomes: list[Outcome] = []
        reasons = []
        for a in ours:
            for b in others or [label for label in sweep.arms if label not in ours]:
                for h in sweep.horizons:
                    result = verdict(sweep.judged(a, h), sweep.judged(b, h))
                    outcomes.append(result.outcome)
                    at = (
                        f" at {tokens_form(*sweep.tokens(h, a, b))}"
                        if len(sweep.horizons) > 1
                        else ""
                    )
                    reasons.append(f"{b}{at} ({result.reason})")
        if not outcomes:
            return unchecked("there is no other method")
        if all(outcome == "holds" for outcome in outcomes):
            return "holds", f"all {len(outcomes)} comparisons hold"
        total: Outcome = "reversed" if "reversed" in outcomes else "inconclusive"
        count, example = outcomes.count(total), reasons[outcomes.index(total)]
        return (
            total,
            f"{total} in {count} of {len(outcomes)} comparisons, for example against {example}",
        )

    return check


@dataclass(frozen=True)
class _SpeedUp:
    """A speed-up; a lower bound if our curve starts below; 0 if it never gets there."""

    ratio: float
    exact: bool = True

    def __str__(self) -> str:
        return f"{'' if self.exact else 'at least '}{self.ratio:.2f}" if self.ratio else "below 1"


def _speed_up(ours: Curve, reference: Curve) -> _SpeedUp:
    exact = speed_up(ours, reference)
    if exact is not None:
        return _SpeedUp(exact)
    below = ours[0][1] < reference[-1][1]
    return _SpeedUp(reference[-1][0] / ours[0][0], exact=False) if below else _SpeedUp(0.0)


def faster_than(other: str) -> Check:
    """Check that ours needs fewer tokens for the other's loss, by the factor the paper claims."""

    def check(sweep: SweepResults) -> Ruling:
        if len(sweep.horizons) < 2:
            return unchecked("one horizon gives no curve")
        ours, theirs, points = curves(sweep, OURS), curves(sweep, other), len(sweep.horizons)
        speed_ups = {
            seed: _speed_up(ours[seed], theirs[seed])
            for seed in ours
            if seed in theirs and len(ours[seed]) == len(theirs[seed]) == points
        }
        if not speed_ups:
            return unchecked("no seed has both curves")
        return _rule_on_speed_ups(speed_ups, paper.CLAIMED_SPEED_UPS[other])

    return check


def _rule_on_speed_ups(speed_ups: dict[int, _SpeedUp], claimed: float) -> Ruling:
    """Judge by the interval or, where a seed has no exact speed-up, by the sign test."""
    measured = f"speed-up {', '.join(map(str, speed_ups.values()))} where the paper claims "
    measured += f"about {claimed:g}"
    ratios = [x.ratio for x in speed_ups.values()]
    if len(ratios) > 1 and all(x.exact and x.ratio for x in speed_ups.values()):
        ends = student_interval([log(ratio) for ratio in ratios])
        assert ends is not None
        interval = exp(ends[0]), exp(ends[1])
        measured += f" (95% interval {interval[0]:.2f} to {interval[1]:.2f})"
        outcome = speed_up_outcome(interval, claimed)
        missed = (
            "faster, but by less than claimed: " if outcome == "missed" and interval[0] >= 1 else ""
        )
        return outcome, f"{missed}{measured}"
    enough = {seed: x.ratio >= NEARLY * claimed for seed, x in speed_ups.items()}
    if len(ratios) == 1 or all(enough.values()) or all(ratio < 1 for ratio in ratios):
        return _by_seed(enough, measured)
    if not all(ratio >= 1 for ratio in ratios):
        return "inconclusive", f"not faster on every seed: {measured}"
    return "inconclusive", f"faster, by how much cannot be told: {measured}"


def constant_phase_ratio(run: Run) -> float | None:
    """Return the angle late in the constant phase over the angle early in it."""
    logged, phase = run.values("angle_mean"), run.spec.constant_phase
    angles = [angle for step, angle in logged.items() if step in phase and angle > 0]
    quarter = len(angles) // 4
    return median(angles[-quarter:]) / median(angles[:quarter]) if quarter else None


def angle(labels: Sequence[str], flat: bool) -> Check:
    """Check that the methods' angle stays flat over the constant phase, or that it falls."""

    def check(sweep: SweepResults) -> Ruling:
        flags: dict[int, bool] = {}
        ratios: list[tuple[str, float]] = []
        for label in labels:
            for seed, trial in sweep.at_best(label).items():
                run = trial.trunk or next(iter(trial.ends.values()), None)
                ratio = constant_phase_ratio(run) if run else None
                if ratio is None:
                    continue
                good = FLAT[0] <= ratio <= FLAT[1] if flat else ratio < FLAT[0]
                flags[seed] = flags.get(seed, True) and good
                ratios.append((label, ratio))
        if {label for label, _ in ratios} < set(labels):
            return unchecked(f"{' and '.join(labels)}: too few logged angles in that phase")
        measured = ", ".join(f"{label} × {ratio:.2f}" for label, ratio in ratios)
        needed = f"flat: × {FLAT[0]:g} to {FLAT[1]:g}" if flat else f"falls: below × {FLAT[0]:g}"
        return _by_seed(flags, f"{measured} over the constant phase ({needed})")

    return check


def same_best_value(sweep: SweepResults) -> Ruling:
    best = {label: sweep.best[label] for label in sweep.arms if label in sweep.best}
    if len(best) < len(sweep.arms):
        return unchecked("a width has no finished run")
    measured = ", ".join(
        f"{x}: {b.lr:g}{' (edge)' if sweep.at_edge(x) else ''}" for x, b in best.items()
    )
    return _by_seed({sweep.seeds[0]: len({b.lr for b in best.values()}) == 1}, measured)


def _losses(sweep: SweepResults, label: str) -> dict[int, dict[float, float]]:
    """Return final losses by seed and value."""
    losses: dict[int, dict[float, float]] = {}
    for trial in sweep.of_arm(label):
        end = trial.final(sweep.last(label))
        if end is not None:
            losses.setdefault(trial.seed, {})[trial.value] = end[1]
    return losses


def below_from(low: float, other: str) -> Check:
    """Check that ours is below the other at every common learning rate from `low` on."""

    def check(sweep: SweepResults) -> Ruling:
        ours, theirs = _losses(sweep, OURS), _losses(sweep, other)
        flags, measured = {}, []
        for seed in ours.keys() & theirs.keys():
            common = sorted(v for v in ours[seed].keys() & theirs[seed].keys() if v >= low)
            differences = {v: ours[seed][v] - theirs[seed][v] for v in common}
            if differences:
                flags[seed] = all(d < 0 for d in differences.values())
                measured += [f"{v:g}: {d:+.4f}" for v, d in differences.items()]
        nothing = f"the grids have no common learning rate from {low:g} on"
        return _by_seed(flags, ", ".join(measured) or nothing)

    return check


def rises_sharply(label: str) -> Check:
    """Check that the loss at the largest learning rate is well above the best."""

    def check(sweep: SweepResults) -> Ruling:
        rises = {
            seed: losses[max(losses)] - min(losses.values())
            for seed, losses in _losses(sweep, label).items()
            if len(losses) > 1
        }
        measured = ", ".join(
            f"the largest learning rate is {rise:.4f} above the best (sharply: {SHARP:g})"
            for rise in rises.values()
        )
        flags = {seed: rise >= SHARP for seed, rise in rises.items()}
        return _by_seed(flags, measured or "no grid is finished")

    return check


def speedrun(sweep: SweepResults) -> Ruling:
    if sweep.scale != "paper":
        return "inconclusive", "cannot be checked at this scale: 3.28 is for the track's own model"
    losses = sweep.judged(OURS, sweep.horizons[-1])
    if not losses:
        return unchecked("no finished run")
    result, n, steps = speedrun_passes(list(losses.values())), len(losses), sweep.horizons[-1]
    measured = f"mean {fmean(losses.values()):.4f} over {n}, statistic {result.statistic:+.4f}"
    measured += f", {steps:,} steps"
    if n < 2:
        return "inconclusive", f"one seed, it takes at least two: {measured}"
    if result.passes and steps <= paper.SPEEDRUN_STEPS:
        return "holds", measured
    above = all(loss > paper.SPEEDRUN_TARGET for loss in losses.values())
    return ("reversed" if above and steps >= paper.SPEEDRUN_STEPS else "inconclusive"), measured


PAPER_CLAIMS: tuple[Claim, ...] = (
    Claim("teaser", "AngularMuown has the lowest loss at every horizon", lowest([OURS])),
    Claim("teaser", "AngularMuown reaches AdamW's loss with about half the tokens",
          faster_than("adamw")),
    Claim("teaser", "AngularMuown reaches NorMuon's loss with about two thirds of the tokens",
          faster_than("normuon")),
    Claim("teaser", "AngularMuown reaches Muown's loss with about two thirds of the tokens",
          faster_than("muown")),
    Claim("angles", "With kappa 1 the mean angle per step stays flat",
          angle([paper.KAPPA_1], flat=True)),
    Claim("angles", "Muon with weight decay keeps a plateau of the angle",
          angle([paper.MUON_DECAY], flat=True)),
    Claim("angles", "Muown and AngularMuown with kappa 1/t anneal the angle towards zero",
          angle(["muown", OURS], flat=False)),
    Claim("angles", "AngularMuown with kappa 1/t has the lowest loss of all", lowest([OURS])),
    Claim("width", "The best learning rate is the same at widths 512, 768 and 1280",
          same_best_value),
    Claim("qwen2", "AngularMuown with kappa 1/t has the lowest loss over all learning rates",
          lowest([OURS])),
    Claim("qwen2",
          "AngularMuown with kappa 1/t is below NorMuon at every learning rate from 2e-2 on",
          below_from(2e-2, "normuon")),
    Claim("qwen2", "With kappa 1 the loss rises sharply with the learning rate",
          rises_sharply(paper.KAPPA_1)),
    Claim("moe", "AngularMuown is below Muon, each at its best learning rate",
          lowest([paper.RMS_SCALE, paper.SPECTRAL_SCALE], ["muon"])),
    Claim("speedrun", "The preliminary version reaches 3.28 in 3,075 steps", speedrun, "S"),
)  # fmt: skip


def claims_table(sweeps: Sequence[SweepResults], key: str) -> Table | None:
    """Judge the paper's claims, each on the sweeps of its experiment."""
    rows: list[Row] = []
    for sweep in sweeps:
        for claim in PAPER_CLAIMS:
            if claim.experiment == sweep.experiment:
                outcome, reason = claim.check(sweep)
                row: Row = {"experiment": sweep.name, "the paper's claim": claim.text}
                rows.append(row | {"verdict": Mark(outcome, outcome), "reason": reason})
    note = (
        "Judged on our runs at their scale: an inconclusive verdict does not refute the paper. A "
        f"claimed speed-up holds where its 95% interval is above {NEARLY:g} of it, is reversed "
        "where the interval is below 1, and is missed where it lies above the interval. A "
        "claim that every seed answers with yes or no takes at least "
        f"{FEWEST} seeds with the same answer."
    )
    return Table(key, "The paper's claims", rows, note) if rows else None


RULE = (
    f"It holds where the mean difference is at least {LEAST:g} and its 95% interval excludes zero, "
    f"or at least {FEWEST} seeds have one sign, which the cell then says."
)
PAIRS_NOTE = (
    "Seed by seed, each method at its best value; negative is better for the first one. Interval: "
    f"Student's, of the mean over seeds. {RULE} Edge: the best value of this method lies at the "
    "end of its grid, so a wider grid may change the verdict. To settle: seeds needed in addition "
    "if mean and variance stay as they are."
)


def pair_table(sweep: SweepResults) -> Table | None:
    rows = [
        _compare(sweep, a, b, h)
        for a, b in sweep.pairs
        for h in sweep.horizons
        if sweep.reaches(a, h) and sweep.reaches(b, h)
    ]
    title = "Method against method"
    note = f"{PAIRS_NOTE} {added_note(sweep)}".strip()
    return Table(key_of(sweep, "pairs"), title, rows, note) if rows else None


def all_pairs_table(sweeps: Sequence[SweepResults], key: str) -> Table | None:
    """Compare methods over all sweeps at the last horizon, where two seeds or more judge."""
    rows: list[Row] = []
    for sweep in sweeps:
        for a, b in sweep.pairs:
            last = sweep.last(a, b)
            if len(sweep.judged(a, last).keys() & sweep.judged(b, last).keys()) > 1:
                row = _compare(sweep, a, b, last)
                del row["reason"]
                rows.append({"experiment": sweep.name, **row})
    title = "Method against method, at the last horizon, where two seeds or more judge"
    return Table(key, title, rows, PAIRS_NOTE) if rows else None


def edge_tag(sweep: SweepResults, *arms: str) -> Mark | None:
    """Return which of the methods have their best value at the end of its grid."""
    at_edge = [arm for arm in arms if sweep.at_edge(arm)]
    return Mark(f"edge: {', '.join(at_edge)}", "edge") if at_edge else None


def _compare(sweep: SweepResults, a: str, b: str, horizon: int) -> Row:
    result = verdict(sweep.judged(a, horizon), sweep.judged(b, horizon))
    interval = result.interval
    return {
        "claim": f"{a} is below {b}",
        "tokens": token_count(*sweep.tokens(horizon, a, b)),
        "verdict": Mark(result.label, result.outcome),
        "edge": edge_tag(sweep, a, b),
        "mean difference": difference(result.paired.mean),
        "95% interval": interval and f"{interval[0]:+.4f} to {interval[1]:+.4f}",
        "seeds": seeds_form(result.paired.seeds),
        "to settle": result.to_settle,
        "reason": result.reason,
    }
