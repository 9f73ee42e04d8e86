"""Momentum in 8 bits: one byte per entry, and the largest absolute entry of every row.

An entry M of a row with the largest entry s is stored as an integer q between -127 and 127 that
stands for sign(q) (q / 127)^2 s. Squares place more levels where entries are small: if one entry is
a thousand times the others, those still have levels of their own.

Rounding is stochastic: M lies between two levels and becomes the upper one with a probability that
makes the expected value M. Rounding to nearest would lose every gradient that is smaller than half
a level, at every step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from angular_muown.params.layout import Layout
from angular_muown.params.rounding import position_noise
from angular_muown.stages.reductions import LOCAL, Reductions

if TYPE_CHECKING:
    from angular_muown.params.options import Group

INT8 = "int8"  # of a group's state_dtype
SCALE = "momentum_scale"  # the row vector of largest entries
LEVELS = 127
# Added to the step number: the noise differs from that of the weights' rounding.
SALT = 0x5BD1E995


def is_eight_bit(group: "Group") -> bool:
    return group["state_dtype"] == INT8


def scale_names(group: "Group") -> tuple[str, ...]:
    """Return the names of the row vectors that 8-bit momentum needs."""
    return (SCALE,) if is_eight_bit(group) else ()


def decode(q: Tensor, scale: Tensor) -> Tensor:
    """Return the entries that integers stand for; q has the dtype of the result."""
    root = q / LEVELS
    return root * root.abs() * scale


def encode(
    M: Tensor, step: int | Tensor, corner: tuple[int, int] = (0, 0), over: Reductions = LOCAL
) -> tuple[Tensor, Tensor]:
    """Return M (..., m, n) in 8 bits and the scale (..., m, 1) of its rows.

    A row with an entry that is not finite has a scale that is not finite and decodes to NaN.

    Args:
        step: seed of the rounding.
        corner: where M starts in larger matrices, if it is a part of them.
        over: finds the largest entry of rows that ranks share.
    """
    scale = over.row_max(M)
    z = M.abs() / torch.where(scale == 0, 1.0, scale) * LEVELS**2
    lower = z.sqrt().floor()
    share = (z - lower.square()) / (2 * lower + 1)
    noise = position_noise(M, step + SALT, corner)
    up = (noise >> 8) * 2.0**-24 < share
    q = (lower + up).nan_to_num(0.0).clamp(max=LEVELS) * M.sign().nan_to_num(0.0)
    return q.to(torch.int8), scale


# --- state that was made for another state_dtype ---


def to_eight_bit(M: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return a momentum with its parameter's shape in 8 bits, and its scales."""
    q = torch.empty(M.shape, dtype=torch.int8, device=M.device)
    compute = torch.promote_types(M.dtype, torch.float32)
    scale = torch.empty(layout.vector_shape(M, SCALE), dtype=compute, device=M.device)
    for X, integers, scales in _pieces(layout, M.to(compute), q, scale):
        encoded, largest = encode(X, 0)
        integers.copy_(encoded)
        scales.copy_(largest)
    return q, scale


def from_eight_bit(q: Tensor, scale: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the momentum that 8 bits stand for."""
    M = torch.empty(q.shape, dtype=dtype, device=q.device)
    for X, integers, scales in _pieces(layout, M, q, scale):
        X.copy_(decode(integers.to(scale.dtype), scales))
    return M


def _pieces(
    layout: Layout, M: Tensor, q: Tensor, scale: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Cut columns alone: a row has a scale in every block of columns, whatever block it is in."""
    by_row = replace(layout, blocks=1, interleaved=1)
    yield from zip(by_row.cut(M), by_row.cut(q), by_row.cut_vector(scale, SCALE), strict=True)
