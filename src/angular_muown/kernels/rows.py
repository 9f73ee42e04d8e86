"""Row kernels: everything before and after the polar factor, on parameters where they lie.

The maths is that of `engine.update` and its stages, written down a second time because a compiler
needs it in this form; tests/angular_muown/test_kernels.py holds the two together. `table` has one
line per matrix: the addresses and strides that are named below; `numbers` holds a step's scalars.
"""

import triton
import triton.language as tl

from angular_muown.kernels import tables

# one line of the table
WEIGHT, GRADIENT, MOMENTUM, ROW_STRIDE = (tl.constexpr(i) for i in range(4))
STORED_NORM, SECOND_MOMENT, EXP_AVG, EXP_AVG_SQ, STATE_STRIDE = (tl.constexpr(i) for i in range(4, 9))
LINE = tl.constexpr(tables.LINE)
# scalars
BETA, STEP, RADIUS_LR, DECAY, BETA1, BETA2, EPS, ROW_BETA, SEED = (tl.constexpr(i) for i in range(9))
# row statistics, (STATS, count, m)
EXPONENT, SQUARES, RADIAL, FACTOR = (tl.constexpr(i) for i in range(4))
FLAT, OBLIQUE, WEIGHT_NORM = (tl.constexpr(i) for i in range(3))
FIXED, ADAM, LOG_ADAM = (tl.constexpr(i) for i in range(3))


@triton.jit
def _address(table, matrix, column: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """An address from the table, known to be a multiple of BYTES: said where it is made, because
    the compiler does not carry such a hint into or out of a function."""
    return tl.multiple_of(tl.load(table + matrix * LINE + column).to(tl.pointer_type(TYPE)), BYTES)


@triton.jit
def _divisor(x):  # type: ignore[no-untyped-def]
    return tl.where(x == 0.0, 1.0, x)


@triton.jit
def _places(table, matrix, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    stride = tl.load(table + matrix * LINE + ROW_STRIDE)
    stride = tl.multiple_of(stride, 8)
    inside = (row[:, None] < m) & (column[None, :] < n)
    place = row[:, None].to(tl.int64) * stride + column[None, :]
    own = row[:, None].to(tl.int64) * n + column[None, :]  # in a dense matrix
    return row, column, inside, place, own


@triton.jit
def _read(table, matrix, which: tl.constexpr, place, mask, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = _address(table, matrix, which, TYPE, 16)
    return tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def before_kernel(  # type: ignore[no-untyped-def]
    table, numbers, stats, work, stride, count, m, n,
    CHART: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """W, G, M -> M and, as float16 rows with an exponent each, the matrix to orthogonalize."""
    matrix = tl.program_id(1).to(tl.int64)
    row, _, inside, place, own = _places(table, matrix, m, n, ROWS, COLUMNS)
    G = _read(table, matrix, GRADIENT, place, inside, G_TYPE)
    if MAXIMIZE:
        G = -G
    momentum = _address(table, matrix, MOMENTUM, M_TYPE, 16)
    M = tl.load(momentum + place, mask=inside, other=0.0).to(tl.float32)
    in_rows = row < m
    lines = matrix * m + row
    if CHART == FLAT:
        T = G
    else:
        W = _read(table, matrix, WEIGHT, place, inside, W_TYPE)
        g = tl.sqrt(tl.sum(W * W, axis=1))
        # a row at zero leaves along -G, so its radial gradient is -|G|
        r = tl.where(g == 0.0, -tl.sqrt(tl.sum(G * G, axis=1)), tl.sum(G * W, axis=1) / _divisor(g))
        tl.store(stats + RADIAL * count * m + lines, r, mask=in_rows)
        T = g[:, None] * G - tl.where(g == 0.0, 0.0, r)[:, None] * W
        if CHART == WEIGHT_NORM:
            state = _address(table, matrix, STORED_NORM, tl.float32, 4)
            at = row * tl.load(table + matrix * LINE + STATE_STRIDE)
            rho = tl.load(state + at, mask=in_rows, other=0.0)
            T = T / _divisor(tl.where(rho == 0.0, g, rho))[:, None]
    beta = tl.load(numbers + BETA)
    M = beta * M + T
    tl.store(momentum + place, M.to(M_TYPE), mask=inside)
    X = M
    if NESTEROV:
        X = T + beta * M
    # Powers of two bring each row to [1, 2): exact, and safe for rows of 1e-30 or 1e30.
    largest = tl.max(tl.abs(X), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    X = X * ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    tl.store(stats + EXPONENT * count * m + lines, exponent.to(tl.float32), mask=in_rows)
    tl.store(stats + SQUARES * count * m + lines, tl.sum(X * X, axis=1), mask=in_rows)
    tl.store(work + matrix * stride + own, X.to(work.dtype.element_ty), mask=inside)


@triton.jit
def normalize_kernel(  # type: ignore[no-untyped-def]
    stats, work, stride, count, m, n, size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows with exponents -> X at Frobenius norm `size`, in place."""
    matrix = tl.program_id(1).to(tl.int64)
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
    factor = size / _divisor(tl.sqrt(tl.sum(total, axis=0)))
    column = tl.arange(0, COLUMNS)
    for start in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        e = tl.load(exponents + row, mask=row < m, other=-126.0)
        inside = (row[:, None] < m) & (column[None, :] < n)
        place = work + matrix * stride + row[:, None].to(tl.int64) * n + column[None, :]
        X = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        X = X * (factor * tl.exp2(e - highest))[:, None]
        tl.store(place, X.to(work.dtype.element_ty), mask=inside)


@triton.jit
def squares_kernel(  # type: ignore[no-untyped-def]
    stats, work, stride, count, m, n, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Row sums of Q^2, where the work buffer holds Q / scale."""
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < m) & (column[None, :] < n)
    place = work + matrix * stride + row[:, None].to(tl.int64) * n + column[None, :]
    Q = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
    lines = stats + SQUARES * count * m + matrix * m + row
    tl.store(lines, tl.sum(Q * Q, axis=1), mask=row < m)


@triton.jit
def second_moment_kernel(table, numbers, stats, count, m, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """NorMuon's v and the factor that each row of Q gets, with Q's Frobenius norm restored."""
    matrix = tl.program_id(0).to(tl.int64)
    beta = tl.load(numbers + ROW_BETA)
    moments = _address(table, matrix, SECOND_MOMENT, tl.float32, 4)
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
        scaled += q / _divisor(v)
    restore = tl.sqrt(tl.sum(whole, axis=0)) / _divisor(tl.sqrt(tl.sum(scaled, axis=0)))
    for start in range(0, m, BLOCK):
        here = start + at < m
        v = tl.load(moments + (start + at) * stride, mask=here, other=0.0)
        factor = restore / _divisor(tl.sqrt(v))
        tl.store(stats + FACTOR * count * m + matrix * m + start + at, factor, mask=here)
