"""The comparison on a corpus that is read once: every optimizer under three schedules.

First learning rate and schedule at a quarter of the corpus, on one seed; then the best of those
over all of it, on more seeds. No torch here.
"""

from dataclasses import replace
from typing import Any

from angular_lab.config.spec import Spec
from angular_lab.experiments.ablations import larger_model
from angular_lab.experiments.definition import (
    HORIZONS,
    OURS,
    SEEDS,
    Arm,
    Experiment,
    base,
    trained_by,
    tuning_seed,
)
from angular_lab.experiments.extensions import DECOUPLED, FALLING, GAINS_RATE
from angular_lab.experiments.published import KAPPA_1

Grids = tuple[tuple[str, str, tuple[float, ...]], ...]  # method, schedule, rates

DECAYED = "normuon, decay 0.1"
SHORT, LONG, LINEAR = "cooldown 20%", "cooldown 50%", "linear to zero"
SCHEDULES = {SHORT: 0.2, LONG: 0.5, LINEAR: FALLING}  # the last share of the steps
# At scale s 13,000 steps of 16,384 tokens: 213.0M of 213.5M, so that none is read twice.
STEPS = HORIZONS | {"s": (3250, 6500, 9750, 13_000)}
VALIDATION = 2**21  # tokens at scale s: all that are held out
CHANGES: dict[str, dict[str, Any]] = {
    KAPPA_1: {"decay_degree": 0.0},
    DECAYED: {"weight_decay": 0.1},
    DECOUPLED: {"radius_lr": GAINS_RATE},
    "adamw": {"aux_lr": 1.6e-2},  # eight times the best rate: `tuned-adamw`
}
# The expected best is in the middle: at a constant learning rate, from what was best at 22.5M to
# 90M tokens; higher where the learning rate falls for longer. The steeper, the closer the grid.
# A sweep takes them in this order: the most informative ones come first.
GRIDS: Grids = (
    (OURS, LONG, (1.6e-2, 2.5e-2, 4e-2)),
    ("normuon", LONG, (6e-3, 1.2e-2, 2.4e-2)),
    (KAPPA_1, LINEAR, (1e-2, 1.6e-2, 2.5e-2)),
    (DECOUPLED, LINEAR, (1e-2, 1.6e-2, 2.5e-2)),
    (OURS, SHORT, (1e-2, 1.6e-2, 2.5e-2)),
    (OURS, LINEAR, (1.6e-2, 2.5e-2, 4e-2)),
    (KAPPA_1, LONG, (6.3e-3, 1e-2, 1.6e-2)),
    (DECOUPLED, LONG, (6.3e-3, 1e-2, 1.6e-2)),
    ("normuon", LINEAR, (8e-3, 1.6e-2, 3.2e-2)),
    ("normuon", SHORT, (4e-3, 8e-3, 1.6e-2)),
    (KAPPA_1, SHORT, (4e-3, 6.3e-3, 1e-2)),
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

# The learning rates that were best there: every method under its best schedule, and its closest
# competitors under another one.
AT_A_QUARTER = {
    (OURS, LINEAR): 2.5e-2,
    (OURS, LONG): 2.5e-2,
    (DECAYED, LINEAR): 1.6e-2,
    (DECAYED, LONG): 6e-3,
    ("muon", LINEAR): 1e-2,
    ("normuon", LONG): 1.2e-2,
    ("muown", LONG): 8e-3,
    ("adamw", LONG): 1.25e-3,
    (KAPPA_1, LINEAR): 1.6e-2,
    (DECOUPLED, LINEAR): 1.6e-2,
    ("hyperball", LINEAR): 1e-2,
}

# The whole corpus, under the schedules that are best at a quarter of it. Hyperball had not run
# there and takes that of the most similar method. If the angle does not fall by itself, four
# times the steps need a lower learning rate. The closest competitors come first.
WHOLE: Grids = (
    (OURS, LINEAR, (1.6e-2, 2.5e-2, 4e-2)),
    (DECAYED, LINEAR, (6e-3, 1.2e-2, 2.4e-2)),
    (OURS, LONG, (1.6e-2, 2.5e-2, 4e-2)),
    (DECAYED, LONG, (2.5e-3, 4e-3, 6.3e-3)),
    ("muon", LINEAR, (4e-3, 8e-3, 1.6e-2)),
    (KAPPA_1, LINEAR, (6.3e-3, 1e-2, 1.6e-2)),
    ("normuon", LONG, (6e-3, 1.2e-2, 2.4e-2)),
    ("muown", LONG, (4e-3, 8e-3, 1.6e-2)),
    ("adamw", LONG, (8e-4, 1.25e-3, 2e-3)),
    ("normuon", LINEAR, (8e-3, 1.2e-2, 1.8e-2)),
    (DECOUPLED, LINEAR, (6.3e-3, 1e-2, 1.6e-2)),
    ("hyperball", LINEAR, (6.3e-3, 1e-2, 1.6e-2)),
)

# The best over all of the corpus after a cooldown of 50%.
OURS_RATE, ADAMW_RATE = 2.5e-2, 1.25e-3
# A larger model: the closest methods, each under its best schedule. At scale s a step has twice
# the tokens of model S.
LARGER: Grids = (
    (OURS, LONG, (1.6e-2, 2.5e-2, 4e-2)),
    (DECAYED, LINEAR, (4e-3, 8e-3, 1.6e-2)),
    ("muown", LONG, (4e-3, 8e-3, 1.6e-2)),
    ("adamw", LONG, (6.25e-4, 1.25e-3, 2.5e-3)),
)
LARGER_STEPS = {name: steps[0] for name, steps in STEPS.items()} | {"s": STEPS["s"][0] // 2}


def spec_of(scale: str, method: str, schedule: str) -> Spec:
    """Return a method's spec under a schedule, evaluated at the horizons only."""
    name, spec = method.partition(",")[0], base(scale)
    spec = trained_by(spec, name, **CHANGES.get(method, {}))
    tokens = VALIDATION if scale == "s" else spec.eval_tokens
    spec = replace(spec, eval_every=STEPS[scale][0], eval_tokens=tokens)
    return _falling(spec, decay=SCHEDULES[schedule])


def _arms(scale: str, grids: Grids) -> tuple[Arm, ...]:
    return tuple(
        Arm(f"{method}, {schedule}", spec_of(scale, method, schedule), rates)
        for method, schedule, rates in grids
    )


def one_pass(scale: str) -> Experiment:
    title = "Corpus read once: learning rates and schedules at a quarter of it, one seed"
    arms = _arms(scale, GRIDS)
    ours = arms[0].label
    return Experiment("one-pass", scale, title, arms, STEPS[scale][:1], SEEDS[scale][:1], ours)


def quarter(scale: str) -> Experiment:
    """Judge what a quarter of the corpus chose. Such a run takes a quarter of the time, so there
    can be four seeds of every method before one has them over the whole corpus."""
    seeds = (1, 2, 3, 4) if scale == "s" else SEEDS[scale]
    title = "Corpus read once: every method at a quarter of it, on seeds that chose nothing"
    grids = tuple((method, schedule, (lr,)) for (method, schedule), lr in AT_A_QUARTER.items())
    arms = _arms(scale, grids)
    return Experiment(
        "one-pass-quarter", scale, title, arms, STEPS[scale][:1], seeds, arms[0].label,
        tuning_seed=tuning_seed(scale),
    )  # fmt: skip


def one_pass_long(scale: str) -> Experiment:
    """Three seeds judge. A schedule that falls for most of the run has no trunk to share, so other
    horizons would be runs of their own."""
    seeds = (*SEEDS[scale], 3) if scale == "s" else SEEDS[scale]
    title, arms = "Corpus read once: all of it", _arms(scale, WHOLE)
    ours = arms[0].label
    return Experiment("one-pass-long", scale, title, arms, STEPS[scale][-1:], seeds, ours)


def horizons(scale: str) -> Experiment:
    """Cool down earlier, off one trunk: how many tokens a method needs for another one's loss."""
    arms = _arms(scale, ((OURS, LONG, (OURS_RATE,)), ("adamw", LONG, (ADAMW_RATE,))))
    return Experiment(
        "one-pass-horizons", scale, "Corpus read once: half and three quarters of it", arms,
        STEPS[scale][1:3], SEEDS[scale], arms[0].label, tuning_seed=tuning_seed(scale),
    )  # fmt: skip


def kappa(scale: str) -> Experiment:
    """Try what the advice on AngularMuown leaves open, on one seed: the clock of kappa, at a
    quarter of the corpus and over all of it; a longer cooldown and cosine, at a quarter."""
    longer, flat = spec_of(scale, OURS, LONG), spec_of(scale, KAPPA_1, LINEAR)
    rates = (1.6e-2, 2.5e-2, 4e-2)
    clock = replace(longer, optim=replace(longer.optim, lr=OURS_RATE))
    quarter, *_, whole = STEPS[scale]
    arms = (
        Arm(
            f"{OURS}, clock of kappa", clock, (5e-4, 1e-3, 2e-3), "optim.decay_scale",
            horizons=(quarter, whole),
        ),
        Arm(f"{OURS}, cooldown 70%", _falling(longer, decay=0.7), rates),
        Arm(f"{OURS}, cosine", _falling(longer, kind="cosine"), rates),
        Arm(f"{KAPPA_1}, cosine", _falling(flat, kind="cosine"), (1e-2, 1.6e-2, 2.5e-2)),
    )  # fmt: skip
    title, seeds = "Corpus read once: clocks of kappa, cosine, a longer cooldown", SEEDS[scale][:1]
    return Experiment("one-pass-kappa", scale, title, arms, (quarter,), seeds, expected=())


def _falling(spec: Spec, **changes: Any) -> Spec:
    return replace(spec, schedule=replace(spec.schedule, **changes))


def larger(scale: str) -> Experiment:
    """Choose learning rates of the larger model at a quarter of the corpus, on one seed."""
    steps, model = LARGER_STEPS[scale], larger_model(scale).model
    arms = tuple(
        replace(arm, spec=replace(arm.spec, model=model, eval_every=steps))
        for arm in _arms(scale, LARGER)
    )
    title, seeds = "Corpus read once: learning rates of a larger model", SEEDS[scale][:1]
    return Experiment("one-pass-larger", scale, title, arms, (steps,), seeds, arms[0].label)
