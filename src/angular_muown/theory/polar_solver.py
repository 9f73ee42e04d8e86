"""The tangent-constrained polar factor of Algorithm 2: its solver, its calculus, cheap steps.

The nuclear norm |X|_* = sum sigma_k has no gradient where a singular value is zero, and square
matrices do end there. So the solver walks on F(X) = sum phi_k with phi = sqrt(sigma^2 + eps^2),
whose gradient Q = P diag(sigma / phi) V^T becomes the polar factor as eps falls.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from angular_muown.stages import tangent
from angular_muown.stages.charts import nonzero
from angular_muown.stages.reductions import frobenius, row_norm
from angular_muown.theory.manifold import project, radial


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


# The tangent-constrained polar factor: the descent direction of the paper's Algorithm 2.
#
#     minimize <M, D>   over   |D|_op <= 1,  <D_i, U_i> = 0 for every row i
#
# With a multiplier l_i for every row, the dual problem is to minimize the nuclear norm of X = M +
# Diag(l) U; its gradient is h_i = <polar(X)_i, U_i>. Every feasible D bounds it from below, -<M,
# D> <= |X|_*. The difference is the duality gap: it proves how good D is.

# Found by trying factors of 3 on the spectra of tests/library/theory/test_polar_solver.py.
OPENING = 2  # steps by the majorizer alone: rectangular matrices are nearly done after them
FIRST_EPS = 0.005  # smoothing at the start, relative to the mean singular value
SMOOTHING = 0.5  # share of the gap that smoothing may cost
FASTEST = 0.05  # eps falls by this factor at most, at once
ARRIVED = 0.01  # a step that promises less than this share of the gap: time to lower eps
CAUTION = 0.1  # the majorizer's weight in the first step after the opening; 0 is Newton's step
NEWTON_ACCURACY, NEWTON_PRODUCTS = 1e-2, 50  # of the conjugate gradients inside a step


class TangentPolar(NamedTuple):
    """The direction and its proof. `gap` and `tangency` have the batch's shape."""

    D: Tensor
    multiplier: Tensor  # l, (..., m)
    gap: Tensor  # (|X|_* + <M, D>) / |X|_*: at most this share of the best is missing
    tangency: Tensor  # max_i |<D_i, U_i>|


class _Walk(NamedTuple):
    """Where each matrix of the batch stands."""

    multiplier: Tensor  # (..., m, 1)
    at: SmoothPolar
    caution: Tensor  # 1: a step by the majorizer, which cannot fail; 0: Newton's
    centered: Tensor  # the last step went as Newton's model said: eps may fall
    D: Tensor  # the best feasible direction so far
    reached: Tensor  # -<M, D>
    bound: Tensor  # the lowest |X|_* so far
    proof: Tensor  # the multiplier that gave it

    @property
    def gap(self) -> Tensor:
        return ((self.bound - self.reached) / nonzero(self.bound)).clamp(min=0)


def tangent_polar(
    M: Tensor,
    U: Tensor,
    iterations: int = 50,
    multiplier: Tensor | None = None,
    tolerance: float | None = None,
) -> TangentPolar:
    """argmin <M, D> over |D|_op <= 1 and <D_i, U_i> = 0, for (..., m, n) and unit rows U_i.

    Args:
        iterations: steps of the multiplier at most; it stops when all gaps are small enough.
        multiplier: where to start, such as the last result's; None is the tangent part of M.
        tolerance: the gap that is small enough; None is 1e-7, or 1e-4 below float64.
    """
    if tolerance is None:
        tolerance = 1e-7 if M.dtype == torch.float64 else 1e-4
    for k, found in enumerate(solver_path(M, U, multiplier)):
        if k >= iterations or bool((found.gap <= tolerance).all()):
            return found
    raise AssertionError("the path does not end")


def solver_path(M: Tensor, U: Tensor, multiplier: Tensor | None = None) -> Iterator[TangentPolar]:
    """The results after 0, 1, 2, ... steps, without an end; gaps never rise."""
    if M.shape != U.shape:
        raise ValueError(f"M is {tuple(M.shape)} and U is {tuple(U.shape)}: shapes must be equal")
    lengths = row_norm(U)
    if not torch.allclose(lengths, torch.ones_like(lengths), rtol=0, atol=1e-3):
        low, high = (float(x) for x in torch.aminmax(lengths))
        raise ValueError(f"rows of U have lengths from {low:g} to {high:g}: they must be 1")
    size = nonzero(M.abs().amax(dim=(-2, -1), keepdim=True))  # 1e-30 M has the same answer
    M = M / size
    walk = _start(M, U, None if multiplier is None else multiplier.unsqueeze(-1) / size)
    for k in count():
        found = (walk.proof * size).squeeze(-1)
        yield TangentPolar(walk.D, found, walk.gap, tangency(walk.D, U))
        walk = _step(walk, M, U, opening=k < OPENING)


def tangency(D: Tensor, U: Tensor) -> Tensor:
    return radial(D, U).abs().amax(dim=(-2, -1))


def feasible(A: Tensor, U: Tensor) -> Tensor:
    """The feasible direction near -A: tangent, then scaled down to |D|_op <= 1."""
    D = project(project(A, U), U)  # twice: the first leaves the rounding of its own products
    return -D / torch.linalg.matrix_norm(D, ord=2, keepdim=True).clamp(min=1)


def _start(M: Tensor, U: Tensor, multiplier: Tensor | None) -> _Walk:
    multiplier = -radial(M, U) if multiplier is None else multiplier
    at = SmoothPolar.of(M + multiplier * U, M.new_zeros(()))
    at = at._replace(eps=nonzero(FIRST_EPS * at.S.mean(dim=-1, keepdim=True)))
    bound = at.nuclear_norm
    never = torch.zeros_like(bound, dtype=torch.bool)
    caution, D = torch.full_like(bound, CAUTION), torch.zeros_like(M)
    walk = _Walk(multiplier, at, caution, never, D, torch.zeros_like(bound), bound, multiplier)
    return _certify(walk, at.Q, M, U)


def _step(walk: _Walk, M: Tensor, U: Tensor, opening: bool) -> _Walk:
    """One step of the multiplier, between the majorizer's and Newton's, kept where F falls."""
    at, eps = walk.at, _next_eps(walk)
    # Newton's equations for l and eps together: the path of minima is followed to the new eps
    # along its tangent. From the old minimum alone, steps at a smaller eps would overshoot.
    ahead = at.Q + (eps - at.eps).unsqueeze(-1) * at.Q_by_eps
    caution = torch.ones_like(walk.caution) if opening else walk.caution
    d = _solve(at, U, -radial(ahead, U), caution[..., None, None])
    before, multiplier = at._replace(eps=eps), walk.multiplier + d
    walk = _certify(walk, before.Q + before.derivative(d * U), M, U)
    after = SmoothPolar.of(M + multiplier * U, eps)
    fall = before.value - after.value
    # A quadratic falls by half of what its slope says.
    expected = -(radial(before.Q, U) * d).sum(dim=(-2, -1)) / 2
    ratio = fall / nonzero(expected)
    arrived = expected.abs() <= ARRIVED * (walk.bound - walk.reached)
    kept = fall > -4 * torch.finfo(fall.dtype).eps * before.value
    return walk._replace(
        multiplier=pick(kept, multiplier, walk.multiplier),
        at=SmoothPolar(*(pick(kept, a, b) for a, b in zip(after, before, strict=True))),
        caution=_next_caution(walk.caution, ratio, opening),
        centered=(arrived | (kept & (ratio > 0.7))) & (not opening),
        bound=torch.minimum(after.nuclear_norm, walk.bound),
        proof=pick(after.nuclear_norm < walk.bound, multiplier, walk.proof),
    )


def _next_caution(caution: Tensor, ratio: Tensor, opening: bool) -> Tensor:
    """More where the model failed, less where it was right."""
    if opening:
        return caution
    trusted = torch.where(ratio > 0.9, caution / 16, caution / 4)
    worried = torch.where(ratio < 0.3, (4 * caution).clamp(0.01, 1), caution)
    return torch.where(ratio > 0.7, trusted, worried)


def _next_eps(walk: _Walk) -> Tensor:
    """Lower until its cost is a small share of the gap, where the walk is ready for it."""
    S, eps = walk.at.S, walk.at.eps
    levels = S[..., :1] * 4.0 ** -torch.arange(24, dtype=S.dtype, device=S.device)
    cheap = walk.at.excess(levels) <= SMOOTHING * (walk.bound - walk.reached).unsqueeze(-1)
    wanted = torch.where(cheap, levels, levels[..., -1:]).amax(dim=-1, keepdim=True)
    lower = torch.maximum(torch.minimum(wanted, eps), FASTEST * eps)
    return pick(walk.centered, lower, eps)


def _solve(at: SmoothPolar, U: Tensor, right: Tensor, caution: Tensor) -> Tensor:
    """((1 - caution) H + caution K) d = right by conjugate gradients, for the Hessian H and the
    majorizer K of F along the rows of U; K's diagonal is the preconditioner."""

    def inner(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(dim=(-2, -1), keepdim=True)

    diagonal = at.row_curvature(U)
    d, residual = torch.zeros_like(right), right
    direction = scaled = residual / diagonal
    power = target = inner(residual, scaled)
    for _ in range(NEWTON_PRODUCTS):
        Z = direction * U
        image = radial(torch.lerp(at.derivative(Z), at.majorizer(Z), caution), U)
        length = power / nonzero(inner(direction, image))
        d, residual = d + length * direction, residual - length * image
        scaled, last = residual / diagonal, power
        power = inner(residual, scaled)
        if bool((power <= NEWTON_ACCURACY**2 * target).all()):
            break
        direction = scaled + power / nonzero(last) * direction
    return d


def _certify(walk: _Walk, A: Tensor, M: Tensor, U: Tensor) -> _Walk:
    """Keep the feasible direction near -A where it is better than the one there is."""
    D = feasible(A, U)
    reached = -(M * D).sum(dim=(-2, -1))
    better = reached > walk.reached
    return walk._replace(D=pick(better, D, walk.D), reached=torch.maximum(reached, walk.reached))


def pick(where: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """new for the matrices of the batch that are marked."""
    return torch.where(where.reshape(where.shape + (1,) * (old.dim() - where.dim())), new, old)


# A few cheap dual steps with a warm start, and the proof of what they reached.
#
# `tangent_polar` solves one problem to the end. An optimizer solves a slowly changing one at every
# step; there the last multiplier is nearly right, and one or two steps keep it so.

# Smoothing, of the mean singular value. Square matrices end where a singular value is zero; there
# the polar factor jumps and is not tangent. docs/log.md has what less and more of it leave.
SOFTNESS = 0.05


def dual_steps(M: Tensor, U: Tensor, multiplier: Tensor | None, steps: int) -> TangentPolar:
    """What AngularMuown's orthogonalize="tangent" does, with a smooth polar factor in place of
    Polar Express: so many steps from a multiplier. None is the tangent part of M."""
    along, T = radial(M, U), project(M, U)
    size = nonzero(frobenius(T))  # 1e-30 M takes the same steps
    start = torch.zeros_like(along) if multiplier is None else multiplier.unsqueeze(-1) + along
    found = tangent.dual_steps(_soft, T / size, U, start / size, steps)
    D = feasible(found.Q, U)
    bound = torch.linalg.svdvals(found.X).sum(dim=-1) * size.squeeze(-1, -2)
    gap = (bound + (M * D).sum(dim=(-2, -1))) / nonzero(bound)
    reached = (found.multiplier * size - along).squeeze(-1)
    return TangentPolar(D, reached, gap, tangency(D, U))


def _soft(X: Tensor) -> Tensor:
    """sigma / phi for the singular values, with eps in proportion to their mean. So Q is near the
    gradient of the nuclear norm, and the gradient of no function. <X, Q> is at most
    0.301 SOFTNESS, 1.5%, below |X|_*: sigma (1 - sigma / phi) <= 0.301 eps, summed. A step that
    lowers the one may raise the other within this; the proven gap is of |X|_* itself.
    """
    polar = SmoothPolar.of(X, X.new_zeros(()))
    return polar._replace(eps=nonzero(SOFTNESS * polar.S.mean(dim=-1, keepdim=True))).Q
