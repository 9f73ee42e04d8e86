"""The tangent-constrained polar factor of Algorithm 2: an exact solver, and cheap dual steps.

The nuclear norm |X|_* = sum sigma_k has no gradient where a singular value is zero, which is where
solutions for square matrices are. The solver therefore minimizes F(X) = sum phi_k with
phi = sqrt(sigma^2 + eps^2). Its gradient Q = P diag(sigma / phi) V^T approaches the polar factor as
eps decreases.
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
        """Return F(X)."""
        return self.phi.sum(dim=-1)

    @property
    def nuclear_norm(self) -> Tensor:
        return self.S.sum(dim=-1)

    @property
    def Q(self) -> Tensor:
        """Return the gradient of F. Its singular values sigma / phi are below 1."""
        return (self.P * (self.S / self.phi).unsqueeze(-2)) @ self.Vh

    @property
    def Q_by_eps(self) -> Tensor:
        """Return dQ / d eps."""
        slope = -self.S * self.eps / self.phi.pow(3)
        return (self.P * slope.unsqueeze(-2)) @ self.Vh

    def excess(self, eps: Tensor) -> Tensor:
        """Return |X|_* - <X, Q>, the cost of smoothing, for alternative values of eps (..., k)."""
        S, eps = self.S.unsqueeze(-1), eps.unsqueeze(-2)
        phi = torch.hypot(S, eps)
        return (S * (phi - S) / phi).sum(dim=-2)

    def derivative(self, Z: Tensor) -> Tensor:
        """Return the directional derivative of Q along Z.

        Within the singular subspaces, Z = P T V^T, the symmetric part of T is multiplied by divided
        differences of sigma / phi and the antisymmetric part by divided sums. Both are written so
        that equal singular values cause no cancellation. The part of Z outside the subspaces is
        multiplied by 1 / phi.
        """
        P, Vh, phi = self.P, self.Vh, self.phi
        # A floor far below eps: two zero singular values would give 0/0 instead of the limit 1/eps.
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
        """Return K Z, where F(X + Z) <= F(X) + <Q, Z> + <Z, K Z> / 2 for every Z.

        A step that minimizes the right-hand side decreases F. F is the trace of
        (X X^T + eps^2)^(1/2), and the root is concave, so it is below its tangent:
        K Z = (X X^T + eps^2)^(-1/2) Z. The same holds for X^T X from the right. The shorter side
        is used, because it has no spare zero eigenvalues.
        """
        if Z.shape[-2] <= Z.shape[-1]:
            return (self.P / self.phi.unsqueeze(-2)) @ (self.P.mT @ Z)
        return ((Z @ self.Vh.mT) / self.phi.unsqueeze(-2)) @ self.Vh

    def row_curvature(self, U: Tensor) -> Tensor:
        """Return the majorizer's diagonal <e_i U_i, K (e_i U_i)>, (..., m, 1)."""
        basis = self.P if U.shape[-2] <= U.shape[-1] else U @ self.Vh.mT
        return (basis.square() / self.phi.unsqueeze(-2)).sum(dim=-1, keepdim=True)


# The tangent-constrained polar factor: the descent direction of the paper's Algorithm 2.
#
#     minimize <M, D>   over   |D|_op <= 1,  <D_i, U_i> = 0 for every row i
#
# With a multiplier l_i for every row, the dual problem is to minimize the nuclear norm of
# X = M + Diag(l) U. Its gradient is h_i = <polar(X)_i, U_i>. Every feasible D gives the lower bound
# -<M, D> <= |X|_*. The difference is the duality gap, which certifies the quality of D.

# Tuned in factors of 3 on the spectra of tests/library/theory/test_polar_solver.py.
MAJORIZER_STEPS = 2  # initial steps with the majorizer alone; enough for most rectangular matrices
INITIAL_EPS = 0.005  # relative to the mean singular value
SMOOTHING_COST = 0.5  # the share of the gap that smoothing may cost
MIN_EPS_FACTOR = 0.05  # the fastest decrease of eps in one step
CONVERGED = 0.01  # decrease eps if a step promises less than this share of the gap
INITIAL_DAMPING = 0.1  # after the majorizer steps
CG_TOLERANCE, CG_ITERATIONS = 1e-2, 50


class TangentPolar(NamedTuple):
    """A direction and its certificate. `gap` and `tangency` have the batch's shape."""

    D: Tensor
    multiplier: Tensor  # l, (..., m)
    gap: Tensor  # (|X|_* + <M, D>) / |X|_*: D is within this fraction of optimal
    tangency: Tensor  # max_i |<D_i, U_i>|


class _Solver(NamedTuple):
    """The solver's state for each matrix of a batch."""

    multiplier: Tensor  # (..., m, 1)
    polar: SmoothPolar  # at M + Diag(multiplier) U
    damping: Tensor  # weight of the majorizer: 1 is its step, which always descends; 0 is Newton's
    centered: Tensor  # the last step matched its quadratic model, so eps may decrease
    D: Tensor  # the best feasible direction so far
    reached: Tensor  # -<M, D>
    bound: Tensor  # the lowest |X|_* so far
    best_multiplier: Tensor  # the multiplier of `bound`

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
    """Return argmin <M, D> over |D|_op <= 1 and <D_i, U_i> = 0, for (..., m, n) and unit rows U_i.

    Args:
        iterations: maximum number of steps. The solver stops once every gap is within `tolerance`.
        multiplier: starting point, such as the last result's; None starts at the tangent part of M.
        tolerance: largest acceptable gap; None is 1e-7, or 1e-4 below float64.
    """
    if tolerance is None:
        tolerance = 1e-7 if M.dtype == torch.float64 else 1e-4
    for k, result in enumerate(solver_path(M, U, multiplier)):
        if k >= iterations or bool((result.gap <= tolerance).all()):
            return result
    raise AssertionError("solver_path is infinite")


def solver_path(M: Tensor, U: Tensor, multiplier: Tensor | None = None) -> Iterator[TangentPolar]:
    """Yield the results after 0, 1, 2, ... steps, indefinitely. Gaps never increase."""
    if M.shape != U.shape:
        raise ValueError(f"M is {tuple(M.shape)} and U is {tuple(U.shape)}: shapes must be equal")
    lengths = row_norm(U)
    if not torch.allclose(lengths, torch.ones_like(lengths), rtol=0, atol=1e-3):
        low, high = (float(x) for x in torch.aminmax(lengths))
        raise ValueError(f"rows of U have lengths from {low:g} to {high:g}: they must be 1")
    size = nonzero(M.abs().amax(dim=(-2, -1), keepdim=True))  # the solution does not depend on it
    M = M / size
    solver = _start(M, U, None if multiplier is None else multiplier.unsqueeze(-1) / size)
    for k in count():
        best = (solver.best_multiplier * size).squeeze(-1)
        yield TangentPolar(solver.D, best, solver.gap, tangency(solver.D, U))
        solver = _step(solver, M, U, majorizer_only=k < MAJORIZER_STEPS)


def tangency(D: Tensor, U: Tensor) -> Tensor:
    return radial(D, U).abs().amax(dim=(-2, -1))


def feasible(A: Tensor, U: Tensor) -> Tensor:
    """Return a feasible direction near -A: project to the tangent space, then limit |D|_op to 1."""
    D = project(project(A, U), U)  # twice: the first projection leaves rounding errors along U
    return -D / torch.linalg.matrix_norm(D, ord=2, keepdim=True).clamp(min=1)


def _start(M: Tensor, U: Tensor, multiplier: Tensor | None) -> _Solver:
    multiplier = -radial(M, U) if multiplier is None else multiplier
    polar = SmoothPolar.of(M + multiplier * U, M.new_zeros(()))
    polar = polar._replace(eps=nonzero(INITIAL_EPS * polar.S.mean(dim=-1, keepdim=True)))
    bound = polar.nuclear_norm
    centered = torch.zeros_like(bound, dtype=torch.bool)
    damping, D = torch.full_like(bound, INITIAL_DAMPING), torch.zeros_like(M)
    reached = torch.zeros_like(bound)
    solver = _Solver(multiplier, polar, damping, centered, D, reached, bound, multiplier)
    return _certify(solver, polar.Q, M, U)


def _step(solver: _Solver, M: Tensor, U: Tensor, majorizer_only: bool) -> _Solver:
    """Take a damped Newton step of the multiplier, in the matrices where it decreases F."""
    polar, eps = solver.polar, _next_eps(solver)
    # Newton's equations for l and eps together follow the path of minima along its tangent to the
    # new eps. Starting from the old minimum, steps at a smaller eps would overshoot.
    ahead = polar.Q + (eps - polar.eps).unsqueeze(-1) * polar.Q_by_eps
    damping = torch.ones_like(solver.damping) if majorizer_only else solver.damping
    d = _solve(polar, U, -radial(ahead, U), damping[..., None, None])
    before, multiplier = polar._replace(eps=eps), solver.multiplier + d
    solver = _certify(solver, before.Q + before.derivative(d * U), M, U)
    after = SmoothPolar.of(M + multiplier * U, eps)
    decrease = before.value - after.value
    # At its minimum, a quadratic has decreased by half of what its slope predicts.
    expected = -(radial(before.Q, U) * d).sum(dim=(-2, -1)) / 2
    ratio = decrease / nonzero(expected)
    converged = expected.abs() <= CONVERGED * (solver.bound - solver.reached)
    accepted = decrease > -4 * torch.finfo(decrease.dtype).eps * before.value
    return solver._replace(
        multiplier=select(accepted, multiplier, solver.multiplier),
        polar=SmoothPolar(*(select(accepted, a, b) for a, b in zip(after, before, strict=True))),
        damping=solver.damping if majorizer_only else _next_damping(solver.damping, ratio),
        centered=(converged | (accepted & (ratio > 0.7))) & (not majorizer_only),
        bound=torch.minimum(after.nuclear_norm, solver.bound),
        best_multiplier=select(
            after.nuclear_norm < solver.bound, multiplier, solver.best_multiplier
        ),
    )


def _next_damping(damping: Tensor, ratio: Tensor) -> Tensor:
    """Increase the damping where the quadratic model failed, decrease it where it was accurate."""
    lower = torch.where(ratio > 0.9, damping / 16, damping / 4)
    higher = torch.where(ratio < 0.3, (4 * damping).clamp(0.01, 1), damping)
    return torch.where(ratio > 0.7, lower, higher)


def _next_eps(solver: _Solver) -> Tensor:
    """Decrease eps of centered matrices until smoothing costs at most a share of the gap."""
    S, eps = solver.polar.S, solver.polar.eps
    levels = S[..., :1] * 4.0 ** -torch.arange(24, dtype=S.dtype, device=S.device)
    allowed = SMOOTHING_COST * (solver.bound - solver.reached).unsqueeze(-1)
    cheap = solver.polar.excess(levels) <= allowed
    target = torch.where(cheap, levels, levels[..., -1:]).amax(dim=-1, keepdim=True)
    lower = torch.maximum(torch.minimum(target, eps), MIN_EPS_FACTOR * eps)
    return select(solver.centered, lower, eps)


def _solve(polar: SmoothPolar, U: Tensor, rhs: Tensor, damping: Tensor) -> Tensor:
    """Solve ((1 - damping) H + damping K) d = rhs by conjugate gradients.

    H is the Hessian and K the majorizer of F along the rows of U. K's diagonal is the
    preconditioner.
    """

    def inner(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(dim=(-2, -1), keepdim=True)

    diagonal = polar.row_curvature(U)
    d, residual = torch.zeros_like(rhs), rhs
    direction = preconditioned = residual / diagonal
    rho = first_rho = inner(residual, preconditioned)
    for _ in range(CG_ITERATIONS):
        Z = direction * U
        image = radial(torch.lerp(polar.derivative(Z), polar.majorizer(Z), damping), U)
        length = rho / nonzero(inner(direction, image))
        d, residual = d + length * direction, residual - length * image
        preconditioned, last_rho = residual / diagonal, rho
        rho = inner(residual, preconditioned)
        if bool((rho <= CG_TOLERANCE**2 * first_rho).all()):
            break
        direction = preconditioned + rho / nonzero(last_rho) * direction
    return d


def _certify(solver: _Solver, A: Tensor, M: Tensor, U: Tensor) -> _Solver:
    """Adopt the feasible direction near -A in the matrices where it is the best so far."""
    D = feasible(A, U)
    reached = -(M * D).sum(dim=(-2, -1))
    return solver._replace(
        D=select(reached > solver.reached, D, solver.D),
        reached=torch.maximum(reached, solver.reached),
    )


def select(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` for the matrices of the batch in `mask`, `old` for the others."""
    return torch.where(mask.reshape(mask.shape + (1,) * (old.dim() - mask.dim())), new, old)


# A few cheap dual steps with a warm start, and a certificate for the result.
#
# `tangent_polar` solves a single problem to convergence. An optimizer solves a slowly changing
# problem in every step: the last multiplier is nearly right, and one or two steps keep it so.

# Smoothing, relative to the mean singular value. Solutions for square matrices have a zero singular
# value, where the polar factor jumps and is not tangent. docs/evidence/what-did-not-help.md has
# other values.
SOFTNESS = 0.05


def dual_steps(M: Tensor, U: Tensor, multiplier: Tensor | None, steps: int) -> TangentPolar:
    """Take dual steps from a multiplier. None starts at the tangent part of M.

    These are the steps of AngularMuown's orthogonalize="tangent", with a smooth polar factor
    instead of Polar Express.
    """
    along, T = radial(M, U), project(M, U)
    size = nonzero(frobenius(T))  # the steps do not depend on the norm of M
    start = torch.zeros_like(along) if multiplier is None else multiplier.unsqueeze(-1) + along
    dual = tangent.dual_steps(_soft_polar, T / size, U, start / size, steps)
    D = feasible(dual.Q, U)
    bound = torch.linalg.svdvals(dual.X).sum(dim=-1) * size.squeeze(-1, -2)
    gap = (bound + (M * D).sum(dim=(-2, -1))) / nonzero(bound)
    multiplier = (dual.multiplier * size - along).squeeze(-1)
    return TangentPolar(D, multiplier, gap, tangency(D, U))


def _soft_polar(X: Tensor) -> Tensor:
    """Replace the singular values by sigma / phi, with eps proportional to their mean.

    Q is therefore close to the gradient of the nuclear norm, but is not itself a gradient. <X, Q>
    is at most 0.301 SOFTNESS, 1.5%, below |X|_*, because sigma (1 - sigma / phi) <= 0.301 eps. A
    step that decreases <X, Q> may increase |X|_* by that much. The certified gap uses |X|_* itself.
    """
    polar = SmoothPolar.of(X, X.new_zeros(()))
    return polar._replace(eps=nonzero(SOFTNESS * polar.S.mean(dim=-1, keepdim=True))).Q
