"""Kernels for norms: rows to a matrix of given size, and NorMuon's second moment."""

import triton
import triton.language as tl

from angular_muown.kernels.rows import (
    EXPONENT,
    FACTOR,
    LINE,
    ROW_BETA,
    SECOND_MOMENT,
    SQUARES,
    STATE_STRIDE,
    address,
    divisor,
)


@triton.jit(do_not_specialize=["count"])
def scales_kernel(stats, count, m, size, BLOCK: tl.constexpr):
    """Row factors that bring a matrix of rows with exponents to Frobenius norm `size`."""
    matrix = tl.program_id(0).to(tl.int64)
    exponents = stats + EXPONENT * count * m + matrix * m
    squares = stats + SQUARES * count * m + matrix * m
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -126.0, tl.float32)
    for start in range(0, m, BLOCK):
        here = start + at < m
        e = tl.load(exponents + start + at, mask=here, other=-126.0)
        q = tl.load(squares + start + at, mask=here, other=0.0)
        top = tl.maximum(top, tl.where(q == 0.0, -126.0, e))
    highest = tl.max(top, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        here = start + at < m
        e = tl.load(exponents + start + at, mask=here, other=-126.0)
        q = tl.load(squares + start + at, mask=here, other=0.0)
        total += q * tl.exp2(2.0 * (e - highest))
    factor = size / divisor(tl.sqrt(tl.sum(total, axis=0)))
    for start in range(0, m, BLOCK):
        here = start + at < m
        e = tl.load(exponents + start + at, mask=here, other=-126.0)
        place = stats + FACTOR * count * m + matrix * m + start + at
        tl.store(place, factor * tl.exp2(e - highest), mask=here)


@triton.jit(do_not_specialize=["count"])
def normalize_kernel(
    stats, raw, out, stride, count, m, n, tiles, TURN: tl.constexpr, TILE: tl.constexpr
):
    """Rows times their factors; TURNed, the result is (n, m)."""
    matrix = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    factor = tl.load(stats + FACTOR * count * m + matrix * m + row, mask=row < m, other=0.0)
    inside = (row[:, None] < m) & (column[None, :] < n)
    place = row[:, None] * n + column[None, :]
    X = tl.load(raw + matrix * stride + place, mask=inside, other=0.0).to(tl.float32)
    X = (X * factor[:, None]).to(out.dtype.element_ty)
    if TURN:
        inside = (column[:, None] < n) & (row[None, :] < m)
        place = column[:, None] * m + row[None, :]
        tl.store(out + matrix * stride + place, tl.trans(X), mask=inside)
    else:
        tl.store(out + matrix * stride + place, X, mask=inside)


@triton.jit(do_not_specialize=["count"])
def squares_kernel(
    stats, work, stride, count, m, n, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Row sums of Q^2, where the work buffer holds Q / scale."""
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < m) & (column[None, :] < n)
    place = work + matrix * stride + row[:, None] * n + column[None, :]
    Q = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
    lines = stats + SQUARES * count * m + matrix * m + row
    tl.store(lines, tl.sum(Q * Q, axis=1), mask=row < m)


@triton.jit(do_not_specialize=["count"])
def second_moment_kernel(table, numbers, stats, count, m, n, BLOCK: tl.constexpr):
    """NorMuon's v and the factor that each row of Q gets, with Q's Frobenius norm restored."""
    matrix = tl.program_id(0).to(tl.int64)
    beta = tl.load(numbers + ROW_BETA)
    moments = address(table, matrix, SECOND_MOMENT, tl.float32, 4)
    stride = tl.load(table + matrix * LINE + STATE_STRIDE)
    squares = stats + SQUARES * count * m + matrix * m
    at = tl.arange(0, BLOCK)
    whole = tl.zeros((BLOCK,), tl.float32)
    scaled = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        here = start + at < m
        q = tl.load(squares + start + at, mask=here, other=0.0)
        v = tl.load(moments + (start + at) * stride, mask=here, other=0.0)
        v = (1.0 - beta) * (q / n) + beta * v
        tl.store(moments + (start + at) * stride, v, mask=here)
        whole += q
        scaled += q / divisor(v)
    restore = tl.sqrt(tl.sum(whole, axis=0)) / divisor(tl.sqrt(tl.sum(scaled, axis=0)))
    for start in range(0, m, BLOCK):
        here = start + at < m
        v = tl.load(moments + (start + at) * stride, mask=here, other=0.0)
        factor = restore / divisor(tl.sqrt(v))
        tl.store(stats + FACTOR * count * m + matrix * m + start + at, factor, mask=here)
