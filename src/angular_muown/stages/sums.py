"""Sums over the rows and columns of matrices, wherever their entries are.

A stage asks its `sums` for every total of more than one entry, and for the sides of the matrices.
`Whole` adds up what it is given; ranks that hold parts of matrices add up each other's as well
(`Parts` in parts.py). So a stage is written once, for whole matrices.
"""

from copy import copy
from typing import Self

import torch
from torch import Tensor


def row_norm(X: Tensor) -> Tensor:
    return torch.linalg.vector_norm(X, dim=-1, keepdim=True)


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
        return row_norm(X)

    def row_largest(self, X: Tensor) -> Tensor:
        return X.abs().amax(dim=-1, keepdim=True)

    def largest(self, X: Tensor) -> Tensor:
        return X.abs().amax(dim=(-2, -1), keepdim=True)

    def frobenius(self, X: Tensor) -> Tensor:
        return self.entries(X.square()).sqrt()


WHOLE = Whole()


def frobenius(X: Tensor) -> Tensor:
    return WHOLE.frobenius(X)


class Summing:
    """A stage that adds up: every one of them can do so over ranks."""

    sums: Whole = WHOLE

    def over(self, sums: Whole) -> Self:
        stage = copy(self)
        stage.sums = sums
        return stage
