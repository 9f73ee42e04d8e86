"""The Prefetcher: the same values in the same order, never too far ahead, and no thread stays."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angular_lab.data.shards import Prefetcher


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@given(start=st.integers(-5, 5), length=st.integers(-3, 20), depth=st.integers(1, 5))
def test_it_is_map(start, length, depth) -> None:
    def make(step: int) -> tuple[int, None]:
        return step, None

    wanted = list(map(make, range(start, start + length)))
    assert list(Prefetcher(make, start, start + length, depth)) == wanted


def test_none_is_a_value_like_others() -> None:
    assert list(Prefetcher(lambda _: None, 0, 3)) == [None] * 3


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_is_depth_ahead_and_no_further(depth) -> None:
    begun: list[int] = []
    with Prefetcher(lambda step: begun.append(step), 0, 100, depth) as steps:
        for taken in range(10):
            deadline = time.monotonic() + 5
            while len(begun) < taken + depth and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)  # the time to go too far
            assert begun == list(range(taken + depth))
            next(steps)


def test_it_works_in_the_background() -> None:
    here = threading.get_ident()
    found = list(Prefetcher(lambda _: threading.get_ident(), 0, 5))
    assert len(set(found)) == 1
    assert here not in found


def test_an_exception_comes_in_its_place_and_ends_it() -> None:
    def make(step: int) -> int:
        if step == 3:
            raise KeyError("three")
        return step

    steps = Prefetcher(make, 0, 10)
    assert [next(steps) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="three"):
        next(steps)
    assert list(steps) == []


def test_close_ends_it_at_once_and_twice_is_once() -> None:
    steps = Prefetcher(lambda step: step, 0, 10**9, depth=3)
    assert next(steps) == 0
    start = time.monotonic()
    steps.close()
    steps.close()
    assert time.monotonic() - start < 1
    assert list(steps) == []


def test_leaving_a_block_with_an_error_ends_it() -> None:
    with pytest.raises(RuntimeError, match="outside"), Prefetcher(lambda s: s, 0, 10**9):
        raise RuntimeError("outside")


def test_a_waiting_consumer_is_let_go() -> None:
    gate = threading.Event()
    steps = Prefetcher(lambda _: gate.wait(5), 0, 10)
    found: list[object] = []
    consumer = threading.Thread(target=lambda: found.append(next(steps, "ended")))
    consumer.start()
    closer = threading.Thread(target=steps.close)
    closer.start()
    consumer.join(2)
    assert found == ["ended"]
    gate.set()
    closer.join()


def test_garbage_collection_ends_it() -> None:
    steps = Prefetcher(lambda step: step, 0, 10**9)
    thread = steps._thread
    next(steps)
    del steps
    gc.collect()
    thread.join(2)
    assert not thread.is_alive()


def test_depth_has_to_be_positive() -> None:
    with pytest.raises(ValueError, match="depth=0"):
        Prefetcher(lambda step: step, 0, 1, depth=0)
