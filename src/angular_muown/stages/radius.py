"""Radius rules: how the row lengths g, or other sizes of a weight, follow their gradient r."""

from collections.abc import Callable

import torch
from torch import Tensor

from angular_muown.stages.charts import Rows, gain, gain_slope, nonzero
from angular_muown.stages.reductions import Summing

MOMENTS = ("exp_avg", "exp_avg_sq")
COLUMN_MOMENTS = ("column_exp_avg", "column_exp_avg_sq")


def adam_direction(
    r: Tensor,
    rows: Rows,
    betas: tuple[float, float],
    eps: float,
    t: float | Tensor,
    moments: tuple[str, str] = MOMENTS,
) -> Tensor:
    """Adam's bias-corrected direction for the gradient r; t counts from 1."""
    (first, second), (beta1, beta2) = moments, betas
    # Not by lerp, which makes inf - inf of a square that overflowed once.
    rows[first] = m = beta1 * rows[first] + (1 - beta1) * r
    rows[second] = v = beta2 * rows[second] + (1 - beta2) * r.square()
    return m / (1 - beta1**t) / nonzero((v / (1 - beta2**t)).sqrt() + eps)


def forget_at_zero(g: Tensor, rows: Rows) -> None:
    """A row at zero takes a new direction (see polar_coordinates): its first moment has no past."""
    rows["exp_avg"] = rows["exp_avg"].masked_fill(g == 0, 0.0)


class ByAdam(Summing):
    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self.betas, self.eps = betas, eps


class Adam(ByAdam):
    """g <- g - lr adam(r): the paper's rule. A length may cross zero: then the row turns around."""

    rows = MOMENTS
    signed = True

    def __call__(
        self, g: Tensor, r: Tensor, rows: Rows, lr: float | Tensor, t: float | Tensor
    ) -> Tensor:
        forget_at_zero(g, rows)
        return g - lr * adam_direction(r, rows, self.betas, self.eps, t)


class LogAdam(ByAdam):
    """g <- g exp(-lr adam(r)): the same relative speed for every length, and never below zero.

    A product cannot leave zero, so a row at zero takes Adam's additive step once.
    """

    rows = MOMENTS
    signed = False

    def __call__(
        self, g: Tensor, r: Tensor, rows: Rows, lr: float | Tensor, t: float | Tensor
    ) -> Tensor:
        forget_at_zero(g, rows)
        change = -lr * adam_direction(r, rows, self.betas, self.eps, t)
        return torch.where(g == 0, change.clamp(min=0), g * change.exp())


class Gains(ByAdam):
    """Adam on the free variables of GainedSphere's gains a and b; the norm g stays."""

    rows = (*MOMENTS, *COLUMN_MOMENTS)
    signed = False

    def __call__(
        self, g: Tensor, r: Tensor, rows: Rows, lr: float | Tensor, t: float | Tensor
    ) -> Tensor:
        x, y = rows["row_gain"], rows["column_gain"]
        for_x = gain_slope(x) * self.sums.rows(r * gain(y))
        for_y = gain_slope(y) * self.sums.columns(r * gain(x))
        adam = (rows, self.betas, self.eps, t)
        rows["row_gain"] = x - lr * adam_direction(for_x, *adam)
        rows["column_gain"] = y - lr * adam_direction(for_y, *adam, COLUMN_MOMENTS)
        return g


class Fixed(Summing):
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
