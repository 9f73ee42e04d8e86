"""The convergence theorem as arithmetic: constants in, step size, momentum and bound out.

For T steps of Algorithm 2 on m x n matrices, with r = min(m, n):
    lr       = sqrt(Delta_0 (1 - beta) / (L T))
    1 - beta = min(1, max(T^(-2/3), sqrt(Delta_0 L / (r sigma^2 T))))
    mean of E|grad|_F <= 4 sqrt(Delta_0 L / T) + 7 (r Delta_0 L sigma^2 / T)^(1/4)
                         + 4 sqrt(r) sigma / T^(1/3)
"""

from math import inf, sqrt
from typing import NamedTuple


class Constants(NamedTuple):
    """What the theorem needs to know of a problem; `theory.assumptions` checks such claims."""

    smoothness: float  # L, of the loss and of its gradient, in |.|_op and |.|_*
    initial_gap: float  # Delta_0 >= loss(U_1) - inf loss
    noise: float  # sigma, |.|_F
    rank: int  # r = min(m, n)


class Parameters(NamedTuple):
    lr: float
    momentum: float


def parameters(constants: Constants, steps: int) -> Parameters:
    """The theorem's step size and momentum for a run of so many steps."""
    L, gap, sigma, r = constants
    noisy = sqrt(gap * L / (r * sigma**2 * steps)) if sigma else inf
    weight = min(1.0, max(steps ** (-2 / 3), noisy))  # 1 - beta
    return Parameters(sqrt(gap * weight / (L * steps)), 1 - weight)


def bound(constants: Constants, steps: int) -> float:
    """What the mean gradient norm of such a run cannot exceed, in expectation."""
    return sum(terms(constants, steps))


def terms(constants: Constants, steps: int) -> tuple[float, float, float]:
    """The bound's three parts: T^(-1/2), T^(-1/4) and T^(-1/3)."""
    L, gap, sigma, r = constants
    return (
        4 * sqrt(gap * L / steps),
        7 * (r * gap * L * sigma**2 / steps) ** 0.25,
        4 * sqrt(r) * sigma / steps ** (1 / 3),
    )
