"""How the polar factor of X respects the tangent space at unit rows U, <Q_i, U_i> = 0.

`Free` ignores it, as the paper's practical algorithm does; `Constrained` is its Algorithm 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angular_muown.stages.charts import nonzero, project, radial
from angular_muown.stages.context import Context
from angular_muown.stages.orthogonalize import unit
from angular_muown.stages.reductions import LOCAL

Polar = Callable[[Tensor], Tensor]
TANGENT = "tangent"  # the value of `orthogonalize` that asks for `Constrained`
RIDGE = 0.05  # of the mean singular value; the gap closes more slowly with less or more (test)


class Free:
    """Q = polar(X), whatever U is."""

    state_names = ()
    needs_directions = False

    def send(self, X: Tensor, U: Tensor, context: Context) -> Tensor:
        return X

    def __call__(self, polar: Polar, X: Tensor, U: Tensor) -> Tensor:
        return polar(X)

    def receive(self, Q: Tensor, U: Tensor, context: Context) -> Tensor:
        return Q


@dataclass
class Constrained(Free):
    """max <X, Q> over |Q|_op <= 1, <Q_i, U_i> = 0: the paper's Algorithm 2, by its dual problem.

    Each step starts from the last one's multiplier. X changes little between steps, so one dual
    step each keeps the multiplier near the solution. The component of Q along U is dropped. X and Q
    carry the multiplier along U to the rank that has whole matrices, and back.
    """

    steps: int
    state_names = ("multiplier",)
    needs_directions = True

    def send(self, X: Tensor, U: Tensor, context: Context) -> Tensor:
        over = context.reductions
        X = unit(project(X, U, over), 1.0, over)
        # A zero row of X has the multiplier 0: an old multiplier must not move it now.
        return X + torch.where(over.row_norm(X) == 0, 0.0, context.state["multiplier"]) * U

    def __call__(self, polar: Polar, X: Tensor, U: Tensor) -> Tensor:
        dual = dual_steps(polar, project(X, U), U, radial(X, U), self.steps)
        return project(dual.Q, U) + dual.multiplier * U

    def receive(self, Q: Tensor, U: Tensor, context: Context) -> Tensor:
        multiplier = context.state["multiplier"] = radial(Q, U, context.reductions)
        return Q - multiplier * U


class Dual(NamedTuple):
    """A point of the dual problem."""

    multiplier: Tensor  # l, (..., m, 1)
    X: Tensor  # X + Diag(l) U
    Q: Tensor  # its polar factor
    value: Tensor  # <X + Diag(l) U, Q>, (..., 1, 1): its nuclear norm, as well as Q is exact


def dual_steps(polar: Polar, X: Tensor, U: Tensor, multiplier: Tensor, steps: int) -> Dual:
    """Minimize the nuclear norm f(l) = |X + Diag(l) U|_* over l, for a tangent X.

    At the minimum, Q = polar(X + Diag(l) U) is tangent. f is convex and has the gradient
    h_i = <Q_i, U_i>. Each step costs one polar factor and divides h_i by f's curvature in l_i, as
    if there were no other row. A step that does not lower <X + Diag(l) U, Q> is undone, and the
    next one is half as long. With the exact Q this value is f, which then never rises; with an
    approximate Q, f may rise by the difference between the two.
    """
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
    return Dual(multiplier, X, Q, LOCAL.total(X * Q))


def _dual_step(at: Dual, U: Tensor) -> Tensor:
    """Return h_i / c_i, where c_i = e_i^T (X X^T)^(-1/2) e_i for a wide X and
    u_i^T (X^T X)^(-1/2) u_i for a tall one.

    The root is Q X^T (X^T Q). The ridge keeps small singular values from stopping the step.
    """
    X, Q = at.X, at.Q
    m, n = X.shape[-2:]
    root = Q @ X.mT if m <= n else X.mT @ Q
    eye = torch.eye(min(m, n), dtype=X.dtype, device=X.device)
    ridge = RIDGE / min(m, n) * at.value
    inverse = torch.linalg.inv_ex(
        root + nonzero(ridge) * eye
    ).inverse  # inv would synchronize with the host
    c = inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) if m <= n else radial(U @ inverse, U)
    return radial(Q, U) / nonzero(c)
