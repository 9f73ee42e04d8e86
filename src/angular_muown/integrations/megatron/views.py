"""Present a rank's part of a Megatron weight to the engine as whole matrices.

Megatron's weights are plain tensors with attributes: `partition_dim` 0 (column-parallel: rows are
sharded) or 1 (row-parallel: columns are sharded), `partition_stride` 2 for a gated layer whose
local rows are gate, then up, and `is_qkv` for rows that are q, k, v of one query group after
another. Here each part becomes a DTensor over the tensor-parallel ranks. The engine therefore
reduces rows over all columns and computes the polar factor of the whole matrix.

q, k and v are one matrix each, over all query groups, as in Megatron's Muon and in a model with
three projections. The blocks q, k, v, q, k, v would instead be one matrix per head. Interleaved
rows are not a view of the weight, so they are copied, and copied back after the step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.distributed.mesh import local
from angular_muown.params.loading import SHAPED_LIKE_WEIGHT
from angular_muown.stages.context import State


def block_sizes(p: Tensor, qkv_split_shapes: list[int] | None) -> list[int] | None:
    """Return the sizes of the row blocks that repeat in a rank's part; None if it is one matrix."""
    rows = p.shape[0]
    if getattr(p, "is_qkv", False):
        sizes = getattr(p, "qkv_split_shapes", None) or qkv_split_shapes
        if not sizes or rows % sum(sizes):
            raise ValueError(
                f"a fused q, k, v weight with {rows} rows and qkv_split_shapes={sizes!r}: pass the "
                "row counts of q, k and v in one query group; their sum must divide the rows"
            )
        return list(sizes)
    stride = getattr(p, "partition_stride", 1)
    if stride == 1:
        return None
    if rows % stride:
        raise ValueError(
            f"a weight with {rows} rows and partition_stride={stride}: it must divide the rows"
        )
    return [rows // stride] * stride


@dataclass(frozen=True)
class TensorParallel:
    """The ranks across which a weight is sharded, and the sharded dimension."""

    ranks: dist.ProcessGroup
    dim: int

    @staticmethod
    def of(p: Tensor, pg_collection: Any) -> "TensorParallel | None":
        dim = getattr(p, "partition_dim", -1)
        if pg_collection is None or dim not in (0, 1):
            return None
        expert = getattr(p, "expert_tp", False)
        ranks = pg_collection.expt_tp if expert else pg_collection.tp
        return TensorParallel(ranks, dim) if ranks is not None and ranks.size() > 1 else None

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole tensor, as a DTensor, from this rank's part."""
        from torch.distributed.tensor import DTensor, Shard

        mesh = _mesh(self.ranks, part.device.type)
        return DTensor.from_local(part, mesh, [Shard(self.dim)], run_check=False)


@lru_cache(maxsize=8)
def _mesh(ranks: dist.ProcessGroup, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(ranks, device)


@dataclass
class MatrixViews:
    """A parameter, and the matrices with their states that the engine steps in its place."""

    parameter: Tensor
    states: dict[Tensor, State] = field(default_factory=dict)  # empty: the parameter itself
    parameter_state: State = field(default_factory=dict)
    rows: list[Tensor | None] = field(default_factory=list)  # of each matrix; None: all

    @property
    def matrices(self) -> list[Tensor]:
        return list(self.states) or [self.parameter]

    @staticmethod
    def of(
        p: Tensor,
        parameter_state: State,
        sizes: list[int] | None,
        ranks: TensorParallel | None,
        init: Callable[[Tensor, State], None],
    ) -> "MatrixViews":
        """Split a parameter and its state. `init` adds missing entries to a matrix's state."""
        all_rows: list[Tensor | None] = [None] if sizes is None else [*_interleaved(p, sizes)]
        states = {}
        for rows in all_rows:
            matrix = _take(p, rows, ranks)
            matrix.grad = None if p.grad is None else _take(p.grad, rows, ranks)
            state: State = {"step": parameter_state["step"].clone()}
            for name in SHAPED_LIKE_WEIGHT:
                if name in parameter_state:
                    state[name] = _take(parameter_state[name], rows, ranks)
            init(matrix, state)
            for name in _vectors(parameter_state):
                local(state[name]).copy_(_take(parameter_state[name], rows, None))
            states[matrix] = state
        return MatrixViews(p, states, parameter_state, all_rows)

    def copy_back(self) -> None:
        """Write what the engine changed in copies back to the parameter and its state."""
        target = self.parameter_state
        for (matrix, state), rows in zip(self.states.items(), self.rows, strict=True):
            target["step"].copy_(state["step"])
            if rows is not None:
                with torch.no_grad():
                    self.parameter[rows] = local(matrix)
                    for name in SHAPED_LIKE_WEIGHT:
                        if name in target:
                            target[name][rows] = local(state[name])
            for name in _vectors(target):
                target[name][slice(None) if rows is None else rows] = local(state[name])


def _interleaved(p: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the row indices of each block, over all periods."""
    indices = torch.arange(p.shape[0], device=p.device).view(-1, sum(sizes))
    return [part.flatten() for part in indices.split(sizes, dim=1)]


def _take(t: Tensor, rows: Tensor | None, ranks: TensorParallel | None) -> Tensor:
    part = t.detach() if rows is None else t.detach()[rows]
    return part if ranks is None else ranks.whole(part)


def _vectors(state: State) -> list[str]:
    return [name for name in state if name not in ("step", *SHAPED_LIKE_WEIGHT)]
