"""Collectives, and how an error on one rank ends a step on all of them.

Without that, the others would wait in a collective until its time limit. A rank that fails leaves
a message in the job's store, and ranks that wait on the CPU look there once a second.
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

LOOK_EVERY = timedelta(seconds=1)
Ranks = tuple[int, ...]
_steps: Counter[Ranks] = Counter()  # taken by the same ranks together; the same number on each
_watched: dict[Ranks, str] = {}  # keys of the step that is under way


class PeerError(RuntimeError):
    """Another rank failed. The message is the one it left."""


@contextmanager
def failing_together() -> Iterator[None]:
    """Inside, after `watch`, an error on one rank ends the step on the ranks that share it."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        what = f"{type(error).__name__}: {error}{notes}"
        for key in _watched.values():
            with suppress(Exception):  # a store that is gone must not hide the error
                _store().set(key, f"rank {dist.get_rank()} failed in its step: {what}")
        raise
    finally:
        _watched.clear()


def watch(rank_groups: Iterable[Ranks]) -> None:
    """From here to its end, these ranks take a step together. Steps are numbered for each set of
    ranks, so that an error that was handled does not end a later step."""
    for ranks in rank_groups:
        if ranks not in _watched:
            _steps[ranks] += 1
            _watched[ranks] = f"angular_muown/{'-'.join(map(str, ranks))}/{_steps[ranks]}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _look() -> None:
    """Raise what a rank that failed has left."""
    for key in _watched.values():
        message = b""
        with suppress(Exception):  # the network's own error is raised then
            if _store().check([key]):
                message = _store().get(key)
        if message:
            raise PeerError(message.decode())


def wait(handle: Any, device: torch.device) -> None:
    """Wait for a collective; on a GPU without the host."""
    if device.type != "cpu" or not _watched:
        handle.wait()
        return
    while True:
        try:
            handle.wait(LOOK_EVERY)
            return
        except RuntimeError:
            _look()  # a rank that failed is the cause of what the network reports, too
            if handle.is_completed():
                handle.wait()  # raises if it failed; it may just have ended
                return


def all_gather(to: Tensor, own: Tensor, rank_group: RankGroup) -> None:
    """`own` of every rank, one behind the other. torch 2.13 renames its function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    wait(gather(to, own, group=rank_group.group, async_op=True), to.device)


def all_reduce(t: Tensor, rank_group: RankGroup, op: Any) -> None:
    wait(dist.all_reduce(t, op=op, group=rank_group.group, async_op=True), t.device)


def swap(
    out: list[list[Tensor]], sizes: list[int], group: Any, device: torch.device
) -> Callable[[], list[Tensor]]:
    """Send a list of byte tensors to each rank of a group; `sizes` come from each. Returns at
    once; the result waits, on a GPU without the host."""
    counts = [sum(t.numel() for t in to) for to in out]
    flat = [t for to in out for t in to]
    send = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    handle: Any = dist.all_to_all_single(received, send, sizes, counts, group=group, async_op=True)

    def finish(kept: Tensor = send) -> list[Tensor]:
        wait(handle, device)
        return list(received.split(sizes))

    return finish
