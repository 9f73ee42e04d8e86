"""Launches for some matrices of one kind, their order on streams, and their share of memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from angular_muown.kernels import products
from angular_muown.kernels.columns import CHORD, STATS
from angular_muown.kernels.coverage import CHARTS, RADII
from angular_muown.kernels.pointers import Kind
from angular_muown.kernels.polar_chain import SCALE, Places, Product, modelled_microseconds
from angular_muown.kernels.triton.rows import (
    after_kernel,
    before_kernel,
    normalize_kernel,
    scales_kernel,
    second_moment_kernel,
    squares_kernel,
)
from angular_muown.params.options import Group
from angular_muown.params.rounding import DROPPED_BITS
from angular_muown.stages.charts import chord_angle
from angular_muown.stages.normalize import RowSecondMoment
from angular_muown.stages.orthogonalize import Iteration
from angular_muown.update import Recipe

# Ways to spend it, the fastest first: lanes, and whether cuBLAS computes the products with X. With
# cuBLAS a third lane is slower. Without it, which is how small models go, a lane costs nothing, and
# four keep the GPU filled (docs/performance.md has the times).
WAYS = ((2, True), (4, False), (2, False), (1, True), (1, False))
CUBLAS_WORKSPACE = 32 * 2**20  # bytes that torch gives cuBLAS for every stream on these GPUs
CUBLAS_SHARE = 4  # it is 5 to 10% faster than a kernel of our own: worth a quarter of the room


@dataclass(frozen=True)
class Budget:
    streams: int
    words: int  # float16, of each lane
    cublas: bool  # whether cuBLAS computes the products with X; its workspaces count


def divide(budget: int, matrices: Sequence[int]) -> Budget:
    """Room in `budget` bytes for matrices that take so many words each. A matrix must be whole:
    where one lane alone is too small, the budget is exceeded."""
    for streams, cublas in WAYS:
        workspaces = cublas * streams * CUBLAS_WORKSPACE
        room = Budget(streams, (budget - workspaces) // (2 * streams), cublas)
        if CUBLAS_SHARE * workspaces <= budget and max(matrices) <= room.words:
            return room
    return Budget(1, budget // 2, False)


# A chunk: some matrices of one kind that pass through the work buffer together.

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ROW_ELEMENTS = 2048  # of a row kernel's program
TURN_TILE = 64
ROW_BYTES, BANDWIDTH = 32, 4.2e6  # per element, and per microsecond on an H200
BLOCK = 1024  # rows at a time, where one program looks at all of them


@dataclass(frozen=True)
class Choices:
    """What decides which code runs; numbers are not among it."""

    chart: int
    radius: int
    factors: bool
    nesterov: bool
    maximize: bool
    noise: bool
    iteration: Iteration

    def draws(self, dtype: torch.dtype) -> bool:
        """Whether weights of this type are rounded by chance."""
        return self.noise and dtype in DROPPED_BITS

    @staticmethod
    def of(recipe: Recipe, group: Group) -> "Choices":
        assert isinstance(recipe.orthogonalize, Iteration), "coverage.knows comes first"
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
    """All matrices of one kind: `count` lines of the table from `start` on."""

    kind: Kind
    start: int
    count: int
    chain: tuple[Product, ...]
    places: Places

    @property
    def words(self) -> int:
        """float16 words that a matrix takes in the work buffer, row statistics included."""
        return self.places.size + 2 * STATS * self.kind[0]

    @property
    def microseconds(self) -> float:
        """For one matrix, as modelled."""
        m, n, *_ = self.kind
        return modelled_microseconds(m, n, self.chain) + ROW_BYTES * m * n / BANDWIDTH

    def chunk(self, room: Budget) -> int:
        """Matrices at a time: as many as fit into a lane, evenly, with something for each lane."""
        fitting = max(1, room.words // self.words)
        return -(-self.count // max(room.streams, -(-self.count // fitting)))


@dataclass(frozen=True)
class Chunk:
    choices: Choices
    batch: Batch
    size: float  # Frobenius norm that the iteration starts from
    first: int  # matrix of the batch
    count: int
    lines: Tensor  # of the table, from this chunk's first matrix on
    numbers: Tensor  # this kind's scalars
    ages: Tensor  # Adam's bias corrections, from this chunk's first matrix on
    work: Tensor  # this chunk's lane of the buffer
    stream: int
    cublas: bool

    @cached_property
    def X(self) -> Tensor:
        size = self.batch.places.size
        return self.work[: self.count * size].view(self.count, size)

    @cached_property
    def stats(self) -> Tensor:
        start = self.count * self.batch.places.size
        return self.work[start : start + 2 * STATS * self.count * self.batch.kind[0]].view(
            torch.float32
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch.places.size, self.count, self.batch.kind[0], self.batch.kind[1]

    @property
    def tile(self) -> tuple[int, int]:
        columns = triton.next_power_of_2(self.batch.kind[1])
        return max(1, ROW_ELEMENTS // columns), columns

    def _launch(self, kernel: Any, *args: Any) -> None:
        """A row kernel over all rows: `args`, then the tile."""
        height, columns = self.tile
        warps = min(16, max(4, height * columns // 1024))
        grid = (triton.cdiv(self.batch.kind[0], height), self.count)
        kernel[grid](*args, height, columns, num_warps=warps)

    def run(self, observed: bool = False) -> None:
        self._before()
        batch = self.batch
        products.run(self.X, *batch.kind[:2], batch.chain, batch.places, self.cublas)
        self._after(observed)

    @property
    def Q(self) -> Tensor:
        """The polar factors, once they are computed, in float32."""
        m, n, *_ = self.batch.kind
        start = self.batch.places.offsets[-1]
        return self.X[:, start : start + m * n].unflatten(1, (m, n)).float() / SCALE

    @property
    def angles(self) -> Tensor:
        """(count, m): radians that the rows turned by in an observed run."""
        return chord_angle(self.stats.view(STATS, self.count, -1)[CHORD].sqrt())

    def _before(self) -> None:
        _, _, m, n = self.shape
        choices, types = self.choices, [TYPES[dtype] for dtype in self.batch.kind[2:]]
        raw = self.X[:, self.batch.places.raw :]
        flags = (choices.chart, choices.nesterov, choices.maximize)
        self._launch(
            before_kernel, self.lines, self.numbers, self.stats, raw, *self.shape, *flags, *types
        )
        scales: Any = scales_kernel[(self.count,)]
        scales(self.stats, self.count, m, self.size, BLOCK)
        tiles = triton.cdiv(n, TURN_TILE)
        normalize: Any = normalize_kernel[triton.cdiv(m, TURN_TILE) * tiles, self.count]
        normalize(self.stats, raw, self.X, *self.shape, tiles, m < n, TURN_TILE)

    def _after(self, observed: bool) -> None:
        choices, types = self.choices, [TYPES[dtype] for dtype in self.batch.kind[2:]]
        Q = self.X[:, self.batch.places.offsets[-1] :]
        if choices.factors:
            self._launch(squares_kernel, self.stats, Q, *self.shape, 1 / SCALE)
            moments: Any = second_moment_kernel[(self.count,)]
            moments(self.lines, self.numbers, self.stats, *self.shape[1:], BLOCK)
        noise = choices.draws(self.batch.kind[2])
        flags = (choices.chart, choices.radius, choices.factors, choices.maximize, noise, observed)
        tables = (self.lines, self.numbers, self.ages, self.stats)
        self._launch(after_kernel, *tables, Q, *self.shape, 1 / SCALE, *flags, *types)


# Order of a step's launches.


def launch(chunks: Sequence[Chunk], device: torch.device, count: int) -> None:
    """Chunks in `count` lanes, each with its part of the work buffer: the tiles of one fill the
    processors that the last tiles of the other leave idle."""
    if device.type != "cuda":
        for chunk in chunks:
            chunk.run()
        return
    current = torch.cuda.current_stream(device)
    streams = [current, *(side_stream(device, f"lane {i}") for i in range(1, count))]
    for stream in streams[1:]:
        stream.wait_stream(current)
    for chunk in chunks:
        with torch.cuda.stream(streams[chunk.stream]):
            chunk.run()
    for stream in streams[1:]:
        current.wait_stream(stream)


def record(chunks: Sequence[Chunk], device: torch.device, count: int) -> torch.cuda.CUDAGraph:
    """The launches as a graph."""
    # cuBLAS keeps a workspace per stream. The graph's must be its own: others may free theirs.
    torch._C._cuda_clearCublasWorkspaces()
    graph = _captured(lambda: launch(chunks, device, count), device, _keeper(device).pool())
    torch._C._cuda_clearCublasWorkspaces()
    return graph


@cache
def _keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """Holds the memory pool that all optimizers' graphs share: what they allocate (cuBLAS's
    workspaces, 32 MiB for each lane) is there once. A pool ends with the last graph in it."""
    return _captured(lambda: torch.zeros(1, device=device), device, None)


def _captured(work: Callable[[], Any], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), side_stream(device, "capture")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # thread_local: other threads (data loaders, NCCL's watchdog) may use the GPU meanwhile
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph


@cache
def side_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
