"""Products of an orthogonalization: the symmetric ones by half their tiles, others by cuBLAS, or
by a kernel of our own where cuBLAS's workspaces would be most of the memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from angular_muown.kernels.polar_chain import TILE, Kind, Places, Product
from angular_muown.kernels.triton.matmul import apply_kernel, symmetric_kernel

WARPS, STAGES, DEPTH = 4, 3, 64  # two programs share a processor: one computes, one stores


def run(
    work: Tensor, m: int, n: int, chain: Sequence[Product], places: Places, cublas: bool
) -> None:
    """Carry a chain out on `work`, (count, places.size) float16, which holds the X's at 0, always
    with the long side first: the layout that both kinds of product are fastest in. The last one
    leaves its result as (m, n)."""
    for number, product in enumerate(chain, start=1):
        if product.kind is Kind.APPLY:
            turned = m < n and number == len(chain)
            apply = _apply_by_cublas if cublas else _apply
            apply(work, m, n, product, places.offsets, number, turned)
        else:
            _symmetric(work, m, n, product, places.offsets, number)


def _apply(
    work: Tensor, m: int, n: int, product: Product, offsets: Sequence[int], out: int, turned: bool
) -> None:
    short, long = min(m, n), max(m, n)
    count, stride = work.shape[0], work.stride(0)

    def described(number: int, rows: int, columns: int, width: int) -> TensorDescriptor:
        part = work[:, offsets[number] :]
        strides = [stride, columns, 1]
        return TensorDescriptor(part, [count, rows, columns], strides, [1, TILE, width])

    P, X = (product.left, short, short, DEPTH), (product.right, long, short, DEPTH)
    rows, columns = (short, long) if turned else (long, short)
    across = -(-columns // TILE)
    tiles = -(-rows // TILE) * across
    factors = [described(*factor) for factor in ((P, X) if turned else (X, P))]
    launch: Any = apply_kernel[(tiles * count,)]
    launch(
        *factors, described(out, rows, columns, TILE), short, tiles, across, TILE, DEPTH,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def _apply_by_cublas(
    work: Tensor, m: int, n: int, product: Product, offsets: Sequence[int], out: int, turned: bool
) -> None:
    short, long = min(m, n), max(m, n)

    def view(number: int, rows: int, columns: int) -> Tensor:
        at = offsets[number]
        return work[:, at : at + rows * columns].unflatten(1, (rows, columns))

    P, X = view(product.left, short, short), view(product.right, long, short)
    if turned:  # P X^T
        torch.bmm(P, X.mT, out=view(out, short, long))
    else:  # X P; P is symmetric, and as its transpose it lies along the sum, like X
        torch.bmm(X, P.mT, out=view(out, long, short))


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
        part(product.left), part(product.right), part(product.C), part(out),
        short, depth, work.stride(0), tiles,
        product.alpha, product.beta, product.delta,
        product.C >= 0, depth % DEPTH == 0, 0 < short % TILE <= TILE // 2, TILE, DEPTH,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
