"""The fused step of a group: tables, chunks through a bounded work buffer, launches.

All addresses and numbers are read from small tensors on the device, so the launches of a step are
the same from step to step whatever moves: gradients, learning rate, kappa, momentum.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from angular_muown.kernels import products
from angular_muown.kernels.after import after_kernel
from angular_muown.kernels.dispatch import CHARTS, ITERATIONS, RADII
from angular_muown.kernels.rows import (
    before_kernel,
    normalize_kernel,
    second_moment_kernel,
    squares_kernel,
)
from angular_muown.kernels.schedule import SCALE, Places, Product, allocate, chain_for
from angular_muown.kernels.tables import ROW_STATE, Kind, table
from angular_muown.recipe import Recipe
from angular_muown.rounding import DROPPED_BITS
from angular_muown.stages.normalize import RowSecondMoment
from angular_muown.views import Layout

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NUMBERS = 12  # scalars per kind of matrix; named in rows.py
STATS = 4  # row vectors between the kernels; named in rows.py
TILE_ELEMENTS = 4096  # of a row kernel's program
LANES = 2


@dataclass(frozen=True)
class Choices:
    """What decides which code runs; numbers are not among it."""

    chart: int
    radius: int
    factors: bool
    nesterov: bool
    maximize: bool
    noise: bool
    iteration: Any

    @staticmethod
    def of(recipe: Recipe, group: dict[str, Any]) -> "Choices":
        return Choices(
            CHARTS[type(recipe.chart)],
            RADII[type(recipe.radius)],
            isinstance(recipe.normalize, RowSecondMoment),
            group["nesterov"],
            group["maximize"],
            group["write_back"] == "stochastic",
            recipe.orthogonalize,
        )


@dataclass(frozen=True)
class Batch:
    """Matrices of one kind: lines start .. start + count of the table."""

    kind: Kind
    start: int
    count: int
    chain: tuple[Product, ...]
    places: Places
    chunk: int  # matrices at a time

    @property
    def floats(self) -> int:
        """float16 words of a chunk's work, its row statistics included."""
        return self.chunk * words(self.kind, self.places)


def words(kind: Kind, places: Places) -> int:
    return places.size + 2 * STATS * kind[0]


class FusedStep:
    """The covered parameters of one group."""

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        layout: Layout,
        choices: Choices,
        budget: int,
    ) -> None:
        self.params, self.states, self.choices = list(params), list(states), choices
        self.device = params[0].device
        self.gradients = [p.grad.dtype for p in params if p.grad is not None]
        self.known = table(params, states, layout)
        self.triples, self.margin = ITERATIONS[choices.iteration]
        self.batches: list[Batch] = []
        start = 0
        for kind, count in self.known.kinds.items():
            self.batches.append(self._batch(kind, start, count, budget))
            start += count
        self.lane_words = max(batch.floats for batch in self.batches)
        self.chunks = [
            (batch, first, min(batch.chunk, batch.count - first))
            for batch in self.batches
            for first in range(0, batch.count, batch.chunk)
        ]
        self.lines = torch.empty_like(self.known.fixed, device=self.device)
        size = NUMBERS * len(self.batches) + 2 * start
        self.values = torch.empty(size, dtype=torch.float32, device=self.device)
        self.seen: list[tuple[int, int, int]] = []
        # Counters of one group side by side, so that one addition advances them all.
        self.steps = torch.stack([state["step"] for state in states])
        self.rows: list[dict[str, Tensor]] = []
        for state, step in zip(states, self.steps.unbind(), strict=True):
            state["step"] = step
            self.rows.append({k: state[k] for k in ("step", *ROW_STATE) if k in state})
        self.launched = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def _batch(self, kind: Kind, start: int, count: int, budget: int) -> Batch:
        chain = chain_for(kind[0], kind[1], self.triples)
        places = allocate(kind[0], kind[1], chain)
        fitting = max(1, budget // (2 * LANES * words(kind, places)))
        chunks = -(-count // fitting)
        return Batch(kind, start, count, chain, places, -(-count // chunks))

    @property
    def workspace(self) -> int:
        """float16 words that a step needs."""
        return LANES * self.lane_words

    def look(self) -> list[tuple[int, int, int]]:
        """Where weights, gradients and momenta lie now."""
        grads: list[Any] = [p.grad for p in self.params]
        return [
            (p.data_ptr(), grad.data_ptr(), state["momentum_buffer"].data_ptr())
            for p, grad, state in zip(self.params, grads, self.states, strict=True)
        ]

    def owns_state(self) -> bool:
        """Whether the row state is still the tensors that the table points at."""
        return all(
            state[name] is kept
            for state, row in zip(self.states, self.rows, strict=True)
            for name, kept in row.items()
        )

    def refresh(self, places: list[tuple[int, int, int]], values: Tensor) -> None:
        """Bring addresses and this step's numbers onto the device."""
        if places != self.seen:
            _send(self.known.lines(places, self.rows), self.lines)
            self.seen = places
        _send(values, self.values)

    def run(self, work: Tensor) -> None:
        """The launches, from the second step on as one graph: a hundred launches cost the host
        more time than the GPU needs for a small model."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            self.launch(work)
        elif not self.launched:  # compiles, and allocates what libraries allocate at first use
            self.launch(work)
            self.launched = True
        else:
            if self.graph is None:
                self.graph = self._capture(work)
            self.graph.replay()

    def _capture(self, work: Tensor) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # thread_local: other threads (data loaders, NCCL's watchdog) may use the GPU meanwhile
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.launch(work)
            finally:
                graph.capture_end()
        return graph

    def launch(self, work: Tensor) -> None:
        """Chunks in two lanes, each with its half of the buffer: while one of them waits for
        memory, the other one multiplies."""
        halves = work[: self.lane_words], work[self.lane_words : LANES * self.lane_words]
        with _lanes(self.device) as lanes:
            for number, (batch, first, count) in enumerate(self.chunks):
                with lanes[number % LANES]:
                    self._launch_chunk(batch, first, count, halves[number % LANES])

    def _launch_chunk(self, batch: Batch, first: int, count: int, work: Tensor) -> None:
        m, n, *dtypes = batch.kind
        lines = self.lines[batch.start + first :]
        numbers = self.values[self.batches.index(batch) * NUMBERS :]
        ages = self.values[NUMBERS * len(self.batches) :][2 * (batch.start + first) :]
        choices, places = self.choices, batch.places
        X = work[: count * places.size].view(count, places.size)
        rows = work[count * places.size :][: 2 * STATS * count * m]
        stats = rows.view(torch.float32)
        Q = X[:, places.offsets[-1] :]
        columns = triton.next_power_of_2(n)
        height = max(1, TILE_ELEMENTS // columns)
        warps = min(16, max(4, columns * height // 1024))
        grid = (triton.cdiv(m, height), count)
        shape = (places.size, count, m, n)
        types = [TYPES[dtype] for dtype in dtypes]
        before_kernel[grid](
            lines, numbers, stats, X, *shape, choices.chart, choices.nesterov, choices.maximize,
            *types, height, columns, num_warps=warps,
        )  # fmt: skip
        normalize_kernel[min(grid[0], 64), count](
            stats, X, *shape, SCALE / self.margin, height, columns, 1024, num_warps=warps
        )
        products.run(X, m, n, batch.chain, places)
        if choices.factors:
            squares_kernel[grid](stats, Q, *shape, 1 / SCALE, height, columns, num_warps=warps)
            second_moment_kernel[(count,)](lines, numbers, stats, count, m, n, 1024)
        noise = choices.noise and dtypes[0] in DROPPED_BITS
        after_kernel[grid](
            lines, numbers, ages, stats, Q, *shape, 1 / SCALE, choices.chart, choices.radius,
            choices.factors, choices.maximize, noise, *types, height, columns,
            num_warps=warps,
        )  # fmt: skip


@contextmanager
def _lanes(device: torch.device) -> Iterator[list[AbstractContextManager[Any]]]:
    """The current stream and others that start after it and are waited for."""
    if device.type != "cuda":
        yield [nullcontext()] * LANES
        return
    current = torch.cuda.current_stream(device)
    others = [_side_stream(device, i) for i in range(1, LANES)]
    for other in others:
        other.wait_stream(current)
    yield [torch.cuda.stream(current), *(torch.cuda.stream(other) for other in others)]
    for other in others:
        current.wait_stream(other)


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _send(values: Tensor, to: Tensor) -> None:
    if to.device.type == "cuda":
        values = values.pin_memory()
    to.copy_(values, non_blocking=True)
