"""Student's interval: printed tables, and the law that it is made for."""

from math import nan, sqrt
from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angular_lab.experiments.intervals import student_interval

LOSSES = st.floats(1, 10)


@pytest.mark.parametrize(
    ("freedom", "confidence", "quantile"),  # of printed tables
    [
        (1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.95, 2.776), (9, 0.95, 2.262),
        (10, 0.95, 2.228), (1, 0.5, 1.0), (2, 0.9, 2.920), (5, 0.99, 4.032), (120, 0.95, 1.980),
    ],
)  # fmt: skip
def test_students_quantiles(freedom, confidence, quantile) -> None:
    values = [0.0] * freedom + [1.0]
    low, high = student_interval(values, confidence)
    half = quantile * stdev(values) / sqrt(freedom + 1)
    assert (low, high) == pytest.approx(
        (fmean(values) - half, fmean(values) + half), abs=4e-4 * stdev(values)
    )


def test_it_covers_as_often_as_it_says() -> None:
    """Three normal values at a time: the law that the interval is made for."""
    dice, runs = Random(0), 4000
    found = (student_interval([dice.gauss(1, 2) for _ in range(3)], 0.8) for _ in range(runs))
    covered = sum(low <= 1 <= high for low, high in found)
    assert covered / runs == pytest.approx(0.8, abs=0.02)  # three standard deviations


@given(st.lists(LOSSES, min_size=2, max_size=6), st.floats(-3, 3), st.floats(0.1, 3))
def test_it_moves_with_its_values(values, shift, factor) -> None:
    low, high = student_interval(values)
    moved = student_interval([factor * value + shift for value in values])
    assert moved == pytest.approx((factor * low + shift, factor * high + shift), abs=1e-6)
    narrow = student_interval(values, 0.5)
    assert low <= narrow[0] <= narrow[1] <= high


def test_one_value_has_no_interval() -> None:
    assert student_interval([3.0]) is None


@pytest.mark.parametrize(
    ("values", "confidence", "words"),
    [
        ([], 0.95, "no values"),
        ([1.0, nan], 0.95, "a value is nan"),
        ([1.0, 2.0], 95, "confidence=95: it must lie between 0 and 1"),
        ([1.0, 2.0], nan, "confidence=nan"),
    ],
)
def test_bad_input_to_the_interval(values, confidence, words) -> None:
    with pytest.raises(ValueError, match=words):
        student_interval(values, confidence)
