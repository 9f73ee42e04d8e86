"""Momentum in 8 bits: one byte per entry, and the largest absolute entry of every row.

An entry M of a row with the largest entry s is stored as an integer q between -127 and 127 that
stands for sign(q) (q / 127)^2 s. Squares place more levels where entries are small: if one entry is
a thousand times the others, those still have levels of their own.

Rounding is stochastic: M lies between two levels and becomes the upper one with a probability that
makes the expected value M. Rounding to nearest would lose every gradient that is smaller than half
a level, at every step. The probability is a multiple of 2^-24, which makes entries below 1e-10 of
their row's largest too large on average. All matrices of a step share the noise, as in rounding.py.

A step orthogonalizes its momentum before rounding; the next step reads what was stored.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from angular_muown.params.layout import Layout, Slice2D
from angular_muown.params.rounding import paired_noise
from angular_muown.stages.reductions import LOCAL, Reductions

if TYPE_CHECKING:
    from angular_muown.params.options import Group

INT8 = "int8"  # of a group's state_dtype
SCALE = "momentum_scale"  # the row vector of largest entries
LEVELS = 127
SMALLEST = 2.0**-126  # scale: the smallest normal float32, whose reciprocal is finite
# Added to the step number: the noise differs from that of the weights' rounding.
SALT = 0x5BD1E995


def is_eight_bit(group: "Group") -> bool:
    return group["state_dtype"] == INT8


def scale_names(group: "Group") -> tuple[str, ...]:
    """Return the names of the row vectors that 8-bit momentum needs."""
    return (SCALE,) if is_eight_bit(group) else ()


def decode(q: Tensor, scale: Tensor) -> Tensor:
    """Return the entries that integers stand for; q has the dtype of the result."""
    # The scale last, as a factor of its own: scale / LEVELS^2 may be too small for float32.
    return q * q.abs() * (1 / LEVELS**2) * scale


def encode(
    M: Tensor, step: int | Tensor, corner: tuple[int, int] = (0, 0), over: Reductions = LOCAL
) -> tuple[Tensor, Tensor]:
    """Return M (..., m, n) in 8 bits and the scale (..., m, 1) of its rows.

    A row with an entry that is not finite has an infinite scale and decodes to NaN. Rows whose
    largest entry is below the normal range of float32 lose levels.

    Args:
        step: seed of the rounding.
        corner: where M starts in larger matrices, if it is a part of them.
        over: finds the largest entry of rows that ranks share.
    """
    scale = over.row_max(M)
    scale = torch.where(scale.isnan(), torch.inf, scale).clamp(min=SMALLEST)
    z = M.abs() * (1 / scale) * LEVELS**2  # LEVELS^2 / scale may be too large for float32
    lower = z.sqrt().floor()
    share = (z - lower.square()) / (2 * lower + 1)
    up = paired_noise(M, step + SALT, corner) * 2.0**-24 < share
    q = (lower + up).nan_to_num(0.0).clamp(max=LEVELS).copysign(M)
    return q.to(torch.int8), scale


# --- state that was made for another state_dtype ---

ENTRIES = 2**22  # that are converted at a time


def convert_to_eight_bit(
    M: Tensor,
    q: Tensor,
    scale: Tensor,
    layout: Layout,
    window: Slice2D | None = None,
    over: Reductions = LOCAL,
) -> None:
    """Write a momentum with its parameter's shape to q and scale, in 8 bits.

    Args:
        window: the part of the matrices that these tensors hold; None is all of them.
        over: finds the largest entry of rows that ranks share; they convert together.
    """
    for X, integers, scales, corner in _pieces(layout, window, M, q, scale):
        encoded, largest = encode(X.to(scale.dtype), 0, corner, over)
        integers.copy_(encoded)
        scales.copy_(largest)


def convert_from_eight_bit(
    q: Tensor, scale: Tensor, M: Tensor, layout: Layout, window: Slice2D | None = None
) -> None:
    """Write what 8 bits stand for to a momentum with its parameter's shape."""
    for X, integers, scales, _ in _pieces(layout, window, M, q, scale):
        X.copy_(decode(integers.to(scale.dtype), scales))


def _pieces(
    layout: Layout, window: Slice2D | None, M: Tensor, q: Tensor, scale: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, tuple[int, int]]]:
    """Yield some rows at a time, and where they start in whole matrices.

    Columns alone are cut: a row has a scale in every block of columns, whatever block of rows it is
    in.
    """
    by_row = replace(layout, blocks=1, interleaved=1)
    m, n = by_row.sides(M.shape) if window is None else (window.m, window.n)
    whole = window or Slice2D((0, m), (0, n), m, n)
    cuts = by_row.cut(M, whole), by_row.cut(q, whole), by_row.cut_vector(scale, SCALE, whole)
    for block, X, integers, scales in zip(by_row.grid(m, n), *cuts, strict=True):
        part = whole.of_block(block)
        rows = max(1, ENTRIES // block.n)  # the same on all ranks that share rows
        for i in range(len(X)):
            for start in range(0, X.shape[1], rows):
                some = i, slice(start, start + rows)
                corner = part.rows[0] + start, part.columns[0]
                yield X[some], integers[some], scales[some], corner
