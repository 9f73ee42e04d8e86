"""How the polar factor of X heeds the tangent space of the unit rows U: <Q_i, U_i> = 0.

Not at all is the paper's practical algorithm. The other two are beyond it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from angular_muown.stages.charts import nonzero, tangent_part
from angular_muown.stages.orthogonalize import unit

Polar = Callable[[Tensor], Tensor]
RIDGE = 0.05  # of the mean singular value: with less, or more, the gap closes more slowly (test)


def free(polar: Polar, X: Tensor, U: Tensor) -> Tensor:
    return polar(X)


def projected(polar: Polar, X: Tensor, U: Tensor) -> Tensor:
    """What the momentum has along its row is left out. Q may still have some of it."""
    return polar(tangent_part(X, U))


def constrained(polar: Polar, X: Tensor, U: Tensor, iterations: int) -> Tensor:
    """max <X, Q> over |Q|_op <= 1, <Q_i, U_i> = 0: the paper's Algorithm 2, by its dual problem.

    Q = polar(X + Diag(l) U), where l minimises the nuclear norm f(l) = |X + Diag(l) U|_*, which is
    convex, with the gradient h_i = <Q_i, U_i>. l starts where X is tangent. Each iteration costs
    one polar factor and divides h by f's curvature in l_i, as if there were no other row. A step
    that does not lower f is taken back, and the next one is half as long.
    """
    X = tangent_part(unit(X, 1.0), U)
    Q = polar(X)
    f = _inner(X, Q)
    length = torch.ones_like(f)
    for _ in range(iterations):
        X_new = X - length * _dual_step(X, Q, U) * U
        Q_new = polar(X_new)
        f_new = _inner(X_new, Q_new)
        lower = f_new < f
        X, Q = torch.where(lower, X_new, X), torch.where(lower, Q_new, Q)
        f, length = torch.where(lower, f_new, f), torch.where(lower, length, length / 2)
    return Q


def _inner(X: Tensor, Q: Tensor) -> Tensor:
    """<X, Q>, which is the nuclear norm of X. Row sums first, as everywhere."""
    return (X * Q).sum(dim=-1, keepdim=True).sum(dim=-2, keepdim=True)


def _dual_step(X: Tensor, Q: Tensor, U: Tensor) -> Tensor:
    """h_i / c_i with c_i = e_i^T (X X^T)^(-1/2) e_i of a wide X, u_i^T (X^T X)^(-1/2) u_i of a tall
    one. The root is Q X^T (X^T Q). The ridge keeps small singular values from stopping the step."""
    m, n = X.shape[-2:]
    root = Q @ X.mT if m <= n else X.mT @ Q
    eye = torch.eye(min(m, n), dtype=X.dtype, device=X.device)
    ridge = RIDGE / min(m, n) * _inner(X, Q)
    inverse = torch.linalg.inv_ex(root + nonzero(ridge) * eye).inverse  # no look from the host
    if m <= n:
        c = inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    else:
        c = ((U @ inverse) * U).sum(dim=-1, keepdim=True)
    return (Q * U).sum(dim=-1, keepdim=True) / nonzero(c)
