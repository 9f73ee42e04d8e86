"""Packets: rows in transit between ranks, read and written where they are.

A packet is a row in float16 behind a header with its exponent and its sum of squares. An owner's
matrices arrive as runs of packets, one from each rank. `addresses` has one line per matrix: the
matrix's first row in its parameter, then for each rank the address where its run would start if it
started at row 0. So row i of a matrix comes from rank (first + i) // chunk, at that address plus i
packets.
"""

import triton
import triton.language as tl

from angular_muown.kernels import columns

HEADER = tl.constexpr(columns.HEADER)
FACTOR = tl.constexpr(columns.FACTOR)


@triton.jit
def row_address(addresses, matrix, row, mask, chunk, parts, words):
    """Byte addresses of rows that take `words` float16 words each."""
    line = addresses + matrix * (parts + 1)
    part = (tl.load(line) + row) // chunk
    return tl.load(line + 1 + part, mask=mask, other=0) + row.to(tl.int64) * (2 * words)


@triton.jit
def _header(addresses, matrix, row, mask, chunk, parts, n):
    """Exponents and sums of squares of rows; -126 and 0 outside of the matrix."""
    at = row_address(addresses, matrix, row, mask, chunk, parts, n + HEADER)
    pointer = at.to(tl.pointer_type(tl.float32))
    exponent = tl.load(pointer, mask=mask, other=-126.0)
    return exponent, tl.load(pointer + 1, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["count", "chunk"])
def packet_scales_kernel(addresses, stats, count, m, n, chunk, parts, size, BLOCK: tl.constexpr):
    """`scales_kernel`, for a matrix that arrived in packets."""
    matrix = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -126.0, tl.float32)
    for start in range(0, m, BLOCK):
        row = start + at
        e, q = _header(addresses, matrix, row, row < m, chunk, parts, n)
        top = tl.maximum(top, tl.where(q == 0.0, -126.0, e))
    highest = tl.max(top, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        row = start + at
        e, q = _header(addresses, matrix, row, row < m, chunk, parts, n)
        total += q * tl.exp2(2.0 * (e - highest))
    root = tl.sqrt(tl.sum(total, axis=0))
    factor = size / tl.where(root == 0.0, 1.0, root)
    for start in range(0, m, BLOCK):
        row = start + at
        e, q = _header(addresses, matrix, row, row < m, chunk, parts, n)
        place = stats + FACTOR * count * m + matrix * m + row
        tl.store(place, factor * tl.exp2(e - highest), mask=row < m)


@triton.jit(do_not_specialize=["count", "chunk"])
def unpack_kernel(
    addresses, stats, out, stride, count, m, n, chunk, parts, tiles,
    TRANSPOSE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`normalize_kernel`, for a matrix that arrived in packets."""
    matrix = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    factor = tl.load(stats + FACTOR * count * m + matrix * m + row, mask=row < m, other=0.0)
    at = row_address(addresses, matrix, row, row < m, chunk, parts, n + HEADER)
    pointer = tl.multiple_of(at.to(tl.pointer_type(tl.float16)), 16) + HEADER
    inside = (row[:, None] < m) & (column[None, :] < n)
    X = tl.load(pointer[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    X = (X * factor[:, None]).to(out.dtype.element_ty)
    if TRANSPOSE:
        inside = (column[:, None] < n) & (row[None, :] < m)
        place = column[:, None] * m + row[None, :]
        tl.store(out + matrix * stride + place, tl.trans(X), mask=inside)
    else:
        tl.store(out + matrix * stride + row[:, None] * n + column[None, :], X, mask=inside)


@triton.jit(do_not_specialize=["chunk"])
def return_kernel(addresses, Q, stride, m, n, chunk, parts, tiles, TILE: tl.constexpr):
    """Copy the rows of Q to the runs that go back to their ranks, without headers."""
    matrix = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < m) & (column[None, :] < n)
    place = Q + matrix * stride + row[:, None] * n + column[None, :]
    values = tl.load(place, mask=inside, other=0.0)
    at = row_address(addresses, matrix, row, row < m, chunk, parts, n)
    pointer = tl.multiple_of(at.to(tl.pointer_type(tl.float16)), 16)
    tl.store(pointer[:, None] + column[None, :], values, mask=inside)
