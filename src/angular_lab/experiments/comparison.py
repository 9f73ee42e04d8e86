"""The paper's experiments as data, and the registry of all. No torch here."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from angular_lab.config.named_runs import named_run
from angular_lab.data.shards import Manifest
from angular_lab.errors import UserError
from angular_lab.experiments import (
    ablations,
    extensions,
    one_pass,
    published,
    tiny_model,
    trials,
)
from angular_lab.experiments.definition import (
    HORIZONS,
    OURS,
    RATES,
    SCALES,
    SEEDS,
    TEASER,
    Arm,
    Experiment,
    base,
    cooldown_variant,
    trained_by,
    tuned_rate,
    with_vocabulary,
)

LONGER_COOLDOWN = 0.2  # share of the steps


def teaser(scale: str) -> Experiment:
    spec = base(scale)
    names = (*TEASER, "muon") if scale == "s" else TEASER  # the paper leaves Muon out here
    arms = tuple(Arm(name, trained_by(spec, name), RATES[scale][name]) for name in names)
    horizons, title = HORIZONS[scale], "Loss after the cooldown at four horizons"
    if scale == "s":  # does the comparison depend on the length of the cooldown?
        arms += tuple(cooldown_variant(arm, LONGER_COOLDOWN, horizons[-1]) for arm in arms)
    return Experiment("teaser", scale, title, arms, horizons, SEEDS[scale], OURS)


def angles(scale: str) -> Experiment:
    spec = base(scale)
    grid = tuple(k * 1e-3 for k in (1, 2, 4, 6, 8, 10)) if scale == "paper" else ()
    variants: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("adamw", "adamw", {}),
        ("muon, no decay", "muon", {"weight_decay": 0.0}),
        (published.MUON_DECAY, "muon", {"weight_decay": 0.1}),
        ("normuon", "normuon", {}),
        ("muown", "muown", {}),
        ("angular_muown", "angular_muown", {}),
        (published.KAPPA_1, OURS, {"decay_degree": 0.0}),
    )
    arms = tuple(
        Arm(label, trained_by(spec, name, **changes), grid or (tuned_rate(scale, name),))
        for label, name, changes in variants
    )
    title = "Loss and angle per step"
    return Experiment("angles", scale, title, arms, HORIZONS[scale][:1], SEEDS[scale][:1], OURS)


def width(scale: str) -> Experiment:
    widths = {"paper": (512, 768, 1280), "s": (256, 384, 640), "nano": (48, 96, 192)}[scale]
    spec = base(scale)
    if scale == "paper":
        model = replace(spec.model, sequence=2048)
        spec = replace(spec, batch=256, micro_batch=16, model=model)
    size = spec.model.width // spec.model.heads
    exponents = range(7, 3, -1) if scale == "s" else range(8, 2, -1)
    arms = []
    for d in widths:
        mlp = spec.model.mlp
        inner = None if mlp is None else round(d * mlp / spec.model.width)
        model = replace(spec.model, width=d, heads=d // size, mlp=inner)
        values = tuple(2.0**-k for k in exponents)
        arms.append(
            Arm(f"d = {d}", trained_by(replace(spec, model=model), "angular_muown"), values)
        )
    horizon = {"paper": 5100, "s": HORIZONS["s"][0], "nano": 60}[scale]
    title = "The same best learning rate at every width"
    return Experiment("width", scale, title, tuple(arms), (horizon,), SEEDS[scale][:1])


def qwen2(scale: str) -> Experiment:
    spec = base(scale, "qwen2-0.5b")
    if scale != "paper":
        spec = replace(spec, model=replace(spec.model, kind="qwen2", kv_heads=1))
    small = scale != "paper"
    rates = RATES[scale]["angular_muown"] if small else tuple(published.QWEN2[0].losses)
    arms = (
        Arm("angular_muown", trained_by(spec, "angular_muown"), rates),
        Arm(published.KAPPA_1, trained_by(spec, OURS, decay_degree=0.0), rates),
        Arm("normuon", trained_by(spec, "normuon"), RATES[scale]["normuon"] if small else rates),
    )
    horizon = HORIZONS[scale][:1]
    return Experiment("qwen2", scale, "Qwen2", arms, horizon, SEEDS[scale][:1], OURS)


def moe(scale: str) -> Experiment:
    spec = base(scale, "moe-1.1b")
    if scale != "paper":
        sizes: dict[str, Any] = {
            "kind": "moe",
            "experts": 8,
            "experts_per_token": 2,
            "dense_layers": 1,
        }
        assert spec.model.mlp is not None
        inner = spec.model.mlp // 4
        model = replace(spec.model, **sizes, expert_mlp=inner, shared_mlp=inner, tied=False)
        spec = replace(spec, model=model)
    rms, fan = (trained_by(spec, "angular_muown", scale=name) for name in ("rms", "fan_ratio"))
    arms = (
        Arm(published.RMS_SCALE, rms, (3e-4, 6e-4, 1e-3, 2e-3)),
        Arm(published.SPECTRAL_SCALE, fan, (1e-3, 2e-3, 4e-3, 8e-3)),
        Arm("muon", trained_by(spec, "muon", scale="rms"), (3e-4, 6e-4, 1e-3, 2e-3)),
    )
    horizon = (spec.steps,) if scale == "paper" else HORIZONS[scale][:1]
    ours = arms[0].label
    return Experiment("moe", scale, "Mixture of experts", arms, horizon, SEEDS[scale][:1], ours)


def speedrun(scale: str) -> Experiment:
    spec = named_run("speedrun") if scale == "paper" else base(scale)
    if scale != "paper":
        sizes: dict[str, Any] = {"kind": "gpt_speedrun", "soft_cap": 15.0, "tied": False}
        spec = replace(spec, model=replace(spec.model, **sizes))
    arms = (Arm("angular_muown", trained_by(spec, "angular_muown"), (spec.optim.lr,)),)
    seeds = tuple(range(8 if scale == "paper" else 3))
    horizon = (spec.steps,) if scale == "paper" else HORIZONS[scale][:1]
    title = "Optimization track of the speedrun"
    return Experiment("speedrun", scale, title, arms, horizon, seeds, OURS)


EXPERIMENTS: dict[str, Callable[[str], Experiment]] = {
    "teaser": teaser,
    "angles": angles,
    "width": width,
    "qwen2": qwen2,
    "moe": moe,
    "speedrun": speedrun,
    "aux-lr": ablations.aux_lr,
    "tuned-adamw": ablations.tuned_adamw,
    "radius": ablations.radius,
    "split-qkv": ablations.split_qkv,
    "kappa": ablations.kappa,
    "control": ablations.control,
    "decayed": ablations.decayed,
    "closest": ablations.closest,
    "larger": ablations.larger,
    "variants": extensions.variants,
    "constrained": extensions.constrained,
    "average": extensions.average,
    "concurrent": extensions.concurrent,
    "schedules": extensions.schedules,
    "storage": extensions.storage,
    "one-pass": one_pass.one_pass,
    "one-pass-quarter": one_pass.quarter,
    "one-pass-long": one_pass.one_pass_long,
    "one-pass-kappa": one_pass.kappa,
    "one-pass-horizons": one_pass.horizons,
    "one-pass-larger": one_pass.larger,
    "trials": trials.trials,
    "one-pass-closest": trials.closest,
    "short-runs": tiny_model.short_runs,
    "small-batches": tiny_model.small_batches,
    "tiny-trials": tiny_model.tiny_trials,
    "tiny-comparison": tiny_model.tiny_comparison,
}


def experiment(name: str, scale: str) -> Experiment:
    if name not in EXPERIMENTS:
        near = get_close_matches(name, EXPERIMENTS, n=1)
        hint = f": did you mean {near[0]}?" if near else "."
        raise UserError(f"unknown experiment '{name}'{hint} There are {', '.join(EXPERIMENTS)}")
    if scale not in SCALES:
        *before, last = SCALES
        raise UserError(f"--scale {scale}: it must be {', '.join(before)} or {last}")
    return EXPERIMENTS[name](scale)


def planned(name: str, scale: str, data: str | None) -> Experiment:
    """Return the experiment, with models large enough for the vocabulary of the prepared data."""
    plan, prepared = experiment(name, scale), Manifest.load(Path(data)) if data else None
    return with_vocabulary(plan, prepared.vocabulary) if prepared else plan
