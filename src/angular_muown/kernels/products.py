"""Run the products of an orthogonalization.

Symmetric products compute half of their tiles. The others run in cuBLAS, or in our own kernel if
cuBLAS's workspaces would take too much of the memory budget.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from angular_muown.kernels.polar_chain import TILE, Allocation, Kind, Product
from angular_muown.kernels.triton.matmul import apply_kernel, symmetric_kernel

WARPS, STAGES, DEPTH = 4, 3, 64  # two programs share an SM: one computes, one stores


def run(
    work: Tensor, m: int, n: int, chain: Sequence[Product], allocation: Allocation, cublas: bool
) -> None:
    """Run a chain of products on `work`, (count, allocation.size) in float16.

    X is read from offset 0 with its long side first, the layout in which both kinds of product are
    fastest. The last product stores its result as (m, n).
    """
    offsets = allocation.offsets
    for out, product in enumerate(chain, start=1):
        if product.kind is Kind.APPLY:
            transposed = m < n and out == len(chain)
            apply = _apply_by_cublas if cublas else _apply
            apply(work, m, n, product, offsets, out, transposed)
        else:
            _symmetric(work, m, n, product, offsets, out)


def _apply(
    work: Tensor,
    m: int,
    n: int,
    product: Product,
    offsets: Sequence[int],
    out: int,
    transposed: bool,
) -> None:
    short, long = min(m, n), max(m, n)
    count, stride = work.shape[0], work.stride(0)

    def describe(index: int, rows: int, columns: int, width: int) -> TensorDescriptor:
        part = work[:, offsets[index] :]
        strides = [stride, columns, 1]
        return TensorDescriptor(part, [count, rows, columns], strides, [1, TILE, width])

    P, X = (product.left, short, short, DEPTH), (product.right, long, short, DEPTH)
    rows, columns = (short, long) if transposed else (long, short)
    across = -(-columns // TILE)
    tiles = -(-rows // TILE) * across
    factors = [describe(*factor) for factor in ((P, X) if transposed else (X, P))]
    launch: Any = apply_kernel[(tiles * count,)]
    launch(
        *factors, describe(out, rows, columns, TILE), short, tiles, across, TILE, DEPTH,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def _apply_by_cublas(
    work: Tensor,
    m: int,
    n: int,
    product: Product,
    offsets: Sequence[int],
    out: int,
    transposed: bool,
) -> None:
    short, long = min(m, n), max(m, n)

    def view(index: int, rows: int, columns: int) -> Tensor:
        start = offsets[index]
        return work[:, start : start + rows * columns].unflatten(1, (rows, columns))

    P, X = view(product.left, short, short), view(product.right, long, short)
    if transposed:  # P X^T
        torch.bmm(P, X.mT, out=view(out, short, long))
    else:  # X P. P is symmetric; its transpose is contiguous along the summed dimension, like X
        torch.bmm(X, P.mT, out=view(out, long, short))


def _symmetric(
    work: Tensor, m: int, n: int, product: Product, offsets: Sequence[int], out: int
) -> None:
    short, long = min(m, n), max(m, n)
    depth = long if product.kind is Kind.GRAM else short
    edge = -(-short // TILE)
    tiles = edge * (edge + 1) // 2

    def part(index: int) -> Tensor:
        return work[:, offsets[max(index, 0)] :]

    launch: Any = symmetric_kernel[(tiles * work.shape[0],)]
    launch(
        part(product.left), part(product.right), part(product.C), part(out),
        short, depth, work.stride(0), tiles,
        product.alpha, product.beta, product.delta,
        product.C >= 0, depth % DEPTH == 0, 0 < short % TILE <= TILE // 2, TILE, DEPTH,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
