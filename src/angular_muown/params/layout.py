"""Layouts: how to read a parameter as matrices.

A layout is declared in the parameter's group, never guessed from its shape:
`view` ("matrix"; "stack": leading dimensions count matrices; "conv": out x rest), `transposed`
(stored as in x out), `blocks` (split the rows into k equal blocks or the given sizes: fused
q, k, v, gated MLPs, heads), `interleaved` (the rows of the blocks alternate: they come in this many
units, each with its part of every block in turn, such as q, k and v of one head) and
`column_blocks` (blocks of columns: heads of an output projection).
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
    """The rows and columns of an m x n matrix that a part covers.

    With a period, the part is a block whose rows repeat every `period` rows of a larger matrix:
    `rows` is then its interval within one period, and m counts all its rows.
    """

    rows: Interval
    columns: Interval
    m: int
    n: int
    period: int = 0

    @property
    def size(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def of_block(self, block: "Slice2D") -> "Slice2D":
        """Return the part of `block` inside this slice, relative to the block's corner."""
        start, stop = self.rows
        if block.period:  # the block's rows in a range of rows are consecutive rows of the block
            rows = (_rows_before(start, block), _rows_before(stop, block))
        else:
            rows = _overlap(block.rows, self.rows)
        columns = _overlap(block.columns, self.columns)
        return Slice2D(rows, columns, block.m, block.n)


def _rows_before(row: int, block: Slice2D) -> int:
    """Return how many rows of a periodic block lie before a row of the larger matrix."""
    units, rest = divmod(row, block.period)
    start, stop = block.rows
    return units * (stop - start) + min(max(rest - start, 0), stop - start)


def vector_axes(name: str) -> tuple[bool, bool]:
    """Return whether a state vector has an entry per row, and whether it has one per column.

    "column_..." has one entry per column, "matrix_..." one per matrix, any other name one per row.
    """
    return not name.startswith(("column_", "matrix_")), name.startswith("column_")


def _by_row(name: str | None) -> bool:
    return name is None or vector_axes(name)[0]


def block_sizes(total: int, cut: Cut) -> list[int]:
    """Return the sizes of the blocks that `total` rows (columns) are cut into."""
    if isinstance(cut, int):
        if cut < 1 or total % cut:
            raise ValueError(
                f"has a side of {total}, which does not divide into {cut} equal blocks"
            )
        return [total // cut] * cut
    if min(cut, default=0) < 1:
        raise ValueError(f"has block sizes {list(cut)}, which must all be at least 1")
    if sum(cut) != total:
        raise ValueError(f"has block sizes {list(cut)}, which add up to {sum(cut)}, not {total}")
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
    interleaved: int = 1

    @staticmethod
    def of(group: Mapping[str, Any]) -> "Layout":
        cuts = (group["blocks"] or 1, group["column_blocks"] or 1)
        # Tuples, because layouts are cache keys; a loaded state dict may hold lists.
        rows, columns = (cut if isinstance(cut, int) else tuple(cut) for cut in cuts)
        units = group.get("interleaved") or 1
        return Layout(group["view"], group["transposed"], rows, columns, units)

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
        rows, columns = self._sizes(m, n)
        within_unit = _intervals([size // self.interleaved for size in rows])
        period = m // self.interleaved if self.interleaved > 1 else 0
        return [
            Slice2D(a, b, size, b[1] - b[0], period)
            for size, a in zip(rows, within_unit, strict=True)
            for b in _intervals(columns)
        ]

    def cut(self, t: Tensor, window: Slice2D | None = None) -> list[Tensor]:
        """Cut a parameter, gradient or momentum into its matrices: (count, m_i, n_i).

        These are views, unless the rows of the blocks alternate. With a window, t holds only that
        part of the matrices. Its cuts may then be empty.
        """
        return self.split(self.in_order(t, None, self.order(t, window)), None, window)

    def cut_vector(self, t: Tensor, name: str = "", window: Slice2D | None = None) -> list[Tensor]:
        """Cut a state vector of a parameter whose blocks do not alternate, likewise."""
        return self.split(self.in_order(t, name, None), name, window)

    def order(self, t: Tensor, window: Slice2D | None = None) -> Tensor | None:
        """Return the rows of a parameter block by block; None if that is how they are stored.

        Args:
            t: the parameter, or the part of it that the window describes.
            window: the part of the matrices that t holds; None is all of them.
        """
        if self.interleaved == 1:
            return None
        if window is None:
            _, m, n = self.canonical(torch.empty(t.shape, device="meta")).shape
            window = Slice2D((0, m), (0, n), m, n)
        rows = []
        for block in self._row_blocks(window):
            start, stop = window.of_block(block).rows
            k = torch.arange(start, stop, device=t.device)
            size = block.rows[1] - block.rows[0]
            rows.append(k // size * block.period + k % size + block.rows[0] - window.rows[0])
        return torch.cat(rows)

    def _row_blocks(self, window: Slice2D) -> list[Slice2D]:
        """Return the first block of each row of blocks."""
        return self.grid(window.m, window.n)[:: len(block_sizes(window.n, self.column_blocks))]

    def in_order(self, t: Tensor, name: str | None, order: Tensor | None) -> Tensor:
        """Return t as (count, m, n) with the rows of each block together.

        It is a view of t, and a copy if the rows of the blocks alternate.

        Args:
            t: a tensor with the parameter's shape, or a state vector of the parameter.
            name: of the state vector; None if t has the parameter's shape.
            order: what `order` returned for the parameter.
        """
        X = self._matrices(t, name)
        return X if order is None or not _by_row(name) else X.index_select(1, order)

    def store(self, X: Tensor, t: Tensor, name: str | None, order: Tensor) -> None:
        """Write to t what `in_order` copied from it."""
        if _by_row(name):  # otherwise X is t
            self._matrices(t, name).index_copy_(1, order, X)

    def _matrices(self, t: Tensor, name: str | None) -> Tensor:
        if name is None:
            return self.canonical(t)
        return t.unsqueeze(0) if t.ndim == 2 else t.flatten(0, -3)

    def split(self, X: Tensor, name: str | None, window: Slice2D | None = None) -> list[Tensor]:
        """Split what `in_order` returned into its matrices, as views.

        A vector without an entry per row (column) has one row (column) per block.
        """
        by_row, by_column = (True, True) if name is None else vector_axes(name)
        if self.blocks == 1 and self.column_blocks == 1:  # the usual case, kept cheap
            return [X]
        count, m, n = X.shape
        row_cut = self.blocks if by_row else m
        column_cut = self.column_blocks if by_column else n
        if window is None:
            rows, columns = block_sizes(m, row_cut), block_sizes(n, column_cut)
        else:
            rows = self._rows_within(window) if by_row else [1] * m
            columns = _sizes_within(window.columns, window.n, column_cut) if by_column else [1] * n
        # Equal row blocks become one piece with more matrices if that is a view, which it is not
        # for a stack of transposed matrices.
        equal = isinstance(self.blocks, int) or len(set(self.blocks)) == 1
        is_view = equal and len(columns) == 1 and not (self.transposed and self.view == "stack")
        if is_view and window is None:
            return [X.reshape(count * len(rows), rows[0], n)]
        return [b for a in X.split(rows, dim=1) for b in a.split(columns, dim=2)]

    def _rows_within(self, window: Slice2D) -> list[int]:
        """Return how many rows of each block lie in the window."""
        intervals = [window.of_block(block).rows for block in self._row_blocks(window)]
        return [stop - start for start, stop in intervals]

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
        rows = block_sizes(m, self.blocks)
        if any(size % self.interleaved for size in rows):
            raise ValueError(
                f"has row blocks {rows}, which do not all divide into interleaved="
                f"{self.interleaved} units"
            )
        return rows, block_sizes(n, self.column_blocks)
