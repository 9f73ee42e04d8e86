"""How the polar factor of X heeds the tangent space of the unit rows U: <Q_i, U_i> = 0.

Not at all is the paper's practical algorithm. The other two are beyond it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angular_muown.stages.charts import Rows, nonzero, row_norm, tangent_part
from angular_muown.stages.orthogonalize import unit

Polar = Callable[[Tensor], Tensor]
TANGENT = "tangent"  # the value of `orthogonalize` that asks for `Constrained`
RIDGE = 0.05  # of the mean singular value: with less, or more, the gap closes more slowly (test)


class Free:
    rows = ()

    def __call__(self, polar: Polar, X: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return polar(X)


class Projected:
    """What the momentum has along its row is left out. Q may still have some of it."""

    rows = ()

    def __call__(self, polar: Polar, X: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return polar(tangent_part(X, U))


@dataclass(frozen=True)
class Constrained:
    """max <X, Q> over |Q|_op <= 1, <Q_i, U_i> = 0: the paper's Algorithm 2, by its dual problem.

    The multiplier of the last step is where this one starts: X changes little from step to step, so
    one dual step each keeps the multiplier near the solution.
    """

    steps: int
    rows = ("multiplier",)

    def __call__(self, polar: Polar, X: Tensor, U: Tensor, rows: Rows) -> Tensor:
        found = dual_steps(polar, X, U, rows["multiplier"], self.steps)
        rows["multiplier"] = found.multiplier
        return found.Q


class Dual(NamedTuple):
    """A point of the dual problem, of a tangent X with |X|_F = 1."""

    multiplier: Tensor  # l, (..., m, 1)
    X: Tensor  # X + Diag(l) U
    Q: Tensor  # its polar factor
    value: Tensor  # its nuclear norm, <X + Diag(l) U, Q>, (..., 1, 1)


def dual_steps(polar: Polar, X: Tensor, U: Tensor, multiplier: Tensor, steps: int) -> Dual:
    """Steps of l towards the least nuclear norm f(l) = |X + Diag(l) U|_*, X's tangent part at norm
    1; then Q = polar(X + Diag(l) U) is tangent.

    f is convex and has the gradient h_i = <Q_i, U_i>. Each step costs one polar factor and divides
    h by f's curvature in l_i, as if there were no other row. A step that does not lower f is taken
    back, and the next one is half as long.
    """
    X = unit(tangent_part(X, U), 1.0)
    # A row that wants nothing has the multiplier 0: what it wanted once must not move it now.
    multiplier = torch.where(row_norm(X) == 0, 0.0, multiplier)
    at = _at(polar, X, U, multiplier)
    length = torch.ones_like(at.value)
    for _ in range(steps):
        new = _at(polar, X, U, at.multiplier - length * _dual_step(at, U))
        lower = new.value < at.value
        at = Dual(*(torch.where(lower, a, b) for a, b in zip(new, at, strict=True)))
        length = torch.where(lower, length, length / 2)
    return at


def _at(polar: Polar, X: Tensor, U: Tensor, multiplier: Tensor) -> Dual:
    X = X + multiplier * U
    Q = polar(X)
    return Dual(multiplier, X, Q, _inner(X, Q))


def _inner(X: Tensor, Q: Tensor) -> Tensor:
    """<X, Q>, which is the nuclear norm of X. Row sums first, as everywhere."""
    return (X * Q).sum(dim=-1, keepdim=True).sum(dim=-2, keepdim=True)


def _dual_step(at: Dual, U: Tensor) -> Tensor:
    """h_i / c_i with c_i = e_i^T (X X^T)^(-1/2) e_i of a wide X, u_i^T (X^T X)^(-1/2) u_i of a tall
    one. The root is Q X^T (X^T Q). The ridge keeps small singular values from stopping the step."""
    X, Q = at.X, at.Q
    m, n = X.shape[-2:]
    root = Q @ X.mT if m <= n else X.mT @ Q
    eye = torch.eye(min(m, n), dtype=X.dtype, device=X.device)
    ridge = RIDGE / min(m, n) * at.value
    inverse = torch.linalg.inv_ex(root + nonzero(ridge) * eye).inverse  # no look from the host
    if m <= n:
        c = inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    else:
        c = ((U @ inverse) * U).sum(dim=-1, keepdim=True)
    return (Q * U).sum(dim=-1, keepdim=True) / nonzero(c)
