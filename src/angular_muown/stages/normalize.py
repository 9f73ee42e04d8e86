"""What may happen to the polar factor Q before it becomes a step at U."""

from dataclasses import dataclass

import torch
from torch import Tensor

from angular_muown.stages.charts import Rows, nonzero
from angular_muown.stages.reductions import Summing


class AsIs(Summing):
    rows = ()

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return Q


class UnitNorm(Summing):
    """Q / |Q|_F: the learning rate alone is the size of a step."""

    rows = ()

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return Q / nonzero(self.sums.frobenius(Q))


@dataclass
class RowSecondMoment(Summing):
    """NorMuon (arXiv 2510.05491): v <- beta v + (1 - beta) mean(Q_i^2); Q_i / sqrt(v_i), then the
    Frobenius norm that Q had. No bias correction: the restored norm cancels a common factor."""

    beta: float
    rows = ("row_second_moment",)

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        sums = self.sums
        squares = sums.rows(Q.square()) / sums.shape(Q)[1]
        v = torch.lerp(squares, rows["row_second_moment"], self.beta)
        rows["row_second_moment"] = v
        # A row that never got a gradient has v = 0 and Q_i = 0: 0/0 must stay 0.
        scaled = Q / nonzero(v.sqrt())
        return scaled * (sums.frobenius(Q) / nonzero(sums.frobenius(scaled)))
