"""Which products an orthogonalization consists of, what they cost, and where their results lie.

One step of the iteration is X <- p(A) X with A = X X^T and p(A) = a I + b A + c A^2. Steps are
taken singly or in pairs; a pair, the Gram form, touches the long side once,
X <- p_2(p_1 A p_1) p_1(A) X.
All small matrices are polynomials of one A, so they commute and are symmetric: half of their tiles
are computed and mirrored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from angular_muown.stages.orthogonalize import Iteration, Triple

TILE = 128
# The iterate is kept as 16 X, so that entries of X X^T (1e-6 for large matrices) stay above the
# smallest normal number of float16, 6e-5. Coefficients are divided accordingly.
SCALE = 16.0
ALIGNMENT = 128  # elements: results start where every load can be 16 bytes wide


class Kind(Enum):
    GRAM = "X X^T"
    SMALL = "a product of small matrices"
    APPLY = "a small matrix times X"


# TFLOP/s of the operations that a kind's tiles really compute: what trials on an H200 suggested.
# Only their ratios matter, and only between the two forms; benchmarks/orthogonalize.py times both
# per shape, and the choice was right on all of them (docs/performance.md).
RATE = {Kind.GRAM: 520.0, Kind.SMALL: 450.0, Kind.APPLY: 600.0}


@dataclass(frozen=True)
class Product:
    """out = alpha L R + beta C + delta I; numbers name earlier results, 0 is X itself."""

    kind: Kind
    left: int
    right: int
    alpha: float = 1.0
    C: int = -1
    beta: float = 0.0
    delta: float = 0.0

    @property
    def reads(self) -> set[int]:
        return {self.left, self.right, self.C} - {-1}


def products(triples: Sequence[Triple], segments: Sequence[int]) -> list[Product]:
    """The iteration as a list; the result number i is made by the product number i - 1."""
    if sum(segments) != len(triples) or not set(segments) <= {1, 2}:
        raise ValueError(f"segments={segments} must be ones and twos that add up to {len(triples)}")
    steps = iter([(a, b / SCALE**2, c / SCALE**4) for a, b, c in triples])
    made: list[Product] = []
    X = 0
    for length in segments:
        X = (
            _single(made, X, next(steps))
            if length == 1
            else _pair(made, X, next(steps), next(steps))
        )
    return made


def _make(made: list[Product], kind: Kind, *args: Any, **kwargs: Any) -> int:
    made.append(Product(kind, *args, **kwargs))
    return len(made)


def _square(triple: Triple) -> tuple[float, float]:
    """h and e of the square completed, p(A) = c (A + h I)^2 + e I: it needs nothing but A + h I."""
    a, b, c = triple
    return b / (2 * c), a - b * b / (4 * c)


def _single(made: list[Product], X: int, triple: Triple) -> int:
    h, e = _square(triple)
    A = _make(made, Kind.GRAM, X, X, delta=h)
    p = _make(made, Kind.SMALL, A, A, triple[2], delta=e)
    return _make(made, Kind.APPLY, p, X)


def _pair(made: list[Product], X: int, first: Triple, second: Triple) -> int:
    """p_1 = a I + B. The large multiple of I is kept out of what is rounded, and A without h I,
    beside which its small part would be lost, until the last product that needs it."""
    a, b, c = first
    h, e = _square(second)
    A = _make(made, Kind.GRAM, X, X)
    B = _make(made, Kind.SMALL, A, A, c, C=A, beta=b)
    Z = _make(made, Kind.SMALL, A, B, C=A, beta=a)  # A p_1
    A = _make(made, Kind.SMALL, Z, B, C=Z, beta=a, delta=h)  # p_1 A p_1 + h I
    p = _make(made, Kind.SMALL, A, A, second[2], delta=e)
    P = _make(made, Kind.SMALL, p, B, C=p, beta=a)  # p_2 p_1
    return _make(made, Kind.APPLY, P, X)


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
def chain_for(m: int, n: int, iteration: Iteration) -> tuple[Product, ...]:
    """Return the products of an iteration: in the ordinary form or in the Gram form.

    The cheaper one is taken, unless `iteration.gram` fixes the choice.

    What rounding does to A grows with every step between two fresh ones, most at the first step,
    whose factor is 8. A single step and then pairs stay below the error of the ordinary iteration
    in bfloat16 on every spectrum that was tried; three steps from one A do not
    (docs/performance.md).
    """
    triples = iteration.coefficients
    pairs, odd = divmod(len(triples) - 1, 2)
    forms = [(1,) * len(triples), (1,) + (2,) * pairs + (1,) * odd]
    chains = [tuple(products(triples, form)) for form in forms]
    if iteration.gram:
        return chains[iteration.takes_gram_form(m, n)]
    return min(chains, key=lambda chain: modelled_microseconds(m, n, chain))


@dataclass(frozen=True)
class Places:
    """Offsets of all results inside a matrix's part of the work buffer, in elements."""

    offsets: tuple[int, ...]  # of result 0, which is X, and of what each product makes
    raw: int  # of X before it is normalized: where it stays, or beside it where it is turned
    size: int


@cache
def allocate(m: int, n: int, chain: tuple[Product, ...]) -> Places:
    """A place for every result, in the least room: hardly more than what is alive at once."""
    small, large = (-(-size // ALIGNMENT) * ALIGNMENT for size in (min(m, n) ** 2, m * n))
    sizes = [large, *(large if product.kind is Kind.APPLY else small for product in chain)]
    last = {value: i for i, product in enumerate(chain) for value in product.reads}
    last[len(chain)] = len(chain)
    raw = large if m < n else 0
    room = raw + large
    for i in range(len(chain)):
        alive = [v for v in range(i + 1) if last[v] >= i]
        room = max(room, sizes[i + 1] + sum(sizes[v] for v in alive))
    while (offsets := _fit([0], sizes, last, room)) is None:
        room += -(-small // (4 * ALIGNMENT)) * ALIGNMENT
    return Places(tuple(offsets), raw, room)


def _fit(placed: list[int], sizes: list[int], last: dict[int, int], room: int) -> list[int] | None:
    """Depth first: each result touches the room's ends or something alive."""
    number = len(placed)
    if number == len(sizes):
        return placed
    spans = [(placed[v], placed[v] + sizes[v]) for v in range(number) if last[v] >= number - 1]
    size = sizes[number]
    ends = {0, room - size, *(end for _, end in spans), *(start - size for start, _ in spans)}
    for place in sorted(end for end in ends if 0 <= end <= room - size):
        if all(place + size <= start or end <= place for start, end in spans):
            found = _fit([*placed, place], sizes, last, room)
            if found is not None:
                return found
    return None
