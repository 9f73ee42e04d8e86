"""Kernel launches for chunks of matrices, their order on streams, and their memory budget."""

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
from angular_muown.kernels.pointers import MatrixKind
from angular_muown.kernels.polar_chain import SCALE, Allocation, Product, modelled_microseconds
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

# Ways to spend the budget, fastest first: the number of streams, and whether cuBLAS computes the
# products with X. With cuBLAS, a third stream is slower. Without it, which is the case for small
# models, streams cost no memory, and four keep the GPU busy (docs/explanation/kernels.md has the
# times).
CONFIGURATIONS = ((2, True), (4, False), (2, False), (1, True), (1, False))
CUBLAS_WORKSPACE = 32 * 2**20  # bytes that torch allocates for cuBLAS per stream on these GPUs
CUBLAS_SHARE = 4  # cuBLAS is 5 to 10% faster than our kernel: worth a quarter of the budget


@dataclass(frozen=True)
class Budget:
    """How an optimizer's workspace is divided."""

    streams: int
    words: int  # float16 words of work buffer per stream
    cublas: bool  # cuBLAS computes the products with X; its workspaces count


def divide(budget: int, matrices: Sequence[int]) -> Budget:
    """Divide `budget` bytes for matrices of the given sizes in words.

    A matrix cannot be split: if the largest does not fit even a single stream, the step exceeds the
    budget.
    """
    for streams, cublas in CONFIGURATIONS:
        workspaces = cublas * streams * CUBLAS_WORKSPACE
        divided = Budget(streams, (budget - workspaces) // (2 * streams), cublas)
        if CUBLAS_SHARE * workspaces <= budget and max(matrices) <= divided.words:
            return divided
    return Budget(1, budget // 2, False)


# A chunk: matrices of one kind that pass through the work buffer together.

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,  # momentum alone
}
ROW_ELEMENTS = 2048  # per program of a row kernel
WARP_ELEMENTS = 1024  # per warp of one, if rows are longer
# Rounding to 8 bits takes registers. Without a bound the compiler uses so many that half as many
# rows of 8,192 entries run concurrently as with a float32 momentum (benchmarks/registers.py). Where
# ranks share rows, any momentum takes more than the bound: registers would spill to memory.
WARP_ELEMENTS_8_BIT, REGISTERS_8_BIT = 512, 64
TRANSPOSE_TILE = 64
ROW_BYTES, BANDWIDTH = 32, 4.2e6  # bytes per element, bytes per microsecond on an H200
BLOCK = 1024  # rows at a time, in kernels whose programs read all rows of a matrix


@dataclass(frozen=True)
class Choices:
    """What the kernels are specialized for; scalars are passed at run time."""

    chart: int
    radius: int
    factors: bool
    nesterov: bool
    maximize: bool
    noise: bool
    iteration: Iteration

    def draws(self, dtype: torch.dtype) -> bool:
        """True if weights of this dtype are rounded stochastically."""
        return self.noise and dtype in DROPPED_BITS

    def needs_seed(self, weight: torch.dtype, _: torch.dtype, momentum: torch.dtype) -> bool:
        """True if a step with these dtypes rounds anything stochastically."""
        return self.draws(weight) or momentum == torch.int8

    @staticmethod
    def of(recipe: Recipe, group: Group) -> "Choices":
        assert isinstance(recipe.orthogonalize, Iteration), "check coverage.knows(recipe) first"
        return Choices(
            CHARTS[type(recipe.chart)],
            RADII[type(recipe.radius)],
            isinstance(recipe.normalize, RowSecondMoment),
            group["nesterov"],
            group["maximize"],
            group["write_back"] == "stochastic",
            recipe.orthogonalize,
        )


def words_of(allocation: Allocation, m: int) -> int:
    """Return the float16 words of an m-row matrix in the work buffer, with its row statistics."""
    return allocation.size + 2 * STATS * m


@dataclass(frozen=True)
class Batch:
    """All matrices of one kind: `count` entries of the table from `start` on."""

    kind: MatrixKind
    start: int
    count: int
    chain: tuple[Product, ...]
    allocation: Allocation

    @property
    def words(self) -> int:
        return words_of(self.allocation, self.kind[0])

    @property
    def microseconds(self) -> float:
        """The estimated time for one matrix."""
        m, n, *_ = self.kind
        return modelled_microseconds(m, n, self.chain) + ROW_BYTES * m * n / BANDWIDTH

    def chunk_size(self, budget: Budget) -> int:
        """Return how many matrices to process at a time.

        Chunks are as large as fits a stream's buffer, equal in size, and enough for all streams.
        """
        fitting = max(1, budget.words // self.words)
        return -(-self.count // max(budget.streams, -(-self.count // fitting)))


@dataclass(frozen=True)
class Chunk:
    """Matrices `first` to `first + count` of a batch, and the device memory of their step."""

    choices: Choices
    batch: Batch
    size: float  # Frobenius norm that the iteration starts from
    first: int
    count: int
    table: Tensor  # entries from this chunk's first matrix on
    scalars: Tensor  # of this kind of matrix
    bias_corrections: Tensor  # Adam's, from this chunk's first matrix on
    work: Tensor  # the work buffer, from the part of this chunk's stream on
    stream: int
    cublas: bool

    @cached_property
    def X(self) -> Tensor:
        size = self.batch.allocation.size
        return self.work[: self.count * size].view(self.count, size)

    @cached_property
    def stats(self) -> Tensor:
        start = self.count * self.batch.allocation.size
        return self.work[start : start + 2 * STATS * self.count * self.batch.kind[0]].view(
            torch.float32
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Stride between matrices in the work buffer, their number, m and n."""
        return self.batch.allocation.size, self.count, self.batch.kind[0], self.batch.kind[1]

    def _launch(self, kernel: Any, *args: Any, eight_bit: bool = False) -> None:
        m, n, *_ = self.batch.kind
        launch_rows(kernel, m, n, self.count, *args, eight_bit=eight_bit)

    def run(self, observed: bool = False) -> None:
        """Launch the step; if `observed`, store the rows' angles as well."""
        self._before()
        batch = self.batch
        products.run(self.X, *batch.kind[:2], batch.chain, batch.allocation, self.cublas)
        self._after(observed)

    @property
    def Q(self) -> Tensor:
        """The polar factors in float32, after `run`."""
        m, n, *_ = self.batch.kind
        start = self.batch.allocation.offsets[-1]
        return self.X[:, start : start + m * n].unflatten(1, (m, n)).float() / SCALE

    @property
    def angles(self) -> Tensor:
        """(count, m): the angles in radians by which rows turned, after an observed `run`."""
        return chord_angle(self.stats.view(STATS, self.count, -1)[CHORD].sqrt())

    def _before(self) -> None:
        _, _, m, n = self.shape
        choices, types = self.choices, [TYPES[dtype] for dtype in self.batch.kind[2:]]
        raw = self.X[:, self.batch.allocation.raw :]
        flags = (choices.chart, choices.nesterov, choices.maximize, choices.factors)
        flags = (*flags, False, False, False)
        tables = (self.table, self.scalars, *(self.stats,) * 3)
        eight_bit = self.batch.kind[-1] == torch.int8
        args = (*tables, raw, *self.shape, *flags, *types)
        self._launch(before_kernel, *args, eight_bit=eight_bit)
        scales: Any = scales_kernel[(self.count,)]
        scales(self.stats, self.table, self.count, m, self.size, False, BLOCK)
        tiles = triton.cdiv(n, TRANSPOSE_TILE)
        normalize: Any = normalize_kernel[triton.cdiv(m, TRANSPOSE_TILE) * tiles, self.count]
        whole = (m, 0, 0, n, tiles)  # one part, the matrix itself
        args = (self.stats, raw, self.X, self.table, *self.shape, *whole)
        normalize(*args, m < n, False, TRANSPOSE_TILE)

    def _after(self, observed: bool) -> None:
        choices, types = self.choices, [TYPES[dtype] for dtype in self.batch.kind[2:]]
        Q = self.X[:, self.batch.allocation.offsets[-1] :]
        if choices.factors:
            self._launch(squares_kernel, self.stats, Q, *self.shape, 1 / SCALE)
            moments: Any = second_moment_kernel[(self.count,)]
            moments(self.table, self.scalars, self.stats, *self.shape[1:], BLOCK)
        noise = choices.draws(self.batch.kind[2])
        flags = (choices.chart, choices.radius, choices.factors, choices.maximize, noise, observed)
        tables = (self.table, self.scalars, self.bias_corrections, *(self.stats,) * 3)
        n = self.batch.kind[1]
        flags = (*flags, False, False)
        self._launch(after_kernel, *tables, Q, *self.shape, n, 1 / SCALE, *flags, *types)


def launch_rows(
    kernel: Any,
    m: int,
    n: int,
    count: int,
    *args: Any,
    eight_bit: bool = False,
    summed: bool = False,
) -> None:
    """Launch a row kernel over `count` matrices of m rows with `args`, followed by the tile.

    With `eight_bit` the kernel rounds a momentum to 8 bits; `summed` says that it reads sums over
    ranks that share rows.
    """
    height, columns, options = row_tile(n, eight_bit, summed)
    kernel[triton.cdiv(m, height), count](*args, height, columns, **options)


def row_tile(n: int, eight_bit: bool, summed: bool = False) -> tuple[int, int, dict[str, int]]:
    """Return the rows and columns of a program's tile, and the compiler's options for it."""
    columns = 1 << (n - 1).bit_length()  # the next power of two
    height = max(1, ROW_ELEMENTS // columns)
    few = eight_bit and not summed  # registers
    each = WARP_ELEMENTS_8_BIT if few else WARP_ELEMENTS
    options = {"num_warps": min(32, max(4, height * columns // each))}
    if few and torch.version.hip is None:
        options["maxnreg"] = REGISTERS_8_BIT
    return height, columns, options


# The order of a step's launches.


def launch(chunks: Sequence[Chunk], device: torch.device, count: int) -> None:
    """Run the chunks on `count` streams, each with its part of the work buffer.

    Tiles of one stream fill the SMs that the last tiles of another leave idle.
    """
    if device.type != "cuda":
        for chunk in chunks:
            chunk.run()
        return
    current = torch.cuda.current_stream(device)
    streams = [current, *(side_stream(device, f"step {i}") for i in range(1, count))]
    for stream in streams[1:]:
        stream.wait_stream(current)
    for chunk in chunks:
        with torch.cuda.stream(streams[chunk.stream]):
            chunk.run()
    for stream in streams[1:]:
        current.wait_stream(stream)


class Recording:
    """Launches that are recorded when they run for the second time, and replayed from then on.

    For a small model, a hundred launches take the host longer than the GPU needs to run them. The
    first run compiles kernels, and allocates what libraries allocate on first use.
    """

    def __init__(self, items: Sequence[Any], device: torch.device) -> None:
        self.device = device
        self.empty = not items  # torch warns about an empty graph
        self.launched = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, launches: Callable[[], None]) -> None:
        """Run `launches`, the same at every call. It is not kept: its owner keeps this recording,
        and memory on a GPU must not wait for the garbage collector."""
        if self.empty:
            return
        if self.device.type != "cuda" or not self.launched:
            launches()
            self.launched = True
            return
        if self.graph is None:
            self.graph = record(launches, self.device)
        self.graph.replay()


def record(work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Record launches as a CUDA graph."""
    # cuBLAS keeps a workspace per stream. The graph needs its own: other code may free the others.
    torch._C._cuda_clearCublasWorkspaces()
    graph = _capture(work, device, _pool_owner(device).pool())
    torch._C._cuda_clearCublasWorkspaces()
    return graph


@cache
def _pool_owner(device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph that keeps the memory pool shared by all optimizers' graphs alive.

    What graphs allocate (cuBLAS's workspaces, 32 MiB per stream) then exists once. A pool is freed
    with its last graph.
    """
    return _capture(lambda: torch.zeros(1, device=device), device, None)


def _capture(work: Callable[[], Any], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), side_stream(device, "capture")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # thread_local: other threads (data loaders, NCCL's watchdog) may use the GPU concurrently
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph


@cache
def side_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
