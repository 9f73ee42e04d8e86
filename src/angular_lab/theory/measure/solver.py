"""How many steps the tangent-constrained polar factor takes, and what taking none costs."""

from typing import Any

import torch
from torch import Tensor

from angular_muown.theory import project, solver_path, tangent_polar

SHAPES = ((64, 256), (256, 64), (128, 128))
SPECTRA = ("Gaussian", "power law", "clustered")
STEPS = 50
SAMPLES = 4
ACCURACIES = (1e-3, 1e-6)


def random_matrix(spectrum: str, m: int, n: int, random: torch.Generator) -> Tensor:
    """Draw a matrix; "power law": singular values fall from 1 to 1e-3; "clustered": a quarter of
    them is 1, the rest 0.01."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    if spectrum == "Gaussian":
        return normal(m, n)
    r = min(m, n)
    P, V = (torch.linalg.qr(normal(side, r))[0] for side in (m, n))
    values = {
        "power law": torch.logspace(0, -3, r, dtype=torch.float64),
        "clustered": torch.where(torch.arange(r) < r // 4, 1.0, 0.01).double(),
    }[spectrum]
    return (P * values) @ V.mT


def random_problem(spectrum: str, m: int, n: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw unit rows U and a matrix M that is tangent to them."""
    U = torch.randn(m, n, generator=random, dtype=torch.float64)
    U = U / U.norm(dim=-1, keepdim=True)
    return project(random_matrix(spectrum, m, n, random), U), U


def measure(quick: bool = False) -> dict[str, Any]:
    shapes = tuple((m // 8, n // 8) for m, n in SHAPES) if quick else SHAPES
    return {
        "accuracies": ACCURACIES,
        "samples": SAMPLES,
        "cells": [measure_cell(spectrum, *shape) for shape in shapes for spectrum in SPECTRA],
    }


def measure_cell(spectrum: str, m: int, n: int) -> dict[str, Any]:
    """Solve a few samples and return the worst of them after every step."""
    random = torch.Generator().manual_seed(0)
    samples = [random_problem(spectrum, m, n, random) for _ in range(SAMPLES)]
    M, U = (torch.stack(tensors) for tensors in zip(*samples, strict=True))
    gaps, duals, tangency, norm_excess = [], [], 0.0, -1.0
    for k, solution in enumerate(solver_path(M, U)):
        gaps.append(float(solution.gap.max()))
        X = M + solution.multiplier.unsqueeze(-1) * U
        duals.append(torch.linalg.matrix_norm(X, ord="nuc"))
        norm = torch.linalg.matrix_norm(solution.D, ord=2)
        tangency = max(tangency, float(solution.tangency.max()))
        norm_excess = max(norm_excess, float(norm.max()) - 1)
        if k == STEPS or gaps[-1] < 1e-8:
            break
    best = -(M * solution.D).sum(dim=(-2, -1))
    dual_excess = [float((dual / best - 1).max()) for dual in duals]
    return {
        "spectrum": spectrum,
        "shape": [m, n],
        "gap": gaps,
        "dual_excess": dual_excess,
        "steps_gap": [_steps_to(accuracy, gaps) for accuracy in ACCURACIES],
        "steps_dual": [_steps_to(accuracy, dual_excess) for accuracy in ACCURACIES],
        "tangency": tangency,
        "norm_excess": norm_excess,
        "float32_gap": float(tangent_polar(M.float(), U.float()).gap.max()),
    }


def _steps_to(accuracy: float, values: list[float]) -> int | None:
    return next((k for k, value in enumerate(values) if value <= accuracy), None)
