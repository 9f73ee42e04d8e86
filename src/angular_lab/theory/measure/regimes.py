"""Table 1 of the paper, simulated: the angle of a step under white-noise gradients.

A row of norm nu takes steps of length a. Independent steps are perpendicular on average, so their
squares add up. Momentum correlates successive steps: over times longer than its memory, squared
norms grow c times as fast, where c is the sum of a step's correlations with all others.
"""

from collections.abc import Callable
from itertools import pairwise
from math import atan, sqrt
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import nn

from angular_muown import AngleMonitor, AngularMuown, Muon, Muown, inverse_polynomial

SHAPE = (16, 64)
STEPS = 6_000
MUON_LR, DECAY, MUOWN_LR, ANGULAR_LR, WARMUP = 0.05, 0.1, 0.05, 0.02, 500
BETA = 0.95
POINTS = 60  # in the figure, evenly spaced in the logarithm of the step

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def growth_factor(beta: float, keep: float = 1.0) -> float:
    """Return c for momentum with Nesterov's look-ahead.

    The gradients of a step have the weights 1 + beta, beta^2, beta^3, ..., so the correlation of
    steps k apart is proportional to beta^k. Decay by the factor `keep` leaves keep^k of the older
    one.
    """
    tail = beta**4 / (1 - beta**2)
    correlation = ((1 + beta) * beta + tail) / ((1 + beta) ** 2 + tail)
    return 1 + 2 * correlation * beta * keep / (1 - beta * keep)


def decayed_norm(t: int, lr: float, decay: float, c: float, start: float = 1.0) -> float:
    """Return the norm after t steps nu^2 <- (1 - lr decay)^2 nu^2 + c lr^2."""
    keep = (1 - lr * decay) ** 2
    fixed = c * lr**2 / (1 - keep)
    return sqrt(fixed + (start**2 - fixed) * keep**t)


def grown_norm(t: int, lr: float, c: float, start: float = 1.0) -> float:
    """Return Muown's stored norm after t steps: rho^2 = rho_0^2 + c lr^2 t."""
    return sqrt(start**2 + c * lr**2 * t)


class Regime(NamedTuple):
    name: str
    make: MakeOptimizer
    norm: Callable[[int], float]  # before step t: the divisor of the step's length
    step: Callable[[int], float]  # the step's length

    def angle(self, t: int) -> float:
        return atan(self.step(t) / self.norm(t))


def regimes() -> list[Regime]:
    exact = {"orthogonalize": "svd", "scale": "none"}

    def weight_decay(name: str, beta: float) -> Regime:
        keep = 1 - MUON_LR * DECAY
        c = growth_factor(beta, keep)
        return Regime(
            name,
            lambda p: Muon(p, lr=MUON_LR, weight_decay=DECAY, momentum=beta, **exact),
            lambda t: decayed_norm(t, MUON_LR, DECAY, c),
            lambda t: MUON_LR / keep,
        )

    def implicit(name: str, beta: float) -> Regime:
        c = growth_factor(beta)
        return Regime(
            name,
            lambda p: Muown(p, lr=MUOWN_LR, momentum=beta, radius="fixed", **exact),
            lambda t: grown_norm(t, MUOWN_LR, c),
            lambda t: MUOWN_LR,
        )

    explicit = Regime(
        "AngularMuown, momentum",
        lambda p: AngularMuown(p, lr=ANGULAR_LR, momentum=BETA, warmup_steps=WARMUP, **exact),
        lambda t: 1.0,
        lambda t: ANGULAR_LR * inverse_polynomial(t, WARMUP, 1e-3, 1.0),
    )
    return [
        weight_decay("weight decay", 0.0),
        weight_decay("weight decay, momentum", BETA),
        implicit("Muown", 0.0),
        implicit("Muown, momentum", BETA),
        explicit,
    ]


def measure(steps: int = STEPS) -> dict[str, Any]:
    return {
        "shape": SHAPE,
        "steps": steps,
        "memory": growth_factor(BETA),
        "lines": [measure_regime(regime, steps) for regime in regimes()],
    }


def measure_regime(regime: Regime, steps: int) -> dict[str, Any]:
    """Return measured and predicted angles and norms: by window, and over the second half."""
    angle, norm = simulate(regime.make, steps)
    columns = {
        "angle": angle,
        "norm": norm,
        "angle_predicted": [regime.angle(t) for t in range(steps)],
        "norm_predicted": [regime.norm(t) for t in range(steps)],
    }
    half = steps // 2
    return {
        "name": regime.name,
        "points": [
            {"step": (a + b - 1) / 2, **{k: fmean(values[a:b]) for k, values in columns.items()}}
            for a, b in windows(steps)
        ],
        "late": {key: fmean(values[half:]) for key, values in columns.items()},
    }


def windows(steps: int) -> list[tuple[int, int]]:
    """Return consecutive ranges of steps whose ends grow geometrically."""
    ends = sorted({round(steps ** (k / POINTS)) for k in range(POINTS + 1)})
    return [(a - 1, b - 1) for a, b in pairwise(ends)]


def simulate(make: MakeOptimizer, steps: int) -> tuple[list[float], list[float]]:
    """Return the rows' mean angle and mean norm at every step under white-noise gradients.

    The norm is the one that divides the step: Muown's stored norm, Muon's row norm, or 1.
    """
    random = torch.Generator().manual_seed(0)
    m, n = SHAPE
    model = nn.Linear(n, m, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.normal_(generator=random)
        model.weight /= model.weight.norm(dim=-1, keepdim=True)
    optimizer = make(list(model.parameters()))
    monitor, angles, norms = AngleMonitor(model, optimizer), [], []
    for _ in range(steps):
        W = model.weight.detach()
        length = W.norm(dim=-1) if isinstance(optimizer, Muon) else torch.ones(m)
        norms.append(float(optimizer.state[model.weight].get("stored_norm", length).mean()))
        model.weight.grad = torch.randn(m, n, generator=random, dtype=torch.float64)
        optimizer.step()
        angles.append(monitor.read()["angle_mean"])
    return angles, norms
