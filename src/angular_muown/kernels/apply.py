"""The kernel for X P and P X^T: a product whose factors both lie along the sum."""

import triton
import triton.language as tl


@triton.jit
def apply_kernel(
    left, right, out, depth, tiles, across, TILE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = L R^T, batched, through tensor descriptors: beyond the edges zeros are read and
    nothing is written. Of `tiles` tiles per matrix, `across` lie side by side."""
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
