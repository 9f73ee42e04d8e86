"""The family's members without row lengths. Arguments are explained in optimizers.py."""

from typing import Any

import torch
from torch import Tensor

from angular_muown.engine import Engine
from angular_muown.groups import Group, arguments
from angular_muown.recipe import Recipe, polar_of, rows_of, scale_of
from angular_muown.stages.charts import Flat


class Muon(Engine):
    """The weight itself, no radii.

        M = beta M + G;  Q = polar(G + beta M)
        W <- (1 - lr weight_decay) W - lr s Q

    scale="fan_ratio" is Keller Jordan's rule, "adam_rms" Moonlight's (arXiv 2502.16982).
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
        scale: str = "fan_ratio",
        orthogonalize: str = "newton_schulz",
        weight_decay: float = 0.1,
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
        return Recipe(Flat(), polar_of(group), scale_of(group))


class NorMuon(Engine):
    """Muon with rows of Q normalised by their second moment.

        v = row_beta v + (1 - row_beta) mean(Q_i^2)
        Q <- Q / sqrt(v), then back to the Frobenius norm that Q had
        W <- (1 - lr weight_decay) W - lr s Q

    Paper: Li et al.: NorMuon, arXiv 2510.05491.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 4e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        row_beta: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scale: str = "fan_ratio",
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
        return Recipe(Flat(), polar_of(group), scale_of(group), rows_of(group))
