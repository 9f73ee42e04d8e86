"""Experiments beside the paper: confounds of its comparison, leads beyond it, rivals. No torch."""

from dataclasses import replace
from typing import Any

from angular_lab.experiment_plan import (
    FAMILY,
    HORIZONS,
    RATES,
    SEEDS,
    Experiment,
    Line,
    base,
    middle,
    trained_by,
)


def _ablation(
    name: str, scale: str, title: str, axis: str, values: tuple[float, ...], kinds: tuple[str, ...]
) -> Experiment:
    lines = tuple(
        Line(kind, trained_by(base(scale), kind, lr=middle(scale, kind)), values, axis)
        for kind in kinds
    )
    return Experiment(name, scale, title, lines, HORIZONS[scale][:1], SEEDS[scale])


def aux_lr(scale: str) -> Experiment:
    values = (1e-3, 2e-3, 4e-3, 8e-3)
    title = "Each optimizer at its own rate for embeddings, head and norms"
    return _ablation("aux-lr", scale, title, "optim.aux_lr", values, FAMILY)


def radius(scale: str) -> Experiment:
    values, title = (1e-3, 4e-3, 1.6e-2, 6.4e-2), "The row lengths' own rate"
    return _ablation("radius", scale, title, "optim.radius_lr", values, ("muown", "angular_muown"))


def kappa(scale: str) -> Experiment:
    values, title = (1e-4, 3e-4, 1e-3, 3e-3), "How fast the angle falls"
    return _ablation("kappa", scale, title, "optim.decay_scale", values, ("angular_muown",))


def split_qkv(scale: str) -> Experiment:
    lines = tuple(
        Line(
            f"{name}, {'split' if split else 'fused'}",
            trained_by(base(scale), name, split_blocks=split),
            RATES[scale][name],
        )
        for name in FAMILY[1:]
        for split in (True, False)
    )
    title = "Fused matrices as their blocks, or whole"
    return Experiment("split-qkv", scale, title, lines, HORIZONS[scale][:1], SEEDS[scale])


def leads(scale: str) -> Experiment:
    """Each alone against the method as published, then together; at the longest horizon, because
    only there has kappa fallen far."""
    aux = 0.3 * middle(scale, "angular_muown")
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        ("as published", {}),
        ("log radius", {"radius": "log_adam"}),
        ("aux rate x 0.3", {"aux_lr": aux}),
        ("log radius, aux rate x 0.3", {"radius": "log_adam", "aux_lr": aux}),
        ("tangent momentum", {"tangent_momentum": True}),
        ("constrained polar factor", {"orthogonalize": "tangent"}),
        ("exact angle", {"exact_angle": True}),
        ("row second moment", {"row_beta": 0.95}),
        ("column gains", {"column_gains": True}),
    )
    lines = tuple(
        Line(
            label,
            trained_by(base(scale), "angular_muown", **changes),
            RATES[scale]["angular_muown"],
        )
        for label, changes in variants
    )
    title = "Leads beyond the paper"
    return Experiment("leads", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])


def rivals(scale: str) -> Experiment:
    """Each at its own settings: magnitude-direction decoupling is published with a rate that falls
    linearly to the end."""
    spec = base(scale)
    falling = replace(spec, schedule=replace(spec.schedule, decay=0.95))
    relative = (5e-3, 1e-2, 2e-2, 4e-2)  # steps of these two are relative to the weight
    decoupled = "magnitude_direction"
    lines = (
        Line("angular_muown", trained_by(spec, "angular_muown"), RATES[scale]["angular_muown"]),
        Line("hyperball", trained_by(spec, "hyperball"), relative),
        Line(decoupled, trained_by(spec, decoupled, radius_lr=4e-3), relative),
        Line(
            f"{decoupled}, falling rate",
            trained_by(falling, decoupled, radius_lr=4e-3),
            relative,
        ),
    )
    title = "Rivals that came out beside the paper"
    return Experiment("rivals", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])
