"""Which products an orthogonalization consists of, what they cost, and where their results lie.

One step of the iteration is X <- p(A) X with A = X X^T and p(A) = a I + b A + c A^2. The steps are
taken in segments. Inside a segment of k steps everything happens on the small side: p_1(A) is
followed by A <- p_1(A) A p_1(A), and the segment ends with X <- p_k ... p_1 X. Segments of one are
the ordinary iteration, longer ones its Gram form. All small matrices are polynomials of the
segment's A, so they commute and are symmetric: half of their tiles are computed and mirrored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

Triple = tuple[float, float, float]
TILE = 128
# The iterate is kept as 16 X, so that entries of X X^T (1e-6 for large matrices) stay above the
# smallest normal number of float16, 6e-5. Coefficients are divided accordingly.
SCALE = 16.0
ALIGNMENT = 128  # elements: results start where every load can be 16 bytes wide


class Kind(Enum):
    GRAM = "X X^T"
    SMALL = "a product of small matrices"
    APPLY = "a small matrix times X"


# TFLOP/s of the operations that a kind's tiles really compute, on an H200
# (results/orthogonalize_h200.json). Only their ratios matter, and only between two forms.
RATE = {Kind.GRAM: 520.0, Kind.SMALL: 450.0, Kind.APPLY: 600.0}


@dataclass(frozen=True)
class Product:
    """out = alpha L R + beta C + gamma D + delta I; numbers name earlier results, 0 is X itself."""

    kind: Kind
    left: int
    right: int
    alpha: float = 1.0
    C: int = -1
    beta: float = 0.0
    D: int = -1
    gamma: float = 0.0
    delta: float = 0.0

    @property
    def reads(self) -> set[int]:
        return {self.left, self.right, self.C, self.D} - {-1}


def products(triples: Sequence[Triple], segments: Sequence[int]) -> list[Product]:
    """The iteration as a list; the result number i is made by the product number i - 1."""
    steps = iter(triples)
    made: list[Product] = []
    X = 0
    for length in segments:
        segment = [next(steps) for _ in range(length)]
        X = _segment(made, X, [(a, b / SCALE**2, c / SCALE**4) for a, b, c in segment])
    return made


def _segment(made: list[Product], X: int, triples: Sequence[Triple]) -> int:
    def make(kind: Kind, left: int, right: int, alpha: float = 1.0, **rest: Any) -> int:
        made.append(Product(kind, left, right, alpha, **rest))
        return len(made)

    # A square completed: p(A) = c (A + h I)^2 + e I needs nothing but A + h I. Where A itself is
    # needed too, it may be so small beside h that the sum would lose it: not before the last step.
    a, b, c = triples[-1]
    h, e = b / (2 * c), a - b * b / (4 * c)
    A = make(Kind.GRAM, X, X, delta=h if len(triples) == 1 else 0.0)
    R, d = 0, 1.0  # p_k ... p_1 = R + d I: the large multiple of I is kept out of the rounding
    for k, (a, b, c) in enumerate(triples[:-1]):
        B = make(Kind.SMALL, A, A, c, C=A, beta=b)  # p(A) - a I
        R = make(Kind.SMALL, B, R, C=R, beta=a, D=B, gamma=d) if k else B
        d *= a
        Z = make(Kind.SMALL, A, B, C=A, beta=a)
        A = make(Kind.SMALL, Z, B, C=Z, beta=a, delta=h if k == len(triples) - 2 else 0.0)
    P = make(Kind.SMALL, A, A, triples[-1][2], delta=e)
    if len(triples) > 1:
        P = make(Kind.SMALL, P, R, C=P, beta=d)
    return make(Kind.APPLY, P, X)


def operations(m: int, n: int, kind: Kind, tile: int = TILE) -> float:
    """Multiplications and additions that the tiles of a product cost for one m x n matrix; with
    tile=1, what a symmetric product must cost."""
    short, long = min(m, n), max(m, n)
    edge = -(-short // tile)
    half = edge * (edge + 1) / 2 * tile**2
    cost = {Kind.GRAM: half * long, Kind.SMALL: half * short, Kind.APPLY: short * long * short}
    return 2.0 * cost[kind]


def modelled_microseconds(m: int, n: int, chain: Sequence[Product]) -> float:
    """For one matrix of many, in a chip that is full."""
    return sum(operations(m, n, product.kind) / RATE[product.kind] for product in chain) / 1e6


@cache
def chain_for(m: int, n: int, triples: tuple[Triple, ...]) -> tuple[Product, ...]:
    """The ordinary iteration or its Gram form, whichever costs less.

    Three steps and then the rest from a fresh Gram matrix: in float16 its error stays below that of
    the ordinary iteration in bfloat16 on every spectrum that was tried (docs/performance.md).
    """
    steps = len(triples)
    forms = [(1,) * steps, (3, steps - 3)] if steps > 3 else [(1,) * steps]
    chains = [tuple(products(triples, form)) for form in forms]
    return min(chains, key=lambda chain: modelled_microseconds(m, n, chain))


@dataclass(frozen=True)
class Places:
    """Offsets of all results inside a matrix's part of the work buffer, in elements."""

    offsets: tuple[int, ...]  # of result 0, which is X, and of what each product makes
    size: int


def allocate(m: int, n: int, chain: Sequence[Product]) -> Places:
    """Every result at the lowest place that nothing alive occupies."""

    def rounded(size: int) -> int:
        return -(-size // ALIGNMENT) * ALIGNMENT

    small, large = rounded(min(m, n) ** 2), rounded(m * n)
    last_use = {value: i for i, product in enumerate(chain) for value in product.reads}
    alive = {0: (0, large)}
    offsets, peak = [0], large
    for i, product in enumerate(chain):
        size = large if product.kind is Kind.APPLY else small
        place = 0
        for start, end in sorted(alive.values()):
            if place + size <= start:
                break
            place = max(place, end)
        alive[i + 1] = (place, place + size)
        offsets.append(place)
        peak = max(peak, place + size)
        alive = {v: span for v, span in alive.items() if last_use.get(v, len(chain)) > i}
    return Places(tuple(offsets), peak)
