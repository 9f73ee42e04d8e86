"""The optimizers and inputs of the tests. A new optimizer needs one row here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from angular_muown import (
    AngularMuown,
    Hyperball,
    MagnitudeDirection,
    Muon,
    Muown,
    NorMuon,
    NorMuown,
)
from angular_muown.engine import Engine
from angular_muown.stages.tangent import Constrained
from angular_muown.update import Recipe
from tests.reference import angular_muown, concurrent_methods, muon, muown


class TangentPolar(AngularMuown):
    """AngularMuown with the tangent constraint and any orthogonalizer.

    `orthogonalize="tangent"` always uses Polar Express. The laws hold for the others too.
    """

    def recipe(self, group: dict[str, Any]) -> Recipe:
        return replace(super().recipe(group), tangent=Constrained(group["tangent_steps"]))


# Optimizer, reference, arguments of both.
PARITY: list[tuple[type[Engine], Any, dict[str, Any]]] = [
    (AngularMuown, angular_muown.AngularMuown, {"lr": 0.02, "warmup_steps": 20}),
    (AngularMuown, angular_muown.AngularMuown, {"lr": 0.05, "weight_decay": 0.1}),
    (TangentPolar, angular_muown.AngularMuown, {"lr": 0.02, "tangent_steps": 1}),
    (TangentPolar, angular_muown.AngularMuown, {"lr": 0.02, "tangent_steps": 2}),
    (Muown, muown.Muown, {"lr": 0.02}),
    (NorMuown, muown.NorMuown, {"lr": 0.02}),
    (Muon, muon.Muon, {"lr": 0.02, "weight_decay": 0.1}),
    (NorMuon, muon.NorMuon, {"lr": 0.01, "weight_decay": 0.0}),
    (Hyperball, concurrent_methods.Hyperball, {"lr": 0.02}),
    (
        MagnitudeDirection,
        concurrent_methods.MagnitudeDirection,
        {"lr": 0.02, "radius_lr": 0.01},
    ),
]

FUSED: list[type[Engine]] = [AngularMuown, Muown, NorMuown, Muon, NorMuon]  # the kernels cover them
ON_SPHERES: list[type[Engine]] = [Hyperball, MagnitudeDirection]
MEMBERS: list[type[Engine]] = [*FUSED, *ON_SPHERES]
FAMILY: list[type[Engine]] = [*MEMBERS, TangentPolar]
WITH_RADII: list[type[Engine]] = [AngularMuown, Muown, NorMuown, TangentPolar]  # learn row norms


def direction_only(optimizer: type[Engine]) -> dict[str, Any]:
    """Return arguments under which only directions learn."""
    if optimizer is MagnitudeDirection:
        return {"radius_lr": 0.0}
    return {"radius": "fixed"} if optimizer in WITH_RADII else {}


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    W = np.random.default_rng(10**6 + seed).normal(size=shape) * 0.05  # no gradient has this seed
    return nn.Parameter(torch.tensor(W, dtype=dtype))


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape), dtype=dtype)


def run(
    optimizer: torch.optim.Optimizer,
    params: list[nn.Parameter],
    steps: int,
    start: int = 0,
    gradient: Callable[[nn.Parameter, int, int], Tensor] | None = None,
) -> None:
    """Take steps whose gradients depend on the weight, its index and the step number."""
    for t in range(start, start + steps):
        for i, p in enumerate(params):
            p.grad = (gradient or pull)(p, i, t)
        optimizer.step()


def pull(p: nn.Parameter, index: int, t: int) -> Tensor:
    """Return a noisy gradient that pulls the weight to zero and exercises every stage."""
    return noise(*p.shape, seed=1000 * t + index, dtype=p.dtype) + 0.1 * p.detach()
