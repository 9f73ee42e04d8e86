"""Stacks: parameters opened for a step as matrices, those of equal shape side by side."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.distributed.mesh import local, local_gradient
from angular_muown.params.eight_bit import SCALE, decode, encode, is_eight_bit
from angular_muown.params.layout import Layout, Slice2D
from angular_muown.params.options import Group, seed
from angular_muown.params.rounding import DROPPED_BITS, reconcile_master, round_stochastically
from angular_muown.stages.context import State
from angular_muown.stages.reductions import LOCAL, Reductions

if TYPE_CHECKING:
    from angular_muown.distributed.mesh import Sharding

# A step makes at most this many float32 copies of a stack (10 to 11.5 for Hyperball and
# MagnitudeDirection on a GPU, benchmarks/step_time.py).
COPIES = 12
COPIES_OF_EIGHT_BIT = 18  # noise, levels and what lies between them
LEAST_ELEMENTS = 2**24  # of a stack: fewer would not fill a GPU


class MatrixView(NamedTuple):
    """Matrices of one shape from one parameter, as views of its storage and state.

    If the parameter is sharded, these are this rank's parts of the matrices.
    """

    parameter: Tensor
    W: Tensor
    G: Tensor
    M: Tensor
    state: State
    t: float | Tensor  # the number of this step, from 1, for Adam; a tensor if capturable
    sides: tuple[int, int]  # rows and columns of the whole matrices
    corner: tuple[int, int] = (0, 0)  # where this part starts in them

    @property
    def per_matrix(self) -> "list[MatrixView]":
        """Split into views of one matrix each."""
        return [
            self._replace(
                W=self.W[i : i + 1],
                G=self.G[i : i + 1],
                M=self.M[i : i + 1],
                state={name: x[i : i + 1] for name, x in self.state.items()},
            )
            for i in range(self.W.shape[0])
        ]


@dataclass
class Stack:
    """Matrices of equal shape side by side, (count, m, n)."""

    views: list[MatrixView]
    maximize: bool
    noise: int | Tensor | None  # seed of the stochastic write-back; None rounds to nearest
    step: int | Tensor = 0  # seed of 8-bit momentum's rounding
    reductions: Reductions = LOCAL
    compute: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.compute = torch.promote_types(self.views[0].W.dtype, torch.float32)

    def _gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts as one tensor in the compute dtype.

        A single part is copied only if it is not contiguous: a step writes nothing before its end,
        but sums along other strides would round differently.
        """
        X = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0].contiguous()
        return X.to(self.compute)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrices."""
        return self.views[0].sides

    @property
    def t(self) -> float | Tensor:
        if not isinstance(self.views[0].t, Tensor):
            return self.views[0].t
        ages = [torch.as_tensor(view.t).expand(view.W.shape[0]) for view in self.views]
        return torch.cat(ages).view(-1, 1, 1)

    @cached_property
    def counts(self) -> list[int]:
        return [view.W.shape[0] for view in self.views]

    @property
    def counts_by_parameter(self) -> list[tuple[Tensor, int]]:
        """Pairs of parameter and number of matrices, in the stack's order."""
        return [(view.parameter, view.W.shape[0]) for view in self.views]

    def gather_W(self) -> Tensor:
        return self._gather([view.W for view in self.views])

    def gather_G(self) -> Tensor:
        G = self._gather([view.G for view in self.views])
        return -G if self.maximize else G

    @property
    def has_eight_bits(self) -> bool:
        return self.views[0].M.dtype == torch.int8

    def gather_M(self, state: State) -> Tensor:
        M = self._gather([view.M for view in self.views])
        return decode(M, state[SCALE]) if self.has_eight_bits else M

    def gather_state(self) -> State:
        names = self.views[0].state
        return {name: self._gather([view.state[name] for view in self.views]) for name in names}

    def write(self, W: Tensor, M: Tensor, state: State) -> None:
        """Store the results in the parameters and their state, at the end of a step."""
        dtype = self.views[0].W.dtype
        if self.noise is not None and dtype in DROPPED_BITS:
            W = round_stochastically(W, dtype, self.noise, self.views[0].corner)
        if self.has_eight_bits:
            M, state[SCALE] = encode(M, self.step, self.views[0].corner, self.reductions)
        self._scatter([view.W for view in self.views], W)
        self._scatter([view.M for view in self.views], M)
        for name, values in state.items():
            self._scatter([view.state[name] for view in self.views], values)

    def _scatter(self, targets: list[Tensor], values: Tensor) -> None:
        parts = values.split(self.counts) if len(targets) > 1 else (values,)
        # A parameter without a gradient keeps its values, even if its ranks went through the step.
        moved = [
            (target, part)
            for view, target, part in zip(self.views, targets, parts, strict=True)
            if view.parameter.grad is not None
        ]
        if moved:
            to, new = zip(*moved, strict=True)
            torch._foreach_copy_(list(to), list(new))  # one launch for all of them


@dataclass
class OpenParameter:
    """A parameter that takes part in this step, with its state, open for reading and writing."""

    parameter: Tensor
    state: State
    layout: Layout
    sharding: "Sharding | None" = None  # set if ranks share the work
    working: Tensor = field(init=False)
    momentum: Tensor = field(init=False)
    # copies with the rows of each block together, their originals and names, to be stored back
    copies: list[tuple[Tensor, Tensor, str | None]] = field(default_factory=list, init=False)
    order: Tensor | None = field(init=False)  # of the rows, if those of the blocks alternate

    def __post_init__(self) -> None:
        p = local(self.parameter)
        self.order = self.layout.order(p, self._window)
        self.momentum = local(self.state["momentum_buffer"])
        if "master" in self.state:
            master = local(self.state["master"])
            # contiguous: torch.where would take over the weight's strides
            self.working = reconcile_master(master, p).contiguous()
        elif self.layout.view == "matrix" or p.is_contiguous():
            self.working = p
        else:  # such as a channels_last convolution, whose matrices are not views
            self.working = p.contiguous()

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.working.dtype, torch.float32)

    @property
    def t(self) -> float | Tensor:
        """The number of the step in progress; its counter advances when the step is over.

        A number if the counter is on the host. The host does not wait for one on the device.
        """
        t = self.state["step"]
        return (float(t) if t.device.type == "cpu" else t) + 1

    @property
    def _window(self) -> Slice2D | None:
        return self.sharding.window if self.sharding is not None else None

    def views(self, state_names: tuple[str, ...]) -> Iterator[MatrixView]:
        window = self._window
        cut_vectors = [self._cut(local(self.state[name]), name) for name in state_names]
        grid = self.layout.grid(window.m, window.n) if window is not None else []
        G = self.layout.in_order(local_gradient(self.parameter), None, self.order)
        gradients = self.layout.split(G, None, window)
        cuts = (self._cut(self.working), gradients, self._cut(self.momentum))
        for i, (W, G, M) in enumerate(zip(*cuts, strict=True)):
            state = {name: parts[i] for name, parts in zip(state_names, cut_vectors, strict=True)}
            sides, corner = (W.shape[-2], W.shape[-1]), (0, 0)
            if window is not None:
                part = window.of_block(grid[i])
                sides, corner = (part.m, part.n), (part.rows[0], part.columns[0])
            yield MatrixView(self.parameter, W, G, M, state, self.t, sides, corner)

    def _cut(self, t: Tensor, name: str | None = None) -> list[Tensor]:
        """Cut a tensor that the step writes to."""
        X = self.layout.in_order(t, name, self.order)
        if self.order is not None:
            self.copies.append((X, t, name))
        return self.layout.split(X, name, self._window)

    def close(self) -> None:
        """Copy back what the step computed outside the parameter and its state."""
        if self.order is not None and self.parameter.grad is not None:
            for X, t, name in self.copies:
                self.layout.store(X, t, name, self.order)
        names = [("momentum_buffer", self.momentum)]
        if "master" in self.state:
            names.append(("master", self.working))
        targets = [(local(self.parameter), self.working)]
        targets += [(local(self.state[name]), value) for name, value in names]
        for target, value in targets:
            if target is not value and self.parameter.grad is not None:
                target.copy_(value)


def stacks(
    opened: Sequence[OpenParameter], state_names: tuple[str, ...], group: Group
) -> Iterator[Stack]:
    """Stack views of one shape, dtype, device and age, as far as the workspace allows."""
    kinds: dict[Any, list[MatrixView]] = defaultdict(list)
    for one in opened:
        for view in one.views(state_names):
            kinds[kind_of(view)].append(view)
    elements = sum(one.working.numel() for one in opened)
    copies = COPIES_OF_EIGHT_BIT if is_eight_bit(group) else COPIES
    limit = max(LEAST_ELEMENTS, int(group["workspace"] * elements / copies))
    for views in kinds.values():
        for batch in _batches(limit, views):
            yield Stack(batch, group["maximize"], seed(group), group["step"])


def _batches(limit: int, views: Sequence[MatrixView]) -> Iterator[list[MatrixView]]:
    """Group views in order, each batch with at most `limit` elements or a single matrix."""
    batch: list[MatrixView] = []
    taken = 0
    for view in views:
        for one in view.per_matrix if view.W.numel() > limit else [view]:
            if batch and taken + one.W.numel() > limit:
                yield batch
                batch, taken = [], 0
            batch.append(one)
            taken += one.W.numel()
    if batch:
        yield batch


def kind_of(view: MatrixView) -> Any:
    """A key that is equal for views that can share a stack."""
    t = None if isinstance(view.t, Tensor) else view.t
    return (*view.sides, view.W.dtype, view.M.dtype == torch.int8, view.W.device, t)
