"""What it takes for a claim of the paper to hold on a sweep: one check per claim.

One seed is never enough, whatever it shows: then the reason says what was measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from angular_lab.experiments import published as paper
from angular_lab.experiments.statistics import Curve, Outcome, speed_up, speedrun_passes, verdict
from angular_lab.report.runs import Run
from angular_lab.report.speed import curves
from angular_lab.report.sweeps import SweepData
from angular_lab.report.tables import seeds_form, tokens_form

NEARLY = 0.9  # "about half the tokens" holds from nine tenths of the claimed speed-up
FLAT = (0.8, 1.25)  # an angle within this factor over the constant phase has stayed
SHARP = 0.05  # nats that a loss must rise by to rise sharply
KAPPA_1 = "angular_muown, kappa = 1"
Check = Callable[[SweepData], tuple[Outcome, str]]


def _by_seed(flags: dict[int, bool], measured: str) -> tuple[Outcome, str]:
    """A claim that every seed answers with yes or no."""
    if not flags:
        return "inconclusive", f"cannot be checked: {measured}"
    if len(flags) == 1:
        agrees = "agrees" if all(flags.values()) else "does not agree"
        return "inconclusive", f"one seed, it takes at least two; it {agrees}: {measured}"
    if all(flags.values()):
        return "holds", f"on all of {seeds_form(list(flags))}: {measured}"
    if not any(flags.values()):
        return "reversed", f"on none of {seeds_form(list(flags))}: {measured}"
    return "inconclusive", f"not the same on {seeds_form(list(flags))}: {measured}"


def _lowest(ours: Sequence[str], others: Sequence[str] = ()) -> Check:
    """Our lines are below the others (all that there are, if none is named), at every horizon."""

    def check(sweep: SweepData) -> tuple[Outcome, str]:
        outcomes: list[Outcome] = []
        reasons = []
        for a in ours:
            for b in others or [label for label in sweep.lines if label not in ours]:
                for h in sweep.horizons:
                    result = verdict(sweep.judged(a, h), sweep.judged(b, h))
                    outcomes.append(result.outcome)
                    at = f" at {tokens_form(sweep.tokens(h))}" if len(sweep.horizons) > 1 else ""
                    reasons.append(f"{b}{at} ({result.reason})")
        if not outcomes:
            return "inconclusive", "cannot be checked: there is no other line"
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
class _Times:
    """A speed-up, or what it is at least: the first horizon was below already. 0: never there."""

    ratio: float
    exact: bool = True

    def __str__(self) -> str:
        return f"{'' if self.exact else 'at least '}{self.ratio:.2f}" if self.ratio else "below 1"


def _times(ours: Curve, reference: Curve) -> _Times:
    exact = speed_up(ours, reference)
    if exact is not None:
        return _Times(exact)
    below = ours[0][1] < reference[-1][1]
    return _Times(reference[-1][0] / ours[0][0], exact=False) if below else _Times(0.0)


def _faster(other: str) -> Check:
    def check(sweep: SweepData) -> tuple[Outcome, str]:
        if len(sweep.horizons) < 2:
            return "inconclusive", "cannot be checked: one horizon gives no curve"
        mine, theirs = curves(sweep, "angular_muown"), curves(sweep, other)
        whole = len(sweep.horizons)
        found = {
            seed: _times(mine[seed], theirs[seed])
            for seed in mine
            if seed in theirs and len(mine[seed]) == len(theirs[seed]) == whole
        }
        claimed = paper.CLAIMED_SPEED_UPS[other]
        if not found:
            return "inconclusive", "cannot be checked: no seed has both curves"
        measured = f"speed-up {', '.join(map(str, found.values()))} where the paper claims about "
        measured += f"{claimed:g}"
        enough = {seed: x.ratio >= NEARLY * claimed for seed, x in found.items()}
        outcome, reason = _by_seed(enough, measured)
        if outcome != "reversed" or all(x.ratio < 1 for x in found.values()):
            return outcome, reason
        if not all(x.ratio >= 1 for x in found.values()):
            return "inconclusive", f"not faster on every seed: {measured}"
        if not all(x.exact for x in found.values()):
            return "inconclusive", f"faster, by how much cannot be told: {measured}"
        return "missed", f"faster, but by less than claimed: {measured}"

    return check


def constant_phase_ratio(run: Run) -> float | None:
    """The angle late in the constant phase over that early in it."""
    spec = run.spec
    cooling = spec.decay_steps if spec.schedule.kind == "wsd" else 0
    steps = range(spec.schedule.warmup + 1, spec.steps - cooling + 1)
    angles = [
        line["angle_mean"]
        for line in run.metrics
        if line["step"] in steps and line.get("angle_mean", 0) > 0
    ]
    quarter = len(angles) // 4
    return median(angles[-quarter:]) / median(angles[:quarter]) if quarter else None


def _angle(labels: Sequence[str], flat: bool) -> Check:
    def check(sweep: SweepData) -> tuple[Outcome, str]:
        flags: dict[int, bool] = {}
        shown = []
        for label in labels:
            for seed, member in sweep.at_best(label).items():
                run = member.trunk or next(iter(member.ends.values()), None)
                ratio = constant_phase_ratio(run) if run else None
                if ratio is None:
                    continue
                good = FLAT[0] <= ratio <= FLAT[1] if flat else ratio < FLAT[0]
                flags[seed] = flags.get(seed, True) and good
                shown.append(f"{label} × {ratio:.2f}")
        wanted = f"flat: × {FLAT[0]:g} to {FLAT[1]:g}" if flat else f"falls: below × {FLAT[0]:g}"
        if len({text.partition(" × ")[0] for text in shown}) < len(labels):
            return _by_seed({}, f"{' and '.join(labels)}: too few logged angles in that phase")
        return _by_seed(flags, f"{', '.join(shown)} over the constant phase ({wanted})")

    return check


def _same_best(sweep: SweepData) -> tuple[Outcome, str]:
    best = {label: sweep.best[label] for label in sweep.lines if label in sweep.best}
    if len(best) < len(sweep.lines):
        return "inconclusive", "cannot be checked: a width has no finished run"
    shown = ", ".join(
        f"{x}: {b.lr:g}{' (edge)' if sweep.at_edge(x) else ''}" for x, b in best.items()
    )
    return _by_seed({sweep.seeds[0]: len({b.lr for b in best.values()}) == 1}, shown)


def _losses(sweep: SweepData, label: str) -> dict[int, dict[float, float]]:
    """Final losses by seed and value."""
    found: dict[int, dict[float, float]] = {}
    for member in sweep.of_line(label):
        end = member.final(sweep.horizons[-1])
        if end is not None:
            found.setdefault(member.seed, {})[member.value] = end[1]
    return found


def _below_from(sweep: SweepData, low: float = 2e-2) -> tuple[Outcome, str]:
    ours, theirs = _losses(sweep, "angular_muown"), _losses(sweep, "normuon")
    flags, shown = {}, []
    for seed in ours.keys() & theirs.keys():
        common = sorted(v for v in ours[seed].keys() & theirs[seed].keys() if v >= low)
        if common:
            differences = [ours[seed][v] - theirs[seed][v] for v in common]
            flags[seed] = all(d < 0 for d in differences)
            shown += [f"{v:g}: {d:+.4f}" for v, d in zip(common, differences, strict=True)]
    return _by_seed(flags, ", ".join(shown) or f"the grids have no common rate from {low:g} on")


def _rises(sweep: SweepData) -> tuple[Outcome, str]:
    flags, shown = {}, []
    for seed, losses in _losses(sweep, KAPPA_1).items():
        if len(losses) > 1:
            rise = losses[max(losses)] - min(losses.values())
            flags[seed] = rise >= SHARP
            shown.append(f"the largest rate is {rise:.4f} above the best (sharply: {SHARP:g})")
    return _by_seed(flags, ", ".join(shown) or "no grid is finished")


def _speedrun(sweep: SweepData) -> tuple[Outcome, str]:
    if sweep.scale != "paper":
        return "inconclusive", "cannot be checked at this scale: 3.28 is for the track's own model"
    losses = sweep.judged("angular_muown", sweep.horizons[-1])
    if not losses:
        return "inconclusive", "cannot be checked: no finished run"
    result, n, steps = speedrun_passes(list(losses.values())), len(losses), sweep.horizons[-1]
    shown = f"mean {fmean(losses.values()):.4f} over {n}, statistic {result.statistic:+.4f}"
    shown += f", {steps:,} steps"
    if n < 2:
        return "inconclusive", f"one seed, it takes at least two: {shown}"
    if result.passes and steps <= paper.SPEEDRUN_STEPS:
        return "holds", shown
    above = all(loss > paper.SPEEDRUN_TARGET for loss in losses.values())
    return ("reversed" if above and steps >= paper.SPEEDRUN_STEPS else "inconclusive"), shown


CHECKS: dict[str, tuple[Check, ...]] = {
    "teaser": (
        _lowest(["angular_muown"]), _faster("adamw"), _faster("normuon"), _faster("muown"),
    ),
    "angles": (
        _angle([KAPPA_1], flat=True),
        _angle(["muon, decay 0.1"], flat=True),
        _angle(["muown", "angular_muown"], flat=False),
        _lowest(["angular_muown"]),
    ),
    "width transfer": (_same_best,),
    "qwen2": (_lowest(["angular_muown"]), _below_from, _rises),
    "moe": (
        _lowest(["angular_muown, RMS scale", "angular_muown, spectral scale"], ["muon"]),
    ),
    "speedrun": (_speedrun,),
}  # fmt: skip
