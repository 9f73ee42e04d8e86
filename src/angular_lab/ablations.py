"""Experiments beside the paper: confounds of its comparison, leads beyond it, rivals. No torch."""

from dataclasses import replace
from typing import Any

from angular_lab.experiment_plan import (
    FAMILY,
    HORIZONS,
    SEEDS,
    Experiment,
    Line,
    base,
    held,
    settler,
    trained_by,
)
from angular_lab.recipes import recipe
from angular_lab.spec import Spec

SHARES = "0.1,0.2,0.4"  # of the steps so far: an average's memory


def _ours(scale: str) -> Line:
    """AngularMuown at the rate that the comparison settles: what others are set against."""
    name = "angular_muown"
    return Line(name, trained_by(base(scale), name), (held(scale, name),))


def _ablation(
    name: str, scale: str, title: str, axis: str, values: tuple[float, ...], kinds: tuple[str, ...]
) -> Experiment:
    lines = tuple(
        Line(kind, trained_by(base(scale), kind, lr=held(scale, kind)), values, axis)
        for kind in kinds
    )
    return Experiment(name, scale, title, lines, HORIZONS[scale][:1], SEEDS[scale])


def aux_lr(scale: str) -> Experiment:
    values = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
    title = "Each optimizer at its own rate for embeddings, head and norms"
    plan = _ablation("aux-lr", scale, title, "optim.aux_lr", values, FAMILY)
    lower = tuple(value / 4 for value in values)  # AdamW's own rates are lower than the others'
    adamw = replace(plan.lines[0], values=lower)
    return replace(plan, lines=(adamw, *plan.lines[1:]))


def tuned_adamw(scale: str) -> Experiment:
    """What `aux_lr` finds at the shortest horizon of scale s, at the longest: AdamW gains by a rate
    apart for embeddings, head and norms, and nobody else does."""
    rate = held(scale, "adamw")
    values = tuple(factor * rate for factor in (4, 8, 16))
    adamw = Line("adamw", trained_by(base(scale), "adamw", lr=rate), values, "optim.aux_lr")
    title = "AdamW with a rate apart for embeddings and head"
    lines = _ours(scale), adamw
    return Experiment("tuned-adamw", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])


def radius(scale: str) -> Experiment:
    values, title = (1e-3, 4e-3, 1.6e-2, 6.4e-2), "The row lengths' own rate"
    return _ablation("radius", scale, title, "optim.radius_lr", values, ("muown", "angular_muown"))


def kappa(scale: str) -> Experiment:
    """At the longest horizon: over a short one the angle had better not fall."""
    values, title = (5e-4, 1e-3, 2e-3), "How fast the angle falls"
    plan = _ablation("kappa", scale, title, "optim.decay_scale", values, ("angular_muown",))
    return replace(plan, horizons=HORIZONS[scale][-1:])


def split_qkv(scale: str) -> Experiment:
    lines = tuple(
        Line(
            f"{name}, {'split' if split else 'fused'}",
            trained_by(base(scale), name, split_blocks=split),
            (held(scale, name),),
        )
        for name in FAMILY[1:]
        for split in (True, False)
    )
    return Experiment(
        "split-qkv",
        scale,
        "Fused matrices as their blocks, or whole",
        lines,
        HORIZONS[scale][:1],
        SEEDS[scale],
        settled_by=settler(scale),
    )


CLOSEST = ("angular_muown", "normuon")  # of the comparison


def closest(scale: str) -> Experiment:
    """AngularMuown and the line that came closest to it, at the longest horizon, on two seeds more.
    All seeds judge: the one that chose the rates is not among them."""
    last = max(SEEDS[scale])
    seeds = (*SEEDS[scale][1:], last + 1, last + 2)
    lines = tuple(
        Line(name, trained_by(base(scale), name), (held(scale, name),)) for name in CLOSEST
    )
    title = "The closest pair, on more seeds"
    return Experiment("closest", scale, title, lines, HORIZONS[scale][-1:], seeds)


def larger(scale: str) -> Experiment:
    """The same rates on a larger model, one seed: our line and the closest of the others. At scale
    s the paper's 124M model (98M with this vocabulary), with 32,768 tokens a step, so that 100M
    tokens are many steps."""
    spec, steps = base(scale), {"paper": HORIZONS["paper"][0], "s": 3052, "nano": 60}[scale]
    if scale == "paper":
        spec = recipe("dense-308m")
    elif scale == "s":
        sizes = {"sequence": 1024, "layers": 12, "width": 768, "heads": 12, "mlp": 0}
        spec = replace(spec, model=replace(spec.model, **sizes))
    else:
        spec = replace(spec, model=replace(spec.model, layers=6))
    spec = replace(spec, average=SHARES)
    lines = tuple(Line(name, trained_by(spec, name), (held(scale, name),)) for name in CLOSEST)
    return Experiment("larger", scale, "A larger model", lines, (steps,), SEEDS[scale][:1])


def control(scale: str) -> Experiment:
    """The schedule without the geometry: others, whose matrices' rate falls as kappa does, from
    where it is best at a constant rate and from above."""
    spec = base(scale)
    falling = replace(spec, schedule=replace(spec.schedule, fall=spec.optim.decay_scale))
    lines = [_ours(scale)]
    for name in ("normuon", "muon"):
        values = tuple(factor * held(scale, name) for factor in (1, 2, 4))
        lines.append(Line(f"{name}, falling", trained_by(falling, name), values))
    title = "Others with a rate that falls as kappa does"
    return Experiment("control", scale, title, tuple(lines), HORIZONS[scale][-1:], SEEDS[scale])


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
    look into. At
    the longest horizon, because only there has kappa fallen far. With averages of the last weights,
    which change nothing in a run. The constrained polar factor has an experiment of its own."""
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


def rivals(scale: str) -> Experiment:
    """Each at its own settings: magnitude-direction decoupling is published with a rate that falls
    linearly to the end."""
    spec = base(scale)
    falling = replace(spec, schedule=replace(spec.schedule, decay=0.95))
    relative = (1e-2, 2e-2, 4e-2)  # steps of these two are relative to the weight
    decoupled = "magnitude_direction"
    lines = (
        _ours(scale),
        Line("hyperball", trained_by(spec, "hyperball"), relative),
        Line(
            f"{decoupled}, falling rate",
            trained_by(falling, decoupled, radius_lr=4e-3),
            relative,
        ),
    )
    title = "Rivals that came out beside the paper"
    return Experiment("rivals", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])
