"""Schedules: pure functions of the step, counted from 0. Nothing to save, nothing to load.

`wsd` and `cosine` are factors for `torch.optim.lr_scheduler.LambdaLR`; `inverse_polynomial` is
the angular multiplier kappa.
"""

from math import atan, cos, degrees, pi
from typing import overload

from torch import Tensor


@overload
def inverse_polynomial(step: int, warmup_steps: int, scale: float, degree: float) -> float: ...
@overload
def inverse_polynomial(step: Tensor, warmup_steps: int, scale: float, degree: float) -> Tensor: ...
def inverse_polynomial(
    step: int | Tensor, warmup_steps: int, scale: float, degree: float
) -> float | Tensor:
    """kappa_t = (1 + c (t - t_w)_+)^(-p): 1 during warm-up, then falling without an end point.

    A tensor gives a tensor, computed where it lies."""
    if isinstance(step, Tensor):
        return (1.0 + scale * (step - warmup_steps).clamp(min=0)) ** -degree
    return (1.0 + scale * max(step - warmup_steps, 0)) ** -degree


def wsd(step: int, total_steps: int, warmup_steps: int = 0, decay_steps: int = 0) -> float:
    """Warm-up, stable, decay: linear from 0, constant 1, linear to 0 at `total_steps`."""
    rise = (step + 1) / (warmup_steps + 1)
    fall = (total_steps - step) / (decay_steps + 1)
    return max(0.0, min(1.0, rise, fall))


def cosine(step: int, total_steps: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Linear warm-up, then half a cosine down to `floor` at `total_steps`."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + cos(pi * progress))


def angle_degrees(lr: float, kappa: float, exact: bool = False) -> float:
    """The angle that a step of length lr * kappa tangent to a unit row turns it by: its arc
    tangent, or along a great circle that length exactly."""
    return degrees(lr * kappa if exact else atan(lr * kappa))
