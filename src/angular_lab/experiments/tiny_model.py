"""Experiments with a tiny model on a CPU, where enough seeds are affordable. No torch here.

Runs of few steps, small batches, and the trials are what the advice on settings rests on; the last
experiment compares all methods.
"""

from dataclasses import replace
from typing import Any

from angular_lab.config.spec import ExtrapolateSpec, ScheduleSpec, Spec
from angular_lab.experiments.definition import OURS, Arm, Experiment, base, trained_by
from angular_lab.experiments.extensions import DECOUPLED
from angular_lab.experiments.one_pass import (
    AT_A_QUARTER,
    CHANGES,
    DECAYED,
    LINEAR,
    LONG,
    SCHEDULES,
    SHORT,
)
from angular_lab.experiments.published import KAPPA_1
from angular_lab.experiments.trials import ALONE, FURTHER, MEMORY, RAMP, STRENGTHS

SEEDS = (0, 1, 2, 3, 4)  # the first chooses learning rates, the others judge
WARMUP = 20  # steps: the least that the documentation advises for short runs
# Where the learning rate or kappa stays higher for longer, the best learning rate is lower.
FALLING_RATES, FLAT_RATES = (1.6e-2, 2.5e-2, 4e-2), (1e-2, 1.6e-2, 2.5e-2)

# -- few steps: how fast kappa should fall there, and which schedule to use ------------------------

# A first try has hundreds of steps, and kappa's default clock is made for thousands: kappa may fall
# faster there, or the cooldown lowers the angle. The longest runs are where kappa takes over.
STEPS = (300, 1000, 3000)
VALIDATION = 2**18  # tokens: at scale nano all that are held out
FALL = 5.0  # kappa's clock times the steps: as at the end of scale s, 5,493 steps at the default
SCALED, COSINE = f"{OURS}, c = {FALL:g} / steps", "cosine"
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
    spec = _evaluated_once(scale, STEPS[-1], VALIDATION, **changes.get(method, {}))
    spec = replace(spec, schedule=_schedule(schedule, steps))
    return Arm(label(method, schedule, steps), spec, rates, horizons=(steps,))


def _schedule(name: str, steps: int) -> ScheduleSpec:
    if name == COSINE:
        return ScheduleSpec(warmup=WARMUP, kind="cosine")
    share = 1 - WARMUP / steps if name == LINEAR else SCHEDULES[name]
    return ScheduleSpec(warmup=WARMUP, decay=share)


def _evaluated_once(
    scale: str, steps: int, tokens: int, optimizer: str = OURS, **changes: Any
) -> Spec:
    """Return the spec of runs of at most so many steps, evaluated at the end only."""
    spec = trained_by(base(scale), optimizer, **changes)
    return replace(spec, save_every=None, angle_every=100, eval_every=steps, eval_tokens=tokens)


def short_runs(scale: str) -> Experiment:
    """Every length has its own learning rates."""
    arms = tuple(_arm(scale, *method, steps) for steps in STEPS for method in METHODS)
    pairs = tuple((label(*a, steps), label(*b, steps)) for steps in STEPS for a, b in PAIRS)
    title = "Runs of few steps: the clock of kappa, and schedules"
    return Experiment("short-runs", scale, title, arms, STEPS, SEEDS, None, pairs)


# -- small batches: for which batches and lengths the settings for small batches help -------------

# Sequences per step: the scale's own batch, four and sixteen times that.
BATCHES = {"nano": (16, 64, 256), "s": (32, 128, 512), "paper": (512, 2048, 8192)}
USUAL, BOTH = "beta2 0.95", "beta2 0.99, ramp"
SETTINGS: dict[str, dict[str, Any]] = {
    USUAL: {},
    "ramp": RAMP,
    "beta2 0.99": MEMORY,
    BOTH: MEMORY | RAMP,
}
# What is tried on top of both: the trials of model S that change training, and a few more values.
ON_TOP: dict[str, dict[str, Any]] = {
    "aux_beta2 0.999": {"aux_beta2": 0.999},
    "momentum 0.9": {"momentum": 0.9},
    "momentum 0.975": {"momentum": 0.975},
    "radius_lr 0.005": {"radius_lr": 0.005},
    "log radius": {"radius": "log_adam"},
    **{name: values for name, values in FURTHER.items() if "forms" not in values},
}
HELD_OUT = 2**19  # tokens of a corpus with thousands of vocabulary entries
SMALL_BATCH_RATES = (1.25e-2, 2.5e-2, 5e-2)


def cells(scale: str) -> list[tuple[int, int, list[str]]]:
    """Return sequences per step, steps, and the settings that are compared there, the usual ones
    first: all for the smallest batch, fewer for larger ones, whose runs are long."""
    smallest, larger, largest = BATCHES[scale]
    return [
        (smallest, 1000, [*SETTINGS]),
        (smallest, 4000, [*SETTINGS]),
        (larger, 1000, [USUAL, "beta2 0.99", BOTH]),
        (largest, 1000, [USUAL, BOTH]),
    ]


def small_batches(scale: str) -> Experiment:
    """Every arm has its own learning rates."""
    arms, pairs = [], []
    for batch, steps, names in cells(scale):
        own = [_with_batch(scale, batch, steps, name) for name in names]
        arms += own
        pairs += [(arm.label, own[0].label) for arm in own[1:]]
    title = "Small batches: beta2 of embeddings, head and norms, and a momentum ramp"
    horizons = tuple(dict.fromkeys(steps for _, steps, _ in cells(scale)))
    return Experiment(
        "small-batches", scale, title, tuple(arms), horizons, SEEDS, None, tuple(pairs)
    )


def tiny_trials(scale: str) -> Experiment:
    """Judge on four seeds what `trials` screens on one: changes on top of both settings, with the
    smallest batch. Every arm has its own learning rates."""
    usual = _with_batch(scale, BATCHES[scale][0], 1000, BOTH)
    ahead = replace(usual.spec, extrapolate=ExtrapolateSpec(strength=STRENGTHS[0]))
    arms = [usual, replace(usual, label=ALONE[0], spec=ahead)]
    for name, changes in ON_TOP.items():
        optim = replace(usual.spec.optim, **changes)
        arms.append(replace(usual, label=name, spec=replace(usual.spec, optim=optim)))
    title = "Trials on four seeds: changes on top of the settings for small batches"
    pairs = tuple((arm.label, usual.label) for arm in arms[1:])
    return Experiment("tiny-trials", scale, title, tuple(arms), (1000,), SEEDS, None, pairs)


def batch_label(batch: int, steps: int, name: str) -> str:
    return f"batch {batch}, {steps} steps, {name}"


def _with_batch(scale: str, batch: int, steps: int, name: str) -> Arm:
    spec = _evaluated_once(scale, steps, HELD_OUT, **SETTINGS[name])
    spec = _in_parts(scale, replace(spec, schedule=_schedule(LONG, steps), batch=batch))
    return Arm(batch_label(batch, steps, name), spec, SMALL_BATCH_RATES, horizons=(steps,))


def _in_parts(scale: str, spec: Spec) -> Spec:
    """Return the spec for a vocabulary of thousands: float32 logits would take most of a step, and
    parts of one size let all runs share a compiled model."""
    micro = min(BATCHES[scale][0], spec.micro_batch or spec.batch)
    return replace(spec, micro_batch=micro, precision="bf16", compile=True)


# -- all methods ---------------------------------------------------------------------------------

# Each under the schedule that was best for model S at a quarter of the corpus.
COMPARED = (
    (OURS, LONG),
    (DECAYED, LINEAR),
    ("muon", LINEAR),
    ("normuon", LONG),
    ("muown", LONG),
    (DECOUPLED, LINEAR),
    ("hyperball", LINEAR),
    (KAPPA_1, LINEAR),
    ("adamw", LONG),
)
COMPARED_STEPS = 4000


def tiny_comparison(scale: str) -> Experiment:
    """Every method with the settings for small batches, at its own learning rate: model S's and
    half and twice that."""
    arms = tuple(_compared(scale, method, schedule) for method, schedule in COMPARED)
    title = "All methods on a tiny model, with the settings for small batches"
    return Experiment(
        "tiny-comparison", scale, title, arms, (COMPARED_STEPS,), SEEDS, arms[0].label
    )


def _compared(scale: str, method: str, schedule: str) -> Arm:
    name, lr = method.partition(",")[0], AT_A_QUARTER[method, schedule]
    settings = MEMORY if name == "adamw" else MEMORY | RAMP
    changes = CHANGES.get(method, {}) | settings
    spec = _evaluated_once(scale, COMPARED_STEPS, HELD_OUT, name, **changes)
    spec = _in_parts(scale, replace(spec, schedule=_schedule(schedule, COMPARED_STEPS)))
    return Arm(f"{method}, {schedule}", spec, (lr / 2, lr, 2 * lr))
