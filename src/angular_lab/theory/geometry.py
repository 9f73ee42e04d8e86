"""The geometry of a step: angles at every size, two ways back to the spheres, and what carrying the
momentum along is worth."""

from collections.abc import Sequence
from math import atan2, degrees, pi
from typing import Any

import torch
from torch import Tensor, nn

from angular_muown.theory import (
    IdealizedAngularMuown,
    Neurons,
    Problem,
    Regression,
    exponential,
    project,
    radial,
    retract,
)

RADIAL = (0.0, 0.5, -0.5, -1.5)  # <xi, U>; below -1 the row is thrown over to the other side
SIZES = tuple(10 ** (k / 10) for k in range(-30, 16))
SHAPE, STEPS, SEEDS = (12, 16), 300, 4
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
BETA = 0.95
VARIANTS = (
    ("as in the paper", {}),
    ("momentum projected", {"transport": "project"}),
    ("momentum transported", {"transport": "parallel"}),
    ("exponential, transported", {"transport": "parallel", "retraction": "exponential"}),
)


def measure(steps: int = STEPS, rates: Sequence[float] = RATES) -> dict[str, Any]:
    problems: list[Problem] = [Regression(*SHAPE, noise=0.1), Neurons(*SHAPE)]
    return {
        "angles": (lines := angles()),
        "angle_error": max(
            abs(a - b) for x in lines for a, b in zip(x["measured"], x["formula"], strict=True)
        ),
        "moves": moves(),
        "momentum": {
            "shape": SHAPE,
            "steps": steps,
            "seeds": SEEDS,
            "beta": BETA,
            "runs": [
                {"problem": problem.name, "variant": name, "lr": lr, **run(problem, lr, steps, how)}
                for problem in problems
                for name, how in VARIANTS
                for lr in rates
            ],
        },
    }


def _row() -> tuple[Tensor, Tensor]:
    """A unit row and a unit vector perpendicular to it."""
    random = torch.Generator().manual_seed(0)
    U, V = (torch.randn(1, 12, generator=random, dtype=torch.float64) for _ in range(2))
    U = U / U.norm()
    V = project(V, U)
    return U, V / V.norm()


def angle(U: Tensor, V: Tensor) -> float:
    """Degrees between two unit rows; exact for small and for large ones."""
    return degrees(2 * atan2(float((V - U).norm()), float((V + U).norm())))


def angles() -> list[dict[str, Any]]:
    """Measured after the retraction, and by tan theta = |xi_perp| / (1 + <xi, U>)."""
    U, V = _row()
    return [
        {
            "radial": along,
            "sizes": SIZES,
            "measured": [angle(U, retract(U, size * V + along * U)) for size in SIZES],
            "formula": [degrees(atan2(size, 1 + along)) for size in SIZES],
        }
        for along in RADIAL
    ]


def moves() -> dict[str, Any]:
    """The angles of the retraction and of the exponential map, and the angle between the two."""
    U, V = _row()
    sizes = [size for size in SIZES if size < pi]  # beyond, the great circle comes back
    ends = [(retract(U, size * V), exponential(U, size * V)) for size in sizes]
    return {
        "sizes": sizes,
        "retraction": [angle(U, a) for a, _ in ends],
        "exponential": [angle(U, b) for _, b in ends],
        "apart": [angle(a, b) for a, b in ends],
        "cubic": [degrees(size**3 / 3) for size in sizes],  # arctan x = x - x^3 / 3 + ...
    }


def run(problem: Problem, lr: float, steps: int, how: dict[str, Any]) -> dict[str, float]:
    """Loss at the end of a run that cools down, and how much of the momentum points along U."""
    random = torch.Generator().manual_seed(1)
    p = nn.Parameter(problem.U_1.expand(SEEDS, -1, -1).clone())
    optimizer = IdealizedAngularMuown([p], lr, BETA, inner_steps=2, **how)
    share = 0.0
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, 2 - 2 * t / steps)  # falls in the 2nd half
        U = p.detach()
        p.grad = problem.sample(U, problem.gradient(U), random)
        optimizer.step()
        M, V = optimizer.state[p]["momentum_buffer"], p.detach()
        share += float((radial(M, V).abs().squeeze(-1) / M.norm(dim=-1).clamp(min=1e-30)).mean())
    losses = problem.loss(p.detach())
    return {
        "loss": float(losses.mean()),
        "spread": float(losses.max() - losses.min()),
        "radial_share": share / steps,
    }
