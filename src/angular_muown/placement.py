"""Placement: which part of a parameter, and of its state, a rank holds.

All of it follows from a DTensor's mesh and placements, by arithmetic: no rank is asked. A plain
tensor is the case with nothing elsewhere.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.layout import Interval, Layout, spans

if TYPE_CHECKING:  # importing torch.distributed.tensor costs a second
    from torch.distributed.tensor import DTensor


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_sharded(t: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(t, "device_mesh")


def local(t: Tensor) -> Tensor:
    """This rank's part; t itself where it is plain."""
    return t.to_local() if is_sharded(t) else t


def whole(t: Tensor) -> Tensor:
    """The global tensor, by communication; t itself where it is plain."""
    return t.full_tensor() if is_sharded(t) else t


def local_gradient(p: Tensor) -> Tensor:
    """Of this rank's part of p; zeros where p has none."""
    if p.grad is None:
        return torch.zeros_like(local(p))
    if is_sharded(p) and is_sharded(p.grad) and p.grad.placements != p.placements:
        return p.grad.redistribute(p.device_mesh, p.placements).to_local()
    return local(p.grad)


def dimension(placement: Any) -> int | None:
    """Which dimension of a tensor a placement spreads. torch has two classes that spread."""
    return getattr(placement, "dim", None)


def ranges_of(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
) -> list[Interval]:
    """What the rank at a coordinate of the mesh holds, in every dimension: chunks of chunks, by
    ceil division, so that the last ranks may hold less, or nothing.

    A strided shard (FSDP2 over tensor parallel) cuts what the ones right of it have cut already.
    """
    strided = [i for i, kind in enumerate(placements) if hasattr(kind, "split_factor")]
    plain = [i for i in range(len(placements)) if i not in strided]
    ranges = [(0, size) for size in shape]
    for i in (*plain, *reversed(strided)):
        along = dimension(placements[i])
        if along is not None:
            start, stop = ranges[along]
            chunk = -(-(stop - start) // mesh[i])
            first = min(start + coordinate[i] * chunk, stop)
            ranges[along] = (first, min(first + chunk, stop))
    return ranges


def spread_like(p: Tensor, value: Tensor, layout: Layout, name: str = "") -> Tensor:
    """A whole value, which every rank has, placed as p is, or as its state vector `name` has to
    be. No communication."""
    if not is_sharded(p):
        return value
    placements = list(p.placements)
    if name:
        placements = [vector_placement(p, kind, layout, name) for kind in placements]
    ranges = ranges_of(value.shape, p.device_mesh.shape, placements, own_coordinate(p))
    part = value[tuple(slice(*r) for r in ranges)]
    part = part.clone(memory_format=torch.contiguous_format)  # a view would keep all of it
    return as_part(part, p, value.shape, placements)


def as_part(
    part: Tensor, p: "DTensor", shape: Sequence[int], placements: Sequence[Any]
) -> "DTensor":
    """This rank's part of a tensor of that shape on p's mesh."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    size = torch.Size(shape)
    return DTensor.from_local(
        part, p.device_mesh, placements, run_check=False, shape=size, stride=stride
    )


def own_coordinate(p: "DTensor") -> Sequence[int]:
    coordinate = p.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of a parameter's mesh has no part to step"
    return coordinate


def vector_placement(p: "DTensor", placement: Any, layout: Layout, name: str) -> Any:
    """A state vector lies over ranks as its parameter does, where it spans what is spread;
    otherwise every rank has it."""
    from torch.distributed.tensor import Replicate

    along = dimension(placement)
    if along is None:
        return Replicate()
    axis, (by_row, by_column) = layout.axis(along, p.ndim), spans(name)
    if axis == "count":
        return placement
    if not (by_row if axis == "rows" else by_column):
        return Replicate()
    _check_channels(p, along, layout, f"{name} has an entry for every {axis.removesuffix('s')}")
    to = len(layout.vector_shape(p, name)) - (2 if axis == "rows" else 1)
    if hasattr(placement, "split_factor"):
        return type(placement)(to, split_factor=placement.split_factor)
    return type(placement)(to)


def _check_channels(p: "DTensor", along: int, layout: Layout, why: str) -> None:
    """A vector is cut into equal parts wherever that falls, also inside the kernel of a channel."""
    parts = prod(
        size
        for size, kind in zip(p.device_mesh.shape, p.placements, strict=True)
        if dimension(kind) == along
    )
    inside = layout.view == "conv" and along == 1 and prod(p.shape[2:]) > 1
    if inside and p.shape[1] % parts:
        raise ValueError(
            f"a convolution of shape {tuple(p.shape)} is spread along dimension 1, {p.shape[1]} "
            f"channels over {parts} ranks, but {why} of its matrix: shard dimension 0, or over a "
            f"number of ranks that divides {p.shape[1]}"
        )


def zeros_like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous zeros, spread over ranks as t is."""
    if is_sharded(t):
        part = torch.zeros(local(t).shape, dtype=dtype, device=t.device)
        return as_part(part, t, t.shape, t.placements)
    return torch.zeros(t.shape, dtype=dtype, device=t.device)


def zero_vector(p: Tensor, layout: Layout, name: str, dtype: torch.dtype) -> Tensor:
    shape = layout.vector_shape(p, name)
    if not is_sharded(p):
        return torch.zeros(shape, dtype=dtype, device=p.device)
    placements = [vector_placement(p, kind, layout, name) for kind in p.placements]
    ranges = ranges_of(shape, p.device_mesh.shape, placements, own_coordinate(p))
    part = torch.zeros([b - a for a, b in ranges], dtype=dtype, device=p.device)
    return as_part(part, p, shape, placements)
