"""A step's scalars for the kernels: two per matrix, a dozen per shape."""

from typing import Any

import torch
from torch import Tensor

from angular_muown.kernels.step import NUMBERS, FusedStep
from angular_muown.recipe import Recipe
from angular_muown.rounding import hash_seed

SEED = 8  # its column holds bits, not a value


def on_host(
    step: FusedStep, group: dict[str, Any], recipe: Recipe, lr: float, radius_lr: float
) -> Tensor:
    """In double precision until they are written down."""
    (beta1, beta2), seed = group["betas"], hash_seed(group["step"])
    values: list[float] = []
    kinds = step.known.kinds
    for m, n, *_ in kinds:
        turn = lr * recipe.kappa * recipe.scale(m, n)
        decay = 1 - lr * group["weight_decay"]
        line = [group["momentum"], turn, radius_lr, decay, beta1, beta2, group["eps"]]
        values += [*line, group.get("row_beta", 0.0)] + [0.0] * (NUMBERS - len(line) - 1)
    t = step.steps.double()
    ages = torch.stack([1 - beta1**t, 1 - beta2**t], dim=-1)[step.known.owner]
    out = torch.cat([torch.tensor(values, dtype=torch.float64), ages.flatten()]).float()
    bits = seed - (1 << 32) if seed >= 1 << 31 else seed
    out.view(torch.int32)[SEED : NUMBERS * len(kinds) : NUMBERS] = bits
    return out
