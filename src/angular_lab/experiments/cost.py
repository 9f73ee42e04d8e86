"""What experiments cost: trials, tokens, operations, hours by device."""

from functools import lru_cache

import torch

from angular_lab.config.spec import ModelSpec
from angular_lab.experiments.comparison import EXPERIMENTS, experiment
from angular_lab.experiments.definition import SCALES, Arm, Experiment
from angular_lab.models import build_model
from angular_lab.show import USUAL_MFU, rate_here
from angular_lab.text import estimated_time
from angular_lab.training.progress import PEAKS

DEVICES = ("H100", "A100", "B200")  # that estimates are given for
HOUR = 3600
AT_MFU = f"at {USUAL_MFU:.0%} of the peak; small models reach less"


@lru_cache(maxsize=256)
def model_size(model: ModelSpec) -> tuple[int, float]:
    """Return the number of parameters and the operations per token."""
    with torch.device("meta"):
        built = build_model(model)
    return sum(p.numel() for p in built.parameters()), built.flops_per_token()


def flops_per_token(model: ModelSpec) -> float:
    return model_size(model)[1]


def steps_per_trial(plan: Experiment, arm: Arm) -> float:
    """Return the steps of the trunk and of every cooldown; a variant shares its arm's trunk."""
    horizons, share = plan.horizons_of(arm), arm.spec.schedule.decay
    cooldowns = sum(share * horizon for horizon in horizons)
    return cooldowns if arm.variant_of else (1 - share) * horizons[-1] + cooldowns


def cost(plan: Experiment) -> tuple[int, float, float]:
    """Return trials, tokens and operations of an experiment, seeds included, grids not extended."""
    trials, tokens, operations = 0, 0.0, 0.0
    for arm in plan.arms:
        count = len(arm.values) + len(plan.seeds) - 1
        arm_tokens = count * steps_per_trial(plan, arm) * arm.spec.tokens_per_step
        trials += count
        tokens += arm_tokens
        operations += arm_tokens * flops_per_token(arm.spec.model)
    return trials, tokens, operations


def device_hours(operations: float) -> dict[str, float]:
    """Return the hours on one GPU of each kind."""
    return {name: operations / (USUAL_MFU * PEAKS[name]) / HOUR for name in DEVICES}


def hours_form(hours: float) -> str:
    """Return two digits, or all before the point; a GPU's work of seconds is next to nothing."""
    if 0 < hours < 0.01:
        return "<0.01"
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def listing(scale: str | None = None) -> tuple[list[dict[str, str]], str]:
    """Return a row per experiment, of one scale or of all, and where the times come from."""
    rate, source = rate_here()
    rows = []
    for name in EXPERIMENTS:
        for size in (scale,) if scale else SCALES:
            trials, tokens, operations = cost(experiment(name, size))
            hours = device_hours(operations)
            rows.append(
                {
                    "experiment": name,
                    "scale": size,
                    "trials": str(trials),
                    "tokens": f"{tokens:.2e}",
                    "FLOP": f"{operations:.2e}",
                    **{f"{device}-hours": hours_form(hours[device]) for device in DEVICES},
                    "here": estimated_time(operations / rate),
                }
            )
    note = f"GPU-hours: {AT_MFU} (peaks of the datasheets, dense bf16)\n"
    return rows, f"{note}here: this machine at {rate / 1e12:.3g} TFLOP/s ({source})"


def questions() -> list[dict[str, str]]:
    """Return the question of every experiment."""
    return [{"experiment": name, "question": experiment(name, "s").title} for name in EXPERIMENTS]
