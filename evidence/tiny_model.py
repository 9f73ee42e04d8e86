"""Runs on a CPU that the advice on settings rests on: few steps, and small batches."""

from statistics import fmean

from angular_lab.experiments.one_pass import LINEAR, LONG, SHORT
from angular_lab.experiments.published import KAPPA_1
from angular_lab.experiments.statistics import LEAST, Verdict, verdict
from angular_lab.experiments.tiny_model import COSINE, FALL, METHODS, PAIRS, SCALED, STEPS, label
from angular_lab.report.read import SweepResults
from evidence.kept import OURS, Kept, Rows
from evidence.measures import Facts, grid
from evidence.whole_corpus import word

NAMES = {  # of facts
    (OURS, LONG): "default_50",
    (SCALED, LONG): "scaled_50",
    (KAPPA_1, LONG): "flat_50",
    (KAPPA_1, LINEAR): "flat_linear",
    (KAPPA_1, COSINE): "flat_cosine",
    (OURS, SHORT): "default_20",
    (SCALED, SHORT): "scaled_20",
}
KAPPAS = {OURS: "default", SCALED: f"$c$ = {FALL:g} / steps"}  # all others: 1


def facts(kept: Kept) -> Facts:
    sweep = kept.sweeps["short-runs-nano"]
    changes = {f"{NAMES[a]}_above_{NAMES[b]}": _by_steps(sweep, a, b) for a, b in PAIRS}
    seeds = {"seeds": len(sweep.seeds) - 1}
    return {"short_runs": seeds | changes | _clock(sweep, changes) | _rates(sweep)}


def _clock(sweep: SweepResults, changes: Facts) -> Facts:
    """What the documents claim about a clock that is scaled to the run."""
    scaled, flat = changes["scaled_50_above_default_50"], changes["default_50_above_flat_50"]
    ours, theirs = (label(method, LONG, 1000) for method in (SCALED, OURS))
    by_sign = _verdict(sweep, ours, theirs, 1000).label.startswith("holds (sign test")
    more = [
        changes["default_50_above_default_20"][steps]["mean"]
        < changes["scaled_20_above_default_20"][steps]["mean"]
        for steps in ("300", "1000")
    ]
    return {
        "scaling_is_worse_after_300": scaled["300"]["outcome"] == "reversed",
        "scaling_is_better_after_1000_by_sign_alone": by_sign,
        "longer_cooldown_helps_more": all(more),
        "kappa_off_is_within_0.005": max(abs(x["mean"]) for x in flat.values()) < LEAST,
    }


def _rates(sweep: SweepResults) -> Facts:
    """The learning rates of the default clock with a cooldown of 50%, on seed 0."""
    best = sweep.best[label(OURS, LONG, 300)].lr
    losses = grid(sweep, label(OURS, LONG, 1000))
    near = [losses[lr] for lr in (0.016, 0.025, 0.04)]
    return {
        "default_lr_is_0.04_after_300": best == 0.04,
        "default_lr_is_flat_after_1000": max(near) - min(near) < LEAST,
    }


def _lengths(sweep: SweepResults) -> list[int]:
    """The numbers of steps that were run."""
    return [steps for steps in STEPS if label(OURS, LONG, steps) in sweep.best]


def _by_steps(sweep: SweepResults, a: tuple[str, str], b: tuple[str, str]) -> Facts:
    """Return how far the first is above the second, by the number of steps."""
    results = {
        steps: _verdict(sweep, label(*a, steps), label(*b, steps), steps)
        for steps in _lengths(sweep)
    }
    return {
        str(steps): {"mean": result.paired.mean, "outcome": word(result)}
        for steps, result in results.items()
    }


def _verdict(sweep: SweepResults, a: str, b: str, steps: int) -> Verdict:
    """Judge "the first is lower", each at its best learning rate."""
    return verdict(sweep.judged(a, steps), sweep.judged(b, steps))


def short_runs_table(kept: Kept) -> Rows:
    """Return the mean losses of the seeds that judge, with the learning rates."""
    sweep = kept.sweeps["short-runs-nano"]
    lengths = _lengths(sweep)

    def cell(method: str, schedule: str, steps: int) -> str:
        arm = label(method, schedule, steps)
        edge = " †" if sweep.at_edge(arm) else ""
        loss = fmean(sweep.judged(arm, steps).values())
        return f"{loss:.4f} at {sweep.best[arm].lr:.2g}{edge}"

    rows = (
        [schedule, KAPPAS.get(method, "1"), *(cell(method, schedule, steps) for steps in lengths)]
        for method, schedule, _ in METHODS
    )
    return [["schedule", "κ", *(f"{steps:,} steps" for steps in lengths)], *rows]
