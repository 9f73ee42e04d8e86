"""Experiments beside the paper: what its comparison may hide. No torch."""

from dataclasses import replace

from angular_lab.config.named_runs import recipe
from angular_lab.experiments.definition import (
    FAMILY,
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

SHARES = "0.1,0.2,0.4"  # of the steps so far: an average's memory


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
    lines = settled(scale), adamw
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
    lines = [settled(scale)]
    for name in ("normuon", "muon"):
        values = tuple(factor * held(scale, name) for factor in (1, 2, 4))
        lines.append(Line(f"{name}, falling as kappa", trained_by(falling, name), values))
    title = "Others with a rate that falls as kappa does"
    return Experiment("control", scale, title, tuple(lines), HORIZONS[scale][-1:], SEEDS[scale])


def decayed(scale: str) -> Experiment:
    """The closest of the others with the weight decay that the paper leaves out for it: where a
    text is read again, decay is the first thing to try."""
    values, name = (0.025, 0.1, 0.4), CLOSEST[1]
    spec = trained_by(base(scale), name, lr=held(scale, name))
    lines = settled(scale), Line(name, spec, values, "optim.weight_decay")
    title = "The closest line with weight decay"
    return Experiment("decayed", scale, title, lines, HORIZONS[scale][-1:], SEEDS[scale])
