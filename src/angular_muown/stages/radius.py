"""Radius rules: how the row lengths g follow their gradient r."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from angular_muown.stages.charts import Rows, nonzero

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_direction(
    g: Tensor, r: Tensor, rows: Rows, betas: tuple[float, float], eps: float, t: float | Tensor
) -> Tensor:
    """Adam's bias-corrected direction for the radial gradient r; t counts from 1."""
    beta1, beta2 = betas
    # A row at zero takes a new direction (see polar_coordinates): its first moment has no past.
    past = torch.where(g == 0, torch.zeros_like(g), rows["exp_avg"])
    # Not by lerp, which makes inf - inf of a square that overflowed once.
    rows["exp_avg"] = m = beta1 * past + (1 - beta1) * r
    rows["exp_avg_sq"] = v = beta2 * rows["exp_avg_sq"] + (1 - beta2) * r.square()
    return m / (1 - beta1**t) / nonzero((v / (1 - beta2**t)).sqrt() + eps)


@dataclass(frozen=True)
class Adam:
    """g <- g - lr adam(r): the paper's rule. A length may cross zero: then the row turns around."""

    betas: tuple[float, float]
    eps: float
    rows = MOMENTS
    signed = True

    def __call__(
        self, g: Tensor, r: Tensor, rows: Rows, lr: float | Tensor, t: float | Tensor
    ) -> Tensor:
        return g - lr * adam_direction(g, r, rows, self.betas, self.eps, t)


@dataclass(frozen=True)
class LogAdam:
    """g <- g exp(-lr adam(r)): the same relative speed for every length, and never below zero.

    A product cannot leave zero, so a row at zero takes Adam's additive step once.
    """

    betas: tuple[float, float]
    eps: float
    rows = MOMENTS
    signed = False

    def __call__(
        self, g: Tensor, r: Tensor, rows: Rows, lr: float | Tensor, t: float | Tensor
    ) -> Tensor:
        change = -lr * adam_direction(g, r, rows, self.betas, self.eps, t)
        return torch.where(g == 0, change.clamp(min=0), g * change.exp())


class Fixed:
    """g stays: only the directions learn. A row at zero stays there."""

    rows = ()
    signed = False

    def __call__(
        self, g: Tensor, r: Tensor, rows: Rows, lr: float | Tensor, t: float | Tensor
    ) -> Tensor:
        return g


RADII: dict[str, Callable[[tuple[float, float], float], Adam | LogAdam | Fixed]] = {
    "adam": Adam,
    "log_adam": LogAdam,
    "fixed": lambda betas, eps: Fixed(),
}
