"""Experiments beyond the paper: leads, averages, rivals. No torch."""

from dataclasses import replace
from typing import Any

from angular_lab.config.spec import Spec
from angular_lab.experiments.ablations import CLOSEST, SHARES
from angular_lab.experiments.definition import (
    HORIZONS,
    SEEDS,
    Experiment,
    Line,
    base,
    held,
    settled,
    settler,
    trained_by,
)

PUBLISHED = "as published"
CONSTRAINED = "constrained polar factor"


def _changes(scale: str) -> dict[str, dict[str, Any]]:
    """The leads: what each of them changes in AngularMuown."""
    rate = held(scale, "angular_muown")
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


def _variant(scale: str, average: str, lead: str | None = None) -> Spec:
    """AngularMuown as published, or changed by a lead."""
    changes = _changes(scale)[lead] if lead else {}
    return replace(trained_by(base(scale), "angular_muown", **changes), average=average)


def leads(scale: str) -> Experiment:
    """Each alone, and a pair, against the method as published, at its rate, on one seed: what to
    look into. At the longest horizon, because only there has kappa fallen far. With averages of the
    last weights, which change nothing in a run. The constrained polar factor has an experiment of
    its own."""
    rate, windows = held(scale, "angular_muown"), _windows(scale)
    lines = (
        Line(PUBLISHED, _variant(scale, windows), (rate,)),
        *(
            Line(name, _variant(scale, windows, name), (rate,))
            for name in _changes(scale)
            if name != CONSTRAINED
        ),
    )
    title = "Leads beyond the paper, one seed each"
    return Experiment("leads", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale][:1])


def constrained(scale: str) -> Experiment:
    """The lead whose steps take many times as long: at the shortest horizon."""
    rate = held(scale, "angular_muown")
    lines = (
        Line(PUBLISHED, _variant(scale, ""), (rate,)),
        Line(CONSTRAINED, _variant(scale, "", CONSTRAINED), (rate,)),
    )
    title = "The polar factor within the tangent space"
    return Experiment("constrained", scale, title, lines, HORIZONS[scale][:1], SEEDS[scale][:1])


def _windows(scale: str) -> str:
    """Steps: 1%, 3% and 10% of the longest horizon."""
    last = HORIZONS[scale][-1]
    return ",".join(str(max(2, round(share * last))) for share in (0.01, 0.03, 0.1))


def average(scale: str) -> Experiment:
    """Averages of the last weights beside the weights, for ours, the closest line and AdamW: a run
    evaluates all of them, and none changes it. Two horizons, half and whole, because then there is
    a trunk, read out where its cool-downs start, and whole runs can be set against those of half
    the tokens."""
    horizons = HORIZONS[scale][1], HORIZONS[scale][-1]
    specs = {name: trained_by(base(scale), name) for name in (*CLOSEST, "adamw")}
    lines = tuple(
        Line(name, replace(spec, average=SHARES), (held(scale, name),))
        for name, spec in specs.items()
    )
    return Experiment(
        "average",
        scale,
        "Read-out from an average of the last weights",
        lines,
        horizons,
        SEEDS[scale],
        settled_by=settler(scale),
    )


DECOUPLED = "magnitude_direction"
GAINS_RATE = 4e-3  # of its rows and columns
FALLING = 0.95  # share of the steps in which a rate falls that falls to the end
# A rival's step turns a matrix by its rate. Muon's weight decay brings its angle to 0.0063 at its
# best rate of scale s: the best of a rival should lie near that.
RELATIVE = (5e-3, 1e-2, 2e-2)


def _falling(scale: str) -> Spec:
    """With a rate that falls linearly to the end, instead of a cool-down."""
    spec = base(scale)
    return replace(spec, schedule=replace(spec.schedule, decay=FALLING))


def _decoupled(spec: Spec) -> Spec:
    return trained_by(spec, DECOUPLED, radius_lr=GAINS_RATE)


def _decoupled_falling(scale: str) -> Line:
    """As it is usually run. On average such a rate is half as high: the grid is twice as high."""
    rates = tuple(2 * rate for rate in RELATIVE)
    return Line(f"{DECOUPLED}, falling rate", _decoupled(_falling(scale)), rates)


def rivals(scale: str) -> Experiment:
    """Each at its own rate: hyperball under the comparison's schedule, the other as usual."""
    hyperball = Line("hyperball", trained_by(base(scale), "hyperball"), RELATIVE)
    lines = settled(scale), hyperball, _decoupled_falling(scale)
    title = "Rivals that came out beside the paper"
    return Experiment("rivals", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])


def schedules(scale: str) -> Experiment:
    """A rival was ahead with another schedule than ours. Here they are exchanged."""
    ours, closest = CLOSEST
    falling = _falling(scale)
    specs = {
        ours: trained_by(falling, ours),
        f"{ours}, kappa = 1": trained_by(falling, ours, decay_degree=0.0),
        closest: trained_by(falling, closest),
    }
    lines = (
        *(
            Line(f"{label}, falling rate", spec, _around(held(scale, spec.optim.name)))
            for label, spec in specs.items()
        ),
        _decoupled_falling(scale),
        Line(DECOUPLED, _decoupled(base(scale)), RELATIVE),
    )
    title = "Falling rates and cool-downs, exchanged"
    return Experiment("schedules", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])


def _around(rate: float) -> tuple[float, ...]:
    return rate / 2, rate, 2 * rate
