"""Packets: rows in transit between ranks, read and written where they are.

A packet is a row in float16 behind a header with its exponent and its sum of squares. An owner's
matrices arrive as runs of packets, one from each rank. `addresses` has one line per matrix: the
matrix's first row in its parameter, then for each rank the address where its run would start if it
started at row 0. So row i of a matrix comes from rank (first + i) // chunk, at that address plus i
packets.
"""

import triton
import triton.language as tl


@triton.jit
def row_address(addresses, matrix, row, mask, chunk, parts, words):
    """Byte addresses of rows that take `words` float16 words each."""
    line = addresses + matrix * (parts + 1)
    part = (tl.load(line) + row) // chunk
    return tl.load(line + 1 + part, mask=mask, other=0) + row.to(tl.int64) * (2 * words)


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
