"""A seeded permutation of range(n) that is evaluated where it is needed, without an array of n.

A Feistel network on pairs (L, R) with L, R < a, where a^2 >= n:

    (L, R)  ->  (R, (L + F_i(R)) mod a)        i = 1 .. 8

is a bijection whatever F is, and therefore permutes range(a^2). An index that lands at n or above
walks on until it is below n, which makes it a permutation of range(n) (Black and Rogaway, "Ciphers
with arbitrary finite domains", 2002). Only integers: the same on every machine.
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
MASK = 2**64 - 1
# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

U64 = NDArray[np.uint64]


def _word(x: int) -> U64:
    """An array of one, because numpy warns when a scalar wraps around."""
    return np.array([x & MASK], np.uint64)


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * _word(FIRST)
    x = (x ^ (x >> np.uint64(27))) * _word(SECOND)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int) -> U64:
    rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64)
    base = _mix(_mix(_word(seed) + _word(GOLDEN)) ^ _word(epoch))
    return _mix(base + rounds * _word(GOLDEN))


def _feistel(x: U64, side: int, keys: U64) -> U64:
    a = np.uint64(side)
    left, right = x // a, x % a
    for key in keys:
        left, right = right, (left + _mix(right ^ key) % a) % a
    return left * a + right


def permute(indices: NDArray[np.integer], n: int, seed: int, epoch: int = 0) -> NDArray[np.int64]:
    """Where the permutation of range(n) that belongs to (seed, epoch) sends each index."""
    if not 1 <= n < 2**62:
        raise ValueError(f"n={n} must be at least 1 and below 2^62")
    x = np.atleast_1d(np.asarray(indices))
    if x.size and not 0 <= x.min() <= x.max() < n:
        raise ValueError(f"indices from {x.min()} to {x.max()} must lie in [0, {n})")
    side, keys = isqrt(n - 1) + 1, _keys(seed, epoch)
    out = _feistel(x.astype(np.uint64), side, keys)
    while (outside := out >= np.uint64(n)).any():
        out[outside] = _feistel(out[outside], side, keys)
    return out.astype(np.int64).reshape(np.shape(indices))
