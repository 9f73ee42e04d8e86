"""Schedules: pure functions of the step, counted from 0. Nothing to save, nothing to load.

`wsd` and `cosine` are factors for `torch.optim.lr_scheduler.LambdaLR`; `inverse_polynomial` is
the angular multiplier kappa; `averaging` is how much the newest weights count in an average.
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


WINDOWS = "a share of the steps above 0 and below 1, or a whole number of steps from 2 on"


def is_number(x: Any) -> bool:
    """True if x is a finite number of Python's that torch takes: of integers, those of 64 bits."""
    if isinstance(x, int):
        return not isinstance(x, bool) and -(2**63) <= x < 2**63
    return isinstance(x, float) and isfinite(x)


def is_window(x: Any) -> bool:
    return is_number(x) and (0 < x < 1 or (x >= 2 and x == int(x)))


def averaging(window: float) -> Callable[[Any], Any]:
    """The share of the newest weights w in an average of the last ones: a <- a + (w - a) share(k)
    after step k = 1, 2, ... The first share is 1: nothing is left of what a was before.

    Of `window` < 1, a share of the steps so far: 1 / max(1, window k). Whatever the number n of
    steps turns out to be, step k counts as k^(1/window - 1), so the mean age of what is averaged is
    about window n / (1 + window): for 0.1 the last tenth, roughly. Up to step 1/window the average
    is the weights themselves. It is polynomial-decay averaging, of degree 1/window - 1 (Shamir,
    Zhang: Stochastic Gradient Descent for Non-smooth Optimization, ICML 2013), from there on.

    Of `window` >= 2, a number of steps: 1 / min(window, k), the plain mean of the weights until
    there are so many of them, then an exponential average with decay 1 - 1/window.

    A tensor k gives a tensor, computed where it lies."""
    if not is_window(window):
        raise ValueError(f"window={window!r} is not valid: it must be {WINDOWS}")

    def share(step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor):  # in float64, as a number of the host's is
            k = step.double()
            return 1 / ((window * k).clamp(min=1) if window < 1 else k.clamp(max=window))
        return 1 / (max(1, window * step) if window < 1 else min(window, step))

    return share


def angle_degrees(lr: float, kappa: float) -> float:
    """The angle by which a step of length lr * kappa, tangent to a unit row, turns it."""
    return degrees(atan(lr * kappa))
