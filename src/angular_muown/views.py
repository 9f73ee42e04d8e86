"""Views: a parameter as matrices, and matrices of one shape as a stack.

What a parameter means is declared in its group, never guessed from its shape:
`view` ("matrix", "stack": leading dimensions count matrices, "conv": out x rest), `transposed`
(stored as in x out), `blocks` (rows cut in k equal parts or the given sizes: fused q, k, v, gated
MLPs, heads) and `column_blocks` (columns cut likewise: the heads of an output projection).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.placement import store, whole
from angular_muown.rounding import DROPPED_BITS, round_stochastically
from angular_muown.stages.charts import Rows

VIEWS = ("matrix", "stack", "conv")
Cut = int | Sequence[int]


def spans(name: str) -> tuple[bool, bool]:
    """Whether a state vector has an entry for every row, for every column. Its name says so:
    "column_..." has one per column, "matrix_..." one for a whole matrix, any other one per row."""
    return not name.startswith(("column_", "matrix_")), name.startswith("column_")


def block_sizes(total: int, cut: Cut) -> list[int]:
    if isinstance(cut, int):
        if cut < 1 or total % cut:
            raise ValueError(f"{total} does not divide into {cut} equal blocks")
        return [total // cut] * cut
    if min(cut, default=0) < 1:
        raise ValueError(f"block sizes {list(cut)} must all be at least 1")
    if sum(cut) != total:
        raise ValueError(f"block sizes {list(cut)} add up to {sum(cut)}, not to {total}")
    return list(cut)


@dataclass(frozen=True)
class Layout:
    """How the parameters of one group fall into matrices."""

    view: str = "matrix"
    transposed: bool = False
    blocks: Cut = 1
    column_blocks: Cut = 1

    @staticmethod
    def of(group: Mapping[str, Any]) -> "Layout":
        cuts = (group["blocks"] or 1, group["column_blocks"] or 1)
        # tuples, because layouts are keys of caches; a state dict's are lists
        rows, columns = (cut if isinstance(cut, int) else tuple(cut) for cut in cuts)
        return Layout(group["view"], group["transposed"], rows, columns)

    def canonical(self, t: Tensor) -> Tensor:
        """(count, m, n) with fan-out rows; a view of t wherever its strides allow one."""
        if self.view == "conv":
            t = t.reshape(t.shape[0], -1)
        if self.transposed:
            t = t.mT
        return t.unsqueeze(0) if t.ndim == 2 else t.flatten(0, -3)

    def cut(self, t: Tensor) -> list[Tensor]:
        """The matrices of a parameter, gradient or momentum: views of (count, m_i, n_i)."""
        return self._cut(self.canonical(t), self.blocks, self.column_blocks)

    def cut_vector(self, t: Tensor, name: str = "") -> list[Tensor]:
        """The same cut of a state vector: where it does not span the rows (columns), it has one
        row (column) for each block."""
        X = t.unsqueeze(0) if t.ndim == 2 else t.flatten(0, -3)
        by_row, by_column = spans(name)
        rows, columns = self.blocks if by_row else X.shape[1], self.column_blocks
        return self._cut(X, rows, columns if by_column else X.shape[2])

    def _cut(self, X: Tensor, row_cut: Cut, column_cut: Cut) -> list[Tensor]:
        if self.blocks == 1 and self.column_blocks == 1:  # nearly every parameter: spare the host
            return [X]
        count, m, n = X.shape
        rows, columns = block_sizes(m, row_cut), block_sizes(n, column_cut)
        # Equal blocks of rows are one piece with more matrices, as long as that is a view; it is
        # none for a stack whose matrices lie transposed.
        equal = isinstance(self.blocks, int) or len(set(self.blocks)) == 1
        if equal and len(columns) == 1 and not (self.transposed and self.view == "stack"):
            return [X.reshape(count * len(rows), rows[0], n)]
        return [b for a in X.split(rows, dim=1) for b in a.split(columns, dim=2)]

    def vector_shape(self, t: Tensor, name: str = "") -> tuple[int, ...]:
        """Shape of a state vector that belongs to t: (..., m, number of column blocks) for rows."""
        X = self.canonical(torch.empty(t.shape, device="meta"))
        leading = t.shape[:-2] if self.view == "stack" else ()
        (by_row, by_column), (rows, columns) = spans(name), self._sizes(X)
        m, n = X.shape[1:]
        return (*leading, m if by_row else len(rows), n if by_column else len(columns))

    def check(self, t: Tensor) -> None:
        """Raise ValueError where t cannot be read this way."""
        if self.view == "matrix" and t.ndim != 2:
            raise ValueError(
                "has more than 2 dimensions: declare view='stack' for a stack of matrices "
                "(..., m, n), such as experts, or view='conv' for a convolution (out, in, ...)"
            )
        if self.view == "stack" and t.ndim < 3:
            raise ValueError("has no leading dimension: view='stack' wants (..., m, n)")
        self._sizes(self.canonical(torch.empty(t.shape, device="meta")))

    def _sizes(self, X: Tensor) -> tuple[list[int], list[int]]:
        return block_sizes(X.shape[1], self.blocks), block_sizes(X.shape[2], self.column_blocks)


class Piece(NamedTuple):
    """Matrices of one shape out of one parameter: views into its storage and state."""

    parameter: Tensor
    W: Tensor
    G: Tensor
    M: Tensor
    rows: Rows
    t: float | Tensor  # Adam's step count, this step included; a tensor if capturable


@dataclass
class Stack:
    """Equal shapes side by side: (count, m, n). One matrix is the stack with one piece."""

    pieces: list[Piece]
    maximize: bool
    noise: int | Tensor | None  # seed of the stochastic write-back; None rounds to nearest
    compute: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.compute = torch.promote_types(self.pieces[0].W.dtype, torch.float32)

    def _gather(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts)).to(self.compute)

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.pieces[0].W.shape[-2:]
        return m, n

    @property
    def t(self) -> float | Tensor:
        if not isinstance(self.pieces[0].t, Tensor):
            return self.pieces[0].t
        ages = [torch.as_tensor(piece.t).expand(piece.W.shape[0]) for piece in self.pieces]
        return torch.cat(ages).view(-1, 1, 1)

    @cached_property
    def counts(self) -> list[int]:
        return [piece.W.shape[0] for piece in self.pieces]

    @property
    def parts(self) -> list[tuple[Tensor, int]]:
        """Parameters in the stack's order, with their number of matrices."""
        return [(piece.parameter, piece.W.shape[0]) for piece in self.pieces]

    def gather_W(self) -> Tensor:
        return self._gather([piece.W for piece in self.pieces])

    def gather_G(self) -> Tensor:
        G = self._gather([piece.G for piece in self.pieces])
        return -G if self.maximize else G

    def gather_M(self) -> Tensor:
        return self._gather([piece.M for piece in self.pieces])

    def gather_rows(self) -> Rows:
        names = self.pieces[0].rows
        return {name: self._gather([piece.rows[name] for piece in self.pieces]) for name in names}

    def write(self, W: Tensor, M: Tensor, rows: Rows) -> None:
        """Put results where they belong; the last thing that happens in a step."""
        dtype = self.pieces[0].W.dtype
        if self.noise is not None and dtype in DROPPED_BITS:
            W = round_stochastically(W, dtype, self.noise)
        self._scatter([piece.W for piece in self.pieces], W)
        self._scatter([piece.M for piece in self.pieces], M)
        for name, values in rows.items():
            self._scatter([piece.rows[name] for piece in self.pieces], values)

    def _scatter(self, parts: list[Tensor], values: Tensor) -> None:
        torch._foreach_copy_(parts, list(values.split(self.counts)))  # one launch for all of them


@dataclass
class Leaf:
    """A parameter that takes part in this step, with its state, open for reading and writing."""

    parameter: Tensor
    state: dict[str, Any]
    layout: Layout
    working: Tensor = field(init=False)
    momentum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        p = whole(self.parameter)
        self.momentum = whole(self.state["momentum_buffer"])
        if "master" in self.state:
            master = whole(self.state["master"])
            # Where the weight is not its master's rounding, somebody changed it: the weight wins.
            healed = torch.where(master.to(p.dtype) == p, master, p.to(master.dtype))
            self.working = healed.contiguous()  # it would take over the weight's strides
        elif self.layout.view == "matrix" or p.is_contiguous():
            self.working = p
        else:  # such as a channels_last convolution: matrices of it are no views
            self.working = p.contiguous()

    @property
    def age(self) -> float | Tensor:
        """As a number if it is on the host; one on the device is not waited for."""
        t = self.state["step"]
        return float(t) if t.device.type == "cpu" else t

    def pieces(self, row_names: tuple[str, ...]) -> Iterator[Piece]:
        cut, state = self.layout.cut, self.state
        assert self.parameter.grad is not None
        rows = [self.layout.cut_vector(state[name], name) for name in row_names]
        tensors = (self.working, whole(self.parameter.grad), self.momentum)
        for i, (W, G, M) in enumerate(zip(*map(cut, tensors), strict=True)):
            own = {name: parts[i] for name, parts in zip(row_names, rows, strict=True)}
            yield Piece(self.parameter, W, G, M, own, self.age)

    def close(self) -> None:
        """Where the step worked on something else than the parameter and its state, store it."""
        targets = [(self.parameter, self.working), (self.state["momentum_buffer"], self.momentum)]
        if "master" in self.state:
            targets.append((self.state["master"], self.working))
        for target, value in targets:
            if target is not value:
                store(target, value)


def stacks(
    leaves: Sequence[Leaf], row_names: tuple[str, ...], maximize: bool, noise: int | Tensor | None
) -> list[Stack]:
    """Pieces of one shape, dtype, device and age go together."""
    groups: dict[Any, list[Piece]] = defaultdict(list)
    for leaf in leaves:
        for piece in leaf.pieces(row_names):
            age = None if isinstance(piece.t, Tensor) else piece.t
            key = (*piece.W.shape[-2:], piece.W.dtype, piece.W.device, age)
            groups[key].append(piece)
    return [Stack(pieces, maximize, noise) for pieces in groups.values()]
