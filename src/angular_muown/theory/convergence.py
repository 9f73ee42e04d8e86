"""The convergence theorem: parameters, bound, test problems and a check of the assumptions.

For T steps of Algorithm 2 on m x n matrices, with r = min(m, n):
    lr       = sqrt(Delta_0 (1 - beta) / (L T))
    1 - beta = min(1, max(T^(-2/3), sqrt(Delta_0 L / (r sigma^2 T))))
    mean of E|grad|_F <= 4 sqrt(Delta_0 L / T) + 7 (r Delta_0 L sigma^2 / T)^(1/4)
                         + 4 sqrt(r) sigma / T^(1/3)
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from angular_muown.stages.charts import normalize_rows
from angular_muown.stages.reductions import row_norm
from angular_muown.theory.manifold import project, retract


class Constants(NamedTuple):
    """The problem constants in the theorem. `check_assumptions` tests them numerically."""

    smoothness: float  # L, for steps in |.|_op and gradients in |.|_*
    initial_gap: float  # Delta_0 >= loss(U_1) - inf loss
    noise: float  # sigma, in |.|_F
    rank: int  # r = min(m, n)


class Parameters(NamedTuple):
    lr: float
    momentum: float


def parameters(constants: Constants, steps: int) -> Parameters:
    """Return the theorem's learning rate and momentum for a run of `steps` steps."""
    L, gap, sigma, r = constants
    noise_term = sqrt(gap * L / (r * sigma**2 * steps)) if sigma else inf
    weight = min(1.0, max(steps ** (-2 / 3), noise_term))  # 1 - beta
    return Parameters(sqrt(gap * weight / (L * steps)), 1 - weight)


def bound(constants: Constants, steps: int) -> float:
    """Return the theorem's bound on the expected mean gradient norm of such a run."""
    return sum(terms(constants, steps))


def terms(constants: Constants, steps: int) -> tuple[float, float, float]:
    """Return the three terms of the bound, of order T^(-1/2), T^(-1/4) and T^(-1/3)."""
    L, gap, sigma, r = constants
    return (
        4 * sqrt(gap * L / steps),
        7 * (r * gap * L * sigma**2 / steps) ** 0.25,
        4 * sqrt(r) * sigma / steps ** (1 / 3),
    )


TANH_CURVATURE = 4 / (3 * sqrt(3))  # max |tanh''|


class Problem(ABC):
    """A loss over matrices with unit rows. U may be a batch (..., m, n)."""

    name: str
    U_1: Tensor  # starting point
    row_bounds: Tensor  # G_i, bounds on the row norms of the Euclidean gradient
    lipschitz: float  # l, of the Euclidean gradient
    constants: Constants

    @abstractmethod
    def loss(self, U: Tensor) -> Tensor: ...

    @abstractmethod
    def euclidean(self, U: Tensor) -> Tensor:
        """Return the gradient in the ambient space."""

    def gradient(self, U: Tensor) -> Tensor:
        return project(self.euclidean(U), U)

    def sample(self, U: Tensor, gradient: Tensor, random: torch.Generator) -> Tensor:
        """Add Gaussian tangent noise with E|noise|_F^2 = sigma^2 to the exact gradient."""
        m, n = U.shape[-2:]
        dimension = m * (n - 1)  # of the tangent space
        size = self.constants.noise / sqrt(dimension)
        noise = torch.randn(U.shape, generator=random, dtype=U.dtype)
        return gradient + size * project(noise, U)

    def _constants(self, noise: float, lowest: float) -> Constants:
        r, rows = min(self.U_1.shape), self.row_bounds
        L = min(float(rows.sum()), r * float(rows.max())) + r * self.lipschitz
        return Constants(L, float(self.loss(self.U_1)) - lowest, noise, r)


def unit_rows(m: int, n: int, random: torch.Generator) -> Tensor:
    return normalize_rows(torch.randn(m, n, generator=random, dtype=torch.float64))


class Alignment(Problem):
    """<C, U>: rows align with -C_i. There are 2^m stationary points and one minimum."""

    name = "alignment"

    def __init__(self, m: int, n: int, noise: float, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.C, self.U_1 = unit_rows(m, n, random) / m, unit_rows(m, n, random)
        self.row_bounds, self.lipschitz = row_norm(self.C).squeeze(-1), 0.0
        # the minimum is at -C_i / |C_i|
        self.constants = self._constants(noise, lowest=-float(self.row_bounds.sum()))

    def loss(self, U: Tensor) -> Tensor:
        return (self.C * U).sum(dim=(-2, -1))

    def euclidean(self, U: Tensor) -> Tensor:
        return self.C.expand_as(U)


class Regression(Problem):
    """Least squares |A (U - U*)|_F^2 / 2, which couples the rows. The minimum is 0."""

    name = "regression"

    def __init__(self, m: int, n: int, noise: float, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        A = torch.randn(2 * m, m, generator=random, dtype=torch.float64)
        H = A.mT @ A
        self.H = H / (m * torch.linalg.matrix_norm(H, ord=2))
        self.target, self.U_1 = unit_rows(m, n, random), unit_rows(m, n, random)
        self.row_bounds = 2 * self.H.abs().sum(dim=-1)  # |U_j - U*_j| <= 2
        self.lipschitz = float(torch.linalg.matrix_norm(self.H, ord=2))
        self.constants = self._constants(noise, lowest=0.0)

    def loss(self, U: Tensor) -> Tensor:
        error = U - self.target
        return (error * (self.H @ error)).sum(dim=(-2, -1)) / 2

    def euclidean(self, U: Tensor) -> Tensor:
        return self.H @ (U - self.target)


class Neurons(Problem):
    """A layer of tanh neurons that fits a teacher: mean (mean_i tanh<U_i, x> - y)^2 / 2.

    Not convex. The noise is that of minibatch gradients, sampled with replacement.
    """

    name = "neurons"

    def __init__(self, m: int, n: int, samples: int = 64, batch: int = 16, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.x = 1.5 * unit_rows(
            samples, n, random
        )  # long enough to reach the nonlinear part of tanh
        self.batch, target = batch, unit_rows(m, n, random)
        self.y = torch.tanh(self.x @ target.mT).mean(dim=-1)
        self.U_1 = unit_rows(m, n, random)
        sizes = row_norm(self.x).squeeze(-1)
        errors = torch.tanh(sizes) + self.y.abs()  # upper bounds
        # Row i of the gradient is mean(c x) / m with |c| <= errors: apply Cauchy-Schwarz. Its
        # derivative along V is at most mean((1 + TANH_CURVATURE errors) <x, V_i>^2) / m, because
        # tanh' <= 1 and |tanh''| <= TANH_CURVATURE.
        self.row_bounds = (errors.square().mean() * self._moment(torch.ones_like(errors))).sqrt()
        self.row_bounds = self.row_bounds.expand(m) / m
        self.lipschitz = float(self._moment(1 + TANH_CURVATURE * errors)) / m
        # |gradient of one sample| <= error |x| / sqrt(m); a batch divides the variance by its size
        noise = float((errors * sizes).square().mean().sqrt()) / sqrt(m * batch)
        self.constants = self._constants(noise, lowest=0.0)

    def _moment(self, weights: Tensor) -> Tensor:
        """Return the maximum of mean(w <x, v>^2) over unit vectors v."""
        scaled = self.x * (weights / len(self.x)).sqrt().unsqueeze(-1)
        return torch.linalg.matrix_norm(scaled, ord=2).square()

    def loss(self, U: Tensor) -> Tensor:
        out = torch.tanh(U @ self.x.mT).mean(dim=-2)
        return (out - self.y).square().mean(dim=-1) / 2

    def euclidean(self, U: Tensor) -> Tensor:
        return self._mean_gradient(U, self.x, self.y)

    def sample(self, U: Tensor, gradient: Tensor, random: torch.Generator) -> Tensor:
        shape = (*U.shape[:-2], self.batch)
        indices = torch.randint(len(self.x), shape, generator=random)
        return project(self._mean_gradient(U, self.x[indices], self.y[indices]), U)

    def _mean_gradient(self, U: Tensor, x: Tensor, y: Tensor) -> Tensor:
        out = torch.tanh(U @ x.mT)  # (..., m, k)
        error = out.mean(dim=-2, keepdim=True) - y.unsqueeze(-2)
        return (error * (1 - out.square())) @ x / (U.shape[-2] * x.shape[-2])


SIZES = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0)  # |X|_op of the steps X that are tested
NOISE_SAMPLES = 2000


class Measured(NamedTuple):
    """The worst ratios found. The assumptions hold at the tested points if all are at most 1."""

    descent: float  # (loss(V) - loss(U) - <grad, X>) / (L |X|_op^2 / 2)
    gradient: float  # |grad(U) - grad(V)|_* / (L |X|_op)
    initial_gap: float  # (loss(U_1) - lowest loss seen) / Delta_0
    noise: float  # E|noise|_F^2 / sigma^2
    bias: float  # |mean of the noise|_F in units of 5 standard errors


def check_assumptions(problem: Problem, points: int = 40, seed: int = 0) -> Measured:
    """Test `problem.constants` at random points and along a descent path."""
    random = torch.Generator().manual_seed(seed)
    L, gap, sigma, _ = problem.constants
    descent = gradient = noise = bias = 0.0
    lowest = float(problem.loss(problem.U_1))
    for U in _points(problem, points, random):
        G = problem.gradient(U)
        for X in _steps(G, U, random):
            V, size = retract(U, X), torch.linalg.matrix_norm(X, ord=2)
            rise = problem.loss(V) - problem.loss(U) - (G * X).sum()
            change = torch.linalg.matrix_norm(problem.gradient(V) - G, ord="nuc")
            descent = max(descent, float(2 * rise / (L * size**2)))
            gradient = max(gradient, float(change / (L * size)))
            lowest = min(lowest, float(problem.loss(V)))
        mean_square, bias_ratio = _noise(problem, U, G, random)
        noise = max(noise, mean_square / sigma**2 if sigma else 0.0)
        bias = max(bias, bias_ratio / 5)
    first_loss = float(problem.loss(problem.U_1))
    return Measured(descent, gradient, (first_loss - lowest) / gap, noise, bias)


def _points(problem: Problem, count: int, random: torch.Generator) -> Iterator[Tensor]:
    """Yield random points and points of a descent path from U_1, alternately."""
    m, n = problem.U_1.shape
    U = problem.U_1
    for i in range(count):
        yield U if i % 2 else unit_rows(m, n, random)
        G = problem.gradient(U)
        U = retract(U, -0.3 * G / torch.linalg.matrix_norm(G, ord=2).clamp(min=1e-12))


def _steps(G: Tensor, U: Tensor, random: torch.Generator) -> Iterator[Tensor]:
    """Yield tangent steps of every size: along G, -G, noise, and noise in a single row."""
    noise = torch.randn(U.shape, generator=random, dtype=U.dtype)
    row = torch.zeros_like(noise)
    i = int(torch.randint(len(U), (), generator=random))
    row[i] = noise[i]
    for direction in (G, -G, noise, row):
        X = project(direction, U)
        X = X / torch.linalg.matrix_norm(X, ord=2).clamp(min=1e-30)
        for size in SIZES:
            yield size * X


def _noise(problem: Problem, U: Tensor, G: Tensor, random: torch.Generator) -> tuple[float, float]:
    """Return the noise's mean square, and the norm of its mean in standard errors."""
    batch = U.expand(NOISE_SAMPLES, *U.shape)
    Z = problem.sample(batch, G.expand_as(batch), random) - G
    square = float(Z.square().sum(dim=(-2, -1)).mean())
    mean = float(torch.linalg.matrix_norm(Z.mean(dim=0)))
    return square, mean / max((square / NOISE_SAMPLES) ** 0.5, 1e-30)
