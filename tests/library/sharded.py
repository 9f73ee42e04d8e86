"""Parameters in every placement, stepped with gradients that all ranks can compute."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from angular_muown.engine import Engine
from tests.library.family import noise, parameter

# Shape of a mesh, where -1 is what is left of the ranks, and what its dimensions do with the first
# two dimensions of a matrix: cut one of them, or None for copies.
Placement = tuple[tuple[int, ...], tuple[int | None, ...]]
PLACEMENTS: dict[str, Placement] = {
    "rows": ((-1,), (0,)),
    "columns": ((-1,), (1,)),
    "copies": ((-1,), (None,)),
    "hsdp": ((2, -1), (None, 0)),
    "rows x columns": ((2, -1), (0, 1)),
    "columns x rows": ((2, -1), (1, 0)),
    "copies of columns": ((-1, 2), (None, 1)),
}
BY_ROWS = ("rows", "copies", "hsdp")  # no sum travels

# Eighteen rows leave ranks with less than others, or nothing; `first` is where the matrix starts
# among the dimensions, so that -1 is a stack spread by matrices.
GROUPS: list[dict[str, Any]] = [
    {"shapes": [(18, 12), (12, 30), (10, 7), (18, 12)]},
    {"shapes": [(18, 10)], "blocks": 3},
    {"shapes": [(14, 9)], "blocks": (4, 10), "column_blocks": 3},
    {"shapes": [(10, 16)], "transposed": True, "blocks": 2},
    {"shapes": [(12, 6, 3, 1)], "view": "conv"},
    {"shapes": [(3, 10, 6)], "view": "stack", "first": 1},
    {"shapes": [(5, 6, 8)], "view": "stack", "blocks": 2},
]


@cache  # a mesh brings process groups, and these bring threads
def mesh_of(shape: tuple[int, ...]) -> Any:
    known = -torch.tensor(shape).prod().item()
    sizes = [dist.get_world_size() // known if size == -1 else size for size in shape]
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("a", "b", "c")[: len(sizes)])


def place(t: Tensor, placement: Placement | None, first: int = 0) -> Tensor:
    if placement is None:
        return t
    kinds = [Replicate() if d is None else Shard(d + first) for d in placement[1]]
    return distribute_tensor(t, mesh_of(placement[0]), kinds, src_data_rank=None)


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def made(
    groups: Sequence[dict[str, Any]], placement: Placement | None, dtype: torch.dtype
) -> tuple[list[dict[str, Any]], list[tuple[nn.Parameter, int]]]:
    """Groups for an optimizer, and their parameters with the place of the matrix in them."""
    found: list[tuple[nn.Parameter, int]] = []
    own = []
    for group in groups:
        first = group.get("first", 0)
        named = []
        for shape in group["shapes"]:
            W = parameter(*shape, seed=len(found), dtype=dtype).detach()
            p = nn.Parameter(place(W, placement, first))
            named.append((f"w{len(found)}", p))
            found.append((p, first))
        values = {key: x for key, x in group.items() if key not in ("shapes", "first")}
        own.append({"params": named, **values})
    return own, found


def pull(p: Tensor, seed: int) -> Tensor:
    return noise(*p.shape, seed=seed, dtype=p.dtype) + 0.1 * p


def stepped(
    member: type[Engine],
    arguments: dict[str, Any],
    placement: Placement | None = None,
    groups: Sequence[dict[str, Any]] = GROUPS,
    steps: int = 20,
    dtype: torch.dtype = torch.float64,
    gradient: Callable[[Tensor, int], Tensor] = pull,
) -> list[Tensor]:
    """The weights after some steps, whole."""
    own, params = made(groups, placement, dtype)
    optimizer = member(own, **arguments)
    for t in range(steps):
        for i, (p, first) in enumerate(params):
            p.grad = place(gradient(whole(p), 1000 * t + i), placement, first)
        optimizer.step()
    return [whole(p) for p, _ in params]
