"""The permutation of windows: a bijection, the same everywhere, and well mixed."""

from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from angular_lab.data.shards import permute

SEEDS = st.integers(-(2**65), 2**65)


def reference(index: int, n: int, seed: int, epoch: int) -> int:
    """One index at a time, in Python's own integers."""
    wrap = 2**64

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % wrap
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % wrap
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    base = mix(mix((seed + golden) % wrap) ^ epoch)
    side = isqrt(n - 1) + 1
    while True:
        left, right = divmod(index, side)
        for i in range(1, 9):
            left, right = right, (left + mix(right ^ mix((base + i * golden) % wrap))) % side
        index = left * side + right
        if index < n:
            return index


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_it_is_a_bijection(n, seed, epoch) -> None:
    image = permute(np.arange(n), n, seed, epoch)
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(n))


@given(n=st.integers(1, 2**61), seed=SEEDS, epoch=st.integers(0, 2**40), data=st.data())
def test_it_is_the_same_as_plain_integers_for_any_n(n, seed, epoch, data) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    image = permute(np.array(indices, np.int64), n, seed, epoch)
    assert image.tolist() == [reference(i, n, seed, epoch) for i in indices]


def test_it_never_changes() -> None:
    """Frozen: another order would make old runs impossible to repeat."""
    assert permute(np.arange(12), 12, seed=0, epoch=0).tolist() == [
        8,
        10,
        4,
        7,
        1,
        2,
        5,
        9,
        11,
        0,
        6,
        3,
    ]
    large = permute(np.arange(3), 10**12, seed=7, epoch=3)
    assert large.tolist() == [317654723053, 728994263134, 924098530921]


def test_it_keeps_the_shape_and_takes_any_integers() -> None:
    table = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert np.array_equal(permute(table, 6, 1).ravel(), permute(table.ravel(), 6, 1))
    assert permute(np.array([], np.int64), 6, 1).size == 0


@pytest.mark.parametrize("n", [2, 3, 4, 10])
@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_every_index_goes_everywhere_equally_often(n, vary) -> None:
    """A chi-square of the table index x place, over consecutive seeds or epochs."""
    trials = 1000
    images = np.array([permute(np.arange(n), n, **{"seed": 1, vary: i}) for i in range(trials)])
    counts = np.stack([(images == place).sum(0) for place in range(n)])
    chi_square = ((counts - trials / n) ** 2 / (trials / n)).sum()
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_are_separated() -> None:
    """Of n - 1 neighbours about one stays, as in a random permutation; and few points stay."""
    n = 20_000
    images = [permute(np.arange(n), n, seed) for seed in range(20)]
    together = [int((np.diff(image) == 1).sum()) for image in images]
    still = [int((image == np.arange(n)).sum()) for image in images]
    assert 0.3 < np.mean(together) < 2
    assert 0.3 < np.mean(still) < 2


def test_epochs_and_seeds_are_unrelated() -> None:
    n = 20_000
    orders = [permute(np.arange(n), n, seed, epoch) for seed in range(3) for epoch in range(3)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize(("indices", "n"), [([3], 3), ([-1], 3), ([0], 0), ([0], 2**62)])
def test_what_lies_outside_is_refused(indices, n) -> None:
    with pytest.raises(ValueError, match="must"):
        permute(np.array(indices), n, 0)
