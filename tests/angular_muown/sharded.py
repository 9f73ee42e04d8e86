"""Parameters in every placement, stepped with gradients that all ranks can compute."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from angular_muown.engine import Engine
from tests.angular_muown.family import noise, parameter

# name -> shape of the mesh and placements on it; a mesh (1,) has all ranks
PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((-1,), (Shard(0),)),
    "columns": ((-1,), (Shard(1),)),
    "copies": ((-1,), (Replicate(),)),
    "hsdp": ((2, -1), (Replicate(), Shard(0))),
    "rows x columns": ((2, -1), (Shard(0), Shard(1))),
    "columns x rows": ((2, -1), (Shard(1), Shard(0))),
    "copies of columns": ((2, -1), (Replicate(), Shard(1))),
}
SHAPES = ((18, 12), (12, 30), (10, 7), (6, 40), (18, 12))


def mesh_of(shape: Sequence[int]) -> Any:
    known = -torch.tensor(shape).prod().item()
    sizes = [dist.get_world_size() // known if size == -1 else size for size in shape]
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("a", "b", "c")[: len(sizes)])


def place(t: Tensor, mesh: Any, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(t, mesh, list(placements), src_data_rank=None)


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def stepped(
    member: type[Engine],
    arguments: dict[str, Any],
    groups: list[dict[str, Any]],
    steps: int,
    placement: tuple[Any, Sequence[Placement]] | None = None,
    gradient: Any = None,
) -> list[Tensor]:
    """The weights after some steps of groups {"shapes": ..., other keys}, whole."""
    params, own = [], []
    for group in groups:
        rest = {k: v for k, v in group.items() if k not in ("shapes", "dtype")}
        dtype = group.get("dtype", torch.float64)
        made = [
            parameter(*shape, seed=len(params) + i, dtype=dtype)
            for i, shape in enumerate(group["shapes"])
        ]
        if placement is not None:
            made = [nn.Parameter(place(p.detach(), *placement)) for p in made]
        params += made
        own.append(
            {"params": [(f"w{len(params) - len(made) + i}", p) for i, p in enumerate(made)], **rest}
        )
    optimizer = member(own, **arguments)
    for t in range(steps):
        for i, p in enumerate(params):
            seed = 1000 * t + i
            G = (gradient or noise)(*p.shape, seed=seed, dtype=p.dtype)
            G = G + (0.1 * whole(p.detach()) if gradient is None else 0)
            p.grad = place(G, *placement) if placement is not None else G
        optimizer.step()
    return [whole(p.detach()).clone() for p in params]
