"""Where matrices lie, as lines of addresses, and how these and scalars get to the device."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.kernels.columns import (
    ADDRESSES,
    LINE,
    ROW_STATE,
    ROW_STRIDE,
    STATE_STRIDE,
)
from angular_muown.params.layout import Layout
from angular_muown.stages.context import State


class Where(NamedTuple):
    """Addresses, each a list over the parameters, and what could differ at the same ones."""

    weights: list[int]
    gradients: list[int]
    momenta: list[int]
    counters: list[int]
    state: list[list[int]]  # for each of ROW_STATE; empty for what is not kept
    dtypes: list[torch.dtype]  # of gradients
    dense: list[bool]

    @property
    def own(self) -> tuple[Any, ...]:
        """All but the gradients, which may come at new places."""
        return self.weights, self.momenta, self.counters, self.state


def where(params: Sequence[Tensor], states: Sequence[State]) -> Where:
    """Looked up at every step: hence `map`, which costs the host least."""
    grads: list[Any] = [p.grad for p in params]
    kept = [name for name in ROW_STATE if name in states[0]]
    vectors = {name: [state[name] for state in states] for name in kept}
    return Where(
        list(map(Tensor.data_ptr, params)),
        list(map(Tensor.data_ptr, grads)),
        list(map(Tensor.data_ptr, [state["momentum_buffer"] for state in states])),
        list(map(Tensor.data_ptr, [state["step"] for state in states])),
        [list(map(Tensor.data_ptr, vectors.get(name, []))) for name in ROW_STATE],
        [grad.dtype for grad in grads],
        list(map(Tensor.is_contiguous, grads)),
    )


class MatrixOffsets(NamedTuple):
    """Matrices of one shape in a parameter: element offsets, and strides between rows."""

    m: int
    n: int
    offsets: tuple[int, ...]
    stride: int
    state_offsets: tuple[int, ...]
    state_stride: int


@cache
def pieces(shape: torch.Size, layout: Layout) -> tuple[MatrixOffsets, ...]:
    """The layout's own cut, read off tensors without data."""
    weight = torch.empty(shape, device="meta")
    state = torch.empty(layout.vector_shape(weight), device="meta")

    def starts(t: Tensor) -> tuple[int, ...]:
        return tuple(int(t.storage_offset()) + i * t.stride(0) for i in range(t.shape[0]))

    return tuple(
        MatrixOffsets(W.shape[1], W.shape[2], starts(W), W.stride(1), starts(rows), rows.stride(1))
        for W, rows in zip(layout.cut(weight), layout.cut_vector(state), strict=True)
    )


Kind = tuple[int, int, torch.dtype, torch.dtype, torch.dtype]  # m, n and the dtypes of W, G, M


@dataclass
class Table:
    """Lines for all matrices of some parameters, those of one kind next to each other."""

    kinds: dict[Kind, int]  # -> number of matrices, in the table's order
    owner: Tensor  # (matrices,) which parameter a matrix belongs to
    fixed: Tensor  # (matrices, LINE): byte offsets and strides

    def lines(self, at: Where) -> Tensor:
        """With the addresses now: of W, G, M, and of the row state, 0 for what is not kept."""
        state = [addresses or [0] * len(at.weights) for addresses in at.state]
        columns = [at.weights, at.gradients, at.momenta, *state]
        addresses = torch.tensor(columns, dtype=torch.int64, device="cpu").mT
        lines = self.fixed.clone()
        lines[:, ADDRESSES] += addresses[self.owner]
        return lines


def dtypes_of(p: Tensor, state: State) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    assert p.grad is not None
    return p.dtype, p.grad.dtype, state["momentum_buffer"].dtype


def table(params: Sequence[Tensor], states: Sequence[State], layout: Layout) -> Table:
    lines: dict[Kind, list[tuple[list[int], int]]] = defaultdict(list)
    for index, (p, state) in enumerate(zip(params, states, strict=True)):
        dtypes = dtypes_of(p, state)
        sizes = [dtype.itemsize for dtype in dtypes]
        for piece in pieces(p.shape, layout):
            for at, at_state in zip(piece.offsets, piece.state_offsets, strict=True):
                line = [0] * LINE
                offsets = [at * size for size in sizes] + [at_state * 4] * len(ROW_STATE)
                for column, offset in zip(ADDRESSES, offsets, strict=True):
                    line[column] = offset
                line[ROW_STRIDE], line[STATE_STRIDE] = piece.stride, piece.state_stride
                lines[piece.m, piece.n, *dtypes].append((line, index))
    flat = [line for kind in lines.values() for line in kind]
    # on the host, whatever the default device is
    fixed, owner = (
        torch.tensor(part, dtype=torch.int64, device="cpu") for part in zip(*flat, strict=True)
    )
    return Table({kind: len(own) for kind, own in lines.items()}, owner, fixed)


# Small tensors from the host to their place on the device, without waiting for it.

PLACES = 32  # letters on their way; the host waits when it is that many steps ahead


class PinnedRing:
    """The device reads pinned memory by itself while the host goes on. It is pinned once: pinned
    for every step, it would be new memory each time while the device is some steps behind, and to
    pin it is a call to the driver."""

    def __init__(self, to: Tensor) -> None:
        self.to, self.sent = to, 0
        self.places: list[Tensor] = []
        self.read: list[torch.cuda.Event] = []

    def send(self, values: Tensor) -> None:
        if self.to.device.type != "cuda":
            self.to.copy_(values)
            return
        if not self.places:
            shape, kind = (PLACES, *self.to.shape), self.to.dtype
            pinned = torch.empty(shape, dtype=kind, device="cpu", pin_memory=True)
            self.places = list(pinned.unbind())
            self.read = [torch.cuda.Event() for _ in range(PLACES)]
        place, read = self.places[self.sent % PLACES], self.read[self.sent % PLACES]
        read.synchronize()  # returns at once for one that was never recorded
        place.copy_(values)
        self.to.copy_(place, non_blocking=True)
        read.record(torch.cuda.current_stream(self.to.device))
        self.sent += 1
