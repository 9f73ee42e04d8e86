"""Collectives that end on every rank when one rank fails.

Without this, the other ranks would wait in a collective until it times out. A failing rank leaves a
message in the default store, and ranks that wait on the CPU poll the store once a second.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.distributed.mesh import RankGroup

POLL_INTERVAL = timedelta(seconds=1)
Ranks = tuple[int, ...]
_steps: Counter[Ranks] = Counter()  # steps that these ranks took together; equal on each of them
_watched: dict[Ranks, str] = {}  # the store's key for the step in progress


class PeerError(RuntimeError):
    """Another rank failed; the message is the one that rank left in the store."""


@contextmanager
def failing_together() -> Iterator[None]:
    """Report an error in a shared step to the ranks passed to `watch`, so that they fail too."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        description = f"{type(error).__name__}: {error}{notes}"
        for key in _watched.values():
            with suppress(Exception):  # a lost store must not hide the error
                _store().set(key, f"rank {dist.get_rank()} failed in its step: {description}")
        raise
    finally:
        _watched.clear()


def watch(rank_groups: Iterable[Ranks]) -> None:
    """Watch these ranks for errors until the current step ends.

    Steps are numbered per set of ranks, so that an error that was handled does not end a later one.
    """
    for ranks in rank_groups:
        if ranks not in _watched:
            _steps[ranks] += 1
            _watched[ranks] = f"angular_muown/{'-'.join(map(str, ranks))}/{_steps[ranks]}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _raise_peer_error() -> None:
    """Raise PeerError if a watched rank left a message in the store."""
    for key in _watched.values():
        message = b""
        with suppress(Exception):  # without a store, the collective's own error is raised
            if _store().check([key]):
                message = _store().get(key)
        if message:
            raise PeerError(message.decode())


def wait(handle: Any, device: torch.device) -> None:
    """Wait for a collective. On a GPU, the stream waits and the host does not."""
    if device.type != "cpu" or not _watched:
        handle.wait()
        return
    while True:
        try:
            handle.wait(POLL_INTERVAL)
            return
        except RuntimeError:
            _raise_peer_error()  # also the cause of a network error, if a rank failed
            if handle.is_completed():
                handle.wait()  # raises if the collective failed; it may have just succeeded
                return


def all_gather(output: Tensor, part: Tensor, rank_group: RankGroup) -> None:
    """Concatenate every rank's part in `output`."""
    start_all_gather(output, part, rank_group)()


def start_all_gather(output: Tensor, part: Tensor, rank_group: RankGroup) -> Callable[[], None]:
    """Start an all-gather; return a function that waits for it."""
    # torch 2.13 renames its function.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    handle = gather(output, part, group=rank_group.group, async_op=True)
    return lambda: wait(handle, output.device)


def all_reduce(t: Tensor, rank_group: RankGroup, op: Any) -> None:
    wait(dist.all_reduce(t, op=op, group=rank_group.group, async_op=True), t.device)


def swap(
    outgoing: list[list[Tensor]], sizes: list[int], group: Any, device: torch.device
) -> Callable[[], list[Tensor]]:
    """Start an all-to-all: send a list of byte tensors to each rank, receive `sizes` bytes from it.

    Return a function that waits for the result (on a GPU, without blocking the host).
    """
    counts = [sum(t.numel() for t in tensors) for tensors in outgoing]
    flat = [t for tensors in outgoing for t in tensors]
    send = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    finish = all_to_all(send, counts, received, sizes, group)

    def result() -> list[Tensor]:
        finish()
        return list(received.split(sizes))

    return result


def all_to_all(
    send: Tensor, send_sizes: list[int], received: Tensor, sizes: list[int], group: Any
) -> Callable[[], None]:
    """Start an all-to-all between byte buffers; return a function that waits for it."""
    handle: Any = dist.all_to_all_single(
        received, send, sizes, send_sizes, group=group, async_op=True
    )

    def finish(_send: Tensor = send) -> None:  # keeps the buffer alive until then
        wait(handle, received.device)

    return finish
