"""Layouts: how to read a parameter as matrices.

A layout is declared in the parameter's group, never guessed from its shape:
`view` ("matrix"; "stack": leading dimensions count matrices; "conv": out x rest), `transposed`
(stored as in x out), `blocks` (split the rows into k equal blocks or the given sizes: fused
q, k, v, gated MLPs, heads) and `column_blocks` (the same for columns: heads of an output
projection).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

VIEWS = ("matrix", "stack", "conv")
Cut = int | Sequence[int]
Interval = tuple[int, int]


class Slice2D(NamedTuple):
    """The rows and columns of an m x n matrix that a part covers."""

    rows: Interval
    columns: Interval
    m: int
    n: int

    @property
    def size(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def of_block(self, block: "Slice2D") -> "Slice2D":
        """Return the part of `block` inside this slice, relative to the block's corner."""
        rows = _overlap(block.rows, self.rows)
        columns = _overlap(block.columns, self.columns)
        return Slice2D(rows, columns, block.m, block.n)


def vector_axes(name: str) -> tuple[bool, bool]:
    """Return whether a state vector has an entry per row, and whether it has one per column.

    "column_..." has one entry per column, "matrix_..." one per matrix, any other name one per row.
    """
    return not name.startswith(("column_", "matrix_")), name.startswith("column_")


def block_sizes(total: int, cut: Cut) -> list[int]:
    """Return the sizes of the blocks that `total` rows (columns) are cut into."""
    if isinstance(cut, int):
        if cut < 1 or total % cut:
            raise ValueError(f"{total} does not divide into {cut} equal blocks")
        return [total // cut] * cut
    if min(cut, default=0) < 1:
        raise ValueError(f"block sizes {list(cut)} must all be at least 1")
    if sum(cut) != total:
        raise ValueError(f"block sizes {list(cut)} add up to {sum(cut)}, not {total}")
    return list(cut)


def _overlap(block: Interval, part: Interval) -> Interval:
    start = min(max(block[0], part[0]), block[1])
    stop = max(min(block[1], part[1]), start)
    return start - block[0], stop - block[0]


def _sizes_within(part: Interval, total: int, cut: Cut) -> list[int]:
    """Return how many rows (columns) of each block lie in the part."""
    clipped = [_overlap(block, part) for block in _intervals(block_sizes(total, cut))]
    return [stop - start for start, stop in clipped]


def _intervals(sizes: Sequence[int]) -> list[Interval]:
    return list(pairwise(sum(sizes[:i]) for i in range(len(sizes) + 1)))


@dataclass(frozen=True)
class Layout:
    """How the parameters of one group are read as matrices.

    Error messages have no subject: the caller prepends the parameter's name.
    """

    view: str = "matrix"
    transposed: bool = False
    blocks: Cut = 1
    column_blocks: Cut = 1

    @staticmethod
    def of(group: Mapping[str, Any]) -> "Layout":
        cuts = (group["blocks"] or 1, group["column_blocks"] or 1)
        # Tuples, because layouts are cache keys; a loaded state dict may hold lists.
        rows, columns = (cut if isinstance(cut, int) else tuple(cut) for cut in cuts)
        return Layout(group["view"], group["transposed"], rows, columns)

    def canonical(self, t: Tensor) -> Tensor:
        """Return t as (count, m, n) with fan-out rows, as a view if its strides allow one."""
        if self.view == "conv":
            t = t.flatten(1)
        if self.transposed:
            t = t.mT
        return t.unsqueeze(0) if t.ndim == 2 else t.flatten(0, -3)

    def axis(self, dimension: int, dimensions: int) -> str:
        """Return what a parameter's dimension counts: "count" (matrices), "rows" or "columns"."""
        matrix_dim = dimension - (dimensions - 2 if self.view == "stack" else 0)
        if self.view == "conv" and matrix_dim > 1:
            raise ValueError(
                f"is sharded along dimension {dimension}, inside the kernel of a convolution: "
                "shard dimension 0 or 1"
            )
        if matrix_dim < 0:
            return "count"
        return "columns" if (matrix_dim == 1) != self.transposed else "rows"

    def window(self, ranges: Sequence[Interval], shape: Sequence[int]) -> Slice2D:
        """Return the part of a parameter's matrices within these ranges of its dimensions."""
        first, second = (0, 1) if self.view == "conv" else (-2, -1)
        unit = prod(shape[2:]) if self.view == "conv" else 1
        start, stop = ranges[second]
        sides = [(ranges[first], shape[first]), ((start * unit, stop * unit), shape[second] * unit)]
        (rows, m), (columns, n) = reversed(sides) if self.transposed else sides
        return Slice2D(rows, columns, m, n)

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return rows and columns of a parameter's matrices, before the cut into blocks."""
        whole = self.window([(0, size) for size in shape], shape)
        return whole.m, whole.n

    def grid(self, m: int, n: int) -> list[Slice2D]:
        """Return the blocks of an m x n matrix, in the order of `cut` with a window."""
        rows, columns = block_sizes(m, self.blocks), block_sizes(n, self.column_blocks)
        return [
            Slice2D(a, b, a[1] - a[0], b[1] - b[0])
            for a in _intervals(rows)
            for b in _intervals(columns)
        ]

    def cut(self, t: Tensor, window: Slice2D | None = None) -> list[Tensor]:
        """Cut a parameter, gradient or momentum into its matrices: views (count, m_i, n_i).

        With a window, t holds only that part of the matrices. Its cuts may then be empty.
        """
        return self._cut(self.canonical(t), True, True, window)

    def cut_vector(self, t: Tensor, name: str = "", window: Slice2D | None = None) -> list[Tensor]:
        """Cut a state vector the same way.

        A vector without an entry per row (column) has one row (column) per block.
        """
        X = t.unsqueeze(0) if t.ndim == 2 else t.flatten(0, -3)
        return self._cut(X, *vector_axes(name), window)

    def _cut(
        self, X: Tensor, by_row: bool, by_column: bool, window: Slice2D | None
    ) -> list[Tensor]:
        if self.blocks == 1 and self.column_blocks == 1:  # the usual case, kept cheap
            return [X]
        count, m, n = X.shape
        row_cut = self.blocks if by_row else m
        column_cut = self.column_blocks if by_column else n
        if window is None:
            rows, columns = block_sizes(m, row_cut), block_sizes(n, column_cut)
        else:
            rows = _sizes_within(window.rows, window.m, row_cut) if by_row else [1] * m
            columns = _sizes_within(window.columns, window.n, column_cut) if by_column else [1] * n
        # Equal row blocks become one piece with more matrices if that is a view, which it is not
        # for a stack of transposed matrices.
        equal = isinstance(self.blocks, int) or len(set(self.blocks)) == 1
        is_view = equal and len(columns) == 1 and not (self.transposed and self.view == "stack")
        if is_view and window is None:
            return [X.reshape(count * len(rows), rows[0], n)]
        return [b for a in X.split(rows, dim=1) for b in a.split(columns, dim=2)]

    def vector_shape(
        self, t: Tensor, name: str = "", window: Slice2D | None = None
    ) -> tuple[int, ...]:
        """Return the shape of a state vector of t: (..., m, column blocks) if it is per row.

        With a window, t holds only that part of the matrices.
        """
        X = self.canonical(torch.empty(t.shape, device="meta"))
        leading = t.shape[:-2] if self.view == "stack" else ()
        m, n = X.shape[1:]
        sides = (m, n) if window is None else (window.m, window.n)
        (by_row, by_column), (rows, columns) = vector_axes(name), self._sizes(*sides)
        return (*leading, m if by_row else len(rows), n if by_column else len(columns))

    def check(self, t: Tensor) -> None:
        """Raise ValueError if t cannot be read this way."""
        if self.view == "matrix" and t.ndim != 2:
            raise ValueError(
                "has more than 2 dimensions: declare view='stack' for a stack of matrices "
                "(..., m, n), such as experts, or view='conv' for a convolution (out, in, ...)"
            )
        if self.view == "stack" and t.ndim < 3:
            raise ValueError("has no leading dimension: view='stack' expects (..., m, n)")
        self._sizes(*self.canonical(torch.empty(t.shape, device="meta")).shape[1:])

    def _sizes(self, m: int, n: int) -> tuple[list[int], list[int]]:
        return block_sizes(m, self.blocks), block_sizes(n, self.column_blocks)
