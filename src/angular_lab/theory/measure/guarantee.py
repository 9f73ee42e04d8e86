"""The theorem's bound against runs of Algorithm 2 on problems whose constants are known."""

from collections.abc import Sequence
from math import log
from statistics import linear_regression
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
DUAL_SAMPLES = 500  # steps of a run at which the dual norm is measured
SEEDS = {100: 16, 1_000: 8, 10_000: 4, 100_000: 2}
EXACT_UP_TO = 100  # steps; longer runs take one warm-started dual step instead of a solution


def measure_shape(m: int, n: int, horizons: Sequence[int] = HORIZONS) -> dict[str, Any]:
    """Run the problems of a shape at every horizon and check their assumptions."""
    problems: list[Problem] = [Alignment(m, n, NOISE), Regression(m, n, NOISE), Neurons(m, n)]
    cells = [cell for T in horizons for cell in run(problems, T, SEEDS.get(T, 2))]
    slopes, assumptions = [], []
    for problem in problems:
        key = {"problem": problem.name, "shape": [m, n]}
        means = [(c["steps"], c["mean"]) for c in cells if c["problem"] == problem.name]
        slopes.append({**key, "slope": exponent(means[-3:])})
        measured = check_assumptions(problem)._asdict()
        assumptions.append({**key, **problem.constants._asdict(), "measured": measured})
    return {"cells": cells, "slopes": slopes, "assumptions": assumptions}


def measure_ranks(ranks: Sequence[int] = RANKS, steps: int = RANK_HORIZON) -> dict[str, Any]:
    """Vary r alone: L and sigma are the same at every rank, Delta_0 nearly so."""
    cells = [run([Alignment(r, RANK_WIDTH, NOISE)], steps, SEEDS.get(steps, 2))[0] for r in ranks]
    return {
        "rank_cells": cells,
        "rank_exponents": {
            key: exponent([(c["rank"], c[key]) for c in cells]) for key in ("mean", "dual_mean")
        },
    }


@torch.inference_mode()
def run(problems: Sequence[Problem], steps: int, seeds: int) -> list[dict[str, Any]]:
    """Run Algorithm 2 with the theorem's parameters on all problems and seeds in one batch."""
    chosen = [parameters(problem.constants, steps) for problem in problems]
    lr, momentum = (
        torch.tensor([c[i] for c in chosen for _ in range(seeds)]).double()[:, None, None]
        for i in (0, 1)
    )
    p = nn.Parameter(torch.cat([problem.U_1.expand(seeds, -1, -1) for problem in problems]))
    exact = steps <= EXACT_UP_TO
    inner = 0 if exact else 1
    optimizer = IdealizedAngularMuown([p], lr, momentum, inner_steps=inner, tolerance=1e-4)
    random = torch.Generator().manual_seed(steps)
    total, dual, gap = (torch.zeros(len(p), dtype=torch.float64) for _ in range(3))
    every = max(1, steps // DUAL_SAMPLES)
    for t in range(steps):
        points = p.detach().split(seeds)
        gradients = [problem.gradient(U) for problem, U in zip(problems, points, strict=True)]
        G = torch.cat(gradients)
        norm = torch.linalg.matrix_norm(G)
        total += norm
        if t % every == 0:
            dual += dual_norm(G, p.detach())
        batches = zip(problems, points, gradients, strict=True)
        p.grad = torch.cat([problem.sample(U, G, random) for problem, U, G in batches])
        optimizer.step()
        # With these weights, a mean gap of delta raises the bound by at most 1 / (1 - delta).
        gap += norm * optimizer.state[p]["gap"]
    columns = {
        "mean": total / steps,
        "dual_mean": dual / len(range(0, steps, every)),
        "direction_gap": gap / total,
    }
    return [
        {
            **predictions(problem, steps),
            "seeds": seeds,
            "exact": exact,
            **{key: float(values.split(seeds)[i].mean()) for key, values in columns.items()},
            "spread": float(torch.stack(columns["mean"].split(seeds)[i].aminmax()).diff()),
        }
        for i, problem in enumerate(problems)
    ]


def predictions(problem: Problem, steps: int) -> dict[str, Any]:
    """Return the theorem's parameters and bound for a run."""
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
    """Return an upper bound of |G|_{U,*}: the value after a few dual steps plus its proven gap."""
    solution = dual_steps(G, U, None, 3)
    reached = -(G * solution.D).sum(dim=(-2, -1))
    return reached / (1 - solution.gap)


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Fit a power law by least squares of the logarithms and return its exponent."""
    return linear_regression([log(x) for x, _ in points], [log(y) for _, y in points]).slope
