"""A rank's part of a Megatron weight, shown to the engine as whole matrices.

Megatron keeps plain tensors with marks: `partition_dim` 0 (column-parallel: rows are spread) or 1
(row-parallel: columns are), `partition_stride` 2 for a gated layer whose local rows are gate, then
up, and `is_qkv` for rows that are q, k, v of one query group after the other. Here such a part is
a DTensor over the tensor-parallel ranks, so that the engine sees the whole: row lengths and row
products run over all columns, and the polar factor is that of the whole matrix.

q, k and v are matrices of their own over all query groups, as Megatron's Muon has them and as a
model with three projections would. A list of blocks q, k, v, q, k, v would make one matrix of
every head instead. Rows that lie apart are no view: they are copied, and copied back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from angular_muown.distributed.mesh import local
from angular_muown.params.loading import SHAPED_LIKE_WEIGHT

State = dict[str, Any]


def parts_of(p: Tensor, qkv_split_shapes: list[int] | None) -> list[int] | None:
    """Sizes of the row blocks that repeat down a rank's part; None: it is one matrix."""
    rows = p.shape[0]
    if getattr(p, "is_qkv", False):
        sizes = getattr(p, "qkv_split_shapes", None) or qkv_split_shapes
        if not sizes or rows % sum(sizes):
            raise ValueError(
                f"a fused q, k, v weight with {rows} rows and qkv_split_shapes={sizes!r}: give the "
                "rows of q, k and v in one query group, which must add up to a divisor"
            )
        return list(sizes)
    stride = getattr(p, "partition_stride", 1)
    if stride == 1:
        return None
    if rows % stride:
        raise ValueError(f"a weight with {rows} rows and partition_stride={stride}: it must divide")
    return [rows // stride] * stride


@dataclass(frozen=True)
class Group:
    """The ranks that hold the other parts of a weight, and the dimension that is cut."""

    ranks: Any
    dim: int

    @staticmethod
    def of(p: Tensor, pg_collection: Any) -> "Group | None":
        dim = getattr(p, "partition_dim", -1)
        if pg_collection is None or dim not in (0, 1):
            return None
        expert = getattr(p, "expert_tp", False)
        ranks = pg_collection.expt_tp if expert else pg_collection.tp
        return Group(ranks, dim) if ranks is not None and ranks.size() > 1 else None

    def spread(self, part: Tensor, dim: int) -> Tensor:
        """The whole tensor of which every rank has a part."""
        from torch.distributed.tensor import DTensor, Shard

        mesh = _mesh(self.ranks, part.device.type)
        return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)


@lru_cache(maxsize=8)
def _mesh(ranks: Any, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(ranks, device)


@dataclass
class Shown:
    """A parameter, and matrix -> state of what the engine steps in its place."""

    parameter: Tensor
    states: dict[Tensor, State]
    own: State = field(default_factory=dict)
    rows: list[Tensor | None] = field(default_factory=list)
    ranks: Group | None = None

    @property
    def apart(self) -> bool:
        return bool(self.states)

    @property
    def matrices(self) -> list[Tensor]:
        return list(self.states) if self.apart else [self.parameter]

    @staticmethod
    def apart_from(
        p: Tensor,
        own: State,
        sizes: list[int] | None,
        ranks: Group | None,
        init: Callable[[Tensor, State], None],
    ) -> "Shown":
        """`own` is the parameter's state; `init` adds to a state what the engine misses in it."""
        rows: list[Tensor | None] = [None] if sizes is None else [*_interleaved(p, sizes)]
        states = {}
        for chosen in rows:
            matrix = _take(p, chosen, ranks)
            matrix.grad = None if p.grad is None else _take(p.grad, chosen, ranks)
            state: State = {"step": own["step"].clone()}
            for name in SHAPED_LIKE_WEIGHT:
                if name in own:
                    state[name] = _take(own[name], chosen, ranks)
            init(matrix, state)
            for name in _vectors(own):
                local(state[name]).copy_(_take(own[name], chosen, None))
            states[matrix] = state
        return Shown(p, states, own, rows, ranks)

    def put_back(self) -> None:
        """What the engine wrote: matrices that are views of the parameter hold it already."""
        for (matrix, state), rows in zip(self.states.items(), self.rows, strict=True):
            self.own["step"].copy_(state["step"])
            if rows is not None:
                with torch.no_grad():
                    self.parameter[rows] = local(matrix)
                    for name in SHAPED_LIKE_WEIGHT:
                        if name in self.own:
                            self.own[name][rows] = local(state[name])
            for name in _vectors(self.own):
                self.own[name][slice(None) if rows is None else rows] = local(state[name])


def _interleaved(p: Tensor, sizes: list[int]) -> list[Tensor]:
    """The rows of each part, over all periods."""
    numbers = torch.arange(p.shape[0], device=p.device).view(-1, sum(sizes))
    return [part.flatten() for part in numbers.split(sizes, dim=1)]


def _take(t: Tensor, rows: Tensor | None, ranks: Group | None) -> Tensor:
    part = t.detach() if rows is None else t.detach()[rows]
    return part if ranks is None else ranks.spread(part, ranks.dim)


def _vectors(state: State) -> list[str]:
    return [name for name in state if name not in ("step", *SHAPED_LIKE_WEIGHT)]
