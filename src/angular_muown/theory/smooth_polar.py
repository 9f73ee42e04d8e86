"""A smooth polar factor and its derivatives: the calculus behind the tangent-constrained solver.

The nuclear norm |X|_* = sum sigma_k has no gradient where a singular value is zero, and square
matrices do end there. So the solver walks on F(X) = sum phi_k with phi = sqrt(sigma^2 + eps^2),
whose gradient Q = P diag(sigma / phi) V^T becomes the polar factor as eps falls.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SmoothPolar(NamedTuple):
    """X = P diag(S) Vh and the smoothing eps: (..., m, r), (..., r), (..., r, n), (..., 1)."""

    P: Tensor
    S: Tensor
    Vh: Tensor
    eps: Tensor

    @classmethod
    def of(cls, X: Tensor, eps: Tensor) -> "SmoothPolar":
        P, S, Vh = torch.linalg.svd(X, full_matrices=False)
        return cls(P, S, Vh, eps)

    @property
    def phi(self) -> Tensor:
        return torch.hypot(self.S, self.eps)

    @property
    def value(self) -> Tensor:
        """F(X)."""
        return self.phi.sum(dim=-1)

    @property
    def nuclear_norm(self) -> Tensor:
        return self.S.sum(dim=-1)

    @property
    def Q(self) -> Tensor:
        """The gradient of F; its singular values sigma / phi are below 1."""
        return (self.P * (self.S / self.phi).unsqueeze(-2)) @ self.Vh

    @property
    def Q_by_eps(self) -> Tensor:
        """dQ / d eps."""
        slope = -self.S * self.eps / self.phi.pow(3)
        return (self.P * slope.unsqueeze(-2)) @ self.Vh

    def excess(self, eps: Tensor) -> Tensor:
        """|X|_* - <X, Q> if the smoothing were eps (..., k): what Q loses by being smooth."""
        S, eps = self.S.unsqueeze(-1), eps.unsqueeze(-2)
        phi = torch.hypot(S, eps)
        return (S * (phi - S) / phi).sum(dim=-2)

    def derivative(self, Z: Tensor) -> Tensor:
        """dQ for a change Z of X.

        Inside the singular subspaces, Z = P T V^T, the symmetric part of T is multiplied by divided
        differences of sigma / phi and the antisymmetric part by divided sums. Both are written
        without the cancellation for equal singular values. What leaves the subspaces goes by 1/phi.
        """
        P, Vh, phi = self.P, self.Vh, self.phi
        # A floor far below eps: two zero singular values would give 0/0 for the limit 1/eps.
        s, p = torch.maximum(self.S, 1e-10 * self.eps).unsqueeze(-1), phi.unsqueeze(-1)
        cross, total, product = s * p.mT + s.mT * p, s + s.mT, p * p.mT
        difference = self.eps.unsqueeze(-1).square() * total / (product * cross)
        sum_ = cross / (product * total)
        left, right = P.mT @ Z, Z @ Vh.mT
        T = left @ Vh.mT
        inside = P @ ((difference + sum_) / 2 * T + (difference - sum_) / 2 * T.mT) @ Vh
        if Z.shape[-2] < Z.shape[-1]:
            return inside + (P / phi.unsqueeze(-2)) @ (left - T @ Vh)
        return inside + ((right - P @ T) / phi.unsqueeze(-2)) @ Vh

    def majorizer(self, Z: Tensor) -> Tensor:
        """K Z with F(X + Z) <= F(X) + <Q, Z> + <Z, K Z> / 2 for every Z: steps with K descend.

        F is the trace of (X X^T + eps^2)^(1/2). The root is concave, so it lies below its tangent:
        K Z = (X X^T + eps^2)^(-1/2) Z. The same holds with X^T X from the right; taken is the short
        side, the one without spare zeros.
        """
        if Z.shape[-2] <= Z.shape[-1]:
            return (self.P / self.phi.unsqueeze(-2)) @ (self.P.mT @ Z)
        return ((Z @ self.Vh.mT) / self.phi.unsqueeze(-2)) @ self.Vh

    def row_curvature(self, U: Tensor) -> Tensor:
        """<e_i U_i, K (e_i U_i)> for every row, (..., m, 1): the diagonal of the majorizer."""
        onto = self.P if U.shape[-2] <= U.shape[-1] else U @ self.Vh.mT
        return (onto.square() / self.phi.unsqueeze(-2)).sum(dim=-1, keepdim=True)
