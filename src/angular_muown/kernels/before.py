"""The row kernel before the polar factor: split, momentum, and a matrix ready for products."""

import triton
import triton.language as tl

from angular_muown.kernels.rows import (
    BETA,
    EXPONENT,
    FLAT,
    GRADIENT,
    MOMENTUM,
    RADIAL,
    SQUARES,
    STORED_NORM,
    WEIGHT,
    WEIGHT_NORM,
    address,
    divisor,
    exponents,
    places,
    power_of_two,
    read,
    row_norm,
    state_at,
)


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
