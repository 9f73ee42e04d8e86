"""What may happen to the polar factor Q before it becomes a step at U."""

from dataclasses import dataclass

import torch
from torch import Tensor

from angular_muown.stages.charts import (
    Rows,
    nonzero,
    normalize_rows,
    tangent_part,
    without_rounding,
)
from angular_muown.stages.sums import Summing


class AsIs(Summing):
    rows = ()

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return Q


class UnitNorm(Summing):
    """Q / |Q|_F: the learning rate alone is the size of a step."""

    rows = ()

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return Q / nonzero(self.sums.frobenius(Q))


class UnitTangents(Summing):
    """Rows of Q's tangent part at unit length; a row without one stays without.

    None is what the rounding of Q, n units of its dtype, could make of a row along U_i. Iterations
    in bf16, on a GPU, round Q to 1e-2 of a row: there a row of Q along U_i gets a direction from
    rounding. Rows of Q that are zero are exact in every dtype; they have neither gradient nor
    momentum beside their own direction.
    """

    rows = ()

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        T = tangent_part(Q, U, self.sums)
        terms = self.sums.shape(Q)[1]
        return normalize_rows(without_rounding(T, Q, terms, self.sums), self.sums)


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
