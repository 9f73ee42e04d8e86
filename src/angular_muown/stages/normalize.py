"""Normalization of the polar factor Q before it becomes a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from angular_muown.stages.charts import nonzero
from angular_muown.stages.context import Context


class AsIs:
    """No normalization."""

    state_names = ()

    def __call__(self, Q: Tensor, context: Context) -> Tensor:
        return Q


class UnitNorm:
    """Q / |Q|_F: the learning rate alone determines the size of a step."""

    state_names = ()

    def __call__(self, Q: Tensor, context: Context) -> Tensor:
        return Q / nonzero(context.reductions.frobenius(Q))


@dataclass
class RowSecondMoment:
    """NorMuon (arXiv 2510.05491): v <- beta v + (1 - beta) mean(Q_i^2); Q_i / sqrt(v_i), rescaled
    to the Frobenius norm that Q had.

    There is no bias correction: restoring the norm cancels a common factor.
    """

    beta: float
    state_names = ("row_second_moment",)

    def __call__(self, Q: Tensor, context: Context) -> Tensor:
        over = context.reductions
        squares = over.row_sum(Q.square()) / over.shape(Q)[1]
        v = torch.lerp(squares, context.state["row_second_moment"], self.beta)
        context.state["row_second_moment"] = v
        # A row that never had a gradient has v = 0 and Q_i = 0: 0/0 must give 0.
        scaled = Q / nonzero(v.sqrt())
        return scaled * (over.frobenius(Q) / nonzero(over.frobenius(scaled)))
