"""Bytes between ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.spread import Team


def all_gather(to: Tensor, own: Tensor, team: Team) -> None:
    """`own` of every rank, one behind the other. torch 2.13 renames its function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(to, own, group=team.group)


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

    def wait(kept: Tensor = send) -> list[Tensor]:
        handle.wait()
        return list(received.split(sizes))

    return wait
