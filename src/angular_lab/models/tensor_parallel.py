"""Tensor parallelism: each rank computes some heads and a part of the MLP of every layer.

`out` and `down` are sharded by columns. The fused weights (q over k over v, gate over up) are
sharded by rows in their usual order, so that checkpoints and the optimizer's blocks are the same
for any number of ranks. A rank's shard then does not hold the rows of its heads: for a pass, the
ranks gather the fused weight, and each takes its part of every block. This communicates weights,
which are smaller than activations except for small batches.
"""

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from angular_lab.config.spec import ModelSpec
from angular_lab.errors import UserError

if TYPE_CHECKING:  # importing torch.distributed.tensor takes a second
    from torch.distributed.tensor import DTensor


def check(spec: ModelSpec, tensor: int) -> None:
    """Raise ValueError if a model cannot be divided among `tensor` ranks."""
    from angular_lab.models.layers import kv_heads, mlp_width

    if spec.kind != "dense":
        raise UserError(
            f"tensor={tensor} with model.kind={spec.kind}: only dense models are divided among "
            "ranks; set tensor=1"
        )
    counts = {"heads": spec.heads, "kv_heads": kv_heads(spec), "mlp": mlp_width(spec)}
    for name, count in counts.items():
        if count % tensor:
            raise UserError(f"tensor={tensor} does not divide model.{name}={count}")


def divide(layers: nn.ModuleList, mesh: Any) -> None:
    """Shard the weights of blocks across the ranks of a one-dimensional mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    class Rows(ParallelStyle):
        """Shard a fused weight by rows; `row_products` gathers it."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            weight = module.get_parameter("weight").detach()
            sharded = distribute_tensor(weight, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(sharded))
            return module

    for layer in layers:
        styles: dict[str, ParallelStyle] = {
            "attn.qkv": Rows(),
            "attn.out": RowwiseParallel(),
            "mlp.gate_up": Rows(),
            "mlp.down": RowwiseParallel(),
        }
        # every rank has initialized the same weights: none is sent
        parallelize_module(layer, mesh, styles, src_data_rank=None)


def is_divided(weight: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(weight, "device_mesh")


def local_part(t: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or a plain tensor itself."""
    return t.to_local() if is_divided(t) else t


def local_rows(weight: "DTensor", rows: list[int]) -> list[Tensor]:
    """Return this rank's part of every row block of a fused weight."""
    from torch.distributed.tensor import Partial, Replicate

    mesh = weight.device_mesh
    whole = weight.redistribute(placements=[Replicate()])
    # Each rank's gradient is nonzero in the rows that it took; their sum is the weight's.
    local = whole.to_local(grad_placements=[Partial()])
    return [block.chunk(mesh.size())[mesh.get_local_rank()] for block in local.split(rows)]


def sum_gradients(x: Tensor, weight: "DTensor") -> Tensor:
    """Return x, which is the same on all ranks; its gradient is summed over the weight's ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    replicated = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


def clip_gradients(parameters: list[nn.Parameter], bound: float) -> Tensor:
    """Clip gradients to a norm and return their norm before, the same on every rank.

    torch's `clip_grad_norm_` does not accept plain and sharded gradients, or several meshes, at
    once: their norms are combined here.
    """
    from torch.distributed.tensor import DTensor

    gradients = [p.grad for p in parameters if p.grad is not None]
    meshes: dict[Any, list[Tensor]] = {}
    for g in gradients:
        meshes.setdefault(g.device_mesh if isinstance(g, DTensor) else None, []).append(g)
    if len(meshes) <= 1:
        norm = nn.utils.clip_grad_norm_(parameters, bound)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    norms = [nn.utils.get_total_norm(group) for group in meshes.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    factor = (bound / (total + 1e-6)).clamp(max=1.0)  # torch's own constant
    for g in gradients:
        local_part(g).mul_(factor)
    return total
