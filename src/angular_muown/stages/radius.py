"""Radius rules: how the row lengths g, or other sizes of a weight, follow their gradient r."""

from collections.abc import Callable
from math import log
from typing import Self

import torch
from torch import Tensor

from angular_muown.stages.charts import Rows, nonzero
from angular_muown.stages.spheres import gain, gain_slope
from angular_muown.stages.sums import Summing, Whole

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


class ColumnGains(ByAdam):
    """log b <- log b - lr adam(f) for the gains of ColumnGained, f_j = sum_i g_i r_ij, and `inner`
    for the lengths g. Weight decay comes first: g is that of the decayed weight.

    A common factor of b is one of g as well: g a, b / a is the same W for every a > 0, with the
    same U, T and f. Only the additive rule is not indifferent to it: its steps of g have a size. So
    after the step a makes the mean square of b one, as it is at the start, which is when g has the
    size of W's rows. That moves nothing in W: a column without gradient has its old gain there.

    So b_j <= sqrt(n). From below a gain stops at the unit of rounding: beside the others such a
    column is nothing, but V = W / b can still be read.
    """

    def __init__(
        self, inner: Adam | LogAdam | Fixed, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(betas, eps)
        self.inner = inner

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self.inner.rows, *COLUMN_MOMENTS)

    @property
    def signed(self) -> bool:
        return self.inner.signed

    def over(self, sums: Whole) -> Self:
        stage = super().over(sums)
        stage.inner = self.inner.over(sums)
        return stage

    def __call__(
        self, g: Tensor, r: Tensor, rows: Rows, lr: float | Tensor, t: float | Tensor
    ) -> Tensor:
        f = self.sums.columns(g * r)
        adam = adam_direction(f, rows, self.betas, self.eps, t, COLUMN_MOMENTS)
        log_b = rows["column_log_gain"] - lr * adam
        a = (self.sums.rows((2 * log_b).exp()) / self.sums.shape(r)[1]).sqrt()
        least = log(torch.finfo(log_b.dtype).eps)
        rows["column_log_gain"] = (log_b - a.log()).clamp(min=least)
        return a * self.inner(g, self.sums.rows(r), rows, lr, t)


RADII: dict[str, Callable[[tuple[float, float], float], Adam | LogAdam | Fixed]] = {
    "adam": Adam,
    "log_adam": LogAdam,
    "fixed": lambda betas, eps: Fixed(),
}
