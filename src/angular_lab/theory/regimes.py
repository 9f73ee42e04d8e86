"""Table 1 of the paper, simulated: what becomes of the angle of a step under white noise.

A row of length nu takes steps of length a. Independent steps are perpendicular on average, so
squares add up. Momentum makes neighbours alike: over times longer than its memory, squares grow
c times as fast, c = (sum of the weights)^2 / (sum of their squares) of the gradients in a step.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import atan, sqrt
from typing import Any

import torch
from torch import nn

from angular_muown import AngleMonitor, AngularMuown, Muon, Muown, inverse_polynomial

SHAPE = (16, 64)
STEPS = 6_000
MUON_LR, DECAY, MUOWN_LR, ANGULAR_LR, WARMUP = 0.05, 0.1, 0.05, 0.02, 500
BETA = 0.95
POINTS = 60  # on the figure, evenly in the logarithm of the step

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def memory(beta: float) -> float:
    """c of Nesterov's look-ahead, whose gradients have the weights 1 + beta, beta^2, beta^3, ..."""
    if not beta:
        return 1.0
    return (1 - beta) ** -2 / ((1 + beta) ** 2 + beta**4 / (1 - beta**2))


def decayed(t: int, lr: float, decay: float, c: float, start: float = 1.0) -> float:
    """Weight decay: nu^2 <- (1 - lr decay)^2 nu^2 + c lr^2, from the start to its fixed point."""
    keep = (1 - lr * decay) ** 2
    fixed = c * lr**2 / (1 - keep)
    nu = sqrt(fixed + (start**2 - fixed) * keep**t)
    return atan(lr / ((1 - lr * decay) * nu))


def grown(t: int, lr: float, c: float, start: float = 1.0) -> float:
    """Muown's stored norm: rho^2 = rho_0^2 + c lr^2 t."""
    return atan(lr / sqrt(start**2 + c * lr**2 * t))


def scheduled(t: int) -> float:
    """AngularMuown: lr kappa_t."""
    return atan(ANGULAR_LR * inverse_polynomial(t, WARMUP, 1e-3, 1.0))


def lines() -> list[tuple[str, Make, Callable[[int], float]]]:
    """Name, optimizer, prediction."""
    exact = {"orthogonalize": "svd", "scale": "none"}

    def muon(beta: float) -> Make:
        return lambda p: Muon(p, lr=MUON_LR, weight_decay=DECAY, momentum=beta, **exact)

    def muown(beta: float) -> Make:
        return lambda p: Muown(p, lr=MUOWN_LR, momentum=beta, radius="fixed", **exact)

    def angular(p: list[nn.Parameter]) -> torch.optim.Optimizer:
        return AngularMuown(p, lr=ANGULAR_LR, momentum=BETA, warmup_steps=WARMUP, **exact)

    c = memory(BETA)
    return [
        ("weight decay", muon(0.0), lambda t: decayed(t, MUON_LR, DECAY, 1.0)),
        ("weight decay, momentum", muon(BETA), lambda t: decayed(t, MUON_LR, DECAY, c)),
        ("Muown", muown(0.0), lambda t: grown(t, MUOWN_LR, 1.0)),
        ("Muown, momentum", muown(BETA), lambda t: grown(t, MUOWN_LR, c)),
        ("AngularMuown, momentum", angular, scheduled),
    ]


def measure(steps: int = STEPS) -> dict[str, Any]:
    return {
        "shape": SHAPE,
        "steps": steps,
        "memory": memory(BETA),
        "plateau": sqrt(2 * MUON_LR * DECAY),
        "lines": [line(name, make, predict, steps) for name, make, predict in lines()],
    }


def line(name: str, make: Make, predict: Callable[[int], float], steps: int) -> dict[str, Any]:
    angles = simulate(make, steps)
    edges = windows(steps)
    late = range(steps // 2, steps)
    rows = [
        {
            "step": (a + b - 1) / 2,
            "angle": sum(angles[a:b]) / (b - a),
            "predicted": sum(map(predict, range(a, b))) / (b - a),
        }
        for a, b in edges
    ]
    return {
        "name": name,
        "points": rows,
        "late": sum(angles[t] for t in late) / len(late),
        "late_predicted": sum(map(predict, late)) / len(late),
    }


def windows(steps: int) -> list[tuple[int, int]]:
    """Ranges of steps whose ends grow in proportion."""
    ends = sorted({round(steps ** (k / POINTS)) for k in range(POINTS + 1)})
    return [(a - 1, b - 1) for a, b in pairwise(ends)]


def simulate(make: Make, steps: int) -> Sequence[float]:
    """The mean angle of the rows at every step, under gradients that are white noise."""
    random = torch.Generator().manual_seed(0)
    m, n = SHAPE
    model = nn.Linear(n, m, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.normal_(generator=random)
        model.weight /= model.weight.norm(dim=-1, keepdim=True)
    optimizer = make(list(model.parameters()))
    monitor = AngleMonitor(model, optimizer)
    angles = []
    for _ in range(steps):
        model.weight.grad = torch.randn(m, n, generator=random, dtype=torch.float64)
        optimizer.step()
        angles.append(monitor.read()["angle_mean"])
    return angles
