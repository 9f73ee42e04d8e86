"""The row kernel after the polar factor: radius, retraction, rounding, W."""

import triton
import triton.language as tl

from angular_muown.kernels.rows import (
    ADAM,
    BETA1,
    BETA2,
    CHORD,
    DECAY,
    EPS,
    EXP_AVG,
    EXP_AVG_SQ,
    FACTOR,
    FIXED,
    FLAT,
    GRADIENT,
    MOMENTUM,
    RADIAL,
    RADIUS_LR,
    SEED,
    STEP,
    STORED_NORM,
    WEIGHT,
    WEIGHT_NORM,
    address,
    divisor,
    places,
    read,
    row_norm,
    state_at,
)


@triton.jit
def _hash(x):
    """As in angular_muown.rounding, in 32-bit words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(X, row, column, numbers, NOISE: tl.constexpr, TYPE: tl.constexpr):
    """To the weight's type; with NOISE, stochastically to a 16-bit one: the noise of
    angular_muown.rounding, bit for bit."""
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
