"""How fast the tangent-constrained polar factor is found, and what it costs not to look for it."""

from typing import Any

import torch
from torch import Tensor

from angular_muown.theory import project, solver_path, tangent_polar

SHAPES = ((64, 256), (256, 64), (128, 128))
SPECTRA = ("Gaussian", "power law", "clustered")
STEPS = 50
SAMPLES = 4
ACCURACIES = (1e-3, 1e-6)


def spectrum(kind: str, m: int, n: int, random: torch.Generator) -> Tensor:
    """A random matrix; power law: singular values from 1 to 1e-3; clustered: a quarter at 1, the
    rest at 0.01."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    if kind == "Gaussian":
        return normal(m, n)
    r = min(m, n)
    P, V = (torch.linalg.qr(normal(side, r))[0] for side in (m, n))
    values = {
        "power law": torch.logspace(0, -3, r, dtype=torch.float64),
        "clustered": torch.where(torch.arange(r) < r // 4, 1.0, 0.01).double(),
    }[kind]
    return (P * values) @ V.mT


def problem(kind: str, m: int, n: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    U = torch.randn(m, n, generator=random, dtype=torch.float64)
    U = U / U.norm(dim=-1, keepdim=True)
    return project(spectrum(kind, m, n, random), U), U


def measure(quick: bool = False) -> dict[str, Any]:
    shapes = tuple((m // 8, n // 8) for m, n in SHAPES) if quick else SHAPES
    return {
        "accuracies": ACCURACIES,
        "samples": SAMPLES,
        "cells": [cell(kind, *shape) for shape in shapes for kind in SPECTRA],
    }


def cell(kind: str, m: int, n: int) -> dict[str, Any]:
    """The worst of a few samples, after every step."""
    random = torch.Generator().manual_seed(0)
    pairs = [problem(kind, m, n, random) for _ in range(SAMPLES)]
    M, U = (torch.stack(part) for part in zip(*pairs, strict=True))
    gaps, duals, feasible = [], [], []
    for k, found in enumerate(solver_path(M, U)):
        gaps.append(found.gap)
        X = M + found.multiplier.unsqueeze(-1) * U
        duals.append(torch.linalg.matrix_norm(X, ord="nuc"))
        norm = torch.linalg.matrix_norm(found.D, ord=2)
        feasible.append((float(found.tangency.max()), float(norm.max()) - 1))
        if k == STEPS or float(found.gap.max()) < 1e-8:
            break
    best = -(M * found.D).sum(dim=(-2, -1))
    dual = [float((value / best - 1).max()) for value in duals]
    gap = [float(value.max()) for value in gaps]
    single = tangent_polar(M.float(), U.float())
    return {
        "spectrum": kind,
        "shape": [m, n],
        "gap": gap,
        "dual_excess": dual,
        "steps_gap": [_first(gap, x) for x in ACCURACIES],
        "steps_dual": [_first(dual, x) for x in ACCURACIES],
        "tangency": max(t for t, _ in feasible),
        "norm_excess": max(x for _, x in feasible),
        "float32_gap": float(single.gap.max()),
    }


def _first(values: list[float], accuracy: float) -> int | None:
    return next((k for k, value in enumerate(values) if value <= accuracy), None)
