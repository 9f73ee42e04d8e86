"""Tensor parallelism: ranks that divide the products of every layer, each with its own heads and
its own part of the MLP.

`out` and `down` lie over ranks by columns. The fused weights (q over k over v, gate over up) lie by
rows, in the order that they have on one rank, so that a checkpoint and the optimizer's blocks mean
the same at any number of ranks. A rank's rows are then not those of its heads: for a pass the ranks
collect the fused weight, and each takes the rows of its part of every block. That moves weights,
which for all but small batches are less than activations.
"""

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from angular_lab.config.spec import ModelSpec

if TYPE_CHECKING:  # importing torch.distributed.tensor costs a second
    from torch.distributed.tensor import DTensor


def check(spec: ModelSpec, tensor: int) -> None:
    """Raise ValueError where a model cannot be divided so."""
    from angular_lab.models.layers import kv_heads, mlp_width

    if spec.kind != "dense":
        raise ValueError(
            f"tensor={tensor} with model.kind={spec.kind}: only dense models are divided among "
            "ranks; set tensor=1"
        )
    counts = {"heads": spec.heads, "kv_heads": kv_heads(spec), "mlp": mlp_width(spec)}
    for name, count in counts.items():
        if count % tensor:
            raise ValueError(f"tensor={tensor} does not divide model.{name}={count}")


def divide(layers: nn.ModuleList, mesh: Any) -> None:
    """Spread the weights of blocks over the ranks of a mesh with one dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    class Rows(ParallelStyle):
        """The fused weights; `row_products` does the rest."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            weight = module.get_parameter("weight").detach()
            spread = distribute_tensor(weight, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(spread))
            return module

    for layer in layers:
        styles: dict[str, ParallelStyle] = {
            "attn.qkv": Rows(),
            "attn.out": RowwiseParallel(),
            "mlp.gate_up": Rows(),
            "mlp.down": RowwiseParallel(),
        }
        # every rank has made the same weights: none is sent
        parallelize_module(layer, mesh, styles, src_data_rank=None)


def is_divided(weight: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(weight, "device_mesh")


def own_rows(weight: "DTensor", rows: list[int]) -> list[Tensor]:
    """This rank's part of every row block of a fused weight."""
    from torch.distributed.tensor import Partial, Replicate

    mesh = weight.device_mesh
    whole = weight.redistribute(placements=[Replicate()])
    # Each rank's gradient has the rows that it took; their sum is the weight's.
    local = whole.to_local(grad_placements=[Partial()])
    return [block.chunk(mesh.size())[mesh.get_local_rank()] for block in local.split(rows)]


def entering(x: Tensor, weight: "DTensor") -> Tensor:
    """x, which all ranks have, on its way into products of which each rank has a part: the
    gradients that come back are summed."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    spread = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
    return spread.to_local(grad_placements=[Partial()])


def clip_gradients(parameters: list[nn.Parameter], bound: float) -> Tensor:
    """torch's `clip_grad_norm_`, which takes no mixture of plain and spread gradients, nor of
    meshes: here their norms are joined. The norm is that of the whole gradient on every rank."""
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
        (g.to_local() if isinstance(g, DTensor) else g).mul_(factor)
    return total
