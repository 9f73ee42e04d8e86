"""Stochastic rounding from float32 to a 16-bit weight.

Rounding to nearest swallows every step below half a unit in the last place: a cool-down passes
that floor (1e-3 rad in bf16). Rounded up with the probability of the remainder, the weight moves
by the asked amount on average.
"""

from typing import Any

import torch
from torch import Tensor

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # mantissa bits that float32 has beyond
WORD = 0xFFFFFFFF


def round_stochastically(
    X: Tensor, dtype: torch.dtype, seed: int | Tensor, corner: tuple[int, int] = (0, 0)
) -> Tensor:
    """X (..., m, n) in float32 to `dtype`; the same seed gives the same result. X may be the part
    of matrices that starts at `corner`.

    The noise is a hash of (seed, row, column), not a generator's state: nothing to save, replicas
    agree, a resumed run repeats it, and torch's own random numbers are left alone. All matrices of
    a step share it, in whatever order they come; their remainders and signs do not.
    """
    m, n = X.shape[-2:]
    top, left = corner
    row = torch.arange(top, top + m, device=X.device, dtype=torch.int64).unsqueeze(-1)
    column = torch.arange(left, left + n, device=X.device, dtype=torch.int64)
    noise = _hash(_hash(row + hash_seed(seed)) + column)
    mask = (1 << DROPPED_BITS[dtype]) - 1
    bits = X.contiguous().view(torch.int32)
    rounded = (bits + (noise & mask).to(torch.int32)) & ~mask
    # Inf and NaN have no neighbour to go to: adding to their bits would make other values of them.
    rounded = torch.where(X.isfinite(), rounded.view(torch.float32), X)
    if dtype == torch.float16:  # below its normal range the grid is even: 2^-24
        even = (X * 2.0**24 + (noise & 0xFFFF) / 65536).floor() * 2.0**-24
        rounded = torch.where(X.abs() < torch.finfo(dtype).smallest_normal, even, rounded)
    return rounded.to(dtype)


def _hash(x: Tensor) -> Tensor:
    """A 32-bit integer hash (constants of lowbias32, C. Wellons 2018), in int64 words."""
    x = x & WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = ((x ^ (x >> 15)) & WORD) * 0x846CA68B & WORD
    return x ^ (x >> 16)


def hash_seed(seed: Any) -> Any:
    return (seed * 0x9E3779B9 + 0x7F4A7C15) & WORD  # golden-ratio increments keep seeds apart


def reconcile_master(master: Tensor, weight: Tensor) -> Tensor:
    """The master copy. Where the weight is not its rounding, somebody changed it: the weight
    wins."""
    return torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype))
