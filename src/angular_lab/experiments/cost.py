"""What the experiments cost: trials, tokens, operations, hours on this machine."""

import torch

from angular_lab.config.spec import ModelSpec
from angular_lab.experiments.comparison import EXPERIMENTS, experiment
from angular_lab.experiments.definition import SCALES, Arm, Experiment
from angular_lab.models import build_model
from angular_lab.show import duration, rate_here


def flops_per_token(model: ModelSpec) -> float:
    with torch.device("meta"):
        return build_model(model).flops_per_token()


def steps_per_trial(plan: Experiment, arm: Arm) -> float:
    """Return the steps of the trunk and of every cooldown; a variant shares its arm's trunk."""
    horizons, share = plan.horizons_of(arm), arm.spec.schedule.decay
    cooldowns = sum(share * horizon for horizon in horizons)
    return cooldowns if arm.variant_of else (1 - share) * horizons[-1] + cooldowns


def cost(plan: Experiment) -> tuple[int, float, float]:
    """Return trials, tokens and operations of an experiment, seeds included, grids not extended."""
    trials, tokens, operations = 0, 0.0, 0.0
    flops: dict[ModelSpec, float] = {}
    for arm in plan.arms:
        model = arm.spec.model
        if model not in flops:
            flops[model] = flops_per_token(model)
        count = len(arm.values) + len(plan.seeds) - 1
        arm_tokens = count * steps_per_trial(plan, arm) * arm.spec.tokens_per_step
        trials += count
        tokens += arm_tokens
        operations += arm_tokens * flops[model]
    return trials, tokens, operations


def listing(scale: str | None = None) -> tuple[list[dict[str, str]], str]:
    """Return a row per experiment, of one scale or of all, and where the times come from."""
    rate, source = rate_here()
    rows = []
    for name in EXPERIMENTS:
        for size in (scale,) if scale else SCALES:
            plan = experiment(name, size)
            trials, tokens, operations = cost(plan)
            rows.append(
                {
                    "experiment": name,
                    "scale": size,
                    "trials": str(trials),
                    "tokens": f"{tokens:.2e}",
                    "FLOP": f"{operations:.2e}",
                    "time here": duration(operations / rate),
                    "title": plan.title,
                }
            )
    return rows, f"time on this machine at {rate / 1e12:.3g} TFLOP/s ({source})"
