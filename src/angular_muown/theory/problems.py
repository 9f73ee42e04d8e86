"""Problems on the oblique manifold whose constants are known: the theorem can be put to the test.

With G_i >= |row i of the Euclidean gradient|_2 everywhere and the Euclidean gradient l-Lipschitz
in |.|_F, both parts of the smoothness assumption hold with

    L = min(sum G_i, r max G_i) + r l.

A tangent step X turns row i by arctan|X_i|, so |V_i - U_i| <= |X_i| and |V_i - U_i - X_i| <=
|X_i|^2 / 2; the projections at U_i and V_i differ by sin(arctan|X_i|) <= |X_i|. Rows of X are no
longer than |X|_op, and |X|_F <= sqrt(r) |X|_op: summing over rows gives sum G_i, by Frobenius norms
r max G_i, and the change of the gradient itself adds r l.
"""

from abc import ABC, abstractmethod
from math import sqrt

import torch
from torch import Tensor

from angular_muown.stages.charts import normalize_rows
from angular_muown.stages.sums import row_norm
from angular_muown.theory.manifold import project
from angular_muown.theory.theorem import Constants

TANH_BEND = 4 / (3 * sqrt(3))  # the largest |tanh''|


class Problem(ABC):
    """A loss on unit rows; U may be a batch (..., m, n) of points."""

    name: str
    U_1: Tensor  # where runs start
    row_bounds: Tensor  # G_i
    lipschitz: float  # l
    constants: Constants

    @abstractmethod
    def loss(self, U: Tensor) -> Tensor: ...

    @abstractmethod
    def euclidean(self, U: Tensor) -> Tensor:
        """The gradient in the ambient space."""

    def gradient(self, U: Tensor) -> Tensor:
        return project(self.euclidean(U), U)

    def sample(self, U: Tensor, gradient: Tensor, random: torch.Generator) -> Tensor:
        """A noisy gradient, given the exact one: Gaussian in the tangent space, E|noise|^2 =
        sigma^2."""
        m, n = U.shape[-2:]
        size = self.constants.noise / sqrt(
            m * (n - 1)
        )  # the tangent space has m (n - 1) dimensions
        noise = torch.randn(U.shape, generator=random, dtype=U.dtype)
        return gradient + size * project(noise, U)

    def _constants(self, noise: float, lowest: float) -> Constants:
        r, rows = min(self.U_1.shape), self.row_bounds
        L = min(float(rows.sum()), r * float(rows.max())) + r * self.lipschitz
        return Constants(L, float(self.loss(self.U_1)) - lowest, noise, r)


def unit_rows(m: int, n: int, random: torch.Generator) -> Tensor:
    return normalize_rows(torch.randn(m, n, generator=random, dtype=torch.float64))


class Alignment(Problem):
    """<C, U>: each row wants to point against its target. 2^m stationary points, one minimum."""

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
    """|A (U - U*)|_F^2 / 2: least squares whose rows depend on each other; the minimum is 0."""

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
        off = U - self.target
        return (off * (self.H @ off)).sum(dim=(-2, -1)) / 2

    def euclidean(self, U: Tensor) -> Tensor:
        return self.H @ (U - self.target)


class Neurons(Problem):
    """A layer of tanh neurons and a teacher of the same kind: mean (mean_i tanh<U_i, x> - y)^2 / 2.

    Not convex, and the noise is real: gradients of random samples, drawn with replacement.
    """

    name = "neurons"

    def __init__(self, m: int, n: int, samples: int = 64, batch: int = 16, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.x = 1.5 * unit_rows(samples, n, random)  # long enough to bend tanh
        self.batch, target = batch, unit_rows(m, n, random)
        self.y = torch.tanh(self.x @ target.mT).mean(dim=-1)
        self.U_1 = unit_rows(m, n, random)
        sizes = row_norm(self.x).squeeze(-1)
        errors = torch.tanh(sizes) + self.y.abs()  # at most
        # Row i of the gradient is mean(c x) / m with |c| <= errors: Cauchy and Schwarz. Its change
        # with V is at most mean((1 + bend errors) <x, V_i>^2) / m, as tanh' <= 1, |tanh''| <= bend.
        self.row_bounds = (errors.square().mean() * self._moment(torch.ones_like(errors))).sqrt()
        self.row_bounds = self.row_bounds.expand(m) / m
        self.lipschitz = float(self._moment(1 + TANH_BEND * errors)) / m
        # a sample's gradient is at most error |x| / sqrt(m); a mean of `batch` varies less
        noise = float((errors * sizes).square().mean().sqrt()) / sqrt(m * batch)
        self.constants = self._constants(noise, lowest=0.0)

    def _moment(self, weights: Tensor) -> Tensor:
        """The largest of mean(w <x, v>^2) over unit vectors v."""
        scaled = self.x * (weights / len(self.x)).sqrt().unsqueeze(-1)
        return torch.linalg.matrix_norm(scaled, ord=2).square()

    def loss(self, U: Tensor) -> Tensor:
        out = torch.tanh(U @ self.x.mT).mean(dim=-2)
        return (out - self.y).square().mean(dim=-1) / 2

    def euclidean(self, U: Tensor) -> Tensor:
        return self._mean_gradient(U, self.x, self.y)

    def sample(self, U: Tensor, gradient: Tensor, random: torch.Generator) -> Tensor:
        shape = (*U.shape[:-2], self.batch)
        chosen = torch.randint(len(self.x), shape, generator=random)
        return project(self._mean_gradient(U, self.x[chosen], self.y[chosen]), U)

    def _mean_gradient(self, U: Tensor, x: Tensor, y: Tensor) -> Tensor:
        out = torch.tanh(U @ x.mT)  # (..., m, k)
        error = out.mean(dim=-2, keepdim=True) - y.unsqueeze(-2)
        return (error * (1 - out.square())) @ x / (U.shape[-2] * x.shape[-2])
