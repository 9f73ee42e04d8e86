"""Windows over shards, batches as a function of the step, their permutation, and prefetching."""

import gc
import os
import threading
import time
from contextlib import closing
from math import isqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angular_lab.data.batches import AHEAD, Batches, Tokens, permute, prefetch
from tests.lab.data.test_shards import random_ids, write_with_struct

SEEDS = st.integers(-(2**65), 2**65)


# windows


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4), sequence=st.integers(1, 20))
def test_windows_are_slices_of_their_shard(tmp_path_factory, sizes, sequence) -> None:
    folder = tmp_path_factory.mktemp("windows")
    expected = []
    for i, size in enumerate(sizes):
        ids = random_ids(size, 1000, i).tolist()
        write_with_struct(folder / f"x_train_{i}.bin", ids)
        starts = range(0, size - sequence, sequence)
        expected += [ids[s : s + sequence + 1] for s in starts]
    tokens = Tokens(folder, "train", sequence, 1000)
    assert (len(tokens), tokens.token_count) == (len(expected), sum(sizes))
    assert tokens.bytes_per_token is None
    indices = np.random.default_rng(0).permutation(len(expected))
    windows = tokens.windows(indices)
    assert (windows.dtype, windows.shape) == (np.int64, (len(expected), sequence + 1))
    assert windows.tolist() == [expected[i] for i in indices]
    for outside in (-1, len(expected)):
        with pytest.raises(ValueError, match=rf"{outside}.*\[0, {len(expected)}\)"):
            tokens.windows(np.array([outside]))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as on Linux")
def test_there_may_be_more_shards_than_open_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("angular_lab.data.batches.OPEN_SHARDS", 2)
    for i in range(6):
        write_with_struct(tmp_path / f"train_{i}.bin", [i, i])
    tokens = Tokens(tmp_path, "train", 1, 10)
    for _ in range(2):
        assert tokens.windows(np.arange(6))[:, 0].tolist() == list(range(6))
    assert open_files(tmp_path) <= 2
    del tokens
    assert open_files(tmp_path) == 0


def open_files(folder: Path) -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.islink(link))


def test_an_id_beyond_the_vocabulary_is_reported_with_its_position(tmp_path) -> None:
    write_with_struct(tmp_path / "train_0.bin", [1] * 10)
    write_with_struct(tmp_path / "train_1.bin", [1] * 7 + [50] + [1] * 5)
    tokens = Tokens(tmp_path, "train", 3, 50)
    assert tokens.windows(np.arange(5)).max() == 1
    with pytest.raises(ValueError, match=r"train_1.bin holds id 50 at position 7,.*vocabulary=50"):
        tokens.windows(np.arange(len(tokens)))
    Tokens(tmp_path, "train", 3, 51).windows(np.arange(len(tokens)))


# batches


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    """81 windows, each of which starts with its number in the corpus."""
    folder = tmp_path_factory.mktemp("tokens")
    for i, (start, stop) in enumerate([(0, 40), (40, 83)]):
        write_with_struct(folder / f"train_{i}.bin", [w for w in range(start, stop) for _ in "ab"])
    return Tokens(folder, "train", 2, 100)


@pytest.mark.parametrize("size", [9, 32])
def test_every_epoch_holds_each_window_once_in_a_new_order(tokens, size) -> None:
    """32 does not divide 81: such a batch may belong to two epochs."""
    batches = Batches(tokens, size, seed=3)
    rows = np.concatenate([batches.batch(step)[:, 0] for step in range(81)])
    epochs = rows.reshape(size, 81).tolist()
    numbers = sorted(tokens.windows(np.arange(81))[:, 0].tolist())
    assert all(sorted(epoch) == numbers for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == size


@settings(max_examples=30)
@given(step=st.integers(0, 10**9), seed=st.integers(-(2**70), 2**70))
def test_the_order_depends_on_neither_ranks_nor_batch_size(tokens, step, seed) -> None:
    whole = Batches(tokens, 16, seed).batch(step)
    assert whole.shape == (16, 3)
    for world in (2, 4, 16):
        parts = [Batches(tokens, 16, seed).batch(step, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), whole)
    halves = [Batches(tokens, 8, seed).batch(2 * step + i) for i in range(2)]
    assert np.array_equal(np.concatenate(halves), whole)


def test_seeds_give_different_orders(tokens) -> None:
    orders = {tuple(Batches(tokens, 32, seed).indices(0).tolist()) for seed in range(50)}
    assert len(orders) == 50


def test_impossible_batches_are_errors(tokens) -> None:
    with pytest.raises(ValueError, match="81 train windows of 2 tokens, fewer than one batch of 8"):
        Batches(tokens, 82, 0)
    Batches(tokens, 81, 0)
    batches = Batches(tokens, 6, 0)
    with pytest.raises(ValueError, match="batch=6 must be divisible by world=4"):
        batches.batch(0, 0, 4)
    for step, rank, world in [(0, 2, 2), (0, -1, 2), (-1, 0, 1)]:
        with pytest.raises(ValueError, match=f"rank={rank} .* step={step} "):
            batches.batch(step, rank, world)
    with pytest.raises(ValueError, match="batch=0"):
        Batches(tokens, 0, 0)


# the permutation


def reference(index: int, n: int, seed: int, epoch: int) -> int:
    """Permute one index in Python's integers."""
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
def test_permute_is_a_bijection(n, seed, epoch) -> None:
    image = permute(np.arange(n), n, seed, epoch)
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(n))


@given(n=st.integers(1, 2**61), seed=SEEDS, epoch=st.integers(0, 2**40), data=st.data())
def test_permute_equals_a_reference_for_any_n(n, seed, epoch, data) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    image = permute(np.array(indices, np.int64), n, seed, epoch)
    assert image.tolist() == [reference(i, n, seed, epoch) for i in indices]


def test_the_order_of_existing_runs_never_changes() -> None:
    expected = [8, 10, 4, 7, 1, 2, 5, 9, 11, 0, 6, 3]
    assert permute(np.arange(12), 12, seed=0, epoch=0).tolist() == expected
    large = permute(np.arange(3), 10**12, seed=7, epoch=3)
    assert large.tolist() == [317654723053, 728994263134, 924098530921]
    table = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert np.array_equal(permute(table, 6, 1).ravel(), permute(table.ravel(), 6, 1))


def test_neighbours_are_separated_and_orders_are_uncorrelated() -> None:
    """Like a random permutation: about one pair of neighbours and one fixed point survive."""
    n = 20_000
    orders = [permute(np.arange(n), n, seed, epoch) for seed in range(5) for epoch in range(4)]
    pairs = [int((np.diff(order) == 1).sum()) for order in orders]
    fixed = [int((order == np.arange(n)).sum()) for order in orders]
    assert 0.3 < np.mean(pairs) < 2
    assert 0.3 < np.mean(fixed) < 2
    correlations = np.corrcoef(orders)[np.triu_indices(len(orders), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(n)


@pytest.mark.parametrize(("indices", "n"), [([3], 3), ([-1], 3), ([0], 0), ([0], 2**62)])
def test_indices_outside_the_range_are_errors(indices, n) -> None:
    with pytest.raises(ValueError, match="must"):
        permute(np.array(indices), n, 0)


# prefetching


@pytest.mark.parametrize("length", [0, 1, 7])
def test_prefetching_gives_the_results_in_order_from_one_thread(length) -> None:
    results = list(prefetch(lambda step: (step, threading.get_ident()), 3, 3 + length))
    assert [step for step, _ in results] == list(range(3, 3 + length))
    threads = {thread for _, thread in results}
    assert len(threads) <= 1
    assert threading.get_ident() not in threads


def test_prefetching_is_a_fixed_number_of_results_ahead() -> None:
    started: list[int] = []
    with closing(prefetch(started.append, 0, 100)) as steps:
        for taken in range(1, 5):
            next(steps)
            deadline = time.monotonic() + 5
            while len(started) < taken + AHEAD and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)  # long enough to go too far
            assert started == list(range(taken + AHEAD))


def test_an_error_closing_and_garbage_collection_end_the_thread() -> None:
    threads = set(threading.enumerate())
    steps = prefetch(lambda step: 1 // (step - 3), 0, 10)
    assert [next(steps) for _ in range(3)] == [-1, -1, -1]
    with pytest.raises(ZeroDivisionError):  # in place of its result
        next(steps)
    assert list(steps) == []
    assert set(threading.enumerate()) == threads
    steps = prefetch(lambda step: step, 0, 10**9)
    next(steps)
    assert set(threading.enumerate()) != threads
    steps.close()
    assert set(threading.enumerate()) == threads
    steps = prefetch(lambda step: step, 0, 10**9)
    next(steps)
    del steps
    gc.collect()
    assert set(threading.enumerate()) == threads
