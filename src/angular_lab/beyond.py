"""Experiments beyond the paper: leads, averages, rivals. No torch."""

from dataclasses import replace
from typing import Any

from angular_lab.ablations import CLOSEST, SHARES
from angular_lab.experiment_plan import (
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
from angular_lab.spec import Spec

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
        "tangent momentum": {"tangent_momentum": True},
        CONSTRAINED: {"orthogonalize": "tangent"},
        "exact angle": {"exact_angle": True},
        "row second moment": {"row_beta": 0.95},
        "column gains": {"column_gains": True},
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


# Steps of the rivals are relative to the weight: about the angle that Muon's weight decay brings it
# to at its best rate, 0.0063 at scale s. A rate that falls to 0 is half of that on average.
RELATIVE = (5e-3, 1e-2, 2e-2)


def _falling(spec: Spec) -> Spec:
    """With a rate that falls linearly to the end."""
    return replace(spec, schedule=replace(spec.schedule, decay=0.95))


def _decoupled(scale: str) -> Line:
    """Magnitude-direction decoupling as it is published: with such a rate."""
    name, rates = "magnitude_direction", tuple(2 * rate for rate in RELATIVE)
    spec = trained_by(_falling(base(scale)), name, radius_lr=4e-3)
    return Line(f"{name}, falling rate", spec, rates)


def rivals(scale: str) -> Experiment:
    """Each at its own settings."""
    hyperball = Line("hyperball", trained_by(base(scale), "hyperball"), RELATIVE)
    lines = settled(scale), hyperball, _decoupled(scale)
    title = "Rivals that came out beside the paper"
    return Experiment("rivals", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])


def falling(scale: str) -> Experiment:
    """The schedule of the rival that was ahead, for the others too: what of its lead is the
    schedule's?"""
    spec = _falling(base(scale))
    variants: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("angular_muown", "angular_muown", {}),
        ("angular_muown, kappa = 1", "angular_muown", {"decay_degree": 0.0}),
        (CLOSEST[1], CLOSEST[1], {}),
    )
    lines = tuple(
        Line(
            f"{label}, falling rate",
            trained_by(spec, name, **changes),
            tuple(factor * held(scale, name) for factor in (0.5, 1, 2)),
        )
        for label, name, changes in variants
    )
    title = "A rate that falls linearly to the end, for all"
    lines = (*lines, _decoupled(scale))
    return Experiment("falling", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])
