"""Table 1 of the paper, simulated: what becomes of the angle of a step under white noise.

A row of length nu takes steps of length a. Independent steps are perpendicular on average, so
squares add up. Momentum makes neighbours alike: over times longer than its memory, squares grow
c times as fast, c = the sum of the correlations of a step with all the others.
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
POINTS = 60  # on the figure, evenly in the logarithm of the step

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def memory(beta: float, keep: float = 1.0) -> float:
    """c of Nesterov's look-ahead, whose gradients have the weights 1 + beta, beta^2, beta^3, ...

    Steps that are k apart have a correlation in proportion to beta^k. Decay by the factor keep
    leaves keep^k of the older one.
    """
    tail = beta**4 / (1 - beta**2)
    correlation = ((1 + beta) * beta + tail) / ((1 + beta) ** 2 + tail)
    return 1 + 2 * correlation * beta * keep / (1 - beta * keep)


def decayed_norm(t: int, lr: float, decay: float, c: float, start: float = 1.0) -> float:
    """Weight decay: nu^2 <- (1 - lr decay)^2 nu^2 + c lr^2, from the start to its fixed point."""
    keep = (1 - lr * decay) ** 2
    fixed = c * lr**2 / (1 - keep)
    return sqrt(fixed + (start**2 - fixed) * keep**t)


def grown_norm(t: int, lr: float, c: float, start: float = 1.0) -> float:
    """Muown's stored norm: rho^2 = rho_0^2 + c lr^2 t."""
    return sqrt(start**2 + c * lr**2 * t)


class Regime(NamedTuple):
    name: str
    make: Make
    norm: Callable[[int], float]  # before step t: what the step's length is divided by
    step: Callable[[int], float]  # that length

    def angle(self, t: int) -> float:
        return atan(self.step(t) / self.norm(t))


def regimes() -> list[Regime]:
    exact = {"orthogonalize": "svd", "scale": "none"}

    def weight_decay(name: str, beta: float) -> Regime:
        def make(p: list[nn.Parameter]) -> torch.optim.Optimizer:
            return Muon(p, lr=MUON_LR, weight_decay=DECAY, momentum=beta, **exact)

        def norm(t: int) -> float:
            return decayed_norm(t, MUON_LR, DECAY, memory(beta, 1 - MUON_LR * DECAY))

        return Regime(name, make, norm, lambda t: MUON_LR / (1 - MUON_LR * DECAY))

    def implicit(name: str, beta: float) -> Regime:
        def make(p: list[nn.Parameter]) -> torch.optim.Optimizer:
            return Muown(p, lr=MUOWN_LR, momentum=beta, radius="fixed", **exact)

        return Regime(name, make, lambda t: grown_norm(t, MUOWN_LR, memory(beta)),
                      lambda t: MUOWN_LR)  # fmt: skip

    def explicit(p: list[nn.Parameter]) -> torch.optim.Optimizer:
        return AngularMuown(p, lr=ANGULAR_LR, momentum=BETA, warmup_steps=WARMUP, **exact)

    def scheduled(t: int) -> float:
        return ANGULAR_LR * inverse_polynomial(t, WARMUP, 1e-3, 1.0)

    return [
        weight_decay("weight decay", 0.0),
        weight_decay("weight decay, momentum", BETA),
        implicit("Muown", 0.0),
        implicit("Muown, momentum", BETA),
        Regime("AngularMuown, momentum", explicit, lambda t: 1.0, scheduled),
    ]


def measure(steps: int = STEPS) -> dict[str, Any]:
    return {
        "shape": SHAPE,
        "steps": steps,
        "memory": memory(BETA),
        "lines": [line(regime, steps) for regime in regimes()],
    }


def line(regime: Regime, steps: int) -> dict[str, Any]:
    """Angle and norm, measured and predicted: as means over windows, and over the second half."""
    columns = dict(zip(("angle", "norm"), simulate(regime.make, steps), strict=True))
    columns |= {
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
    """Ranges of steps whose ends grow in proportion."""
    ends = sorted({round(steps ** (k / POINTS)) for k in range(POINTS + 1)})
    return [(a - 1, b - 1) for a, b in pairwise(ends)]


def simulate(make: Make, steps: int) -> tuple[list[float], list[float]]:
    """The mean angle of the rows at every step, under gradients that are white noise, and the mean
    norm that the step was divided by: Muown's stored one, or that of what is retracted."""
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
