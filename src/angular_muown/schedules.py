"""Schedules: pure functions of the step, counted from 0. There is nothing to save or load.

`wsd` and `cosine` are factors for `torch.optim.lr_scheduler.LambdaLR`. `inverse_polynomial` is the
angular multiplier kappa. `averaging` is the weight of the newest parameters in an average.
"""

from collections.abc import Callable
from math import atan, cos, degrees, isfinite, pi
from typing import Any, overload

from torch import Tensor


@overload
def inverse_polynomial(step: int, warmup_steps: int, scale: float, degree: float) -> float: ...
@overload
def inverse_polynomial(step: Tensor, warmup_steps: int, scale: float, degree: float) -> Tensor: ...
def inverse_polynomial(
    step: int | Tensor, warmup_steps: int, scale: float, degree: float
) -> float | Tensor:
    """Return kappa_t = (1 + c (t - t_w)_+)^(-p): 1 during warm-up, then decaying without an end.

    Args:
        step: t, from 0. A tensor gives a tensor on the same device.
        warmup_steps: t_w, the number of steps at 1.
        scale: c, per step.
        degree: p; 0 gives 1 at every step.
    """
    if isinstance(step, Tensor):
        return (1.0 + scale * (step - warmup_steps).clamp(min=0)) ** -degree
    return (1.0 + scale * max(step - warmup_steps, 0)) ** -degree


def wsd(step: int, total_steps: int, warmup_steps: int = 0, decay_steps: int = 0) -> float:
    """Return the factor of warm-up, stable, decay: linear from 0, constant 1, linear to 0.

    Args:
        step: the step, from 0.
        total_steps: number of steps of the run; the factor is 0 there.
        warmup_steps: length of the warm-up in steps.
        decay_steps: length of the cooldown in steps.
    """
    rise = (step + 1) / (warmup_steps + 1)
    fall = (total_steps - step) / (decay_steps + 1)
    return max(0.0, min(1.0, rise, fall))


def cosine(step: int, total_steps: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Return the factor of a linear warm-up followed by half a cosine.

    Args:
        step: the step, from 0.
        total_steps: number of steps of the run.
        warmup_steps: length of the warm-up in steps.
        floor: the factor at `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + cos(pi * progress))


WINDOWS = "a fraction of the steps between 0 and 1, or an integer number of steps >= 2"


def is_number(x: Any) -> bool:
    """True if x is a finite Python number that torch accepts; integers must fit into 64 bits."""
    if isinstance(x, int):
        return not isinstance(x, bool) and -(2**63) <= x < 2**63
    return isinstance(x, float) and isfinite(x)


def is_window(x: Any) -> bool:
    return is_number(x) and (0 < x < 1 or (x >= 2 and x == int(x)))


def averaging(window: float) -> Callable[[Any], Any]:
    """Return share(k), the weight of the newest parameters w in a running average a.

    After step k = 1, 2, ...: a <- a + share(k) (w - a). The first share is 1, so that nothing is
    left of the initial a. share() takes an integer, or a tensor and then returns a tensor on the
    same device.

    Args:
        window: below 1, a fraction of the steps so far: share(k) = 1 / max(1, window k). Step k
            counts as k^(1/window - 1) whatever the length n of the run, so the mean age is about
            window n / (1 + window): for 0.1, roughly the last tenth. This is polynomial-decay
            averaging (Shamir, Zhang: Stochastic Gradient Descent for Non-smooth Optimization,
            ICML 2013). From 2 on, a number of steps: share(k) = 1 / min(window, k), a plain mean
            that turns into an exponential average with decay 1 - 1/window.
    """
    if not is_window(window):
        raise ValueError(f"window={window!r} is not valid: it must be {WINDOWS}")

    def share(step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor):  # in float64, like a Python number
            k = step.double()
            return 1 / ((window * k).clamp(min=1) if window < 1 else k.clamp(max=window))
        return 1 / (max(1, window * step) if window < 1 else min(window, step))

    return share


def angle_degrees(lr: float, kappa: float) -> float:
    """Return the angle by which a tangent step of length lr * kappa turns a unit row."""
    return degrees(atan(lr * kappa))
