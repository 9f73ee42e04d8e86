"""The comparison on text that is read once: every optimizer under three schedules. No torch here.

First learning rate and schedule at a quarter of the text, on one seed; then what that chose over
all of it, on more seeds.
"""

from dataclasses import replace
from typing import Any

from angular_lab.config.spec import Spec
from angular_lab.experiments.definition import HORIZONS, SEEDS, Experiment, Line, base, trained_by
from angular_lab.experiments.extensions import DECOUPLED, FALLING, GAINS_RATE

Grids = tuple[tuple[str, str, tuple[float, ...]], ...]  # method, schedule, rates

ANGULAR, STILL, DECAYED = "angular_muown", "angular_muown, kappa = 1", "normuon, decay 0.1"
SHORT, LONG, LINEAR = "cool-down 20%", "cool-down 50%", "linear to zero"
SCHEDULES = {SHORT: 0.2, LONG: 0.5, LINEAR: FALLING}  # the last share of the steps
# At scale s 13,000 steps of 16,384 tokens: 213.0M of 213.5M, so that none is read twice.
STEPS = HORIZONS | {"s": (3250, 6500, 9750, 13_000)}
VALIDATION = 2**21  # tokens at scale s: all that are held out
CHANGES: dict[str, dict[str, Any]] = {
    STILL: {"decay_degree": 0.0},
    DECAYED: {"weight_decay": 0.1},
    DECOUPLED: {"radius_lr": GAINS_RATE},
    "adamw": {"aux_lr": 1.6e-2},  # eight times the best rate: `tuned-adamw`
}
# The best expected in the middle: at a constant rate from what was found at 22.5M to 90M tokens,
# higher where the rate falls for longer. The steeper a loss is around its best rate, the closer.
# In this order, because a sweep takes them so: what tells most comes first.
GRIDS: Grids = (
    (ANGULAR, LONG, (1.6e-2, 2.5e-2, 4e-2)),
    ("normuon", LONG, (6e-3, 1.2e-2, 2.4e-2)),
    (STILL, LINEAR, (1e-2, 1.6e-2, 2.5e-2)),
    (DECOUPLED, LINEAR, (1e-2, 1.6e-2, 2.5e-2)),
    (ANGULAR, SHORT, (1e-2, 1.6e-2, 2.5e-2)),
    (ANGULAR, LINEAR, (1.6e-2, 2.5e-2, 4e-2)),
    (STILL, LONG, (6.3e-3, 1e-2, 1.6e-2)),
    (DECOUPLED, LONG, (6.3e-3, 1e-2, 1.6e-2)),
    ("normuon", LINEAR, (8e-3, 1.6e-2, 3.2e-2)),
    ("normuon", SHORT, (4e-3, 8e-3, 1.6e-2)),
    (STILL, SHORT, (4e-3, 6.3e-3, 1e-2)),
    (DECOUPLED, SHORT, (4e-3, 6.3e-3, 1e-2)),
    ("muown", LONG, (8e-3, 1.6e-2, 3.2e-2)),
    ("adamw", LONG, (1.25e-3, 2e-3, 3.2e-3)),
    ("muown", LINEAR, (1.2e-2, 2.4e-2, 4.8e-2)),
    ("adamw", LINEAR, (1.25e-3, 2e-3, 3.2e-3)),
    ("muown", SHORT, (6e-3, 1.2e-2, 2.4e-2)),
    ("adamw", SHORT, (1e-3, 1.6e-3, 2.5e-3)),
    (DECAYED, LONG, (6e-3, 1.2e-2, 2.4e-2)),
    (DECAYED, LINEAR, (8e-3, 1.6e-2, 3.2e-2)),
    (DECAYED, SHORT, (4e-3, 8e-3, 1.6e-2)),
    ("muon", LONG, (4e-3, 8e-3, 1.6e-2)),
    ("muon", LINEAR, (5e-3, 1e-2, 2e-2)),
    ("muon", SHORT, (2.5e-3, 5e-3, 1e-2)),
    ("hyperball", LONG, (6.3e-3, 1e-2, 1.6e-2)),
    ("hyperball", LINEAR, (1e-2, 1.6e-2, 2.5e-2)),
    ("hyperball", SHORT, (4e-3, 6.3e-3, 1e-2)),
)

# All of the text, under the schedules that are best at a quarter of it. Hyperball has not run there
# and takes that of its nearest relative. If the angle does not fall by itself, four times the steps
# need a lower learning rate. The closest competitors come first.
WHOLE: Grids = (
    (ANGULAR, LINEAR, (1.6e-2, 2.5e-2, 4e-2)),
    (DECAYED, LINEAR, (6e-3, 1.2e-2, 2.4e-2)),
    (ANGULAR, LONG, (1.6e-2, 2.5e-2, 4e-2)),
    ("muon", LINEAR, (4e-3, 8e-3, 1.6e-2)),
    (STILL, LINEAR, (6.3e-3, 1e-2, 1.6e-2)),
    ("normuon", LONG, (6e-3, 1.2e-2, 2.4e-2)),
    ("muown", LONG, (4e-3, 8e-3, 1.6e-2)),
    ("adamw", LONG, (8e-4, 1.25e-3, 2e-3)),
    ("normuon", LINEAR, (8e-3, 1.2e-2, 1.8e-2)),
    (DECOUPLED, LINEAR, (6.3e-3, 1e-2, 1.6e-2)),
    ("hyperball", LINEAR, (6.3e-3, 1e-2, 1.6e-2)),
)


def _spec(scale: str, method: str, schedule: str) -> Spec:
    """Evaluated at the horizons alone."""
    name, spec = method.partition(",")[0], base(scale)
    spec = trained_by(spec, name, **CHANGES.get(method, {}))
    tokens = VALIDATION if scale == "s" else spec.eval_tokens
    falling = replace(spec.schedule, decay=SCHEDULES[schedule])
    return replace(spec, eval_every=STEPS[scale][0], eval_tokens=tokens, schedule=falling)


def _lines(scale: str, grids: Grids) -> tuple[Line, ...]:
    return tuple(
        Line(f"{method}, {schedule}", _spec(scale, method, schedule), rates)
        for method, schedule, rates in grids
    )


def one_pass(scale: str) -> Experiment:
    title = "Text read once: rates and schedules at a quarter of it, one seed"
    lines = _lines(scale, GRIDS)
    return Experiment("one-pass", scale, title, lines, STEPS[scale][:1], SEEDS[scale][:1])


def one_pass_long(scale: str) -> Experiment:
    """Three seeds judge. Other horizons of a schedule that falls for long are runs of their own."""
    seeds = (*SEEDS[scale], 3) if scale == "s" else SEEDS[scale]
    title = "Text read once: all of it"
    return Experiment("one-pass-long", scale, title, _lines(scale, WHOLE), STEPS[scale][-1:], seeds)
