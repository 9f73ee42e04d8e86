"""Runs of few steps: how fast kappa should fall there, and which schedule to use. No torch here.

A first try has hundreds of steps, and kappa's default clock is made for thousands: kappa may fall
faster there, or the cooldown lowers the angle. The longest runs are where kappa takes over.
"""

from dataclasses import replace
from typing import Any

from angular_lab.config.spec import ScheduleSpec
from angular_lab.experiments.definition import OURS, Arm, Experiment, base, trained_by
from angular_lab.experiments.one_pass import LINEAR, LONG, SCHEDULES, SHORT
from angular_lab.experiments.published import KAPPA_1

STEPS = (300, 1000, 3000)
WARMUP = 20  # steps: the least that the documentation advises for short runs
VALIDATION = 2**18  # tokens: at scale nano all that are held out
FALL = 5.0  # kappa's clock times the steps: as at the end of scale s, 5,493 steps at the default
SCALED, COSINE = f"{OURS}, c = {FALL:g} / steps", "cosine"
# Where the learning rate or kappa stays higher for longer, the best learning rate is lower.
FALLING_RATES, FLAT_RATES = (1.6e-2, 2.5e-2, 4e-2), (1e-2, 1.6e-2, 2.5e-2)
METHODS = (
    (OURS, LONG, FALLING_RATES),
    (SCALED, LONG, FALLING_RATES),
    (KAPPA_1, LONG, FLAT_RATES),
    (KAPPA_1, LINEAR, FLAT_RATES),
    (KAPPA_1, COSINE, FLAT_RATES),
    (OURS, SHORT, FALLING_RATES),
    (SCALED, SHORT, FALLING_RATES),
)
# In each pair, "the first is lower" is judged.
PAIRS = (
    ((SCALED, LONG), (OURS, LONG)),
    ((SCALED, SHORT), (OURS, SHORT)),
    ((OURS, LONG), (OURS, SHORT)),
    ((OURS, LONG), (KAPPA_1, LONG)),
    ((OURS, LONG), (KAPPA_1, LINEAR)),
    ((KAPPA_1, COSINE), (KAPPA_1, LINEAR)),
)


def label(method: str, schedule: str, steps: int) -> str:
    return f"{method}, {schedule}, {steps} steps"


def _arm(scale: str, method: str, schedule: str, rates: tuple[float, ...], steps: int) -> Arm:
    changes: dict[str, dict[str, Any]] = {
        SCALED: {"decay_scale": FALL / steps},
        KAPPA_1: {"decay_degree": 0.0},
    }
    kinds = {
        SHORT: ScheduleSpec(warmup=WARMUP, decay=SCHEDULES[SHORT]),
        LONG: ScheduleSpec(warmup=WARMUP, decay=SCHEDULES[LONG]),
        LINEAR: ScheduleSpec(warmup=WARMUP, decay=1 - WARMUP / steps),
        COSINE: ScheduleSpec(warmup=WARMUP, kind="cosine"),
    }
    spec = trained_by(base(scale), OURS, **changes.get(method, {}))
    spec = replace(spec, schedule=kinds[schedule], save_every=None, angle_every=100)
    spec = replace(spec, eval_every=STEPS[-1], eval_tokens=VALIDATION)  # at the end only
    return Arm(label(method, schedule, steps), spec, rates, horizons=(steps,))


def short_runs(scale: str) -> Experiment:
    """Every length has its own learning rates. They are chosen on seed 0, four others judge."""
    arms = tuple(_arm(scale, *method, steps) for steps in STEPS for method in METHODS)
    pairs = tuple((label(*a, steps), label(*b, steps)) for steps in STEPS for a, b in PAIRS)
    title = "Runs of few steps: the clock of kappa, and schedules"
    return Experiment("short-runs", scale, title, arms, STEPS, (0, 1, 2, 3, 4), None, pairs)
