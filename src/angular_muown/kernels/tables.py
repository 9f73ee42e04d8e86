"""Where matrices lie: lines of addresses for the kernels, made from a parameter's layout."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.views import Layout

LINE = 12  # numbers per matrix; the columns are named in rows.py
ADDRESSES = [0, 1, 2, 4, 5, 6, 7]  # the columns that hold some
ROW_STATE = ("stored_norm", "row_second_moment", "exp_avg", "exp_avg_sq")


# addresses of a parameter, its gradient and its momentum, and what could differ at the same ones
Place = tuple[int, int, int, torch.dtype, bool]


class Piece(NamedTuple):
    """Matrices of one shape in a parameter: element offsets, and strides between rows."""

    m: int
    n: int
    offsets: tuple[int, ...]
    stride: int
    state_offsets: tuple[int, ...]
    state_stride: int


@cache
def pieces(shape: torch.Size, layout: Layout) -> tuple[Piece, ...]:
    """The layout's own cut, read off tensors without data."""
    weight = torch.empty(shape, device="meta")
    state = torch.empty(layout.row_shape(weight), device="meta")

    def starts(t: Tensor) -> tuple[int, ...]:
        return tuple(int(t.storage_offset()) + i * t.stride(0) for i in range(t.shape[0]))

    return tuple(
        Piece(W.shape[1], W.shape[2], starts(W), W.stride(1), starts(rows), rows.stride(1))
        for W, rows in zip(layout.cut(weight), layout.cut_rows(state), strict=True)
    )


Kind = tuple[int, int, torch.dtype, torch.dtype, torch.dtype]  # m, n and the dtypes of W, G, M


@dataclass
class Table:
    """Lines for all matrices of some parameters, those of one kind next to each other."""

    kinds: dict[Kind, int]  # -> number of matrices, in the table's order
    owner: Tensor  # (matrices,) which parameter a matrix belongs to
    fixed: Tensor  # (matrices, LINE): byte offsets and strides

    def lines(self, places: Sequence[Place], rows: Sequence[dict[str, Tensor]]) -> Tensor:
        """With the addresses now: of W, G, M, and of the row state, 0 for what is not kept."""
        state = [[row[name].data_ptr() if name in row else 0 for name in ROW_STATE] for row in rows]
        both = [[*place[:3], *own] for place, own in zip(places, state, strict=True)]
        lines = self.fixed.clone()
        lines[:, ADDRESSES] += torch.tensor(both, dtype=torch.int64)[self.owner]
        return lines


def dtypes_of(p: Tensor, state: dict[str, Any]) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    assert p.grad is not None
    return p.dtype, p.grad.dtype, state["momentum_buffer"].dtype


def table(params: Sequence[Tensor], states: Sequence[dict[str, Any]], layout: Layout) -> Table:
    lines: dict[Kind, list[list[int]]] = defaultdict(list)
    for index, (p, state) in enumerate(zip(params, states, strict=True)):
        dtypes = dtypes_of(p, state)
        sizes = [dtype.itemsize for dtype in dtypes]
        for piece in pieces(p.shape, layout):
            for at, at_state in zip(piece.offsets, piece.state_offsets, strict=True):
                line = [at * size for size in sizes] + [piece.stride]
                line += [at_state * 4] * 4 + [piece.state_stride, index]
                lines[piece.m, piece.n, *dtypes].append(line)
    every = torch.tensor([line for kind in lines.values() for line in kind], dtype=torch.int64)
    fixed = torch.zeros(len(every), LINE, dtype=torch.int64)
    fixed[:, :9] = every[:, :9]
    return Table({kind: len(own) for kind, own in lines.items()}, every[:, 9], fixed)
