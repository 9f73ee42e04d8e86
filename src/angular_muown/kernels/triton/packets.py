"""Packets: rows in transit between ranks, read and written where they are.

A packet is a row, or a part of one, in float16 behind a header. On the way to the owner the header
holds the row's exponent, its sum of squares, and NorMuon's v and beta; on the way back, for NorMuon
only, the sum of squares of the row of Q and the factor that restores Q's norm.

An owner's matrices arrive in column parts, usually one: each rank holds some rows of one of them.
`addresses` has a line per matrix with the address of every packet, column part by column part.
"""

import triton
import triton.language as tl

from angular_muown.kernels import columns

HEADER = tl.constexpr(columns.HEADER)
SQUARES = tl.constexpr(columns.SQUARES)
FACTOR = tl.constexpr(columns.FACTOR)


@triton.jit
def packet_address(addresses, matrix, packets, packet, mask):
    """Byte addresses of packets, of which every matrix has `packets`."""
    return tl.load(addresses + matrix * packets + packet, mask=mask, other=0)


@triton.jit
def header(address):
    return tl.multiple_of(address, 16).to(tl.pointer_type(tl.float32))


@triton.jit
def entries(address, columns):
    """Pointers to the entries of packets that have a header."""
    start = tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16)
    return start[:, None] + HEADER + columns[None, :]


@triton.jit(do_not_specialize=["count"])
def return_kernel(
    addresses, Q, stats, stride, count, m, n, packets, first, start, width, tiles,
    FACTORS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy a column part of Q, `width` columns from `start`, to the packets that go back.

    They have a header only with FACTORS.
    """
    matrix = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < m) & (column[None, :] < width)
    place = Q + matrix * stride + row[:, None] * n + start + column[None, :]
    values = tl.load(place, mask=inside, other=0.0)
    at = packet_address(addresses, matrix, packets, first + row, row < m)
    if FACTORS:
        tl.store(entries(at, column), values, mask=inside)
        if tl.program_id(0) % tiles == 0:
            q = tl.load(stats + SQUARES * count * m + matrix * m + row, mask=row < m, other=0.0)
            restore = tl.load(stats + FACTOR * count * m + matrix)
            tl.store(header(at), q, mask=row < m)
            tl.store(header(at) + 1, tl.zeros_like(q) + restore, mask=row < m)
    else:
        pointer = tl.multiple_of(at.to(tl.pointer_type(tl.float16)), 16)
        tl.store(pointer[:, None] + column[None, :], values, mask=inside)
