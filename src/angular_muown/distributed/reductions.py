"""Sums over matrices of which this rank holds a part: what the others hold is added.

With rows spread (FSDP2) a row is all here, and only sums over a whole matrix travel; with columns
spread (a row-parallel layer) row sums do, one number for a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.distributed.collectives import all_reduce
from angular_muown.distributed.mesh import Team, is_sharded, local, team_of
from angular_muown.stages.reductions import Whole


@dataclass(frozen=True)
class Parts(Whole):
    sides: tuple[int, int]  # m and n of the whole matrices
    row_teams: tuple[Team, ...]  # hold other columns of our rows
    column_teams: tuple[Team, ...]

    def shape(self, X: Tensor) -> tuple[int, int]:
        return self.sides

    def rows(self, X: Tensor) -> Tensor:
        return total(super().rows(X), self.row_teams)

    def columns(self, X: Tensor) -> Tensor:
        return total(super().columns(X), self.column_teams)

    def parts(self, t: Tensor) -> Tensor:
        return total(t, (*self.row_teams, *self.column_teams))

    def plain_row_norm(self, X: Tensor) -> Tensor:
        # Squares of roots would not be the squares that were summed.
        return self.rows(X.square()).sqrt() if self.row_teams else super().plain_row_norm(X)

    def row_largest(self, X: Tensor) -> Tensor:
        found = super().row_largest(_filled(X, -1))
        return total(found, self.row_teams, largest=True)

    def largest(self, X: Tensor) -> Tensor:
        found = _filled(self.row_largest(X), -2).amax(dim=-2, keepdim=True)
        return total(found, self.column_teams, largest=True)


def _filled(X: Tensor, dim: int) -> Tensor:
    """Nothing has no largest entry; a zero is as good."""
    shape = list(X.shape)
    shape[dim] = 1
    return X if X.shape[dim] else X.new_zeros(shape)


def total(t: Tensor, teams: Iterable[Team], largest: bool = False) -> Tensor:
    """The sum (or the largest) over the teams, one after the other; the same bits on every rank."""
    for team in teams:
        if team.acts:
            t = t.contiguous()
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            all_reduce(t, team, op)
    return t


def somewhere(flags: Sequence[bool], params: Sequence[Tensor]) -> list[bool]:
    """For each flag, whether it is true on any rank that holds parts of these parameters. A rank on
    which all of them are true does not wait for the others."""
    found = torch.tensor(flags, dtype=torch.float32)
    meshes = {p.device_mesh: local(p).device for p in params if is_sharded(p)}
    for mesh, device in meshes.items():
        teams = [team_of(mesh, [i]) for i in range(mesh.ndim)]
        found = total(found.to(device), teams, largest=True)
    return list(flags) if all(flags) else found.bool().tolist()
