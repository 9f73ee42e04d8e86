"""The paper's experiments as data: lines, grids, horizons, seeds, at three scales. No torch here.

A line is a curve of a figure or a row of a table. `paper` has the paper's sizes, `s` model S and
minutes on one GPU, `nano` a few minutes on a CPU: the same code, other numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from angular_lab import paper
from angular_lab.recipes import recipe
from angular_lab.spec import Spec

SCALES = ("paper", "s", "nano")
RATE = "optim.lr"
WEIGHT_DECAY = {"adamw": 0.1, "muon": 0.1}  # all others 0, as in the paper
FAMILY = ("adamw", "muon", "normuon", "muown", "angular_muown")
TEASER = ("adamw", "normuon", "muown", "angular_muown")
HORIZONS = {
    "paper": (4768, 9537, 14305, 19073),  # 2.5, 5, 7.5, 10B tokens
    "s": (1373, 2747, 4120, 5493),  # 22.5, 45, 67.5, 90M tokens
    "nano": (30, 60, 90, 120),
}
SEEDS = {"paper": (0,), "s": (0, 1, 2), "nano": (0, 1, 2)}
_SMALL: dict[str, tuple[float, ...]] = {
    "adamw": (1e-3, 2e-3, 4e-3),
    "muon": (1e-2, 2e-2, 4e-2),
    "normuon": (2e-3, 4e-3, 8e-3),
    "muown": (2e-3, 4e-3, 8e-3),
    "angular_muown": (1e-2, 2e-2, 4e-2),
}
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "paper": {name: row.rates for name, row in paper.TEASER.items()} | {"muon": paper.SMALL_RATES},
    "s": _SMALL,
    "nano": _SMALL,
}


@dataclass(frozen=True)
class Line:
    """One way of training, over the values of one setting."""

    label: str
    spec: Spec
    values: tuple[float, ...]
    axis: str = RATE


@dataclass(frozen=True)
class Experiment:
    name: str
    scale: str
    title: str
    lines: tuple[Line, ...]
    horizons: tuple[int, ...]  # steps; where there are several, cool-downs off one trunk
    seeds: tuple[int, ...]  # the first chooses a line's value, the others judge it


def base(scale: str, paper_recipe: str = "dense-124m") -> Spec:
    """The scale's model and batch; every evaluation that counts is the last one."""
    if scale == "paper":
        return recipe(paper_recipe)
    spec = recipe(scale)
    if scale == "nano":
        spec = replace(spec, schedule=replace(spec.schedule, warmup=10), eval_every=30)
    return replace(spec, save_every=0)


def trained_by(spec: Spec, name: str, **changes: Any) -> Spec:
    """By another optimizer, with the paper's weight decay unless told otherwise."""
    values: dict[str, Any] = {"name": name, "weight_decay": WEIGHT_DECAY.get(name, 0.0), **changes}
    return replace(spec, optim=replace(spec.optim, **values))


def _middle(scale: str, name: str) -> float:
    """The rate that an ablation holds: the paper's best, or the middle of the grid."""
    if scale == "paper" and name in paper.TEASER:
        return paper.TEASER[name].best_rate
    rates = RATES[scale][name]
    return rates[len(rates) // 2]


def teaser(scale: str) -> Experiment:
    spec = base(scale)
    lines = tuple(Line(name, trained_by(spec, name), RATES[scale][name]) for name in TEASER)
    title = "Cooled-down loss at four horizons"
    return Experiment("teaser", scale, title, lines, HORIZONS[scale], SEEDS[scale])


def angles(scale: str) -> Experiment:
    spec = replace(base(scale), angle_every={"paper": 20, "s": 20, "nano": 5}[scale])
    grid = tuple(k * 1e-3 for k in (1, 2, 4, 6, 8, 10)) if scale == "paper" else ()
    variants: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("adamw", "adamw", {}),
        ("muon, no decay", "muon", {"weight_decay": 0.0}),
        ("muon, decay 0.1", "muon", {"weight_decay": 0.1}),
        ("normuon", "normuon", {}),
        ("muown", "muown", {}),
        ("angular_muown", "angular_muown", {}),
        ("angular_muown, kappa = 1", "angular_muown", {"decay_degree": 0.0}),
    )
    lines = tuple(
        Line(label, trained_by(spec, name, **changes), grid or (_middle(scale, name),))
        for label, name, changes in variants
    )
    title = "Loss and angle per step"
    return Experiment("angles", scale, title, lines, HORIZONS[scale][:1], SEEDS[scale][:1])


def width(scale: str) -> Experiment:
    widths = {"paper": (512, 768, 1280), "s": (256, 384, 640), "nano": (48, 96, 192)}[scale]
    spec = base(scale)
    if scale == "paper":
        model = replace(spec.model, sequence=2048)
        spec = replace(spec, batch=256, micro_batch=16, model=model)
    size = spec.model.width // spec.model.heads
    lines = []
    for d in widths:
        inner = 0 if scale == "paper" else round(d * spec.model.mlp / spec.model.width)
        model = replace(spec.model, width=d, heads=d // size, mlp=inner)
        values = tuple(2.0**-k for k in range(8, 2, -1))
        lines.append(
            Line(f"d = {d}", trained_by(replace(spec, model=model), "angular_muown"), values)
        )
    horizon = {"paper": 5100, "s": HORIZONS["s"][0], "nano": 60}[scale]
    title = "The same best rate at every width"
    return Experiment("width", scale, title, tuple(lines), (horizon,), SEEDS[scale][:1])


def qwen2(scale: str) -> Experiment:
    spec = base(scale, "qwen2-0.5b")
    if scale != "paper":
        spec = replace(spec, model=replace(spec.model, kind="qwen2", kv_heads=1))
    small = scale != "paper"
    rates = RATES[scale]["angular_muown"] if small else tuple(paper.QWEN2[0].losses)
    lines = (
        Line("angular_muown", trained_by(spec, "angular_muown"), rates),
        Line(
            "angular_muown, kappa = 1", trained_by(spec, "angular_muown", decay_degree=0.0), rates
        ),
        Line("normuon", trained_by(spec, "normuon"), RATES[scale]["normuon"] if small else rates),
    )
    horizon = HORIZONS[scale][:1]
    return Experiment("qwen2", scale, "Qwen2", lines, horizon, SEEDS[scale][:1])


def moe(scale: str) -> Experiment:
    spec = base(scale, "moe-1.1b")
    if scale != "paper":
        sizes: dict[str, Any] = {
            "kind": "moe",
            "experts": 8,
            "experts_per_token": 2,
            "dense_layers": 1,
        }
        inner = spec.model.mlp // 4
        model = replace(spec.model, **sizes, expert_mlp=inner, shared_mlp=inner, tied=False)
        spec = replace(spec, model=model)
    rms, fan = (trained_by(spec, "angular_muown", scale=name) for name in ("rms", "fan_ratio"))
    lines = (
        Line("angular_muown, RMS scale", rms, (3e-4, 6e-4, 1e-3, 2e-3)),
        Line("angular_muown, spectral scale", fan, (1e-3, 2e-3, 4e-3, 8e-3)),
        Line("muon", trained_by(spec, "muon", scale="rms"), (3e-4, 6e-4, 1e-3, 2e-3)),
    )
    horizon = (spec.steps,) if scale == "paper" else HORIZONS[scale][:1]
    return Experiment("moe", scale, "Mixture of experts", lines, horizon, SEEDS[scale][:1])


def speedrun(scale: str) -> Experiment:
    spec = recipe("speedrun") if scale == "paper" else base(scale)
    if scale != "paper":
        sizes: dict[str, Any] = {"kind": "gpt_speedrun", "soft_cap": 15.0, "tied": False}
        spec = replace(spec, model=replace(spec.model, **sizes))
    lines = (Line("angular_muown", trained_by(spec, "angular_muown"), (spec.optim.lr,)),)
    seeds = tuple(range(8 if scale == "paper" else 3))
    horizon = (spec.steps,) if scale == "paper" else HORIZONS[scale][:1]
    title = "Optimization track of the speedrun"
    return Experiment("speedrun", scale, title, lines, horizon, seeds)


def _ablation(
    name: str, scale: str, title: str, axis: str, values: tuple[float, ...], kinds: tuple[str, ...]
) -> Experiment:
    lines = tuple(
        Line(kind, trained_by(base(scale), kind, lr=_middle(scale, kind)), values, axis)
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


EXPERIMENTS: dict[str, Callable[[str], Experiment]] = {
    "teaser": teaser,
    "angles": angles,
    "width": width,
    "qwen2": qwen2,
    "moe": moe,
    "speedrun": speedrun,
    "aux-lr": aux_lr,
    "radius": radius,
    "split-qkv": split_qkv,
    "kappa": kappa,
}


def experiment(name: str, scale: str) -> Experiment:
    if name not in EXPERIMENTS:
        near = get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown experiment '{name}': {hint}There are {', '.join(EXPERIMENTS)}")
    if scale not in SCALES:
        raise ValueError(f"--scale {scale}: it must be {', '.join(SCALES)}")
    return EXPERIMENTS[name](scale)
