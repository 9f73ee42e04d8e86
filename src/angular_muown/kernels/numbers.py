"""A step's scalars for the kernels: two per matrix, a dozen per kind of matrix."""

from typing import Any

import torch
from torch import Tensor

from angular_muown.kernels.columns import (
    BETA,
    BETA1,
    BETA2,
    DECAY,
    EPS,
    NUMBERS,
    RADIUS_LR,
    ROW_BETA,
    SEED,
    STEP,
)
from angular_muown.kernels.step import FusedStep
from angular_muown.recipe import Recipe
from angular_muown.rounding import hash_seed
from angular_muown.stages.normalize import RowSecondMoment
from angular_muown.stages.radius import ByAdam

Rate = float | Tensor
WORDS = 1 << 32  # values of a 32-bit word


def write_numbers(
    step: FusedStep, group: dict[str, Any], recipe: Recipe, lr: Rate, radius_lr: Rate, t: Tensor
) -> None:
    """`t`: Adam's count of each parameter, this step included."""
    if group["capturable"]:
        ages = torch.stack([1 - beta ** t.double() for beta in _betas(recipe)], dim=-1)[step.owner]
        _on_device(step, group, recipe, lr, radius_lr, ages)
    else:
        step.numbers.send(_on_host(step, group, recipe, float(lr), float(radius_lr), t.tolist()))


def _on_host(
    step: FusedStep,
    group: dict[str, Any],
    recipe: Recipe,
    lr: float,
    radius_lr: float,
    counts: list[float],
) -> Tensor:
    """In double precision until they are written down; plain numbers cost the host less than
    tensors of a few elements."""
    values: list[float] = []
    for m, n, *_ in step.known.kinds:
        turn = lr * float(recipe.kappa) * recipe.scale(m, n)
        values += _line(group, recipe, turn, radius_lr, 1 - lr * group["weight_decay"])
    end = len(values)
    ages = {t: [1 - beta**t for beta in _betas(recipe)] for t in set(counts)}
    if len(ages) == 1:  # all parameters of one age, as nearly always
        values += ages[counts[0]] * len(step.owners)
    else:
        for parameter in step.owners:
            values += ages[counts[parameter]]
    out = torch.tensor(values, dtype=torch.float32, device="cpu")
    if step.draws:
        out.view(torch.int32)[SEED:end:NUMBERS] = _signed(hash_seed(group["step"]))
    return out


def _on_device(
    step: FusedStep,
    group: dict[str, Any],
    recipe: Recipe,
    lr: Rate,
    radius_lr: Rate,
    ages: Tensor,
) -> None:
    """The same without a look from the host: what a graph can replay."""
    kinds = step.known.kinds
    lines = step.values[: NUMBERS * len(kinds)].view(len(kinds), NUMBERS)
    for row, (m, n, *_) in zip(lines, kinds, strict=True):
        for column, value in enumerate(_line(group, recipe, 0.0, 0.0, 0.0)):
            if column not in (STEP, RADIUS_LR, DECAY, SEED):
                row[column].fill_(value)
        row[STEP] = lr * recipe.kappa * recipe.scale(m, n)
    lines[:, RADIUS_LR] = radius_lr
    lines[:, DECAY] = 1 - lr * group["weight_decay"]
    lines.view(torch.int32)[:, SEED] = _signed(hash_seed(group["step"])).to(torch.int32)
    step.values[lines.numel() :].view(-1, 2).copy_(ages)


def _betas(recipe: Recipe) -> tuple[float, float]:
    return recipe.radius.betas if isinstance(recipe.radius, ByAdam) else (0.0, 0.0)


def _line(
    group: dict[str, Any], recipe: Recipe, turn: float, radius_lr: float, decay: float
) -> list[float]:
    """A stage's numbers are its own: a member of the user's may have others than the group."""
    line = [0.0] * NUMBERS
    line[BETA] = group["momentum"]
    if isinstance(recipe.normalize, RowSecondMoment):
        line[ROW_BETA] = recipe.normalize.beta
    line[BETA1], line[BETA2] = _betas(recipe)
    if isinstance(recipe.radius, ByAdam):
        line[EPS] = recipe.radius.eps
    line[STEP], line[RADIUS_LR], line[DECAY] = turn, radius_lr, decay
    return line


def _signed(word: Any) -> Any:
    return (word + WORDS // 2) % WORDS - WORDS // 2
