"""Runs of few steps, on a CPU: the clock of kappa, and schedules."""

from statistics import fmean

from angular_lab.experiments.one_pass import LINEAR, LONG, SHORT
from angular_lab.experiments.published import KAPPA_1
from angular_lab.experiments.short_runs import COSINE, FALL, METHODS, PAIRS, SCALED, STEPS, label
from angular_lab.experiments.statistics import Verdict, verdict
from angular_lab.report.read import SweepResults
from evidence.kept import OURS, Kept, Rows
from evidence.measures import Facts
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
    return {
        "short_runs": {
            "runs": len(sweep.trials),
            "seeds": len(sweep.seeds) - 1,
            **{f"{NAMES[a]}_above_{NAMES[b]}": _by_steps(sweep, a, b) for a, b in PAIRS},
        }
    }


def _by_steps(sweep: SweepResults, a: tuple[str, str], b: tuple[str, str]) -> Facts:
    """Return how far the first is above the second, by the number of steps."""
    results = {steps: _verdict(sweep, label(*a, steps), label(*b, steps), steps) for steps in STEPS}
    return {
        str(steps): {"mean": result.paired.mean, "outcome": word(result)}
        for steps, result in results.items()
    }


def _verdict(sweep: SweepResults, a: str, b: str, steps: int) -> Verdict:
    """Judge "the first is lower", each at its best learning rate."""
    return verdict(sweep.judged(a, steps), sweep.judged(b, steps))


def table(kept: Kept) -> Rows:
    """Return the mean losses of the seeds that judge, with the learning rates."""
    sweep = kept.sweeps["short-runs-nano"]

    def cell(method: str, schedule: str, steps: int) -> str:
        arm = label(method, schedule, steps)
        edge = " †" if sweep.at_edge(arm) else ""
        loss = fmean(sweep.judged(arm, steps).values())
        return f"{loss:.4f} at {sweep.best[arm].lr:.2g}{edge}"

    rows = (
        [schedule, KAPPAS.get(method, "1"), *(cell(method, schedule, steps) for steps in STEPS)]
        for method, schedule, _ in METHODS
    )
    return [["schedule", "κ", *(f"{steps:,} steps" for steps in STEPS)], *rows]
