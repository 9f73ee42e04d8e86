"""The kernel for X P and P X^T: a product whose factors both lie along the sum."""

import triton
import triton.language as tl


@triton.jit
def apply_kernel(
    left, right, out, rows, columns, depth, stride, tiles, across,
    EVEN: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = L R^T for matrices `stride` apart; L is (rows, depth), R is (columns, depth)."""
    program = tl.program_id(0)
    start = (program // tiles).to(tl.int64) * stride
    left += start
    right += start
    out += start
    tile = program % tiles
    row = tile // across * TILE + tl.arange(0, TILE)
    column = tile % across * TILE + tl.arange(0, TILE)
    k = tl.arange(0, BK)
    # beyond the edge something valid is read, and not written
    at_left = (row % rows)[:, None] * depth + k[None, :]
    at_right = (column % columns)[None, :] * depth + k[:, None]
    sums = tl.zeros((TILE, TILE), tl.float32)
    for begin in range(0, depth, BK):
        if EVEN:
            x = tl.load(left + at_left)
            y = tl.load(right + at_right)
        else:
            x = tl.load(left + at_left, mask=k[None, :] < depth - begin, other=0.0)
            y = tl.load(right + at_right, mask=k[:, None] < depth - begin, other=0.0)
        sums = tl.dot(x, y, sums)
        left += BK
        right += BK
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None] * columns + column[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)
