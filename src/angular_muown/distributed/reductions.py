"""Reductions over sharded matrices, across the ranks that hold their parts.

If rows are sharded (FSDP2), each row is entirely on one rank, and only sums over a whole matrix
need communication. If columns are sharded (a row-parallel layer), row sums do: one number per row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.distributed.collectives import all_reduce
from angular_muown.distributed.mesh import RankGroup, is_sharded, local, ranks_along
from angular_muown.stages.reductions import Reductions


@dataclass(frozen=True)
class ShardedReductions(Reductions):
    """Reductions over matrices that are sharded across ranks."""

    sides: tuple[int, int]  # m and n of the whole matrices
    row_groups: tuple[RankGroup, ...]  # hold other columns of this rank's rows
    column_groups: tuple[RankGroup, ...]  # hold other rows of this rank's columns

    def shape(self, X: Tensor) -> tuple[int, int]:
        return self.sides

    def row_sum(self, X: Tensor) -> Tensor:
        return sum_over(super().row_sum(X), self.row_groups)

    def column_sum(self, X: Tensor) -> Tensor:
        return sum_over(super().column_sum(X), self.column_groups)

    def across_ranks(self, t: Tensor) -> Tensor:
        return sum_over(t, (*self.row_groups, *self.column_groups))

    def unscaled_row_norm(self, X: Tensor) -> Tensor:
        # Squaring local norms again would lose digits: sum the squares instead.
        return self.row_sum(X.square()).sqrt() if self.row_groups else super().unscaled_row_norm(X)

    def row_max(self, X: Tensor) -> Tensor:
        largest = super().row_max(_at_least_one(X, -1))
        # A maximum over ranks may drop NaN, depending on the order of the ranks.
        largest = torch.where(largest.isnan(), torch.inf, largest)
        return max_over(largest, self.row_groups)

    def max(self, X: Tensor) -> Tensor:
        largest = _at_least_one(self.row_max(X), -2).amax(dim=-2, keepdim=True)
        return max_over(largest, self.column_groups)


def _at_least_one(X: Tensor, dim: int) -> Tensor:
    """Return X, or zeros if `dim` is empty: amax over an empty dimension is undefined."""
    shape = list(X.shape)
    shape[dim] = 1
    return X if X.shape[dim] else X.new_zeros(shape)


def sum_over(t: Tensor, rank_groups: Iterable[RankGroup]) -> Tensor:
    """Sum t over one rank group after the other. Every rank gets the same bits."""
    return _reduce(t, rank_groups, dist.ReduceOp.SUM)


def sum_in_place(sums: Iterable[tuple[Tensor, Iterable[RankGroup]]]) -> None:
    """Sum each tensor over its rank groups, one after the other."""
    _in_place(sums, dist.ReduceOp.SUM)


def max_in_place(maxima: Iterable[tuple[Tensor, Iterable[RankGroup]]]) -> None:
    """Find the maximum of each tensor over its rank groups, one after the other."""
    _in_place(maxima, dist.ReduceOp.MAX)


def _in_place(
    tensors: Iterable[tuple[Tensor, Iterable[RankGroup]]], op: dist.ReduceOp.RedOpType
) -> None:
    for t, rank_groups in tensors:
        for rank_group in rank_groups:
            all_reduce(t, rank_group, op)


def max_over(t: Tensor, rank_groups: Iterable[RankGroup]) -> Tensor:
    return _reduce(t, rank_groups, dist.ReduceOp.MAX)


def _reduce(t: Tensor, rank_groups: Iterable[RankGroup], op: dist.ReduceOp.RedOpType) -> Tensor:
    for rank_group in rank_groups:
        if rank_group.communicates:
            t = t.contiguous()
            all_reduce(t, rank_group, op)
    return t


def any_rank(flags: Sequence[bool], params: Sequence[Tensor]) -> list[bool]:
    """For each flag, True if it is true on any rank that holds parts of these parameters.

    If all flags are true on this rank, its host does not wait for the device.
    """
    result = torch.tensor(flags, dtype=torch.float32)
    meshes = {p.device_mesh: local(p).device for p in params if is_sharded(p)}
    for mesh, device in meshes.items():
        rank_groups = [ranks_along(mesh, [i]) for i in range(mesh.ndim)]
        result = max_over(result.to(device), rank_groups)
    return list(flags) if all(flags) else result.bool().tolist()
