"""Step parameters in any placement, with gradients that every rank can compute."""

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

# The shape of a mesh (-1: all remaining ranks), and for each of its dimensions the dimension of a
# matrix that it shards, or None if it replicates.
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

# Eighteen rows leave some ranks with fewer rows than others, or none. `first` is the dimension of
# the parameter that a placement counts from: a stack without it is sharded by matrices.
GROUPS: list[dict[str, Any]] = [
    {"shapes": [(18, 12), (12, 30), (10, 7), (18, 12)]},
    {"shapes": [(18, 10)], "blocks": 3},
    {"shapes": [(18, 10)], "blocks": (9, 6, 3), "interleaved": 3},
    {"shapes": [(14, 9)], "blocks": (4, 10), "column_blocks": 3},
    {"shapes": [(10, 16)], "transposed": True, "blocks": 2},
    {"shapes": [(12, 6, 3, 1)], "view": "conv"},
    {"shapes": [(3, 10, 6)], "view": "stack", "first": 1},
    {"shapes": [(5, 6, 8)], "view": "stack", "blocks": 2},
]


@cache  # a mesh has process groups, and these have threads
def mesh_of(shape: tuple[int, ...]) -> Any:
    others = -torch.tensor(shape).prod().item()  # the product of all sizes but -1
    sizes = [dist.get_world_size() // others if size == -1 else size for size in shape]
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("a", "b", "c")[: len(sizes)])


def place(t: Tensor, placement: Placement | None, first: int = 0) -> Tensor:
    if placement is None:
        return t
    kinds = [Replicate() if d is None else Shard(d + first) for d in placement[1]]
    return distribute_tensor(t, mesh_of(placement[0]), kinds, src_data_rank=None)


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def make_groups(
    groups: Sequence[dict[str, Any]], placement: Placement | None, dtype: torch.dtype
) -> tuple[list[dict[str, Any]], list[tuple[nn.Parameter, int]]]:
    """Return groups for an optimizer, and their parameters, each with its `first`."""
    params: list[tuple[nn.Parameter, int]] = []
    param_groups = []
    for group in groups:
        first = group.get("first", 0)
        named = []
        for shape in group["shapes"]:
            W = parameter(*shape, seed=len(params), dtype=dtype).detach()
            p = nn.Parameter(place(W, placement, first))
            named.append((f"w{len(params)}", p))
            params.append((p, first))
        values = {key: x for key, x in group.items() if key not in ("shapes", "first")}
        param_groups.append({"params": named, **values})
    return param_groups, params


def noisy_gradient(p: Tensor, seed: int) -> Tensor:
    return noise(*p.shape, seed=seed, dtype=p.dtype) + 0.1 * p


def stepped(
    member: type[Engine],
    arguments: dict[str, Any],
    placement: Placement | None = None,
    groups: Sequence[dict[str, Any]] = GROUPS,
    steps: int = 20,
    dtype: torch.dtype = torch.float64,
    gradient: Callable[[Tensor, int], Tensor] = noisy_gradient,
) -> list[Tensor]:
    """Return the whole weights after some steps."""
    param_groups, params = make_groups(groups, placement, dtype)
    optimizer = member(param_groups, **arguments)
    for t in range(steps):
        for i, (p, first) in enumerate(params):
            p.grad = place(gradient(whole(p), 1000 * t + i), placement, first)
        optimizer.step()
    return [whole(p) for p, _ in params]
