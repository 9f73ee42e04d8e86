"""The geometry of a step: angles of all step sizes, two retractions, and transported momentum."""

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

RADIAL = (0.0, 0.5, -0.5, -1.5)  # <xi, U>; below -1 the row lands on the opposite side
SIZES = tuple(10 ** (k / 10) for k in range(-30, 16))
SHAPE, STEPS, SEEDS = (12, 16), 300, 4
LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
BETA = 0.95
VARIANTS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "momentum projected": {"transport": "project"},
    "momentum transported": {"transport": "parallel"},
    "exponential, transported": {"transport": "parallel", "retraction": "exponential"},
}


def measure(steps: int = STEPS, learning_rates: Sequence[float] = LEARNING_RATES) -> dict[str, Any]:
    problems: list[Problem] = [Regression(*SHAPE, noise=0.1), Neurons(*SHAPE)]
    curves = angle_curves()
    errors = [abs(a - b) for c in curves for a, b in zip(c["measured"], c["formula"], strict=True)]
    return {
        "angles": curves,
        "angle_error": max(errors),
        "moves": compare_retractions(),
        "momentum": {
            "shape": SHAPE,
            "steps": steps,
            "seeds": SEEDS,
            "beta": BETA,
            "runs": [
                {"problem": problem.name, "variant": variant, "lr": lr,
                 **run(problem, lr, steps, options)}
                for problem in problems
                for variant, options in VARIANTS.items()
                for lr in learning_rates
            ],
        },
    }  # fmt: skip


def unit_row_and_tangent() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    U, V = (torch.randn(1, 12, generator=random, dtype=torch.float64) for _ in range(2))
    U = U / U.norm()
    V = project(V, U)
    return U, V / V.norm()


def angle(U: Tensor, V: Tensor) -> float:
    """Return the degrees between two unit rows, accurate for small and for large angles."""
    return degrees(2 * atan2(float((V - U).norm()), float((V + U).norm())))


def angle_curves() -> list[dict[str, Any]]:
    """Return angles measured after the retraction and by tan theta = |xi_perp| / (1 + <xi, U>)."""
    U, V = unit_row_and_tangent()
    return [
        {
            "radial": along,
            "sizes": SIZES,
            "measured": [angle(U, retract(U, size * V + along * U)) for size in SIZES],
            "formula": [degrees(atan2(size, 1 + along)) for size in SIZES],
        }
        for along in RADIAL
    ]


def compare_retractions() -> dict[str, Any]:
    """Return the angles of normalizing and of the exponential map, and the angle between them."""
    U, V = unit_row_and_tangent()
    sizes = [size for size in SIZES if size < pi]  # longer steps come back along the great circle
    ends = [(retract(U, size * V), exponential(U, size * V)) for size in sizes]
    return {
        "sizes": sizes,
        "retraction": [angle(U, a) for a, _ in ends],
        "exponential": [angle(U, b) for _, b in ends],
        "apart": [angle(a, b) for a, b in ends],
        "cubic": [degrees(size**3 / 3) for size in sizes],  # arctan x = x - x^3 / 3 + ...
    }


def run(problem: Problem, lr: float, steps: int, options: dict[str, Any]) -> dict[str, float]:
    """Return the final loss of a run with a cooldown, and the momentum's mean share along U."""
    random = torch.Generator().manual_seed(1)
    p = nn.Parameter(problem.U_1.expand(SEEDS, -1, -1).clone())
    optimizer = IdealizedAngularMuown([p], lr, BETA, inner_steps=2, **options)
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
