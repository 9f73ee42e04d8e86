"""How sure a mean over few seeds is. Plain Python: nothing here needs torch."""

from collections.abc import Sequence
from math import cos, isfinite, pi, sin, sqrt, tan
from statistics import fmean, stdev


def student_interval(
    values: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Of the mean, by Student's t: what so few seeds can say if seeds are normally distributed. Of
    two values it is wide, 12.7 standard errors to each side. None for one value."""
    if not values:
        raise ValueError("no values: give at least one")
    for value in values:
        if not isfinite(value):
            raise ValueError(f"a value is {value}: leave out what diverged, and report it")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: it must lie between 0 and 1, as 0.95 does")
    if len(values) < 2:
        return None
    half = _student_quantile(len(values) - 1, confidence) * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def _student_quantile(freedom: int, confidence: float) -> float:
    """t with P(|T| <= t) = confidence, by bisection of the angle atan(t / sqrt(freedom))."""
    low, high = 0.0, pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(freedom, middle) < confidence else (low, middle)
    return sqrt(freedom) * tan(low)


def _within(freedom: int, angle: float) -> float:
    """P(|T| <= t) for a whole number of degrees of freedom: finite sums, Abramowitz and Stegun
    26.7.3 and 26.7.4."""
    odd = freedom % 2
    term, total = (cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (k - 1) / k * cos(angle) ** 2
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
