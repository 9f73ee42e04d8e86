"""Placement: a parameter that is spread over ranks, whole for the time of a step.

A plain tensor is the case with nothing to exchange. A DTensor (FSDP2, HSDP, tensor parallel) is
gathered, every rank computes the same update, and each keeps its own part; what is stored between
steps stays sharded like the parameter.
"""

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:  # importing torch.distributed.tensor costs a second
    from torch.distributed.tensor import DTensor


def is_sharded(t: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(t, "device_mesh")


def whole(t: Tensor) -> Tensor:
    """The global tensor; t itself where there is one rank's view only."""
    return t.full_tensor() if is_sharded(t) else t


def zeros_like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous zeros, spread over ranks as t is."""
    if is_sharded(t):
        return torch.zeros_like(t, dtype=dtype)
    return torch.zeros(t.shape, dtype=dtype, device=t.device)


def store(target: Tensor, value: Tensor) -> None:
    """Write a whole value into a target that may hold a part of it only. No communication."""
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        # src_data_rank=None: every rank has the whole and takes its part
        part = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(value)
