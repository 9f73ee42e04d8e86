"""The theorem's bound against runs of Algorithm 2 on problems whose constants are known."""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from angular_muown.theory import (
    Alignment,
    IdealizedAngularMuown,
    Neurons,
    Problem,
    Regression,
    bound,
    check_assumptions,
    dual_steps,
    parameters,
    terms,
)

SHAPES = ((4, 16), (16, 4), (8, 8))
HORIZONS = (100, 1_000, 10_000, 100_000)
RANKS, RANK_WIDTH, RANK_HORIZON = (1, 2, 4, 8, 16), 32, 10_000
NOISE = 0.5
DUAL_LOOKS = 500  # points of a run at which the dual norm is measured
SEEDS = {100: 16, 1_000: 8, 10_000: 4, 100_000: 2}
EXACT_UP_TO = 100  # steps; beyond it, one warm-started dual step each instead of a solution


def problems(m: int, n: int) -> list[Problem]:
    return [Alignment(m, n, NOISE), Regression(m, n, NOISE), Neurons(m, n)]


def shape_cells(m: int, n: int, horizons: Sequence[int] = HORIZONS) -> dict[str, Any]:
    """Every problem of a shape at every horizon, and what was found of its assumptions."""
    found = problems(m, n)
    cells = [cell for T in horizons for cell in run(found, T, SEEDS.get(T, 2))]
    return {
        "cells": cells,
        "slopes": [
            {
                "problem": problem.name,
                "shape": [m, n],
                "slope": slope([(c["steps"], c["mean"]) for c in cells if _of(c, problem)][-3:]),
            }
            for problem in found
        ],
        "assumptions": [
            {
                "problem": problem.name,
                "shape": [m, n],
                **problem.constants._asdict(),
                "measured": check_assumptions(problem)._asdict(),
            }
            for problem in found
        ],
    }


def rank_cells(ranks: Sequence[int] = RANKS, steps: int = RANK_HORIZON) -> dict[str, Any]:
    """The same L, sigma and nearly the same Delta_0 at every rank: r alone changes."""
    cells = [run([Alignment(r, RANK_WIDTH, NOISE)], steps, SEEDS.get(steps, 2))[0] for r in ranks]
    return {
        "rank_cells": cells,
        "rank_exponents": {
            key: slope([(c["rank"], c[key]) for c in cells]) for key in ("mean", "dual_mean")
        },
    }


@torch.inference_mode()
def run(found: Sequence[Problem], steps: int, seeds: int) -> list[dict[str, Any]]:
    """Algorithm 2 with the theorem's parameters, all problems and seeds side by side."""
    chosen = [parameters(problem.constants, steps) for problem in found]
    lr, momentum = (
        torch.tensor([c[i] for c in chosen for _ in range(seeds)]).double()[:, None, None]
        for i in (0, 1)
    )
    p = nn.Parameter(torch.cat([problem.U_1.expand(seeds, -1, -1) for problem in found]))
    exact = steps <= EXACT_UP_TO
    inner = 0 if exact else 1
    optimizer = IdealizedAngularMuown([p], lr, momentum, inner_steps=inner, tolerance=1e-4)
    random = torch.Generator().manual_seed(steps)
    total, dual, gap = (torch.zeros(len(p), dtype=torch.float64) for _ in range(3))
    every = max(1, steps // DUAL_LOOKS)
    for t in range(steps):
        points = p.detach().split(seeds)
        exacts = [problem.gradient(U) for problem, U in zip(found, points, strict=True)]
        G = torch.cat(exacts)
        norm = torch.linalg.matrix_norm(G)
        total += norm
        if t % every == 0:
            dual += dual_norm(G, p.detach())
        rows = zip(found, points, exacts, strict=True)
        p.grad = torch.cat([problem.sample(U, G, random) for problem, U, G in rows])
        optimizer.step()
        # So weighted, a mean gap of delta raises the theorem's bound by 1 / (1 - delta) at most.
        gap += norm * optimizer.state[p]["gap"]
    columns = {
        "mean": total / steps,
        "dual_mean": dual / len(range(0, steps, every)),
        "direction_gap": gap / total,
    }
    return [
        {
            **_plan(problem, steps),
            "seeds": seeds,
            "exact": exact,
            **{key: float(x.split(seeds)[i].mean()) for key, x in columns.items()},
            "spread": float(torch.stack(columns["mean"].split(seeds)[i].aminmax()).diff()),
        }
        for i, problem in enumerate(found)
    ]


def _plan(problem: Problem, steps: int) -> dict[str, Any]:
    """What the theorem says about a run before it starts."""
    return {
        "problem": problem.name,
        "shape": list(problem.U_1.shape),
        "rank": problem.constants.rank,
        "steps": steps,
        **parameters(problem.constants, steps)._asdict(),
        "bound": bound(problem.constants, steps),
        "terms": terms(problem.constants, steps),
    }


def dual_norm(G: Tensor, U: Tensor) -> Tensor:
    """|G|_{U,*} from above: what a few dual steps reach, and the gap on top of it."""
    found = dual_steps(G, U, None, 3)
    reached = -(G * found.D).sum(dim=(-2, -1))
    return reached / (1 - found.gap)


def _of(cell: dict[str, Any], problem: Problem) -> bool:
    return cell["problem"] == problem.name


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of a power law, by least squares of the logarithms."""
    xs, ys = [log(x) for x, _ in points], [log(y) for _, y in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    up = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return up / sum((a - x) ** 2 for a in xs)
