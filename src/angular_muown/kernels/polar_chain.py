"""The products of an orthogonalization, their cost, and the offsets of their results.

One step of the iteration is X <- p(A) X with A = X X^T and p(A) = a I + b A + c A^2. Steps are
taken singly or in pairs. A pair, the Gram form X <- p_2(p_1 A p_1) p_1(A) X, has two products with
the long side instead of four. All small matrices are polynomials of one A, so they commute and are
symmetric: half of their tiles are computed, the others mirrored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from angular_muown.stages.orthogonalize import Iteration, Triple

TILE = 128
# The iterate is kept as 16 X, so that entries of X X^T (1e-6 for large matrices) stay above the
# smallest normal number of float16, 6e-5. Coefficients are scaled accordingly.
SCALE = 16.0
ALIGNMENT = 128  # elements, so that every load of a result can be 16 bytes wide


class Kind(Enum):
    GRAM = "X X^T"
    SMALL = "a product of small matrices"
    APPLY = "a small matrix times X"


# TFLOP/s of the operations that each kind's tiles compute, estimated on an H200. Only the ratios
# matter, to choose between the two forms; benchmarks/orthogonalize.py times both for every shape,
# and the faster one was chosen on all of them (docs/explanation/kernels.md).
THROUGHPUT = {Kind.GRAM: 520.0, Kind.SMALL: 450.0, Kind.APPLY: 600.0}


@dataclass(frozen=True)
class Product:
    """out = alpha L R + beta C + delta I. Operands are indices of results; 0 is X itself."""

    kind: Kind
    left: int
    right: int
    alpha: float = 1.0
    C: int = -1
    beta: float = 0.0
    delta: float = 0.0

    @property
    def reads(self) -> set[int]:
        """The indices of all operands."""
        return {self.left, self.right, self.C} - {-1}


def products(triples: Sequence[Triple], segments: Sequence[int]) -> list[Product]:
    """Return the iteration as a list of products; product i computes result i + 1.

    Args:
        triples: the coefficients (a, b, c) of each step.
        segments: 1 for a single step, 2 for a pair, in order.
    """
    if sum(segments) != len(triples) or not set(segments) <= {1, 2}:
        raise ValueError(
            f"segments={segments} must consist of 1s and 2s that add up to {len(triples)}"
        )
    steps = iter([(a, b / SCALE**2, c / SCALE**4) for a, b, c in triples])
    chain: list[Product] = []
    X = 0
    for length in segments:
        X = (
            _single(chain, X, next(steps))
            if length == 1
            else _pair(chain, X, next(steps), next(steps))
        )
    return chain


def _append(chain: list[Product], kind: Kind, *args: Any, **kwargs: Any) -> int:
    """Append a product; return the index of its result."""
    chain.append(Product(kind, *args, **kwargs))
    return len(chain)


def _square(triple: Triple) -> tuple[float, float]:
    """Return h and e of the completed square, p(A) = c (A + h I)^2 + e I."""
    a, b, c = triple
    return b / (2 * c), a - b * b / (4 * c)


def _single(chain: list[Product], X: int, triple: Triple) -> int:
    h, e = _square(triple)
    A = _append(chain, Kind.GRAM, X, X, delta=h)
    p = _append(chain, Kind.SMALL, A, A, triple[2], delta=e)
    return _append(chain, Kind.APPLY, p, X)


def _pair(chain: list[Product], X: int, first: Triple, second: Triple) -> int:
    """Append two steps in Gram form, with p_1 = a I + B.

    To limit rounding errors, B is stored without a I, and h I, next to which the small entries of A
    would be lost, is added only by the product that needs it.
    """
    a, b, c = first
    h, e = _square(second)
    A = _append(chain, Kind.GRAM, X, X)
    B = _append(chain, Kind.SMALL, A, A, c, C=A, beta=b)
    Z = _append(chain, Kind.SMALL, A, B, C=A, beta=a)  # A p_1
    A = _append(chain, Kind.SMALL, Z, B, C=Z, beta=a, delta=h)  # p_1 A p_1 + h I
    p = _append(chain, Kind.SMALL, A, A, second[2], delta=e)
    P = _append(chain, Kind.SMALL, p, B, C=p, beta=a)  # p_2 p_1
    return _append(chain, Kind.APPLY, P, X)


def operations(m: int, n: int, kind: Kind, tile: int = TILE) -> float:
    """Return the additions and multiplications of one product for one m x n matrix.

    With tile=1 this is the least that a symmetric product can cost.
    """
    short, long = min(m, n), max(m, n)
    edge = -(-short // tile)
    half = edge * (edge + 1) / 2 * tile**2
    cost = {Kind.GRAM: half * long, Kind.SMALL: half * short, Kind.APPLY: short * long * short}
    return 2.0 * cost[kind]


def modelled_microseconds(m: int, n: int, chain: Sequence[Product]) -> float:
    """Return the estimated time for one of many matrices, with the GPU fully occupied."""
    return sum(operations(m, n, product.kind) / THROUGHPUT[product.kind] for product in chain) / 1e6


@cache
def chain_for(m: int, n: int, iteration: Iteration) -> tuple[Product, ...]:
    """Return the products of an iteration, in the ordinary form or in the Gram form.

    The form with the lower estimated time is chosen, unless `iteration.gram` decides.

    The rounding error of A grows with every step until A is computed afresh, most at the first
    step, whose factor is 8. A single step followed by pairs stays below the error of the ordinary
    iteration in bfloat16 on every spectrum tested; three steps from one A do not
    (docs/explanation/kernels.md).
    """
    triples = iteration.coefficients
    pairs, odd = divmod(len(triples) - 1, 2)
    forms = [(1,) * len(triples), (1,) + (2,) * pairs + (1,) * odd]
    chains = [tuple(products(triples, form)) for form in forms]
    if iteration.gram:
        return chains[iteration.takes_gram_form(m, n)]
    return min(chains, key=lambda chain: modelled_microseconds(m, n, chain))


@dataclass(frozen=True)
class Allocation:
    """Offsets of all results inside a matrix's part of the work buffer, in elements."""

    offsets: tuple[int, ...]  # of result 0, which is X, and of each product's result
    raw: int  # of X before normalization: at X itself, or next to X if it is to be transposed
    size: int


@cache
def allocate(m: int, n: int, chain: tuple[Product, ...]) -> Allocation:
    """Assign an offset to every result, in little more memory than is live at any one time."""
    small, large = (-(-size // ALIGNMENT) * ALIGNMENT for size in (min(m, n) ** 2, m * n))
    sizes = [large, *(large if product.kind is Kind.APPLY else small for product in chain)]
    last_use = {value: i for i, product in enumerate(chain) for value in product.reads}
    last_use[len(chain)] = len(chain)
    raw = large if m < n else 0
    total = raw + large
    for i in range(len(chain)):
        live = [v for v in range(i + 1) if last_use[v] >= i]
        total = max(total, sizes[i + 1] + sum(sizes[v] for v in live))
    while (offsets := _fit([0], sizes, last_use, total)) is None:
        total += -(-small // (4 * ALIGNMENT)) * ALIGNMENT
    return Allocation(tuple(offsets), raw, total)


def _fit(
    placed: list[int], sizes: list[int], last_use: dict[int, int], total: int
) -> list[int] | None:
    """Extend `placed` to all results by depth-first search; None if they do not fit.

    Each result is placed at either end of the buffer or next to a live result.
    """
    index = len(placed)
    if index == len(sizes):
        return placed
    live = [(placed[v], placed[v] + sizes[v]) for v in range(index) if last_use[v] >= index - 1]
    size = sizes[index]
    starts = {0, total - size, *(end for _, end in live), *(start - size for start, _ in live)}
    for offset in sorted(start for start in starts if 0 <= start <= total - size):
        if all(offset + size <= start or end <= offset for start, end in live):
            offsets = _fit([*placed, offset], sizes, last_use, total)
            if offsets is not None:
                return offsets
    return None
