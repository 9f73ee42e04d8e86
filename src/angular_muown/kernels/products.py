"""Products of an orthogonalization: the symmetric ones by half their tiles, the others by cuBLAS."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from angular_muown.kernels.schedule import TILE, Kind, Places, Product

WARPS, STAGES, DEPTH = 4, 3, 64  # two programs share a processor: one computes, one stores


@triton.jit
def symmetric_kernel(  # type: ignore[no-untyped-def]
    left, right, C, D, out, size, depth, stride, tiles, alpha, beta, gamma, delta,
    ALONG: tl.constexpr, HAS_C: tl.constexpr, HAS_D: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = alpha L R + beta C + gamma D + delta I, symmetric (size, size), for matrices `stride`
    apart. L and R lie as (depth, size), so that out = L^T R; ALONG the sum, as (size, depth), they
    are the same X and out = X X^T."""
    program = tl.program_id(0)
    start = (program // tiles).to(tl.int64) * stride
    t = program % tiles
    # column of the upper triangle that tile t lies in; the root may be rounded to either side
    j = ((tl.sqrt(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > t, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= t, j + 1, j)
    i = t - j * (j + 1) // 2
    row = i * TILE + tl.arange(0, TILE)
    column = j * TILE + tl.arange(0, TILE)
    row_in = row % size  # beyond the edge something valid is read, and not written
    column_in = column % size
    k = tl.arange(0, BK)
    L = left + start
    R = right + start
    if ALONG:
        at_L = row_in[:, None] * depth + k[None, :]
        at_R = column_in[None, :] * depth + k[:, None]
        ahead = BK
    else:
        at_L = k[None, :] * size + row_in[:, None]
        at_R = k[:, None] * size + column_in[None, :]
        ahead = BK * size
    sums = tl.zeros((TILE, TILE), tl.float32)
    for begin in range(0, depth, BK):
        if EVEN:
            x = tl.load(L + at_L)
            y = tl.load(R + at_R)
        else:
            x = tl.load(L + at_L, mask=k[None, :] < depth - begin, other=0.0)
            y = tl.load(R + at_R, mask=k[:, None] < depth - begin, other=0.0)
        sums = tl.dot(x, y, sums)
        L += ahead
        R += ahead
    inside = (row[:, None] < size) & (column[None, :] < size)
    place = row[:, None] * size + column[None, :]
    sums = sums * alpha
    if HAS_C:
        sums += beta * tl.load(C + start + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_D:
        sums += gamma * tl.load(D + start + place, mask=inside, other=0.0).to(tl.float32)
    sums += tl.where(row[:, None] == column[None, :], delta, 0.0)
    value = sums.to(out.dtype.element_ty)
    if i == j:
        # Rounding leaves factors that do not quite commute, and what is not symmetric in them
        # would grow: a factor is read as its own transpose.
        value = value * 0.5 + tl.trans(value) * 0.5
    tl.store(out + start + place, value, mask=inside)
    if i != j:
        mirror = column[:, None] * size + row[None, :]
        edges = (column[:, None] < size) & (row[None, :] < size)
        tl.store(out + start + mirror, tl.trans(value), mask=edges)


def run(work: Tensor, m: int, n: int, chain: Sequence[Product], places: Places) -> None:
    """Carry a chain out on `work`, (count, places.size) float16, which holds the X's at 0."""
    for number, product in enumerate(chain, start=1):
        out = places.offsets[number]
        if product.kind is Kind.APPLY:
            _apply(work, m, n, places.offsets[product.left], places.offsets[product.right], out)
        else:
            _symmetric(work, m, n, product, places.offsets, out)


def _apply(work: Tensor, m: int, n: int, P: int, X: int, out: int) -> None:
    short = min(m, n)

    def view(at: int, rows: int, columns: int) -> Tensor:
        return work[:, at : at + rows * columns].unflatten(1, (rows, columns))

    small, large, result = view(P, short, short), view(X, m, n), view(out, m, n)
    if m > n:  # P is symmetric: its transpose lies along the sum, which cuBLAS likes best
        torch.bmm(large, small.mT, out=result)
    else:
        torch.bmm(small, large, out=result)


def _symmetric(
    work: Tensor, m: int, n: int, product: Product, offsets: Sequence[int], out: int
) -> None:
    short, long = min(m, n), max(m, n)
    depth = long if product.kind is Kind.GRAM else short
    edge = -(-short // TILE)
    tiles = edge * (edge + 1) // 2

    def part(number: int) -> Tensor:
        return work[:, offsets[max(number, 0)] :]

    launch: Any = symmetric_kernel[(tiles * work.shape[0],)]
    launch(
        part(product.left), part(product.right), part(product.C), part(product.D), work[:, out:],
        short, depth, work.stride(0), tiles,
        product.alpha, product.beta, product.gamma, product.delta,
        product.kind is Kind.GRAM and m <= n, product.C >= 0, product.D >= 0,
        depth % DEPTH == 0, TILE, DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
