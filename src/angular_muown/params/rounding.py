"""Stochastic rounding from float32 to a 16-bit weight.

Rounding to nearest loses every step below half a unit in the last place, and the steps of a
cooldown fall below that floor (1e-3 rad in bf16). Rounding up with a probability equal to the
remainder moves the weight by the right amount on average.
"""

from typing import Any

import torch
from torch import Tensor

DROPPED_BITS = {
    torch.bfloat16: 16,
    torch.float16: 13,
}  # mantissa bits that a cast from float32 drops
WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: its multiples stay apart


def round_stochastically(
    X: Tensor, dtype: torch.dtype, seed: int | Tensor, corner: tuple[int, int] = (0, 0)
) -> Tensor:
    """Round X (..., m, n) from float32 to `dtype`, deterministically for a given seed.

    If X is a part of larger matrices, `corner` is where it starts in them.

    The noise is a hash of (seed, row, column), not a generator's output: there is nothing to save,
    replicas agree, a resumed run repeats it, and torch's random state is not touched. All matrices
    of a step share the noise, in any order; their remainders and signs differ.
    """
    noise = position_noise(X, seed, corner)
    mask = (1 << DROPPED_BITS[dtype]) - 1
    bits = X.contiguous().view(torch.int32)
    rounded = (bits + (noise & mask).to(torch.int32)) & ~mask
    # Adding noise to the bits of Inf or NaN would turn them into other values.
    rounded = torch.where(X.isfinite(), rounded.view(torch.float32), X)
    if dtype == torch.float16:  # subnormals are evenly spaced, 2^-24 apart
        subnormal = (X * 2.0**24 + (noise & 0xFFFF) / 65536).floor() * 2.0**-24
        rounded = torch.where(X.abs() < torch.finfo(dtype).smallest_normal, subnormal, rounded)
    return rounded.to(dtype)


def position_noise(X: Tensor, seed: int | Tensor, corner: tuple[int, int] = (0, 0)) -> Tensor:
    """Return 32 random bits for every entry of (..., m, n) matrices, as int64 (m, n)."""
    rows, column = _positions(X, seed, corner)
    return _hash(rows + column)


def paired_noise(X: Tensor, seed: int | Tensor, corner: tuple[int, int] = (0, 0)) -> Tensor:
    """Return 24 random bits for every entry, in fewer operations.

    Columns 2k and 2k + 1 begin with the low and the high half of one number and continue with bits
    of the other half; it is hashed with one multiplication instead of two. Neighbors are
    uncorrelated; some entries a thousand columns apart have correlations of about 0.02.
    """
    rows, column = _positions(X, seed, corner)
    x = (rows + (column >> 1) * GOLDEN) & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    turned = (x << 16 | x >> 16) & WORD
    return torch.where(column & 1 == 1, x, turned) >> 8


def _positions(X: Tensor, seed: int | Tensor, corner: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return 32 random bits for every row (m, 1), and the column numbers (n)."""
    m, n = X.shape[-2:]
    top, left = corner
    row = torch.arange(top, top + m, device=X.device, dtype=torch.int64).unsqueeze(-1)
    column = torch.arange(left, left + n, device=X.device, dtype=torch.int64)
    return _hash(row + hash_seed(seed)), column


def _hash(x: Tensor) -> Tensor:
    """Hash 32-bit integers held in int64 (lowbias32, C. Wellons 2018)."""
    x = x & WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = ((x ^ (x >> 15)) & WORD) * 0x846CA68B & WORD
    return x ^ (x >> 16)


def hash_seed(seed: Any) -> Any:
    return (seed * GOLDEN + 0x7F4A7C15) & WORD


def reconcile_master(master: Tensor, weight: Tensor) -> Tensor:
    """Return the master copy, with entries replaced by the weight's if they no longer round to it.

    Such weights were changed outside the optimizer.
    """
    return torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype))
