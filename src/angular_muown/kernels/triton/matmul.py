"""Kernels for matrix products: symmetric ones from half their tiles; a small matrix times X."""

import triton
import triton.language as tl


@triton.jit
def _tile(
    left, right, C, out, size, depth, top, side, alpha, beta, delta,
    HAS_C: tl.constexpr, EVEN: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = top + tl.arange(0, HEIGHT)
    column = side + tl.arange(0, WIDTH)
    k = tl.arange(0, BK)
    # Beyond the edge, indices wrap around to valid memory; these results are not stored.
    left_offset = k[None, :] * size + (row % size)[:, None]
    right_offset = k[:, None] * size + (column % size)[None, :]
    sums = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for begin in range(0, depth, BK):
        if EVEN:
            x = tl.load(left + left_offset)
            y = tl.load(right + right_offset)
        else:
            x = tl.load(left + left_offset, mask=k[None, :] < depth - begin, other=0.0)
            y = tl.load(right + right_offset, mask=k[:, None] < depth - begin, other=0.0)
        sums = tl.dot(x, y, sums)
        left += BK * size
        right += BK * size
    inside = (row[:, None] < size) & (column[None, :] < size)
    offset = row[:, None] * size + column[None, :]
    sums = sums * alpha
    if HAS_C:
        sums += beta * tl.load(C + offset, mask=inside, other=0.0).to(tl.float32)
    sums += tl.where(row[:, None] == column[None, :], delta, 0.0)
    value = sums.to(out.dtype.element_ty)
    if HEIGHT == WIDTH:  # noqa: SIM102 - decided at compile time, the inner one at run time
        if top == side:
            # Rounded factors do not quite commute. Their antisymmetric part would grow, because
            # a factor is read as its own transpose.
            value = value * 0.5 + tl.trans(value) * 0.5
    tl.store(out + offset, value, mask=inside)
    if top != side:
        mirror = column[:, None] * size + row[None, :]
        edges = (column[:, None] < size) & (row[None, :] < size)
        tl.store(out + mirror, tl.trans(value), mask=edges)


@triton.jit
def symmetric_kernel(
    left, right, C, out, size, depth, stride, tiles, alpha, beta, delta,
    HAS_C: tl.constexpr, EVEN: tl.constexpr, HALF_EDGE: tl.constexpr,
    TILE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute out = alpha L^T R + beta C + delta I, a symmetric (size, size) matrix.

    L and R are (depth, size); a symmetric L is its own transpose. Matrices are `stride` apart.
    HALF_EDGE: half a tile is enough for the last columns (704 columns are five and a half tiles).
    """
    program = tl.program_id(0)
    start = (program // tiles).to(tl.int64) * stride
    left += start
    right += start
    C += start
    out += start
    t = program % tiles
    # Tile t is in column j of the upper triangle; the root may be rounded in either direction.
    j = ((tl.sqrt(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > t, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= t, j + 1, j)
    i = t - j * (j + 1) // 2
    if HALF_EDGE and j == size // TILE:
        if i == j:
            _tile(
                left, right, C, out, size, depth, i * TILE, j * TILE, alpha, beta, delta,
                HAS_C, EVEN, TILE // 2, TILE // 2, BK,
            )  # fmt: skip
        else:
            _tile(
                left, right, C, out, size, depth, i * TILE, j * TILE, alpha, beta, delta,
                HAS_C, EVEN, TILE, TILE // 2, BK,
            )  # fmt: skip
    else:
        _tile(
            left, right, C, out, size, depth, i * TILE, j * TILE, alpha, beta, delta,
            HAS_C, EVEN, TILE, TILE, BK,
        )  # fmt: skip


@triton.jit
def apply_kernel(
    left, right, out, depth, tiles, across, TILE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute out = L R^T, batched.

    Tensor descriptors read zeros beyond the edges and write nothing there. A matrix has `tiles`
    tiles, `across` of them in each row.
    """
    program = tl.program_id(0)
    matrix = program // tiles
    tile = program % tiles
    top = tile // across * TILE
    side = tile % across * TILE
    sums = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, depth, BK):
        x = left.load([matrix, top, k]).reshape(TILE, BK)
        y = right.load([matrix, side, k]).reshape(TILE, BK)
        sums = tl.dot(x, y.T, sums)
    out.store([matrix, top, side], sums.to(tl.float16).reshape(1, TILE, TILE))
