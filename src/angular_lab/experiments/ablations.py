"""Ablations: what the paper's comparison may depend on. No torch here."""

from dataclasses import replace

from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import Spec
from angular_lab.experiments.definition import (
    FAMILY,
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

SHARES = (0.1, 0.2, 0.4)  # windows of averages, as shares of the steps so far


def _ablation(
    name: str, scale: str, title: str, axis: str, values: tuple[float, ...], kinds: tuple[str, ...]
) -> Experiment:
    arms = tuple(
        Arm(kind, trained_by(base(scale), kind, lr=tuned_rate(scale, kind)), values, axis)
        for kind in kinds
    )
    ours = OURS if OURS in kinds else None
    return Experiment(name, scale, title, arms, HORIZONS[scale][:1], SEEDS[scale], ours)


def aux_lr(scale: str) -> Experiment:
    values = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
    title = "Each optimizer at its own learning rate for embeddings, head and norms"
    plan = _ablation("aux-lr", scale, title, "optim.aux_lr", values, FAMILY)
    lower = tuple(value / 4 for value in values)  # AdamW's are lower than the others'
    adamw = replace(plan.arms[0], values=lower)
    return replace(plan, arms=(adamw, *plan.arms[1:]))


def tuned_adamw(scale: str) -> Experiment:
    """Repeat at the longest horizon what `aux_lr` finds at the shortest: AdamW gains by a separate
    learning rate for embeddings, head and norms, and no other optimizer does."""
    rate = tuned_rate(scale, "adamw")
    values = tuple(factor * rate for factor in (4, 8, 16))
    adamw = Arm("adamw", trained_by(base(scale), "adamw", lr=rate), values, "optim.aux_lr")
    title = "AdamW with a separate learning rate for embeddings and head"
    arms = baseline_arm(scale), adamw
    return Experiment("tuned-adamw", scale, title, arms, HORIZONS[scale][-1:], SEEDS[scale], OURS)


def radius(scale: str) -> Experiment:
    values, title = (1e-3, 4e-3, 1.6e-2, 6.4e-2), "The learning rate of row lengths"
    return _ablation("radius", scale, title, "optim.radius_lr", values, ("muown", "angular_muown"))


def kappa(scale: str) -> Experiment:
    """Vary the fall of kappa at the longest horizon: over a short one it should not fall."""
    values, title = (5e-4, 1e-3, 2e-3), "How fast the angle falls"
    plan = _ablation("kappa", scale, title, "optim.decay_scale", values, ("angular_muown",))
    return replace(plan, horizons=HORIZONS[scale][-1:])


def split_qkv(scale: str) -> Experiment:
    names = FAMILY[1:]
    arms = tuple(
        Arm(
            f"{name}, {how}",
            trained_by(base(scale), name, split_blocks=how == "split"),
            (tuned_rate(scale, name),),
        )
        for name in names
        for how in ("split", "fused")
    )
    return Experiment(
        "split-qkv",
        scale,
        "Fused matrices as their blocks, or whole",
        arms,
        HORIZONS[scale][:1],
        SEEDS[scale],
        ours=f"{OURS}, split",
        expected=tuple((f"{name}, split", f"{name}, fused") for name in names),
        tuning_seed=tuning_seed(scale),
    )


CLOSEST = (OURS, "normuon")  # the closest pair of the comparison


def closest(scale: str) -> Experiment:
    """Compare AngularMuown with the arm that came closest to it, at the longest horizon, on two
    more seeds. All seeds judge: the one that chose the learning rates is not among them."""
    last = max(SEEDS[scale])
    seeds = (*SEEDS[scale][1:], last + 1, last + 2)
    arms = tuple(
        Arm(name, trained_by(base(scale), name), (tuned_rate(scale, name),)) for name in CLOSEST
    )
    title = "The closest pair, on more seeds"
    return Experiment("closest", scale, title, arms, HORIZONS[scale][-1:], seeds, OURS)


def larger_model(scale: str) -> Spec:
    """Return a run of a larger model. At scale s it is the paper's 124M model, which has 98M
    parameters with this vocabulary, at 32,768 tokens per step, so that 100M tokens are many
    steps."""
    spec = base(scale)
    if scale == "paper":
        return named_run("dense-308m")
    if scale == "s":
        sizes = {"sequence": 1024, "layers": 12, "width": 768, "heads": 12, "mlp": None}
        return replace(spec, model=replace(spec.model, **sizes))
    return replace(spec, model=replace(spec.model, layers=6))


def larger(scale: str) -> Experiment:
    """Train a larger model at the same learning rates, one seed: our arm and the closest other."""
    spec = replace(larger_model(scale), average=SHARES)
    steps = {"paper": HORIZONS["paper"][0], "s": 3052, "nano": 60}[scale]
    arms = tuple(Arm(name, trained_by(spec, name), (tuned_rate(scale, name),)) for name in CLOSEST)
    return Experiment("larger", scale, "A larger model", arms, (steps,), SEEDS[scale][:1], OURS)


def control(scale: str) -> Experiment:
    """Apply the schedule without the geometry: other optimizers, with a learning rate of the
    matrices that falls as kappa does, from the best constant one and from above."""
    spec = base(scale)
    falling = replace(spec, schedule=replace(spec.schedule, fall=spec.optim.decay_scale))
    arms = [baseline_arm(scale)]
    for name in ("normuon", "muon"):
        values = tuple(factor * tuned_rate(scale, name) for factor in (1, 2, 4))
        arms.append(Arm(f"{name}, falling as kappa", trained_by(falling, name), values))
    title = "Other optimizers with a learning rate that falls as kappa does"
    return Experiment(
        "control", scale, title, tuple(arms), HORIZONS[scale][-1:], SEEDS[scale], OURS
    )


def decayed(scale: str) -> Experiment:
    """Give the closest other arm the weight decay that the paper leaves out for it: where a corpus
    is read more than once, decay is the first thing to try."""
    values, name = (0.025, 0.1, 0.4), CLOSEST[1]
    spec = trained_by(base(scale), name, lr=tuned_rate(scale, name))
    arms = baseline_arm(scale), Arm(name, spec, values, "optim.weight_decay")
    title = "The closest method with weight decay"
    return Experiment("decayed", scale, title, arms, HORIZONS[scale][-1:], SEEDS[scale], OURS)
