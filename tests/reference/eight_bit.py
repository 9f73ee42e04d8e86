import numpy as np


def hashed(x: int) -> int:
    """lowbias32 of C. Wellons, one integer at a time."""
    x &= 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def stored(M: np.ndarray, step: int) -> np.ndarray:
    """Return the numbers that an 8-bit momentum holds after a step: 127 levels, (q/127)^2 of the
    row's largest entry, rounded up or down at random with the right mean."""
    seed = (step + 0x5BD1E995) * 0x9E3779B9 + 0x7F4A7C15
    levels = (np.arange(128) / 127) ** 2
    out = np.zeros_like(M)
    for i, row in enumerate(M):
        largest = np.abs(row).max()
        for j, entry in enumerate(row):
            if largest == 0:
                continue
            share = abs(entry) / largest
            below = np.searchsorted(levels, share, side="right") - 1
            if below == 127:
                out[i, j] = np.sign(entry) * largest
                continue
            chance = (share - levels[below]) / (levels[below + 1] - levels[below])
            up = drawn(i, j, seed) / 2**24 < chance
            out[i, j] = np.sign(entry) * largest * levels[below + up]
    return out


def drawn(i: int, j: int, seed: int) -> int:
    """Return 24 random bits: columns 2k and 2k + 1 begin with the low and the high half of a
    number, and continue with bits of the other half."""
    x = (hashed(i + seed) + j // 2 * 0x9E3779B9) & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    low, high = x & 0xFFFF, x >> 16
    return high << 8 | low >> 8 if j % 2 else low << 8 | high >> 8
