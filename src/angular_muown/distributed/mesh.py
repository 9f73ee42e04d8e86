"""Which ranks hold which part of a parameter and of its state.

Everything is computed from a DTensor's mesh and placements, without communication. A plain tensor
is the special case in which this rank holds everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.params.layout import Interval, Layout, Slice2D, vector_axes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_sharded(t: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(t, "device_mesh")


def local(t: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself.

    A plain part is the same object each time, unlike that of `to_local`, which makes a view.
    """
    if not is_sharded(t):
        return t
    part = t._local_tensor
    return part if type(part) is Tensor else t.to_local()  # may be a collective in flight


def whole(t: Tensor) -> Tensor:
    """Gather a DTensor from all ranks; return a plain tensor itself."""
    return t.full_tensor() if is_sharded(t) else t


def local_gradient(p: Tensor) -> Tensor:
    """Return the gradient of this rank's part of p, or zeros if p has no gradient."""
    if p.grad is None:
        return torch.zeros_like(local(p))
    if is_sharded(p) and is_sharded(p.grad) and p.grad.placements != p.placements:
        return p.grad.redistribute(p.device_mesh, p.placements).to_local()
    return local(p.grad)


def dimension(placement: Any) -> int | None:
    """Return the tensor dimension that a placement shards, or None."""
    # Shard and _StridedShard have `dim`; Replicate and Partial do not.
    return getattr(placement, "dim", None)


def ranges_of(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
) -> list[Interval]:
    """Return the range of each dimension that the rank at a mesh coordinate holds.

    Chunks are rounded up, so the last ranks may hold less, or nothing. A strided shard (FSDP2 on
    top of tensor parallelism) splits what the placements to its right have already split.
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


def shard_like(p: Tensor, value: Tensor, layout: Layout, name: str = "") -> Tensor:
    """Shard a whole tensor, which every rank has, without communication.

    It is placed like p, or, with `name`, like that state vector of p.
    """
    if not is_sharded(p):
        return value
    placements = list(p.placements)
    if name:
        placements = [vector_placement(p, kind, layout, name) for kind in placements]
    ranges = ranges_of(value.shape, p.device_mesh.shape, placements, own_coordinate(p))
    part = value[tuple(slice(*r) for r in ranges)]
    part = part.clone(
        memory_format=torch.contiguous_format
    )  # a view would keep all of `value` alive
    return as_part(part, p, value.shape, placements)


def as_part(
    part: Tensor, p: "DTensor", shape: Sequence[int], placements: Sequence[Any]
) -> "DTensor":
    """Wrap this rank's part of a tensor with a global shape as a DTensor on p's mesh."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    size = torch.Size(shape)
    return DTensor.from_local(
        part, p.device_mesh, placements, run_check=False, shape=size, stride=stride
    )


def own_coordinate(p: "DTensor") -> Sequence[int]:
    coordinate = p.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside a parameter's mesh has no part of it"
    return coordinate


def vector_placement(p: "DTensor", placement: Any, layout: Layout, name: str) -> Any:
    """Return the placement of a state vector for one placement of its parameter.

    The vector is sharded if it has entries along the sharded dimension, and replicated otherwise.
    """
    from torch.distributed.tensor import Replicate

    along = dimension(placement)
    if along is None:
        return Replicate()
    axis, (by_row, by_column) = layout.axis(along, p.ndim), vector_axes(name)
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
    """Raise if an even split of a state vector would fall inside the kernel of a channel."""
    parts = prod(
        size
        for size, kind in zip(p.device_mesh.shape, p.placements, strict=True)
        if dimension(kind) == along
    )
    shards = layout.view == "conv" and along == 1 and prod(p.shape[2:]) > 1
    if shards and p.shape[1] % parts:
        raise ValueError(
            f"a convolution of shape {tuple(p.shape)} is sharded along dimension 1, {p.shape[1]} "
            f"channels across {parts} ranks, but {why} of its matrix: shard dimension 0, or use a "
            f"number of ranks that divides {p.shape[1]}"
        )


def zeros_like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous zeros, sharded like t."""
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


# Sharding: the ranks that hold parts or copies of the same matrices, and what each of them holds.


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate, in the order of their process group, and this rank's index."""

    ranks: tuple[int, ...]
    index: int
    group: Any = field(default=None, compare=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a step looks its rank groups up for every parameter."""
        return hash((self.ranks, self.index))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def communicates(self) -> bool:
        """True if there is a process group. A single rank has one only in a test."""
        return self.group is not None


@dataclass(frozen=True)
class Sharding:
    """How the matrices of a parameter are sharded and replicated across ranks."""

    shards: RankGroup  # hold the parts of one copy
    replicas: RankGroup  # hold copies of this part
    everyone: RankGroup  # both
    windows: tuple[Slice2D, ...]  # of each rank in `shards`
    row_groups: tuple[RankGroup, ...] = ()  # hold other columns of this part's rows
    column_groups: tuple[RankGroup, ...] = ()  # hold other rows of this part's columns

    @cached_property
    def window(self) -> Slice2D:
        return self.windows[self.shards.index]

    @property
    def alone(self) -> "Sharding | None":
        """The same without replicas; None if no other rank is left."""
        if not self.shards.communicates:
            return None
        return replace(self, replicas=_only(self.replicas), everyone=self.shards)

    @cached_property
    def _parts(self) -> dict[Slice2D, tuple[Slice2D, ...]]:
        return {}

    def parts_of(self, block: Slice2D) -> tuple[Slice2D, ...]:
        """Return each shard's part of a block.

        Equal blocks get the same tuple object: `Assignment` caches sizes by its identity.
        """
        if block not in self._parts:
            self._parts[block] = tuple(window.of_block(block) for window in self.windows)
        return self._parts[block]


def sharding_of(p: Tensor, layout: Layout, copies: RankGroup | None, name: str) -> Sharding | None:
    """Return how p is sharded, or None if this rank steps its part alone.

    `copies` are the ranks that hold copies of a plain p.
    """
    if is_sharded(p):
        return _sharding_on_mesh(p, layout, name)
    if copies is None:
        return None
    m, n = layout.sides(p.shape)
    return Sharding(_only(copies), copies, copies, (Slice2D((0, m), (0, n), m, n),))


def _only(rank_group: RankGroup) -> RankGroup:
    return RankGroup((rank_group.ranks[rank_group.index],), 0)


def _sharding_on_mesh(p: "DTensor", layout: Layout, name: str) -> Sharding | None:
    mesh, shards, copies, axes = p.device_mesh, [], [], {}
    for i, placement in enumerate(p.placements):
        if mesh.size(i) == 1:
            continue
        if placement.is_partial():
            raise ValueError(
                f"parameter {name!r} has the placement {placement} on {mesh}: a parameter "
                "must be sharded or replicated"
            )
        along = dimension(placement)
        axes[i] = None if along is None else _axis(layout, along, p.ndim, name)
        if axes[i] is None:
            copies.append(i)
        elif axes[i] != "count":
            shards.append(i)
    if not shards and not copies:
        return None
    rank_group = ranks_along(mesh, shards)
    return Sharding(
        rank_group,
        ranks_along(mesh, copies),
        ranks_along(mesh, sorted(shards + copies)),
        tuple(_windows(p, layout, shards, rank_group, name)),
        tuple(ranks_along(mesh, [i]) for i in shards if axes[i] == "columns"),
        tuple(ranks_along(mesh, [i]) for i in shards if axes[i] == "rows"),
    )


def _axis(layout: Layout, along: int, dimensions: int, name: str) -> str:
    try:
        return layout.axis(along, dimensions)
    except ValueError as error:
        raise ValueError(f"parameter {name!r} {error}") from None


def _windows(
    p: "DTensor", layout: Layout, shards: list[int], rank_group: RankGroup, name: str
) -> list[Slice2D]:
    """Return the window of each rank in the group, in the group's order."""
    mesh, my_coordinate = p.device_mesh, list(own_coordinate(p))
    # Read once, not once per rank: mesh.mesh is computed on every access.
    mesh_shape, placements, shape, ranks = mesh.shape, p.placements, p.shape, mesh.mesh.numpy()
    windows: dict[int, Slice2D] = {}
    for places in product(*(range(mesh.size(i)) for i in shards)):
        coordinate = list(my_coordinate)
        for i, place in zip(shards, places, strict=True):
            coordinate[i] = place
        ranges = ranges_of(shape, mesh_shape, placements, coordinate)
        windows[int(ranks[tuple(coordinate)])] = layout.window(ranges, shape)
        sizes = tuple(stop - start for start, stop in ranges)
        if coordinate == my_coordinate and sizes != tuple(local(p).shape):
            raise ValueError(
                f"parameter {name!r} (shape {tuple(p.shape)}) with placements {p.placements} on "
                f"{mesh} should have a part of shape {sizes} on this rank, but its part has shape "
                f"{tuple(local(p).shape)}: this sharding is not supported"
            )
    return [windows[rank] for rank in rank_group.ranks]


def rank_group_of(group: Any) -> RankGroup:
    return RankGroup(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group)


def ranks_along(mesh: Any, dims: list[int]) -> RankGroup:
    """Return the ranks whose mesh coordinates equal this rank's, except along `dims`."""
    coordinate = list(mesh.get_coordinate())
    index = tuple(slice(None) if i in dims else coordinate[i] for i in range(mesh.ndim))
    ranks = mesh.mesh[index].flatten().tolist()
    if len(ranks) == 1:
        return RankGroup((ranks[0],), 0)
    group = _group(mesh, dims)
    ordered = sorted(ranks, key=lambda rank: dist.get_group_rank(group, rank))
    return RankGroup(tuple(ordered), ordered.index(dist.get_rank()), group)


def _group(mesh: Any, dims: list[int]) -> Any:
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if prod(mesh.size(i) for i in dims) == dist.get_world_size():
        return dist.group.WORLD
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no dimension names: create it with mesh_dim_names")
    return mesh[tuple(mesh.mesh_dim_names[i] for i in dims)]._flatten().get_group()
