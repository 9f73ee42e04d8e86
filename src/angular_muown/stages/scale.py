"""Shape scales s(m, n), which make one learning rate fit matrices of every shape.

The polar factor of an m x n matrix has rows of length about sqrt(min(m, n) / m).
"""

from collections.abc import Callable
from math import sqrt


def fan_ratio(m: int, n: int) -> float:
    """sqrt(max(1, m/n)): s * |Q_i| = 1, so a row's angle does not depend on the shape."""
    return sqrt(max(1.0, m / n))


def adam_rms(m: int, n: int) -> float:
    """0.2 sqrt(max(m, n)): the RMS of an AdamW update (Moonlight, arXiv 2502.16982)."""
    return 0.2 * sqrt(max(m, n))


def rms(m: int, n: int) -> float:
    """sqrt(max(m, n)): entries of RMS 1 (the paper's second scale in the MoE table)."""
    return sqrt(max(m, n))


def aspect(m: int, n: int) -> float:
    """sqrt(max(m/n, n/m)): s * |Q|_F = sqrt(max(m, n)) (Haegele et al., arXiv 2606.25971)."""
    return sqrt(max(m / n, n / m))


def none(m: int, n: int) -> float:
    return 1.0


SCALES: dict[str, Callable[[int, int], float]] = {
    "fan_ratio": fan_ratio,
    "adam_rms": adam_rms,
    "rms": rms,
    "aspect": aspect,
    "none": none,
}
