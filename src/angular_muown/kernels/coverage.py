"""What the kernels cover; everything else takes the eager path of `update.update`.

They cover float32, bfloat16 and float16 parameters, dense or sharded, on an NVIDIA GPU with
Triton. Matrices must be row-major, with sides that are multiples of 16 and a short side of at least
128, and every stage must be one that the kernels implement. Blocks whose rows alternate
(`interleaved`) are copied and stepped eagerly. The choice is automatic: both paths compute the same
function.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from angular_muown.kernels import columns
from angular_muown.kernels.columns import ROW_STATE
from angular_muown.kernels.polar_chain import TILE
from angular_muown.params.layout import Layout, Slice2D
from angular_muown.params.options import Group
from angular_muown.stages.charts import Flat, Oblique, WeightNorm
from angular_muown.stages.context import State
from angular_muown.stages.normalize import AsIs, RowSecondMoment
from angular_muown.stages.orthogonalize import Iteration, Orthogonalizer
from angular_muown.stages.radius import Adam, Fixed, LogAdam
from angular_muown.stages.tangent import Free
from angular_muown.update import Recipe

EDGE = 8  # columns of parts start at multiples of it: 16 bytes of a 16-bit type
SIDE = 16  # sides, offsets and addresses are multiples of it, for loads 16 bytes wide
LONGEST_ROW = 32768  # a program holds whole rows in registers; the longest spill
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

CHARTS: dict[type, int] = {
    Flat: columns.FLAT,
    Oblique: columns.OBLIQUE,
    WeightNorm: columns.WEIGHT_NORM,
}
RADII: dict[type, int] = {Fixed: columns.FIXED, Adam: columns.ADAM, LogAdam: columns.LOG_ADAM}


@cache
def runs_on(device: torch.device) -> bool:
    """True if the kernels can run on this device."""
    if device.type != "cuda" or torch.version.hip or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def select_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current device: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def knows(recipe: Recipe) -> bool:
    """True if the kernels implement every stage of the recipe.

    Types must match exactly: a subclass or a user's own stage may compute something else.
    """
    return (
        type(recipe.chart) in CHARTS
        and type(recipe.radius) in RADII
        and type(recipe.normalize) in (AsIs, RowSecondMoment)
        and _is_known(recipe.orthogonalize)
        and type(recipe.tangent) is Free
    )


def _is_known(polar: Orthogonalizer) -> bool:
    # The kernels complete the square of every iteration step, which divides by c.
    return type(polar) is Iteration and all(c != 0 for _, _, c in polar.coefficients)


def covers_shards(p: Tensor, windows: Sequence[Slice2D], layout: Layout, group: Group) -> bool:
    """True if the kernels can step a parameter of which each rank has one of these windows.

    All ranks give the same answer: it depends on the whole parameter and its settings alone.
    """
    m, n = windows[0].m, windows[0].n
    blocks = layout.grid(m, n)
    edges = {edge for part in (*windows, *blocks) for edge in part.columns}
    widths = {stop - start for start, stop in (window.columns for window in windows)}
    # Ranks that share rows add up their sums in one packed tensor: their parts must be alike.
    alike = widths == {n} or (len(widths) == 1 and layout.column_blocks == 1)
    sizes = [(block.m, block.n) for block in blocks]
    return (
        alike
        and all(edge % EDGE == 0 for edge in edges)
        and not layout.transposed
        and layout.interleaved == 1
        and p.dtype in FLOATS
        and (p.dtype == torch.float32 or group["write_back"] != "master")
        and group["state_dtype"] != "float64"
        and group["wire_dtype"] is None
        and not group["capturable"]
        and all(_has_fitting_sides(*size) for size in sizes)
    )


def _has_fitting_sides(m: int, n: int) -> bool:
    """True if the kernels can read and multiply dense m x n matrices."""
    return (
        m % SIDE == 0
        and n % SIDE == 0
        and min(m, n) >= TILE
        and n <= LONGEST_ROW
        and m * n < 2**31  # the kernels index a matrix with 32 bits
    )


@cache
def fits(shape: torch.Size, layout: Layout) -> bool:
    """True if the kernels can read all matrices of a parameter with this shape and layout."""
    if layout.interleaved > 1:  # the rows of a matrix have no common stride
        return False
    pieces = layout.cut(torch.empty(shape, device="meta"))
    return all(
        piece.stride(-1) == 1
        and piece.stride(-2) % SIDE == 0
        and piece.storage_offset() % SIDE == 0
        and _has_fitting_sides(*piece.shape[-2:])
        for piece in pieces
    )


def covers(p: Tensor, state: State, layout: Layout) -> bool:
    """True if the kernels can update this parameter in place, with its gradient and state."""
    grad = p.grad
    return (
        runs_on(p.device)
        and "master" not in state
        and grad is not None
        and all(is_plain(t, p.device) for t in (p, grad))
        and is_plain(state["momentum_buffer"], p.device, *FLOATS, torch.int8)
        and all(
            is_plain(state[name], p.device, torch.float32) for name in ROW_STATE if name in state
        )
        and fits(p.shape, layout)
    )


def is_plain(t: Tensor, device: torch.device, *dtypes: torch.dtype) -> bool:
    """True for an aligned, contiguous tensor on `device` in one of `dtypes` (default: FLOATS)."""
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and t.device == device
        and t.dtype in (dtypes or FLOATS)
        and t.is_contiguous()
        and t.data_ptr() % SIDE == 0
    )
