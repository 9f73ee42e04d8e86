"""Row kernels: split and momentum before the polar factor, norms, radius and retraction after it.

The equations are those of `update` and its stages, repeated because Triton needs them in this form;
tests/library/kernels checks that both agree. `table` has one entry per matrix and `scalars` the
step's scalars; columns.py names the fields.
"""

import triton
import triton.language as tl

from angular_muown.kernels import columns
from angular_muown.kernels.triton.packets import entries, header, packet_address
from angular_muown.params import eight_bit, rounding

# Kernels can read global constants only as constexpr.
WEIGHT = tl.constexpr(columns.WEIGHT)
GRADIENT = tl.constexpr(columns.GRADIENT)
MOMENTUM = tl.constexpr(columns.MOMENTUM)
ROW_STRIDE = tl.constexpr(columns.ROW_STRIDE)
STORED_NORM = tl.constexpr(columns.STORED_NORM)
SECOND_MOMENT = tl.constexpr(columns.SECOND_MOMENT)
EXP_AVG = tl.constexpr(columns.EXP_AVG)
EXP_AVG_SQ = tl.constexpr(columns.EXP_AVG_SQ)
MOMENTUM_SCALE = tl.constexpr(columns.MOMENTUM_SCALE)
STATE_STRIDE = tl.constexpr(columns.STATE_STRIDE)
ENTRY = tl.constexpr(columns.ENTRY)
PACKET = tl.constexpr(columns.PACKET)
RESULT = tl.constexpr(columns.RESULT)
FIRST_ROW = tl.constexpr(columns.FIRST_ROW)
FIRST_COLUMN = tl.constexpr(columns.FIRST_COLUMN)
HEADER = tl.constexpr(columns.HEADER)
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
WEIGHT_SQUARES = tl.constexpr(columns.WEIGHT_SQUARES)
PRODUCTS = tl.constexpr(columns.PRODUCTS)
GRADIENT_SQUARES = tl.constexpr(columns.GRADIENT_SQUARES)
FLAT = tl.constexpr(columns.FLAT)
WEIGHT_NORM = tl.constexpr(columns.WEIGHT_NORM)
FIXED = tl.constexpr(columns.FIXED)
ADAM = tl.constexpr(columns.ADAM)
INFINITY, SIGN = tl.constexpr(0x7F800000), tl.constexpr(-0x80000000)  # bits of float32
LEVELS = tl.constexpr(float(eight_bit.LEVELS))
SMALLEST = tl.constexpr(eight_bit.SMALLEST)
GOLDEN = tl.constexpr(rounding.GOLDEN)
SALT = tl.constexpr(eight_bit.SALT * rounding.GOLDEN & rounding.WORD)  # as hash_seed does


@triton.jit
def address(table, matrix, column: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr):
    """Return an address from the table as a pointer, with the hint that it is a multiple of BYTES.

    The hint is given here because the compiler does not pass it into or out of functions.
    """
    return tl.multiple_of(tl.load(table + matrix * ENTRY + column).to(tl.pointer_type(TYPE)), BYTES)


@triton.jit
def divisor(x):
    """Return x, or 1 where x is 0."""
    return tl.where(x == 0.0, 1.0, x)


@triton.jit
def exponents(X):
    """Return the exponents e for which a row's largest entry divided by 2^e is in [1, 2).

    This scaling is exact. Without it, squares of 1e-30 or 1e30 would leave the range of float32.
    """
    return exponent_of(tl.max(tl.abs(X), axis=1))


@triton.jit
def exponent_of(x):
    """Return the exponents of numbers that are not negative."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) - 127
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
def row_sum(X, Y):
    """Return the row sums of X Y in float64, whose range holds the squares of all float32."""
    e = exponents(X)
    f = exponents(Y)
    total = tl.sum(X * power_of_two(-e)[:, None] * (Y * power_of_two(-f)[:, None]), axis=1)
    power = ((1023 + e + f).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return total.to(tl.float64) * power


@triton.jit
def summed(sums, which: tl.constexpr, count, m, matrix, row, in_rows):
    """Load sums over rows that ranks share."""
    return tl.load(sums + which * count * m + matrix * m + row, mask=in_rows, other=0.0)


@triton.jit
def offsets(table, matrix, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's rows and columns, their mask, and their offsets.

    `offset` is the offset in the parameter, `dense_offset` the one in the work buffer.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    stride = tl.load(table + matrix * ENTRY + ROW_STRIDE)
    stride = tl.multiple_of(stride, 8)
    inside = (row[:, None] < m) & (column[None, :] < n)
    offset = row[:, None].to(tl.int64) * stride + column[None, :]
    dense_offset = row[:, None] * n + column[None, :]
    return row, column, inside, offset, dense_offset


@triton.jit
def read(table, matrix, which: tl.constexpr, offset, mask, TYPE: tl.constexpr):
    pointer = address(table, matrix, which, TYPE, 16)
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def state_at(table, matrix, which: tl.constexpr, row):
    """Return pointers to the entries of a row vector."""
    stride = tl.load(table + matrix * ENTRY + STATE_STRIDE)
    return address(table, matrix, which, tl.float32, 4) + row * stride


# The row kernel before the polar factor: split, momentum, and the matrix to orthogonalize.


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sums"])
def sums_kernel(
    table, sums, count, m, n, MAXIMIZE: tl.constexpr, W_TYPE: tl.constexpr, G_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum over this rank's columns what `before_kernel` needs to know about whole rows."""
    matrix = tl.program_id(1).to(tl.int64)
    row, _, inside, offset, _ = offsets(table, matrix, m, n, ROWS, COLUMNS)
    W = read(table, matrix, WEIGHT, offset, inside, W_TYPE)
    G = read(table, matrix, GRADIENT, offset, inside, G_TYPE)
    if MAXIMIZE:
        G = -G
    place = sums + matrix * m + row
    tl.store(place + WEIGHT_SQUARES * count * m, row_sum(W, W), mask=row < m)
    tl.store(place + PRODUCTS * count * m, row_sum(G, W), mask=row < m)
    tl.store(place + GRADIENT_SQUARES * count * m, row_sum(G, G), mask=row < m)


@triton.jit
def _tangent(
    G, table, sums, count, m, matrix, row, in_rows, inside, offset, radial,
    CHART: tl.constexpr, SUMMED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the rows' directions; store the gradient of their lengths."""
    if CHART == FLAT:
        return G
    W = read(table, matrix, WEIGHT, offset, inside, TYPE)
    if SUMMED:
        root = tl.sqrt(summed(sums, WEIGHT_SQUARES, count, m, matrix, row, in_rows))
        g = root.to(tl.float32)
        along = summed(sums, PRODUCTS, count, m, matrix, row, in_rows) / divisor(root)
        slope = tl.sqrt(summed(sums, GRADIENT_SQUARES, count, m, matrix, row, in_rows))
        r = tl.where(g == 0.0, -slope, along).to(tl.float32)
    else:
        exponent = exponents(W)
        V = W * power_of_two(-exponent)[:, None]
        squares, products = tl.split(tl.sum(tl.join(V * V, G * V), axis=1))  # in one reduction
        length = tl.sqrt(squares)
        g = length * power_of_two(exponent)
        r = products / divisor(length)
        if tl.min(g, axis=0) == 0.0:  # a zero row moves along -G: its radial gradient is -|G|
            r = tl.where(g == 0.0, -row_norm(G), r)
    tl.store(radial, r, mask=in_rows)
    r = tl.where(g == 0.0, 0.0, r)
    if CHART == WEIGHT_NORM:
        # Not (g G - r W) / rho: of a row that was zero, g and rho are so small that g G may be 0.
        rho = divisor(_stored_norm(table, matrix, row, in_rows, g))
        inverse = power_of_two(-exponent_of(g))
        along = r / divisor(g * inverse)
        return (g / rho)[:, None] * (G - along[:, None] * (W * inverse[:, None]))
    return g[:, None] * G - r[:, None] * W


@triton.jit
def _stored_norm(table, matrix, row, in_rows, g):
    """Load rho, which starts as the rows' lengths."""
    rho = tl.load(state_at(table, matrix, STORED_NORM, row), mask=in_rows, other=0.0)
    return tl.where(rho == 0.0, g, rho)


@triton.jit
def momentum_at(table, matrix, TYPE: tl.constexpr):
    """Return the address of the momentum. In 8 bits, parts may start at multiples of 8 bytes."""
    if TYPE == tl.int8:
        return address(table, matrix, MOMENTUM, TYPE, 8)
    return address(table, matrix, MOMENTUM, TYPE, 16)


@triton.jit
def _new_momentum(
    table, scalars, sums, count, m, matrix, row, in_rows, inside, offset, radial,
    CHART: tl.constexpr, MAXIMIZE: tl.constexpr, SUMMED: tl.constexpr,
    W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the rows' directions, and the momentum with it."""
    # First of all loads: a load after a reduction would wait for it.
    stored = tl.load(momentum_at(table, matrix, M_TYPE) + offset, mask=inside, other=0)
    beta = tl.load(scalars + BETA)
    if M_TYPE == tl.int8:
        scale = tl.load(state_at(table, matrix, MOMENTUM_SCALE, row), mask=in_rows, other=0.0)
    G = read(table, matrix, GRADIENT, offset, inside, G_TYPE)
    if MAXIMIZE:
        G = -G
    T = _tangent(
        G, table, sums, count, m, matrix, row, in_rows, inside, offset, radial, CHART, SUMMED,
        W_TYPE,
    )  # fmt: skip
    M = stored.to(tl.float32)
    if M_TYPE == tl.int8:
        return T, M * tl.abs(M) * (1 / (LEVELS * LEVELS)) * (beta * scale)[:, None] + T
    return T, beta * M + T


@triton.jit
def _largest(M):
    """Return the largest absolute entry of each row; infinity where an entry is NaN.

    As integers, the bits of absolute values have their order, with NaN above infinity: one
    reduction finds both.
    """
    bits = tl.max(tl.abs(M).to(tl.int32, bitcast=True), axis=1)
    return tl.minimum(bits, INFINITY).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sums", "maxima"])
def maxima_kernel(
    table, scalars, stats, sums, maxima, count, m, n,
    CHART: tl.constexpr, MAXIMIZE: tl.constexpr, SUMMED: tl.constexpr,
    W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find the largest entry of the new momentum in this rank's columns, for rows that ranks
    share."""
    matrix = tl.program_id(1).to(tl.int64)
    row, _, inside, offset, _ = offsets(table, matrix, m, n, ROWS, COLUMNS)
    in_rows = row < m
    radial = stats + matrix * m + row + RADIAL * count * m
    _, M = _new_momentum(
        table, scalars, sums, count, m, matrix, row, in_rows, inside, offset, radial, CHART,
        MAXIMIZE, SUMMED, W_TYPE, G_TYPE, M_TYPE,
    )  # fmt: skip
    tl.store(maxima + matrix * m + row, _largest(M), mask=in_rows)


@triton.jit
def _store_eight_bit(
    M, scale, table, scalars, matrix, row, column, in_rows, inside, offset, SHARDED: tl.constexpr
):
    """Store the momentum in 8 bits, as angular_muown.params.eight_bit.encode does."""
    scale = tl.maximum(scale, SMALLEST)
    # Several warps read the same entries; all must have read them before one writes.
    tl.debug_barrier()
    tl.store(state_at(table, matrix, MOMENTUM_SCALE, row), scale, mask=in_rows)
    if SHARDED:
        row += tl.load(table + matrix * ENTRY + FIRST_ROW).to(tl.int32)
        column += tl.load(table + matrix * ENTRY + FIRST_COLUMN).to(tl.int32)
    seed = tl.load(scalars + SEED).to(tl.uint32, bitcast=True) + SALT
    column = column.to(tl.uint32)[None, :]
    noise = _hash(row.to(tl.uint32) + seed)[:, None] + (column >> 1) * GOLDEN
    noise = (noise ^ (noise >> 15)) * 0x846CA68B
    noise = tl.where((column & 1) == 1, noise, (noise << 16) | (noise >> 16)) >> 8
    # Few instructions per entry, or they would take longer than the memory that 8 bits save:
    # divisions are per row, and adding 1.5 * 2^23 leaves an integer in the last bits.
    z = tl.abs(M) * (1.0 / scale)[:, None] * (LEVELS * LEVELS)
    lower = tl.floor(tl.sqrt(z))
    up = noise.to(tl.float32) * (lower * 2.0**-23 + 2.0**-24) < z - lower * lower
    highest = tl.where(scale < float("inf"), LEVELS, 0.0)  # 0 also replaces NaN
    q = tl.minimum(lower + up.to(tl.float32), highest[:, None])
    sign = M.to(tl.int32, bitcast=True) & SIGN
    q = (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    q = (q + 12582912.0).to(tl.int32, bitcast=True)
    tl.store(momentum_at(table, matrix, tl.int8) + offset, q.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sums", "maxima"])
def before_kernel(
    table, scalars, stats, sums, maxima, work, stride, count, m, n,
    CHART: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, FACTORS: tl.constexpr,
    SHARDED: tl.constexpr, SUMMED: tl.constexpr, SCALED: tl.constexpr,
    W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update M; store the matrix to orthogonalize as float16 rows with an exponent each.

    If SHARDED, this is this rank's part of a matrix, whose rows are stored as packets. If SUMMED,
    ranks share its rows, and `sums` has the sums over all columns. If SCALED, they also share the
    scales of an 8-bit momentum, and `maxima` has the largest entries of rows.
    """
    matrix = tl.program_id(1).to(tl.int64)
    row, column, inside, offset, dense_offset = offsets(table, matrix, m, n, ROWS, COLUMNS)
    in_rows = row < m
    row_stats = stats + matrix * m + row
    T, M = _new_momentum(
        table, scalars, sums, count, m, matrix, row, in_rows, inside, offset,
        row_stats + RADIAL * count * m, CHART, MAXIMIZE, SUMMED, W_TYPE, G_TYPE, M_TYPE,
    )  # fmt: skip
    X = M
    if NESTEROV:
        X = T + tl.load(scalars + BETA) * M
    exponent = exponents(X)
    X = X * power_of_two(-exponent)[:, None]
    squares = tl.sum(X * X, axis=1)
    if M_TYPE == tl.int8:
        scale = tl.where(squares == squares, tl.max(tl.abs(M), axis=1), float("inf"))
        if SCALED:
            scale = tl.load(maxima + matrix * m + row, mask=in_rows, other=0.0)
        _store_eight_bit(
            M, scale, table, scalars, matrix, row, column, in_rows, inside, offset, SHARDED
        )
    else:
        tl.store(momentum_at(table, matrix, M_TYPE) + offset, M.to(M_TYPE), mask=inside)
    if SHARDED:
        base = tl.load(table + matrix * ENTRY + PACKET + tl.zeros_like(row))
        packet = base + row.to(tl.int64) * (2 * (n + HEADER))
        sends = in_rows & (base != 0)
        tl.store(header(packet), exponent.to(tl.float32), mask=sends)
        tl.store(header(packet) + 1, squares, mask=sends)
        if FACTORS:
            v = tl.load(state_at(table, matrix, SECOND_MOMENT, row), mask=in_rows, other=0.0)
            tl.store(header(packet) + 2, v, mask=sends)
            beta = tl.zeros_like(v) + tl.load(scalars + ROW_BETA)
            tl.store(header(packet) + 3, beta, mask=sends)
        column = tl.arange(0, COLUMNS)
        tl.store(entries(packet, column), X.to(tl.float16), mask=inside & sends[:, None])
    else:
        tl.store(row_stats + EXPONENT * count * m, exponent.to(tl.float32), mask=in_rows)
        tl.store(row_stats + SQUARES * count * m, squares, mask=in_rows)
        tl.store(work + matrix * stride + dense_offset, X.to(work.dtype.element_ty), mask=inside)


# Kernels for norms: scaling to a given Frobenius norm, and NorMuon's second moment.


@triton.jit
def _row_size(stats, addresses, count, matrix, row, m, PACKETS: tl.constexpr):
    """Load the rows' exponents and sums of squares; -126 and 0 outside of the matrix."""
    mask = row < m
    if PACKETS:
        exponent = header(packet_address(addresses, matrix, m, row, mask))
        squares = exponent + 1
    else:
        exponent = stats + EXPONENT * count * m + matrix * m + row
        squares = stats + SQUARES * count * m + matrix * m + row
    e = tl.load(exponent, mask=mask, other=-126.0)
    return e, tl.load(squares, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["count"])
def scales_kernel(stats, addresses, count, m, size, PACKETS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the row factors that scale a matrix to Frobenius norm `size`.

    With PACKETS, the matrix has arrived from other ranks in m packets (see packets.py).
    """
    matrix = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -126.0, tl.float32)
    for start in range(0, m, BLOCK):
        e, q = _row_size(stats, addresses, count, matrix, start + index, m, PACKETS)
        top = tl.maximum(top, tl.where(q == 0.0, -126.0, e))
    highest = tl.max(top, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        e, q = _row_size(stats, addresses, count, matrix, start + index, m, PACKETS)
        total += q * tl.exp2(2.0 * (e - highest))
    factor = size / divisor(tl.sqrt(tl.sum(total, axis=0)))
    for start in range(0, m, BLOCK):
        e, _ = _row_size(stats, addresses, count, matrix, start + index, m, PACKETS)
        pointer = stats + FACTOR * count * m + matrix * m + start + index
        tl.store(pointer, factor * tl.exp2(e - highest), mask=start + index < m)


@triton.jit(do_not_specialize=["count"])
def normalize_kernel(
    stats, raw, out, addresses, stride, count, m, n, packets, first, start, width, tiles,
    TRANSPOSE: tl.constexpr, PACKETS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply rows by their factors; with TRANSPOSE, store the result as (n, m).

    With PACKETS, these are the rows of one column part: `width` columns from `start`, in the
    packets from `first` on. Otherwise there is one part, the matrix itself.
    """
    matrix = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    place = stats + FACTOR * count * packets + matrix * packets + first + row
    factor = tl.load(place, mask=row < m, other=0.0)
    inside = (row[:, None] < m) & (column[None, :] < width)
    if PACKETS:
        source = entries(packet_address(addresses, matrix, packets, first + row, row < m), column)
    else:
        source = raw + matrix * stride + row[:, None] * n + column[None, :]
    X = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    X = (X * factor[:, None]).to(out.dtype.element_ty)
    if TRANSPOSE:
        inside = (column[:, None] < width) & (row[None, :] < m)
        offset = (start + column[:, None]) * m + row[None, :]
        tl.store(out + matrix * stride + offset, tl.trans(X), mask=inside)
    else:
        offset = row[:, None] * n + start + column[None, :]
        tl.store(out + matrix * stride + offset, X, mask=inside)


@triton.jit(do_not_specialize=["count"])
def squares_kernel(
    stats, work, stride, count, m, n, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute the row sums of Q^2; the work buffer holds Q / scale."""
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < m) & (column[None, :] < n)
    pointer = work + matrix * stride + row[:, None] * n + column[None, :]
    Q = tl.load(pointer, mask=inside, other=0.0).to(tl.float32) * scale
    row_stats = stats + SQUARES * count * m + matrix * m + row
    tl.store(row_stats, tl.sum(Q * Q, axis=1), mask=row < m)


@triton.jit
def second_moment(v, q, n, beta):
    """Return NorMuon's new v of rows with n entries whose squares add up to q."""
    return (1.0 - beta) * (q / n) + beta * v


@triton.jit(do_not_specialize=["count"])
def second_moment_kernel(table, scalars, stats, count, m, n, BLOCK: tl.constexpr):
    """Update NorMuon's v; compute the factors of Q's rows, which keep Q's Frobenius norm."""
    matrix = tl.program_id(0).to(tl.int64)
    beta = tl.load(scalars + ROW_BETA)
    moments = address(table, matrix, SECOND_MOMENT, tl.float32, 4)
    stride = tl.load(table + matrix * ENTRY + STATE_STRIDE)
    squares = stats + SQUARES * count * m + matrix * m
    index = tl.arange(0, BLOCK)
    whole = tl.zeros((BLOCK,), tl.float32)
    scaled = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        mask = start + index < m
        q = tl.load(squares + start + index, mask=mask, other=0.0)
        v = tl.load(moments + (start + index) * stride, mask=mask, other=0.0)
        v = second_moment(v, q, n, beta)
        tl.store(moments + (start + index) * stride, v, mask=mask)
        whole += q
        scaled += q / divisor(v)
    restore = tl.sqrt(tl.sum(whole, axis=0)) / divisor(tl.sqrt(tl.sum(scaled, axis=0)))
    for start in range(0, m, BLOCK):
        mask = start + index < m
        v = tl.load(moments + (start + index) * stride, mask=mask, other=0.0)
        factor = restore / divisor(tl.sqrt(v))
        tl.store(stats + FACTOR * count * m + matrix * m + start + index, factor, mask=mask)


@triton.jit(do_not_specialize=["count"])
def restore_kernel(addresses, stats, packets, count, m, n, BLOCK: tl.constexpr):
    """Compute the factors that restore Q's norms, from the v in the headers of packets.

    The ranks that hold the rows store the new v (see `_step`).
    """
    matrix = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    whole = tl.zeros((BLOCK,), tl.float32)
    scaled = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        mask = start + index < m
        at = header(packet_address(addresses, matrix, packets, start + index, mask))
        v = tl.load(at + 2, mask=mask, other=0.0)
        beta = tl.load(at + 3, mask=mask, other=0.0)
        q = tl.load(stats + SQUARES * count * m + matrix * m + start + index, mask=mask, other=0.0)
        whole += q
        scaled += q / divisor(second_moment(v, q, n, beta))
    restore = tl.sqrt(tl.sum(whole, axis=0)) / divisor(tl.sqrt(tl.sum(scaled, axis=0)))
    tl.store(stats + FACTOR * count * m + matrix, restore)


# The row kernel after the polar factor: radius, retraction, rounding, W.


@triton.jit
def _hash(x):
    """The hash of angular_muown.params.rounding, in 32-bit words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(X, row, column, scalars, NOISE: tl.constexpr, TYPE: tl.constexpr):
    """Round to the weight's type; with NOISE, stochastically to a 16-bit type.

    The noise equals that of angular_muown.params.rounding bit for bit.
    """
    if not NOISE:
        return X.to(TYPE)
    seed = tl.load(scalars + SEED).to(tl.uint32, bitcast=True)
    noise = _hash(_hash(row.to(tl.uint32) + seed)[:, None] + column.to(tl.uint32)[None, :])
    bits = X.to(tl.uint32, bitcast=True)
    if TYPE == tl.bfloat16:
        moved = (bits + (noise & 0xFFFF)) & 0xFFFF0000
    else:
        moved = (bits + (noise & 0x1FFF)) & 0xFFFFE000
    finite = (bits & 0x7F800000) != 0x7F800000
    value = tl.where(finite, moved.to(tl.float32, bitcast=True), X)
    if TYPE == tl.float16:  # subnormals are evenly spaced: 2^-24
        even = tl.floor(X * 16777216.0 + (noise & 0xFFFF).to(tl.float32) / 65536.0) / 16777216.0
        value = tl.where(tl.abs(X) < 6.103515625e-05, even, value)
    return value.to(TYPE)


@triton.jit
def _moment(table, matrix, which: tl.constexpr, row, in_rows):
    pointer = state_at(table, matrix, which, row)
    return pointer, tl.load(pointer, mask=in_rows, other=0.0)


@triton.jit
def _new_radius(
    g, r, past, square, mean_pointer, square_pointer, in_rows, scalars, bias_corrections, matrix,
    RADIUS: tl.constexpr,
):  # fmt: skip
    """Update the rows' lengths by Adam and return them.

    The mean changes sign with rows whose length becomes negative.
    """
    beta1 = tl.load(scalars + BETA1)
    beta2 = tl.load(scalars + BETA2)
    mean = beta1 * tl.where(g == 0.0, 0.0, past) + (1.0 - beta1) * r
    square = beta2 * square + (1.0 - beta2) * r * r
    root = tl.sqrt(square / tl.load(bias_corrections + matrix * 2 + 1)) + tl.load(scalars + EPS)
    change = (
        tl.load(scalars + RADIUS_LR)
        * (mean / tl.load(bias_corrections + matrix * 2))
        / divisor(root)
    )
    if RADIUS == ADAM:
        new = g - change
        mean = tl.where(new < 0.0, -mean, mean)
    else:
        new = tl.where(g == 0.0, tl.maximum(-change, 0.0), g * tl.exp(-change))
    # Several warps read the same entries; all must have read them before one writes.
    tl.debug_barrier()
    tl.store(mean_pointer, mean, mask=in_rows)
    tl.store(square_pointer, square, mask=in_rows)
    return new


@triton.jit
def _step(
    table, scalars, stats, work, stride, count, m, n, whole_n, scale, matrix, row, in_rows, inside,
    dense_offset, FACTORS: tl.constexpr, SHARDED: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Return lr kappa scale Q, with NorMuon's factors; if STORE, its new v is stored."""
    if SHARDED:
        start = tl.load(table + matrix * ENTRY + RESULT)
        packet = start + row.to(tl.int64) * (2 * (n + HEADER * FACTORS))
        column = tl.arange(0, inside.shape[1])
        if FACTORS:
            source = entries(packet, column)
        else:
            base = tl.multiple_of(packet.to(tl.pointer_type(tl.float16)), 16)
            source = base[:, None] + column[None, :]
    else:
        source = work + matrix * stride + dense_offset
    step = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    step = step * (tl.load(scalars + STEP) * scale)
    if FACTORS:
        if SHARDED:
            q = tl.load(header(packet), mask=in_rows, other=0.0)
            restore = tl.load(header(packet) + 1, mask=in_rows, other=0.0)
            pointer, v = _moment(table, matrix, SECOND_MOMENT, row, in_rows)
            beta = tl.load(scalars + ROW_BETA)
            v = second_moment(v, q, whole_n, beta)
            if STORE:
                tl.debug_barrier()  # see _new_radius
                tl.store(pointer, v, mask=in_rows)
            factor = restore / divisor(tl.sqrt(v))
        else:
            place = stats + FACTOR * count * m + matrix * m + row
            factor = tl.load(place, mask=in_rows, other=0.0)
        step *= factor[:, None]
    return step


@triton.jit
def _direction(
    W, table, sums, count, m, matrix, row, in_rows, inside, offset,
    MAXIMIZE: tl.constexpr, SUMMED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Return lengths and unit rows. A zero row has the direction -G; G is read only for such."""
    if SUMMED:
        g = tl.sqrt(summed(sums, WEIGHT_SQUARES, count, m, matrix, row, in_rows)).to(tl.float32)
    else:
        g = row_norm(W)
    length = g
    empty = (g == 0.0) & in_rows
    if tl.max(empty.to(tl.int32), axis=0) > 0:
        G = read(table, matrix, GRADIENT, offset, empty[:, None] & inside, TYPE)
        if not MAXIMIZE:
            G = -G
        W = tl.where(empty[:, None], G, W)
        if SUMMED:
            squares = summed(sums, GRADIENT_SQUARES, count, m, matrix, row, in_rows)
            slope = tl.sqrt(squares).to(tl.float32)
        else:
            slope = row_norm(G)
        length = tl.where(empty, slope, g)
    return g, W / divisor(length)[:, None]


@triton.jit
def _moved(U, step, g, table, matrix, row, in_rows, CHART: tl.constexpr):
    """Return the rows after the step, not of unit length."""
    if CHART == WEIGHT_NORM:
        rho = _stored_norm(table, matrix, row, in_rows, g)
        return tl.where((rho == 0.0)[:, None], U, rho[:, None] * U - step)
    return U - step


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sums", "squares"])
def moved_kernel(
    table, scalars, sums, squares, count, m, n, whole_n, scale,
    CHART: tl.constexpr, FACTORS: tl.constexpr, MAXIMIZE: tl.constexpr,
    W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the squares of the moved rows over this rank's columns, for rows that ranks share."""
    matrix = tl.program_id(1).to(tl.int64)
    row, _, inside, offset, dense_offset = offsets(table, matrix, m, n, ROWS, COLUMNS)
    in_rows = row < m
    step = _step(
        table, scalars, sums, sums, 0, count, m, n, whole_n, scale, matrix, row, in_rows, inside,
        dense_offset, FACTORS, True, False,
    )  # fmt: skip
    W = read(table, matrix, WEIGHT, offset, inside, W_TYPE)
    g, U = _direction(
        W, table, sums, count, m, matrix, row, in_rows, inside, offset, MAXIMIZE, True, G_TYPE
    )
    R = _moved(U, step, g, table, matrix, row, in_rows, CHART)
    tl.store(squares + matrix * m + row, row_sum(R, R), mask=in_rows)


@triton.jit
def _retracted(
    U, step, g, length, table, squares, matrix, row, m, in_rows,
    CHART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Return the rows after the step, with their new lengths."""
    R = _moved(U, step, g, table, matrix, row, in_rows, CHART)
    if SUMMED:
        norm = tl.load(squares + matrix * m + row, mask=in_rows, other=0.0)
        norm = tl.sqrt(norm).to(tl.float32)
    elif CHART == WEIGHT_NORM:
        norm = row_norm(R)
    else:
        norm = tl.sqrt(tl.sum(R * R, axis=1))
    if CHART == WEIGHT_NORM:
        rho = _stored_norm(table, matrix, row, in_rows, g)
        stored = state_at(table, matrix, STORED_NORM, row)
        tl.debug_barrier()  # see _new_radius
        tl.store(stored, tl.where(rho == 0.0, 0.0, norm), mask=in_rows)
    return R * (length / divisor(norm))[:, None]


@triton.jit
def _negate_momentum(table, matrix, rows, offset, inside, TYPE: tl.constexpr):
    """Negate the momentum of rows whose length crossed zero, because their direction flips."""
    if tl.max(rows.to(tl.int32), axis=0) > 0:
        momentum = momentum_at(table, matrix, TYPE)
        M = tl.load(momentum + offset, mask=rows[:, None] & inside, other=0)
        tl.store(momentum + offset, (-M.to(tl.float32)).to(TYPE), mask=rows[:, None] & inside)


@triton.jit
def _chord(W, new):
    """Return the squared distance between unit rows, up to sign, or nan if either row is zero.

    See monitor.row_angles.
    """
    g = row_norm(W)
    norm = row_norm(new)
    u = W / divisor(g)[:, None]
    v = new / divisor(norm)[:, None]
    chord = tl.minimum(tl.sum((v - u) * (v - u), axis=1), tl.sum((v + u) * (v + u), axis=1))
    return tl.where((g == 0.0) | (norm == 0.0), float("nan"), chord)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["bias_corrections", "sums", "squares"],
)
def after_kernel(
    table, scalars, bias_corrections, stats, sums, squares, work, stride, count, m, n, whole_n,
    scale, CHART: tl.constexpr, RADIUS: tl.constexpr, FACTORS: tl.constexpr,
    MAXIMIZE: tl.constexpr, NOISE: tl.constexpr, OBSERVED: tl.constexpr, SHARDED: tl.constexpr,
    SUMMED: tl.constexpr, W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update W and its row state from Q, which is the work buffer times `scale`.

    If OBSERVED, also store how far the rows of the stored weight have turned. If SHARDED, this is
    this rank's part of a matrix with `whole_n` columns, and that of Q is where it arrived. If
    SUMMED, ranks share its rows: `sums` and `squares` have the sums over all columns.
    """
    matrix = tl.program_id(1).to(tl.int64)
    row, column, inside, offset, dense_offset = offsets(table, matrix, m, n, ROWS, COLUMNS)
    in_rows = row < m
    row_stats = stats + matrix * m + row
    if CHART != FLAT and RADIUS != FIXED:  # loaded early, to overlap with the rows
        r = tl.load(row_stats + RADIAL * count * m, mask=in_rows, other=0.0)
        mean_pointer, past = _moment(table, matrix, EXP_AVG, row, in_rows)
        square_pointer, square = _moment(table, matrix, EXP_AVG_SQ, row, in_rows)
    W = read(table, matrix, WEIGHT, offset, inside, W_TYPE)
    step = _step(
        table, scalars, stats, work, stride, count, m, n, whole_n, scale, matrix, row, in_rows,
        inside, dense_offset, FACTORS, SHARDED, True,
    )  # fmt: skip
    decay = tl.load(scalars + DECAY)
    if CHART == FLAT:
        new = decay * W - step
    else:
        g, U = _direction(
            W, table, sums, count, m, matrix, row, in_rows, inside, offset, MAXIMIZE, SUMMED, G_TYPE
        )
        length = g * decay
        if RADIUS != FIXED:
            length = _new_radius(
                length, r, past, square, mean_pointer, square_pointer, in_rows, scalars,
                bias_corrections, matrix, RADIUS,
            )  # fmt: skip
        new = _retracted(U, step, g, length, table, squares, matrix, row, m, in_rows, CHART, SUMMED)
        if RADIUS == ADAM:
            _negate_momentum(table, matrix, (length < 0.0) & in_rows, offset, inside, M_TYPE)
    weight = address(table, matrix, WEIGHT, W_TYPE, 16)
    if SHARDED:
        row += tl.load(table + matrix * ENTRY + FIRST_ROW).to(tl.int32)
        column += tl.load(table + matrix * ENTRY + FIRST_COLUMN).to(tl.int32)
    stored = _rounded(new, row, column, scalars, NOISE, W_TYPE)
    tl.store(weight + offset, stored, mask=inside)
    if OBSERVED:
        tl.store(row_stats + CHORD * count * m, _chord(W, stored.to(tl.float32)), mask=in_rows)
