"""Experiments beyond the paper: variants, averages, concurrent methods. No torch here."""

from dataclasses import replace
from typing import Any

from angular_lab.config.spec import Spec
from angular_lab.experiments.ablations import CLOSEST, SHARES
from angular_lab.experiments.definition import (
    HORIZONS,
    OURS,
    SEEDS,
    Arm,
    Experiment,
    base,
    baseline_arm,
    trained_by,
    tuned_rate,
    tuning_seed,
)

PUBLISHED = "as published"
CONSTRAINED = "constrained polar factor"


def _changes(scale: str) -> dict[str, dict[str, Any]]:
    """Return what each variant changes in AngularMuown."""
    rate = tuned_rate(scale, "angular_muown")
    return {
        "log radius": {"radius": "log_adam"},
        "radius rate x 0.2": {"radius_lr": 0.2 * rate},
        "aux rate x 0.3": {"aux_lr": 0.3 * rate},
        "log radius, aux rate x 0.3": {"radius": "log_adam", "aux_lr": 0.3 * rate},
        CONSTRAINED: {"orthogonalize": "tangent"},
        "kappa half as fast": {"decay_scale": 5e-4},
        "kappa twice as fast": {"decay_scale": 2e-3},
        # Two that end where the published one does at scale s, and fall earlier.
        "kappa of degree 0.6": {"decay_scale": 4e-3, "decay_degree": 0.6},
        "kappa of degree 0.5": {"decay_scale": 8e-3, "decay_degree": 0.5},
    }


def _variant(scale: str, average: tuple[int, ...], name: str | None = None) -> Spec:
    """Return AngularMuown as published, or as changed by a variant."""
    changes = _changes(scale)[name] if name else {}
    return replace(trained_by(base(scale), OURS, **changes), average=average)


def _screening(
    name: str, scale: str, title: str, arms: tuple[Arm, ...], horizon: int
) -> Experiment:
    """Return an experiment that compares every arm with the published one, on one seed."""
    pairs = tuple((arm.label, PUBLISHED) for arm in arms if arm.label != PUBLISHED)
    return Experiment(name, scale, title, arms, (horizon,), SEEDS[scale][:1], expected=pairs)


def variants(scale: str) -> Experiment:
    """Compare variants, alone and one pair, with the method as published, at its learning rate, on
    one seed: what is worth a closer look. At the longest horizon, because only there has kappa
    fallen far. Averages of the last weights change nothing in a run. The constrained polar factor
    has an experiment of its own."""
    rate, windows = tuned_rate(scale, OURS), _windows(scale)
    arms = (
        Arm(PUBLISHED, _variant(scale, windows), (rate,)),
        *(
            Arm(name, _variant(scale, windows, name), (rate,))
            for name in _changes(scale)
            if name != CONSTRAINED
        ),
    )
    title = "Variants beyond the paper, one seed"
    return _screening("variants", scale, title, arms, HORIZONS[scale][-1])


def constrained(scale: str) -> Experiment:
    """Try the variant whose steps take many times as long, at the shortest horizon."""
    rate = tuned_rate(scale, OURS)
    arms = (
        Arm(PUBLISHED, _variant(scale, ()), (rate,)),
        Arm(CONSTRAINED, _variant(scale, (), CONSTRAINED), (rate,)),
    )
    title = "The polar factor in the tangent space"
    return _screening("constrained", scale, title, arms, HORIZONS[scale][0])


def _windows(scale: str) -> tuple[int, ...]:
    """Return 1%, 3% and 10% of the longest horizon, in steps."""
    last = HORIZONS[scale][-1]
    return tuple(max(2, round(share * last)) for share in (0.01, 0.03, 0.1))


def average(scale: str) -> Experiment:
    """Evaluate averages of the last weights as well as the weights, for our arm, the closest one
    and AdamW; no average changes a run. Two horizons, half and whole: then there is a trunk,
    evaluated where its cooldowns start, and whole runs compare with those of half the tokens."""
    horizons = HORIZONS[scale][1], HORIZONS[scale][-1]
    specs = {name: trained_by(base(scale), name) for name in (*CLOSEST, "adamw")}
    arms = tuple(
        Arm(name, replace(spec, average=SHARES), (tuned_rate(scale, name),))
        for name, spec in specs.items()
    )
    return Experiment(
        "average",
        scale,
        "Evaluating an average of the last weights",
        arms,
        horizons,
        SEEDS[scale],
        ours=OURS,
        tuning_seed=tuning_seed(scale),
    )


DECOUPLED = "magnitude_direction"
GAINS_RATE = 4e-3  # of its rows and columns
FALLING = 0.95  # share of the steps of a decay that lasts to the end
# A concurrent method's step turns a matrix by its learning rate. Muon's weight decay brings its
# angle to 0.0063 at its best learning rate of scale s: the best of these should be near that.
RELATIVE = (5e-3, 1e-2, 2e-2)


def _falling(scale: str) -> Spec:
    """Return the base spec with a learning rate that falls linearly from the warmup to the end."""
    spec = base(scale)
    return replace(spec, schedule=replace(spec.schedule, decay=FALLING))


def _decoupled(spec: Spec) -> Spec:
    return trained_by(spec, DECOUPLED, radius_lr=GAINS_RATE)


def _decoupled_falling(scale: str) -> Arm:
    """Return the arm as it is usually run. The mean of such a learning rate is half as high, so
    the grid is twice as high."""
    rates = tuple(2 * rate for rate in RELATIVE)
    return Arm(f"{DECOUPLED}, falling rate", _decoupled(_falling(scale)), rates)


def concurrent(scale: str) -> Experiment:
    """Compare concurrent methods at their own learning rates: hyperball under the comparison's
    schedule, the other one as it is usually run."""
    hyperball = Arm("hyperball", trained_by(base(scale), "hyperball"), RELATIVE)
    arms = baseline_arm(scale), hyperball, _decoupled_falling(scale)
    title = "Concurrent methods"
    return Experiment("concurrent", scale, title, arms, HORIZONS[scale][-1:], SEEDS[scale], OURS)


def schedules(scale: str) -> Experiment:
    """Exchange schedules: a concurrent method was ahead with another schedule than ours."""
    ours, closest = CLOSEST
    falling = _falling(scale)
    specs = {
        ours: trained_by(falling, ours),
        f"{ours}, kappa = 1": trained_by(falling, ours, decay_degree=0.0),
        closest: trained_by(falling, closest),
    }
    arms = (
        *(
            Arm(f"{label}, falling rate", spec, _around(tuned_rate(scale, spec.optim.name)))
            for label, spec in specs.items()
        ),
        _decoupled_falling(scale),
        Arm(DECOUPLED, _decoupled(base(scale)), RELATIVE),
    )
    title, first = "Falling learning rates and cooldowns, exchanged", arms[0].label
    return Experiment("schedules", scale, title, arms, HORIZONS[scale][-1:], SEEDS[scale], first)


def storage(scale: str) -> Experiment:
    """Store the momentum in 8 bits, with float32 and with bf16 weights: does it cost loss? Nothing
    is chosen, so every seed judges."""
    rate, plain = tuned_rate(scale, OURS), trained_by(base(scale), OURS)
    eight_bit = trained_by(base(scale), OURS, state_dtype="int8")
    specs = {
        OURS: plain,
        "8-bit momentum": eight_bit,
        "bf16 weights": replace(plain, precision="bf16_weights"),
        "bf16 weights, 8-bit momentum": replace(eight_bit, precision="bf16_weights"),
    }
    arms = tuple(Arm(label, spec, (rate,)) for label, spec in specs.items())
    names = [*specs]
    pairs = ((names[1], names[0]), (names[2], names[0]), (names[3], names[2]))
    seeds = (1, 2, 3) if scale == "s" else SEEDS[scale]
    horizon = HORIZONS[scale][-1:]
    title = "Momentum in 8 bits, and weights in 16"
    chosen_on = tuning_seed(scale)
    return Experiment(
        "storage", scale, title, arms, horizon, seeds, OURS, pairs, tuning_seed=chosen_on
    )


def _around(rate: float) -> tuple[float, ...]:
    return rate / 2, rate, 2 * rate
