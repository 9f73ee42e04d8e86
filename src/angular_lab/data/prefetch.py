"""The next batches, made in the background while the current one is used."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Item(NamedTuple, Generic[T]):
    value: T | None
    error: BaseException | None = None
    last: bool = False


def _work(
    make: Callable[[int], T],
    steps: range,
    room: threading.Semaphore,
    closed: threading.Event,
    ready: "SimpleQueue[_Item[T]]",
) -> None:
    """What the thread does. It knows nothing of the Prefetcher, which can thus be collected."""
    try:
        for step in steps:
            room.acquire()
            if closed.is_set():
                return
            ready.put(_Item(make(step)))
        ready.put(_Item(None, last=True))
    except BaseException as error:
        ready.put(_Item(None, error, last=True))


def _stop(room: threading.Semaphore, closed: threading.Event, ready: "SimpleQueue") -> None:
    closed.set()
    room.release()  # in case the thread waits for room
    ready.put(_Item(None, last=True))  # in case a consumer waits for an item


class Prefetcher(Generic[T]):
    """Iterate over make(start), ..., make(stop - 1), in order, made by one background thread.

    At most `depth` results exist that nobody has taken yet, the one in the making included. An
    exception in `make` is raised where its result would have come. `close`, the end of a `with`
    block, or garbage collection ends the thread; only a call of `make` under way is waited for.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1")
        self._room = threading.Semaphore(depth)
        self._closed = threading.Event()
        self._ready: SimpleQueue[_Item[T]] = SimpleQueue()
        shared = (self._room, self._closed, self._ready)
        self._thread = threading.Thread(
            target=_work, args=(make, range(start, stop), *shared), daemon=True, name="prefetch"
        )
        self._stop = weakref.finalize(self, _stop, *shared)
        self._thread.start()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if item.last:
            if not self._closed.is_set():  # otherwise somebody else closes it, and waits
                self.close()
            raise item.error or StopIteration
        self._room.release()
        return item.value  # type: ignore[return-value]  # None is a value of T here

    def close(self) -> None:
        """End the thread and drop what it has made; calling it again does nothing."""
        self._stop()
        self._thread.join()

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
