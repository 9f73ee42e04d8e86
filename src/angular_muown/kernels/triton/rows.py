"""Row kernels: split and momentum before the polar factor, norms, radius and retraction after it.

The maths is that of `update` and its stages, written down a second time because a compiler needs
it in this form; tests/library/kernels holds the two together. `table` has one line per matrix,
`numbers` a step's scalars; columns.py names what is where.
"""

import triton
import triton.language as tl

from angular_muown.kernels import columns

# a kernel sees constants only as constexpr
WEIGHT = tl.constexpr(columns.WEIGHT)
GRADIENT = tl.constexpr(columns.GRADIENT)
MOMENTUM = tl.constexpr(columns.MOMENTUM)
ROW_STRIDE = tl.constexpr(columns.ROW_STRIDE)
STORED_NORM = tl.constexpr(columns.STORED_NORM)
SECOND_MOMENT = tl.constexpr(columns.SECOND_MOMENT)
EXP_AVG = tl.constexpr(columns.EXP_AVG)
EXP_AVG_SQ = tl.constexpr(columns.EXP_AVG_SQ)
STATE_STRIDE = tl.constexpr(columns.STATE_STRIDE)
LINE = tl.constexpr(columns.LINE)
BETA = tl.constexpr(columns.BETA)
STEP = tl.constexpr(columns.STEP)
RADIUS_LR = tl.constexpr(columns.RADIUS_LR)
DECAY = tl.constexpr(columns.DECAY)
BETA1 = tl.constexpr(columns.BETA1)
BETA2 = tl.constexpr(columns.BETA2)
EPS = tl.constexpr(columns.EPS)
ROW_BETA = tl.constexpr(columns.ROW_BETA)
SEED = tl.constexpr(columns.SEED)
EXPONENT = tl.constexpr(columns.EXPONENT)
SQUARES = tl.constexpr(columns.SQUARES)
RADIAL = tl.constexpr(columns.RADIAL)
FACTOR = tl.constexpr(columns.FACTOR)
CHORD = tl.constexpr(columns.CHORD)
FLAT = tl.constexpr(columns.FLAT)
WEIGHT_NORM = tl.constexpr(columns.WEIGHT_NORM)
FIXED = tl.constexpr(columns.FIXED)
ADAM = tl.constexpr(columns.ADAM)


@triton.jit
def address(table, matrix, column: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr):
    """An address from the table, known to be a multiple of BYTES: said where it is made, because
    the compiler does not carry such a hint into or out of a function."""
    return tl.multiple_of(tl.load(table + matrix * LINE + column).to(tl.pointer_type(TYPE)), BYTES)


@triton.jit
def divisor(x):
    return tl.where(x == 0.0, 1.0, x)


@triton.jit
def exponents(X):
    """Powers of two that bring rows to [1, 2) when divided by: exact, and squares of 1e-30 or 1e30
    would leave the range of float32."""
    largest = tl.max(tl.abs(X), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.minimum(tl.maximum(exponent, -126), 126)


@triton.jit
def power_of_two(exponent):
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_norm(X):
    exponent = exponents(X)
    Y = X * power_of_two(-exponent)[:, None]
    return tl.sqrt(tl.sum(Y * Y, axis=1)) * power_of_two(exponent)


@triton.jit
def places(table, matrix, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    stride = tl.load(table + matrix * LINE + ROW_STRIDE)
    stride = tl.multiple_of(stride, 8)
    inside = (row[:, None] < m) & (column[None, :] < n)
    place = row[:, None].to(tl.int64) * stride + column[None, :]
    own = row[:, None] * n + column[None, :]  # in a dense matrix
    return row, column, inside, place, own


@triton.jit
def read(table, matrix, which: tl.constexpr, place, mask, TYPE: tl.constexpr):
    pointer = address(table, matrix, which, TYPE, 16)
    return tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def state_at(table, matrix, which: tl.constexpr, row):
    """Addresses of a row vector's entries."""
    stride = tl.load(table + matrix * LINE + STATE_STRIDE)
    return address(table, matrix, which, tl.float32, 4) + row * stride


# The row kernel before the polar factor: split, momentum, and a matrix ready for products.


@triton.jit
def _tangent(
    G, table, matrix, row, in_rows, inside, place, radial, CHART: tl.constexpr, TYPE: tl.constexpr
):
    """The gradient for the rows' directions; the one for their lengths is stored."""
    if CHART == FLAT:
        return G
    W = read(table, matrix, WEIGHT, place, inside, TYPE)
    exponent = exponents(W)
    V = W * power_of_two(-exponent)[:, None]
    length = tl.sqrt(tl.sum(V * V, axis=1))
    g = length * power_of_two(exponent)
    # a row at zero leaves along -G, so its radial gradient is -|G|
    r = tl.where(g == 0.0, -row_norm(G), tl.sum(G * V, axis=1) / divisor(length))
    tl.store(radial, r, mask=in_rows)
    T = g[:, None] * G - tl.where(g == 0.0, 0.0, r)[:, None] * W
    if CHART == WEIGHT_NORM:
        rho = tl.load(state_at(table, matrix, STORED_NORM, row), mask=in_rows, other=0.0)
        T = T / divisor(tl.where(rho == 0.0, g, rho))[:, None]
    return T


@triton.jit(do_not_specialize=["count"])
def before_kernel(
    table, numbers, stats, work, stride, count, m, n,
    CHART: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """W, G, M -> M and, as float16 rows with an exponent each, the matrix to orthogonalize."""
    matrix = tl.program_id(1).to(tl.int64)
    row, _, inside, place, own = places(table, matrix, m, n, ROWS, COLUMNS)
    in_rows = row < m
    lines = stats + matrix * m + row
    G = read(table, matrix, GRADIENT, place, inside, G_TYPE)
    if MAXIMIZE:
        G = -G
    radial = lines + RADIAL * count * m
    T = _tangent(G, table, matrix, row, in_rows, inside, place, radial, CHART, W_TYPE)
    momentum = address(table, matrix, MOMENTUM, M_TYPE, 16)
    beta = tl.load(numbers + BETA)
    M = beta * tl.load(momentum + place, mask=inside, other=0.0).to(tl.float32) + T
    tl.store(momentum + place, M.to(M_TYPE), mask=inside)
    X = M
    if NESTEROV:
        X = T + beta * M
    exponent = exponents(X)
    X = X * power_of_two(-exponent)[:, None]
    tl.store(lines + EXPONENT * count * m, exponent.to(tl.float32), mask=in_rows)
    tl.store(lines + SQUARES * count * m, tl.sum(X * X, axis=1), mask=in_rows)
    tl.store(work + matrix * stride + own, X.to(work.dtype.element_ty), mask=inside)


# Kernels for norms: rows to a matrix of given size, and NorMuon's second moment.


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


# The row kernel after the polar factor: radius, retraction, rounding, W.


@triton.jit
def _hash(x):
    """As in angular_muown.params.rounding, in 32-bit words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(X, row, column, numbers, NOISE: tl.constexpr, TYPE: tl.constexpr):
    """To the weight's type; with NOISE, stochastically to a 16-bit one: the noise of
    angular_muown.params.rounding, bit for bit."""
    if not NOISE:
        return X.to(TYPE)
    seed = tl.load(numbers + SEED).to(tl.uint32, bitcast=True)
    noise = _hash(_hash(row.to(tl.uint32) + seed)[:, None] + column.to(tl.uint32)[None, :])
    bits = X.to(tl.uint32, bitcast=True)
    if TYPE == tl.bfloat16:
        moved = (bits + (noise & 0xFFFF)) & 0xFFFF0000
    else:
        moved = (bits + (noise & 0x1FFF)) & 0xFFFFE000
    finite = (bits & 0x7F800000) != 0x7F800000
    value = tl.where(finite, moved.to(tl.float32, bitcast=True), X)
    if TYPE == tl.float16:  # below its normal range the grid is even: 2^-24
        even = tl.floor(X * 16777216.0 + (noise & 0xFFFF).to(tl.float32) / 65536.0) / 16777216.0
        value = tl.where(tl.abs(X) < 6.103515625e-05, even, value)
    return value.to(TYPE)


@triton.jit
def _moment(table, matrix, which: tl.constexpr, row, in_rows):
    at = state_at(table, matrix, which, row)
    return at, tl.load(at, mask=in_rows, other=0.0)


@triton.jit
def _new_radius(
    g, r, past, square, first, second, in_rows, numbers, ages, matrix, RADIUS: tl.constexpr
):
    """Adam on the lengths; returns them, after writing its moments (turned with their rows)."""
    beta1 = tl.load(numbers + BETA1)
    beta2 = tl.load(numbers + BETA2)
    mean = beta1 * tl.where(g == 0.0, 0.0, past) + (1.0 - beta1) * r
    square = beta2 * square + (1.0 - beta2) * r * r
    root = tl.sqrt(square / tl.load(ages + matrix * 2 + 1)) + tl.load(numbers + EPS)
    change = tl.load(numbers + RADIUS_LR) * (mean / tl.load(ages + matrix * 2)) / divisor(root)
    if RADIUS == ADAM:
        new = g - change
        mean = tl.where(new < 0.0, -mean, mean)
    else:
        new = tl.where(g == 0.0, tl.maximum(-change, 0.0), g * tl.exp(-change))
    # Several warps read the same entries: all of them, before one writes.
    tl.debug_barrier()
    tl.store(first, mean, mask=in_rows)
    tl.store(second, square, mask=in_rows)
    return new


@triton.jit
def _direction(
    W, g, table, matrix, in_rows, inside, place, MAXIMIZE: tl.constexpr, TYPE: tl.constexpr
):
    """Unit rows. A row at zero has the direction -G, which is read for such rows only."""
    length = g
    empty = (g == 0.0) & in_rows
    if tl.max(empty.to(tl.int32), axis=0) > 0:
        G = read(table, matrix, GRADIENT, place, empty[:, None] & inside, TYPE)
        if not MAXIMIZE:
            G = -G
        W = tl.where(empty[:, None], G, W)
        length = tl.where(empty, row_norm(G), g)
    return W / divisor(length)[:, None]


@triton.jit
def _retracted(U, step, g, length, table, matrix, row, in_rows, CHART: tl.constexpr):
    """Rows moved by the step, at their new lengths."""
    if CHART == WEIGHT_NORM:
        stored = state_at(table, matrix, STORED_NORM, row)
        rho = tl.load(stored, mask=in_rows, other=0.0)
        rho = tl.where(rho == 0.0, g, rho)
        R = tl.where((rho == 0.0)[:, None], U, rho[:, None] * U - step)
        norm = row_norm(R)
        tl.store(stored, tl.where(rho == 0.0, 0.0, norm), mask=in_rows)
    else:
        R = U - step
        norm = tl.sqrt(tl.sum(R * R, axis=1))
    return R * (length / divisor(norm))[:, None]


@triton.jit
def _turn_momentum(table, matrix, rows, place, inside, TYPE: tl.constexpr):
    """Rows whose length crossed zero turn round, and their momentum with them."""
    if tl.max(rows.to(tl.int32), axis=0) > 0:
        momentum = address(table, matrix, MOMENTUM, TYPE, 16)
        M = tl.load(momentum + place, mask=rows[:, None] & inside, other=0.0)
        tl.store(momentum + place, (-M.to(tl.float32)).to(TYPE), mask=rows[:, None] & inside)


@triton.jit
def _chord(W, new):
    """Squared distance of the unit rows, up to sign; nan where one is zero: monitor.row_angles."""
    g = row_norm(W)
    norm = row_norm(new)
    u = W / divisor(g)[:, None]
    v = new / divisor(norm)[:, None]
    chord = tl.minimum(tl.sum((v - u) * (v - u), axis=1), tl.sum((v + u) * (v + u), axis=1))
    return tl.where((g == 0.0) | (norm == 0.0), float("nan"), chord)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ages"])
def after_kernel(
    table, numbers, ages, stats, work, stride, count, m, n, scale,
    CHART: tl.constexpr, RADIUS: tl.constexpr, FACTORS: tl.constexpr, MAXIMIZE: tl.constexpr,
    NOISE: tl.constexpr, OBSERVED: tl.constexpr,
    W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Q (the work buffer times `scale`) and W -> W, with the row state that belongs to it; where
    OBSERVED, also how far the rows of what is stored have turned."""
    matrix = tl.program_id(1).to(tl.int64)
    row, column, inside, place, own = places(table, matrix, m, n, ROWS, COLUMNS)
    in_rows = row < m
    lines = stats + matrix * m + row
    if CHART != FLAT and RADIUS != FIXED:  # asked for first: they need not wait for the rows
        r = tl.load(lines + RADIAL * count * m, mask=in_rows, other=0.0)
        first, past = _moment(table, matrix, EXP_AVG, row, in_rows)
        second, square = _moment(table, matrix, EXP_AVG_SQ, row, in_rows)
    W = read(table, matrix, WEIGHT, place, inside, W_TYPE)
    step = tl.load(work + matrix * stride + own, mask=inside, other=0.0).to(tl.float32)
    step = step * (tl.load(numbers + STEP) * scale)
    if FACTORS:
        step *= tl.load(lines + FACTOR * count * m, mask=in_rows, other=0.0)[:, None]
    decay = tl.load(numbers + DECAY)
    if CHART == FLAT:
        new = decay * W - step
    else:
        g = row_norm(W)
        U = _direction(W, g, table, matrix, in_rows, inside, place, MAXIMIZE, G_TYPE)
        length = g * decay
        if RADIUS != FIXED:
            length = _new_radius(
                length, r, past, square, first, second, in_rows, numbers, ages, matrix, RADIUS
            )
        new = _retracted(U, step, g, length, table, matrix, row, in_rows, CHART)
        if RADIUS == ADAM:
            _turn_momentum(table, matrix, (length < 0.0) & in_rows, place, inside, M_TYPE)
    weight = address(table, matrix, WEIGHT, W_TYPE, 16)
    stored = _rounded(new, row, column, numbers, NOISE, W_TYPE)
    tl.store(weight + place, stored, mask=inside)
    if OBSERVED:
        tl.store(lines + CHORD * count * m, _chord(W, stored.to(tl.float32)), mask=in_rows)
