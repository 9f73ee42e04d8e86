"""Sums over the rows and columns of matrices, wherever their entries are.

A stage asks its `sums` for every total of more than one entry, and for the sides of the matrices.
`Whole` adds up what it is given; ranks that hold parts of matrices add up each other's as well
(`Parts` in distributed/reductions.py). So a stage is written once, for whole matrices.
"""

from collections.abc import Callable
from copy import copy
from functools import cache
from math import frexp, inf
from typing import Self

import torch
from torch import Tensor


class Whole:
    """Of matrices (..., m, n) that are all here."""

    def shape(self, X: Tensor) -> tuple[int, int]:
        m, n = X.shape[-2:]
        return m, n

    def rows(self, X: Tensor) -> Tensor:
        return X.sum(dim=-1, keepdim=True)

    def columns(self, X: Tensor) -> Tensor:
        return X.sum(dim=-2, keepdim=True)

    def entries(self, X: Tensor) -> Tensor:
        """Row sums first, so that one matrix and a stack of them add in the same order."""
        return self.columns(self.rows(X))

    def parts(self, t: Tensor) -> Tensor:
        """Of a t that every rank made from its part of the same matrices."""
        return t

    def row_norm(self, X: Tensor) -> Tensor:
        return _norm(X, self.plain_row_norm, self.row_largest)

    def plain_row_norm(self, X: Tensor) -> Tensor:
        """For rows whose squares are known to stay in range, such as nearly unit ones."""
        return torch.linalg.vector_norm(X, dim=-1, keepdim=True)

    def row_largest(self, X: Tensor) -> Tensor:
        if may_look(X):
            return X.abs().amax(dim=-1, keepdim=True)
        return torch.linalg.vector_norm(X, ord=inf, dim=-1, keepdim=True)  # slow on a CPU

    def largest(self, X: Tensor) -> Tensor:
        return X.abs().amax(dim=(-2, -1), keepdim=True)

    def frobenius(self, X: Tensor) -> Tensor:
        return _norm(X, lambda X: self.entries(X.square()).sqrt(), self.largest)


def may_look(X: Tensor) -> bool:
    """Whether the host may decide by the entries of X: for those of a GPU it would have to wait."""
    return X.device.type == "cpu"


def _norm(
    X: Tensor, norm: Callable[[Tensor], Tensor], largest: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute a norm whose squares neither overflow nor underflow.

    A power of two is taken out first where it matters. That is exact, so the result has the same
    bits either way.
    """
    if may_look(X):
        found = norm(X)
        if _is_ordinary(found):
            return found
    top = largest(X)
    limit = (
        frexp(torch.finfo(X.dtype).max)[1] - 2
    )  # of exponents whose power and inverse are normal
    power = torch.ldexp(torch.ones_like(top), torch.frexp(top).exponent.clamp(-limit, limit))
    return power * norm(X / power)


def _is_ordinary(norm: Tensor) -> bool:
    """Whether the squares of these norms are held with all their digits."""
    if norm.numel() == 0:
        return True
    low, high = _ordinary_range(norm.dtype)
    least, most = torch.aminmax(norm)
    return low < float(least) and float(most) < high


@cache
def _ordinary_range(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return 1e4 * info.tiny**0.5, 0.05 * info.max**0.5


WHOLE = Whole()
row_norm, frobenius = WHOLE.row_norm, WHOLE.frobenius


class Summing:
    """A stage that adds up: every one of them can do so over ranks."""

    sums: Whole = WHOLE

    def over(self, sums: Whole) -> Self:
        stage = copy(self)
        stage.sums = sums
        return stage
