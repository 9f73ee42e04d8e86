"""Tables of the matrices' addresses, and the transfer of tables and scalars to the device."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.kernels.columns import (
    ADDRESSES,
    ENTRY,
    ROW_STATE,
    ROW_STRIDE,
    STATE_STRIDE,
)
from angular_muown.params.layout import Layout, Slice2D
from angular_muown.stages.context import State


class Addresses(NamedTuple):
    """Addresses per parameter, and the gradients' properties that an address does not show."""

    weights: list[int]
    gradients: list[int]
    momenta: list[int]
    counters: list[int]
    state: list[list[int]]  # for each of ROW_STATE; empty if the method does not keep it
    dtypes: list[torch.dtype]  # of gradients
    dense: list[bool]

    @property
    def persistent(self) -> tuple[list[int], list[int], list[int], list[list[int]]]:
        """All addresses but the gradients', which may change at every step."""
        return self.weights, self.momenta, self.counters, self.state


def addresses_of(params: Sequence[Tensor], states: Sequence[State]) -> Addresses:
    """Return the current addresses. Called at every step; `map` costs the host least."""
    grads: list[Any] = [p.grad for p in params]
    names = [name for name in ROW_STATE if name in states[0]]
    vectors = {name: [state[name] for state in states] for name in names}
    return Addresses(
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
def matrix_offsets(
    shape: torch.Size, layout: Layout, window: Slice2D | None = None
) -> tuple[MatrixOffsets, ...]:
    """Return the offsets of a parameter's matrices, by applying the layout to meta tensors.

    With a window, `shape` is that of this part alone, and each block has its own offsets.
    """
    weight = torch.empty(shape, device="meta")
    state = torch.empty(layout.vector_shape(weight, window=window), device="meta")

    def starts(t: Tensor) -> tuple[int, ...]:
        return tuple(int(t.storage_offset()) + i * t.stride(0) for i in range(t.shape[0]))

    return tuple(
        MatrixOffsets(W.shape[1], W.shape[2], starts(W), W.stride(1), starts(rows), rows.stride(1))
        for W, rows in zip(
            layout.cut(weight, window), layout.cut_vector(state, "", window), strict=True
        )
    )


MatrixKind = tuple[int, int, torch.dtype, torch.dtype, torch.dtype]  # m, n, dtypes of W, G, M


@dataclass
class Table:
    """One entry per matrix of the parameters; matrices of one kind are adjacent."""

    kinds: dict[MatrixKind, int]  # -> number of matrices, in the table's order
    owner: Tensor  # (matrices,) index of the parameter that a matrix belongs to
    relative: Tensor  # (matrices, ENTRY): byte offsets within tensors, and strides

    def resolve(self, addresses: Addresses) -> Tensor:
        """Return the entries with absolute addresses of W, G, M and row state.

        Row state that the method does not keep gets an address that no kernel reads.
        """
        state = [vector or [0] * len(addresses.weights) for vector in addresses.state]
        columns = [addresses.weights, addresses.gradients, addresses.momenta, *state]
        bases = torch.tensor(columns, dtype=torch.int64, device="cpu").mT
        entries = self.relative.clone()
        entries[:, ADDRESSES] += bases[self.owner]
        return entries


def dtypes_of(p: Tensor, state: State) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of weight, gradient and momentum."""
    assert p.grad is not None
    return p.dtype, p.grad.dtype, state["momentum_buffer"].dtype


def table_entry(
    start: int, state_start: int, dtypes: Sequence[torch.dtype], stride: int, state_stride: int
) -> list[int]:
    """Return a matrix's entry, with byte offsets in place of addresses."""
    entry = [0] * ENTRY
    offsets = [start * dtype.itemsize for dtype in dtypes]
    offsets += [state_start * torch.float32.itemsize] * len(ROW_STATE)
    for column, offset in zip(ADDRESSES, offsets, strict=True):
        entry[column] = offset
    entry[ROW_STRIDE], entry[STATE_STRIDE] = stride, state_stride
    return entry


def build_table(params: Sequence[Tensor], states: Sequence[State], layout: Layout) -> Table:
    """Build the table of all matrices of the parameters."""
    by_kind: dict[MatrixKind, list[tuple[list[int], int]]] = defaultdict(list)
    for index, (p, state) in enumerate(zip(params, states, strict=True)):
        dtypes = dtypes_of(p, state)
        for piece in matrix_offsets(p.shape, layout):
            for start, state_start in zip(piece.offsets, piece.state_offsets, strict=True):
                entry = table_entry(start, state_start, dtypes, piece.stride, piece.state_stride)
                by_kind[piece.m, piece.n, *dtypes].append((entry, index))
    flat = [pair for pairs in by_kind.values() for pair in pairs]
    # on the host, whatever the default device is
    relative, owner = (
        torch.tensor(part, dtype=torch.int64, device="cpu") for part in zip(*flat, strict=True)
    )
    return Table({kind: len(pairs) for kind, pairs in by_kind.items()}, owner, relative)


# Asynchronous copies of small tensors from the host to a fixed tensor on the device.

SLOTS = 32  # copies in flight; the host waits if it is further ahead


class PinnedRing:
    """A ring of pinned buffers from which the device copies while the host continues.

    The buffers are pinned once, because pinning memory is a driver call. Pinning at every step
    would need new memory each time that the device lags behind.
    """

    def __init__(self, target: Tensor) -> None:
        self.target, self.sent = target, 0
        self.slots: list[Tensor] = []
        self.copied: list[torch.cuda.Event] = []

    def send(self, values: Tensor) -> None:
        """Copy `values` to the target, in the order of the current stream."""
        if self.target.device.type != "cuda":
            self.target.copy_(values)
            return
        if not self.slots:
            shape, dtype = (SLOTS, *self.target.shape), self.target.dtype
            pinned = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            self.slots = list(pinned.unbind())
            self.copied = [torch.cuda.Event() for _ in range(SLOTS)]
        slot, copied = self.slots[self.sent % SLOTS], self.copied[self.sent % SLOTS]
        copied.synchronize()  # returns at once if the event was never recorded
        slot.copy_(values)
        self.target.copy_(slot, non_blocking=True)
        copied.record(torch.cuda.current_stream(self.target.device))
        self.sent += 1
