"""The theorem's assumptions, looked for a violation at many points: claims about a problem that a
measurement could refute."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from angular_muown.theory.manifold import project, retract
from angular_muown.theory.problems import Problem, unit_rows

SIZES = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0)  # |X|_op of the steps that are tried
NOISE_SAMPLES = 2000


class Measured(NamedTuple):
    """The worst that was found; the assumptions hold there if every number is at most 1."""

    descent: float  # (loss(V) - loss(U) - <grad, X>) / (L |X|_op^2 / 2)
    gradient: float  # |grad(U) - grad(V)|_* / (L |X|_op)
    initial_gap: float  # (loss(U_1) - lowest loss seen) / Delta_0
    noise: float  # E|noise|_F^2 / sigma^2
    bias: float  # |mean of the noise|_F, in standard errors of it, over 5


def check_assumptions(problem: Problem, points: int = 40, seed: int = 0) -> Measured:
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
        second, first = _noise(problem, U, G, random)
        noise = max(noise, second / sigma**2 if sigma else 0.0)
        bias = max(bias, first / 5)
    first_loss = float(problem.loss(problem.U_1))
    return Measured(descent, gradient, (first_loss - lowest) / gap, noise, bias)


def _points(problem: Problem, count: int, random: torch.Generator) -> Iterator[Tensor]:
    """Random ones, and ones on the way down from the start."""
    m, n = problem.U_1.shape
    U = problem.U_1
    for i in range(count):
        yield U if i % 2 else unit_rows(m, n, random)
        G = problem.gradient(U)
        U = retract(U, -0.3 * G / torch.linalg.matrix_norm(G, ord=2).clamp(min=1e-12))


def _steps(G: Tensor, U: Tensor, random: torch.Generator) -> Iterator[Tensor]:
    """Up, down, random, and a single random row, at every size."""
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
    """The mean square of the noise, and its mean in standard errors."""
    many = U.expand(NOISE_SAMPLES, *U.shape)
    Z = problem.sample(many, G.expand_as(many), random) - G
    square = float(Z.square().sum(dim=(-2, -1)).mean())
    mean = float(torch.linalg.matrix_norm(Z.mean(dim=0)))
    return square, mean / max((square / NOISE_SAMPLES) ** 0.5, 1e-30)
