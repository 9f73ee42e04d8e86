"""Radius rules: how row lengths g, or other sizes of a weight, follow their gradient r."""

from collections.abc import Callable

import torch
from torch import Tensor

from angular_muown.stages.charts import gain, gain_slope, nonzero
from angular_muown.stages.context import Context

MOMENTS = ("exp_avg", "exp_avg_sq")
COLUMN_MOMENTS = ("column_exp_avg", "column_exp_avg_sq")


def adam_direction(
    r: Tensor,
    context: Context,
    betas: tuple[float, float],
    eps: float,
    moments: tuple[str, str] = MOMENTS,
) -> Tensor:
    """Return Adam's bias-corrected direction for the gradient r."""
    (first, second), (beta1, beta2) = moments, betas
    state, t = context.state, context.t
    # lerp would turn a square that has overflowed into inf - inf.
    state[first] = m = beta1 * state[first] + (1 - beta1) * r
    state[second] = v = beta2 * state[second] + (1 - beta2) * r.square()
    return m / (1 - beta1**t) / nonzero((v / (1 - beta2**t)).sqrt() + eps)


def forget_at_zero(g: Tensor, context: Context) -> None:
    """Reset the first moment of zero rows: they take a new direction (see polar_coordinates)."""
    context.state["exp_avg"] = context.state["exp_avg"].masked_fill(g == 0, 0.0)


class ByAdam:
    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self.betas, self.eps = betas, eps


class Adam(ByAdam):
    """g <- g - lr adam(r): the paper's rule. If a length crosses zero, its row turns around."""

    state_names = MOMENTS
    signed = True

    def __call__(self, g: Tensor, r: Tensor, context: Context) -> Tensor:
        forget_at_zero(g, context)
        return g - context.radius_lr * adam_direction(r, context, self.betas, self.eps)


class LogAdam(ByAdam):
    """g <- g exp(-lr adam(r)): the same relative speed for every length; lengths stay positive.

    A product cannot leave zero, so a zero row takes Adam's additive step once.
    """

    state_names = MOMENTS
    signed = False

    def __call__(self, g: Tensor, r: Tensor, context: Context) -> Tensor:
        forget_at_zero(g, context)
        change = -context.radius_lr * adam_direction(r, context, self.betas, self.eps)
        return torch.where(g == 0, change.clamp(min=0), g * change.exp())


class Gains(ByAdam):
    """Adam on the free variables of GainedSphere's gains a and b; the norm g is constant."""

    state_names = (*MOMENTS, *COLUMN_MOMENTS)
    signed = False

    def __call__(self, g: Tensor, r: Tensor, context: Context) -> Tensor:
        state, over, lr = context.state, context.reductions, context.radius_lr
        x, y = state["row_gain"], state["column_gain"]
        for_x = gain_slope(x) * over.row_sum(r * gain(y))
        for_y = gain_slope(y) * over.column_sum(r * gain(x))
        adam = (context, self.betas, self.eps)
        state["row_gain"] = x - lr * adam_direction(for_x, *adam)
        state["column_gain"] = y - lr * adam_direction(for_y, *adam, COLUMN_MOMENTS)
        return g


class Fixed:
    """Constant g: only the directions learn. A zero row stays zero."""

    state_names = ()
    signed = False

    def __call__(self, g: Tensor, r: Tensor, context: Context) -> Tensor:
        return g


RADII: dict[str, Callable[[tuple[float, float], float], Adam | LogAdam | Fixed]] = {
    "adam": Adam,
    "log_adam": LogAdam,
    "fixed": lambda betas, eps: Fixed(),
}
