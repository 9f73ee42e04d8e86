"""Sums and norms over the rows and columns of matrices, wherever their entries are.

A stage asks `context.reductions` for every total of more than one entry and for the matrices'
sides. `Reductions` handles whole matrices; `ShardedReductions` (distributed/reductions.py) adds
what other ranks hold. Each stage is therefore written once, for whole matrices.
"""

from collections.abc import Callable
from functools import cache
from math import frexp, inf

import torch
from torch import Tensor


class Reductions:
    """Over matrices (..., m, n) that are entirely on this rank."""

    def shape(self, X: Tensor) -> tuple[int, int]:
        """Return m and n of the whole matrices."""
        m, n = X.shape[-2:]
        return m, n

    def row_sum(self, X: Tensor) -> Tensor:
        return X.sum(dim=-1, keepdim=True)

    def column_sum(self, X: Tensor) -> Tensor:
        return X.sum(dim=-2, keepdim=True)

    def total(self, X: Tensor) -> Tensor:
        """Sum all entries of each matrix.

        Rows come first, so that one matrix and a stack of them add up in the same order.
        """
        return self.column_sum(self.row_sum(X))

    def across_ranks(self, t: Tensor) -> Tensor:
        """Sum t over the ranks that hold parts of the same matrices."""
        return t

    def row_norm(self, X: Tensor) -> Tensor:
        return _safe_norm(X, self.unscaled_row_norm, self.row_max)

    def unscaled_row_norm(self, X: Tensor) -> Tensor:
        """Return row norms of rows whose squares stay in range, such as nearly unit ones."""
        return torch.linalg.vector_norm(X, dim=-1, keepdim=True)

    def row_max(self, X: Tensor) -> Tensor:
        """Return the largest absolute entry of each row."""
        if may_look(X):
            return X.abs().amax(dim=-1, keepdim=True)
        return torch.linalg.vector_norm(X, ord=inf, dim=-1, keepdim=True)  # slow on a CPU

    def max(self, X: Tensor) -> Tensor:
        """Return the largest absolute entry of each matrix."""
        return X.abs().amax(dim=(-2, -1), keepdim=True)

    def frobenius(self, X: Tensor) -> Tensor:
        return _safe_norm(X, lambda X: self.total(X.square()).sqrt(), self.max)


def may_look(X: Tensor) -> bool:
    """True if the host may branch on the entries of X. On a GPU it would have to wait for them."""
    return X.device.type == "cpu"


def _safe_norm(
    X: Tensor, norm: Callable[[Tensor], Tensor], largest: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute a norm whose squares neither overflow nor underflow.

    Dividing by a power of two is exact, so the result has the same bits with and without it. On
    the CPU the division is skipped where it is not needed.
    """
    if may_look(X):
        result = norm(X)
        if _is_ordinary(result):
            return result
    top = largest(X)
    limit = frexp(torch.finfo(X.dtype).max)[1] - 2  # 2^limit and its inverse are both normal
    power = torch.ldexp(torch.ones_like(top), torch.frexp(top).exponent.clamp(-limit, limit))
    return power * norm(X / power)


def _is_ordinary(norm: Tensor) -> bool:
    """True if the squares of these norms are represented with all their digits."""
    if norm.numel() == 0:
        return True
    low, high = _ordinary_range(norm.dtype)
    least, most = torch.aminmax(norm)
    return low < float(least) and float(most) < high


@cache
def _ordinary_range(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return 1e4 * info.tiny**0.5, 0.05 * info.max**0.5


LOCAL = Reductions()
row_norm, frobenius = LOCAL.row_norm, LOCAL.frobenius
