"""Rivals that came out beside the paper, each one more chart; `optimizers` explains the letters
and the arguments that all members share.

Here a matrix keeps one Frobenius norm g: what it has when it is first seen, or when it was changed
from outside. A matrix of zeros has none to keep: it grows, as under Muon, until its norm is
sqrt(m), that of unit rows. weight_decay shrinks g; both papers do without.
"""

from typing import Any

import torch
from torch import Tensor

from angular_muown.engine import Engine
from angular_muown.groups import Group, arguments
from angular_muown.recipe import Recipe, polar_of, scale_of
from angular_muown.stages.normalize import UnitNorm
from angular_muown.stages.radius import Gains
from angular_muown.stages.scale import none
from angular_muown.stages.spheres import GainedSphere, Sphere


class Hyperball(Engine):
    """Muon on a sphere, also called MuonH: |W|_F = g for ever, and no size learns.

        M = beta M + G;  Q = polar(G + beta M)
        W <- g unit(W - lr g unit(Q)),            unit(X) = X / |X|_F

    lr is the size of a step relative to W, whatever the shape, so there is no scale.

    Paper: Wen, Dang, Lyu, Ma, Liang: Fantastic Pretraining Optimizers and Where to Find Them II:
    Hyperball Optimization, arXiv 2606.16899.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        orthogonalize: str = "newton_schulz",
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def recipe(self, group: Group) -> Recipe:
        return Recipe(Sphere(), polar_of(group), none, UnitNorm())


class MagnitudeDirection(Engine):
    """A direction on a sphere between gains: W = Diag(a) V Diag(b), |V|_F = g, a and b positive.

        T = Diag(a) G Diag(b)                                 the plain chain rule, not projected
        M = beta M + T;  Q = polar(T + beta M)
        V <- g unit(V - lr s (g / sqrt(max(m, n))) Q)
        x <- Adam(x; radius_lr),  a = softplus(x);  b likewise

    The gains start at 1. With the scale "aspect" a step has the relative size lr, as on the
    paper's sphere of radius sqrt(max(m, n)); here a matrix keeps the norm that it starts with.

    Args (the shared ones are in the docstring of `optimizers`):
        radius_lr: learning rate of x at the initial lr; follows lr's schedule. None: lr.

    Paper: Haegele, Hernandez-Cano, Kosson, Jaggi: Improving Neural Network Training by Decoupling
    the Magnitude and Direction of Weight Vectors, arXiv 2606.25971.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scale: str = "aspect",
        orthogonalize: str = "newton_schulz",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def recipe(self, group: Group) -> Recipe:
        gains = Gains(group["betas"], group["eps"])
        return Recipe(GainedSphere(), polar_of(group), scale_of(group), radius=gains)
