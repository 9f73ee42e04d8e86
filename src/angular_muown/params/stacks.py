"""Views: parameters open for a step, as matrices; matrices of one shape as a stack."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.distributed.mesh import local, local_gradient
from angular_muown.params.layout import Layout
from angular_muown.params.options import Group, seed
from angular_muown.params.rounding import DROPPED_BITS, healed, round_stochastically
from angular_muown.stages.charts import Rows
from angular_muown.stages.reductions import WHOLE, Whole

if TYPE_CHECKING:
    from angular_muown.distributed.mesh import Spread

# A step makes up to so many float32 copies of a stack, all told (10 to 11.5 for the rivals' on a
# GPU, benchmarks/step_time.py). With less room than this a GPU would not be filled.
COPIES = 12
LEAST_ROOM = 2**24  # elements


class Piece(NamedTuple):
    """Matrices of one shape out of one parameter: views into its storage and state. Where these
    lie over ranks, this rank's part of them."""

    parameter: Tensor
    W: Tensor
    G: Tensor
    M: Tensor
    rows: Rows
    t: float | Tensor  # the number of this step for Adam, from 1; a tensor if capturable
    sides: tuple[int, int]  # rows and columns of the whole matrices
    corner: tuple[int, int] = (0, 0)  # where this part starts in them

    @property
    def singles(self) -> "list[Piece]":
        """One matrix each."""
        return [
            self._replace(
                W=self.W[i : i + 1],
                G=self.G[i : i + 1],
                M=self.M[i : i + 1],
                rows={name: x[i : i + 1] for name, x in self.rows.items()},
            )
            for i in range(self.W.shape[0])
        ]


@dataclass
class Stack:
    """Equal shapes side by side: (count, m, n). One matrix is the stack with one piece."""

    pieces: list[Piece]
    maximize: bool
    noise: int | Tensor | None  # seed of the stochastic write-back; None rounds to nearest
    sums: Whole = WHOLE
    compute: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.compute = torch.promote_types(self.pieces[0].W.dtype, torch.float32)

    def _gather(self, parts: Sequence[Tensor]) -> Tensor:
        """One part is copied only where it is not contiguous: a step writes nothing before its end,
        and sums along other strides would round otherwise."""
        X = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0].contiguous()
        return X.to(self.compute)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole matrices."""
        return self.pieces[0].sides

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
            W = round_stochastically(W, dtype, self.noise, self.pieces[0].corner)
        self._scatter([piece.W for piece in self.pieces], W)
        self._scatter([piece.M for piece in self.pieces], M)
        for name, values in rows.items():
            self._scatter([piece.rows[name] for piece in self.pieces], values)

    def _scatter(self, parts: list[Tensor], values: Tensor) -> None:
        found = values.split(self.counts) if len(parts) > 1 else (values,)
        pairs = zip(self.pieces, parts, found, strict=True)
        # A parameter without a gradient stays as it is, although its ranks went through the step.
        moved = [(to, value) for piece, to, value in pairs if piece.parameter.grad is not None]
        if moved:
            targets, new = zip(*moved, strict=True)
            torch._foreach_copy_(list(targets), list(new))  # one launch for all of them


@dataclass
class Leaf:
    """A parameter that takes part in this step, with its state, open for reading and writing."""

    parameter: Tensor
    state: dict[str, Any]
    layout: Layout
    spread: "Spread | None" = None  # where others share the work on it
    working: Tensor = field(init=False)
    momentum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        p = local(self.parameter)
        self.momentum = local(self.state["momentum_buffer"])
        if "master" in self.state:
            master = local(self.state["master"])
            self.working = healed(master, p).contiguous()  # it would take over the weight's strides
        elif self.layout.view == "matrix" or p.is_contiguous():
            self.working = p
        else:  # such as a channels_last convolution: matrices of it are no views
            self.working = p.contiguous()

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.working.dtype, torch.float32)

    @property
    def age(self) -> float | Tensor:
        """The number of the step that is under way, which its counter learns of when it is over.
        As a number if it is on the host; one on the device is not waited for."""
        t = self.state["step"]
        return (float(t) if t.device.type == "cpu" else t) + 1

    def pieces(self, row_names: tuple[str, ...]) -> Iterator[Piece]:
        window = self.spread.window if self.spread is not None else None
        vectors = [(name, local(self.state[name])) for name in row_names]
        rows = [self.layout.cut_vector(vector, name, window) for name, vector in vectors]
        tensors = (self.working, local_gradient(self.parameter), self.momentum)
        grid = self.layout.grid(window.m, window.n) if window is not None else []
        cuts = (self.layout.cut(t, window) for t in tensors)
        for i, (W, G, M) in enumerate(zip(*cuts, strict=True)):
            own = {name: parts[i] for name, parts in zip(row_names, rows, strict=True)}
            sides, corner = (W.shape[-2], W.shape[-1]), (0, 0)
            if window is not None:
                part = window.of_block(grid[i])
                sides, corner = (part.m, part.n), (part.rows[0], part.columns[0])
            yield Piece(self.parameter, W, G, M, own, self.age, sides, corner)

    def close(self) -> None:
        """Where the step worked on something else than the parameter and its state, store it."""
        names = [("momentum_buffer", self.momentum)]
        if "master" in self.state:
            names.append(("master", self.working))
        targets = [(local(self.parameter), self.working)]
        targets += [(local(self.state[name]), value) for name, value in names]
        for target, value in targets:
            if target is not value and self.parameter.grad is not None:
                target.copy_(value)


def stacks(leaves: Sequence[Leaf], row_names: tuple[str, ...], group: Group) -> Iterator[Stack]:
    """Pieces of one shape, dtype, device and age go together, as far as there is room."""
    kinds: dict[Any, list[Piece]] = defaultdict(list)
    for leaf in leaves:
        for piece in leaf.pieces(row_names):
            kinds[kind_of(piece)].append(piece)
    elements = sum(leaf.working.numel() for leaf in leaves)
    room = max(LEAST_ROOM, int(group["workspace"] * elements / COPIES))
    for pieces in kinds.values():
        for some in _within(room, pieces):
            yield Stack(some, group["maximize"], seed(group))


def _within(room: int, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """In turn, as many as have so few elements, at least one matrix."""
    some: list[Piece] = []
    taken = 0
    for piece in pieces:
        for one in piece.singles if piece.W.numel() > room else [piece]:
            if some and taken + one.W.numel() > room:
                yield some
                some, taken = [], 0
            some.append(one)
            taken += one.W.numel()
    if some:
        yield some


def kind_of(piece: Piece) -> Any:
    age = None if isinstance(piece.t, Tensor) else piece.t
    return (*piece.sides, piece.W.dtype, piece.W.device, age)
