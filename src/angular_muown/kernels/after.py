"""The row kernel after the polar factor: radius, retraction, rounding, W."""

import triton
import triton.language as tl

from angular_muown.kernels.rows import (
    ADAM,
    BETA1,
    BETA2,
    DECAY,
    EPS,
    EXP_AVG,
    EXP_AVG_SQ,
    FACTOR,
    FIXED,
    FLAT,
    GRADIENT,
    LINE,
    MOMENTUM,
    RADIAL,
    RADIUS_LR,
    SEED,
    STATE_STRIDE,
    STEP,
    STORED_NORM,
    WEIGHT,
    WEIGHT_NORM,
    _address,
    _divisor,
    _places,
    _read,
)


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """As in angular_muown.rounding, in 32-bit words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(X, row, column, seed, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stochastic rounding to a 16-bit type: the noise of angular_muown.rounding, bit for bit."""
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
def _new_radius(  # type: ignore[no-untyped-def]
    g, r, table, matrix, row, in_rows, numbers, ages, RADIUS: tl.constexpr
):
    """Adam on the lengths; returns them, after writing its moments (turned with their rows)."""
    at = row * tl.load(table + matrix * LINE + STATE_STRIDE)
    first = _address(table, matrix, EXP_AVG, tl.float32, 4) + at
    second = _address(table, matrix, EXP_AVG_SQ, tl.float32, 4) + at
    beta1 = tl.load(numbers + BETA1)
    beta2 = tl.load(numbers + BETA2)
    past = tl.where(g == 0.0, 0.0, tl.load(first, mask=in_rows, other=0.0))
    mean = beta1 * past + (1.0 - beta1) * r
    square = beta2 * tl.load(second, mask=in_rows, other=0.0) + (1.0 - beta2) * r * r
    root = tl.sqrt(square / tl.load(ages + matrix * 2 + 1)) + tl.load(numbers + EPS)
    change = tl.load(numbers + RADIUS_LR) * (mean / tl.load(ages + matrix * 2)) / _divisor(root)
    if RADIUS == ADAM:
        new = g - change
        mean = tl.where(new < 0.0, -mean, mean)
    else:
        new = tl.where(g == 0.0, tl.maximum(-change, 0.0), g * tl.exp(-change))
    tl.store(first, mean, mask=in_rows)
    tl.store(second, square, mask=in_rows)
    return new


@triton.jit
def after_kernel(  # type: ignore[no-untyped-def]
    table, numbers, ages, stats, work, stride, count, m, n, scale,
    CHART: tl.constexpr, RADIUS: tl.constexpr, FACTORS: tl.constexpr, MAXIMIZE: tl.constexpr,
    NOISE: tl.constexpr, W_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Q (the work buffer times `scale`) and W -> W, with the row state that belongs to it."""
    matrix = tl.program_id(1).to(tl.int64)
    row, column, inside, place, own = _places(table, matrix, m, n, ROWS, COLUMNS)
    in_rows = row < m
    lines = matrix * m + row
    W = _read(table, matrix, WEIGHT, place, inside, W_TYPE)
    Q = tl.load(work + matrix * stride + own, mask=inside, other=0.0).to(tl.float32)
    move = tl.load(numbers + STEP) * scale
    if FACTORS:
        factor = tl.load(stats + FACTOR * count * m + lines, mask=in_rows, other=0.0)
        step = Q * (factor * move)[:, None]
    else:
        step = Q * move
    decay = tl.load(numbers + DECAY)
    if CHART == FLAT:
        new = decay * W - step
    else:
        g = tl.sqrt(tl.sum(W * W, axis=1))
        # A row at zero has the direction -G, which is read for such rows only.
        empty = (g == 0.0)[:, None] & inside
        G = _read(table, matrix, GRADIENT, place, empty, G_TYPE)
        if not MAXIMIZE:
            G = -G
        source = tl.where(empty, G, W)
        length = tl.where(g == 0.0, tl.sqrt(tl.sum(G * G, axis=1)), g)
        U = source / _divisor(length)[:, None]
        length = g * decay
        if RADIUS != FIXED:
            r = tl.load(stats + RADIAL * count * m + lines, mask=in_rows, other=0.0)
            length = _new_radius(
                length, r, table, matrix, row, in_rows, numbers, ages, RADIUS
            )
        if CHART == WEIGHT_NORM:
            at = row * tl.load(table + matrix * LINE + STATE_STRIDE)
            state = _address(table, matrix, STORED_NORM, tl.float32, 4) + at
            rho = tl.load(state, mask=in_rows, other=0.0)
            rho = tl.where(rho == 0.0, g, rho)
            R = tl.where((rho == 0.0)[:, None], U, rho[:, None] * U - step)
            norm = tl.sqrt(tl.sum(R * R, axis=1))
            tl.store(state, tl.where(rho == 0.0, 0.0, norm), mask=in_rows)
        else:
            R = U - step
            norm = tl.sqrt(tl.sum(R * R, axis=1))
        new = R * (length / _divisor(norm))[:, None]
        if RADIUS == ADAM:  # rows whose length crossed zero turn round, and their momentum too
            momentum = _address(table, matrix, MOMENTUM, M_TYPE, 16)
            turned = (length < 0.0)[:, None] & inside
            M = tl.load(momentum + place, mask=turned, other=0.0)
            tl.store(momentum + place, -M, mask=turned)
    weight = _address(table, matrix, WEIGHT, W_TYPE, 16)
    if NOISE:
        seed = tl.load(numbers + SEED).to(tl.uint32, bitcast=True)
        tl.store(weight + place, _rounded(new, row, column, seed, W_TYPE), mask=inside)
    else:
        tl.store(weight + place, new.to(W_TYPE), mask=inside)
