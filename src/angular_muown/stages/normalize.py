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


def frobenius(X: Tensor) -> Tensor:
    """Row sums first, so that one matrix and a stack of them add in the same order."""
    return X.square().sum(dim=-1, keepdim=True).sum(dim=-2, keepdim=True).sqrt()


class AsIs:
    rows = ()

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return Q


class UnitNorm:
    """Q / |Q|_F: the learning rate alone is the size of a step."""

    rows = ()

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return Q / nonzero(frobenius(Q))


class UnitTangents:
    """Rows of Q's tangent part at unit length; a row without one stays without.

    None is what the rounding of Q, n units of its dtype, could make of a row along U_i. Iterations
    in bf16, on a GPU, round Q to 1e-2 of a row: there a row of Q along U_i gets a direction from
    rounding. Rows of Q that are zero are exact in every dtype; they have neither gradient nor
    momentum beside their own direction.
    """

    rows = ()

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        return normalize_rows(without_rounding(tangent_part(Q, U), Q, Q.shape[-1]))


@dataclass(frozen=True)
class RowSecondMoment:
    """NorMuon (arXiv 2510.05491): v <- beta v + (1 - beta) mean(Q_i^2); Q_i / sqrt(v_i), then the
    Frobenius norm that Q had. No bias correction: the restored norm cancels a common factor."""

    beta: float
    rows = ("row_second_moment",)

    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor:
        v = torch.lerp(Q.square().mean(dim=-1, keepdim=True), rows["row_second_moment"], self.beta)
        rows["row_second_moment"] = v
        # A row that never got a gradient has v = 0 and Q_i = 0: 0/0 must stay 0.
        scaled = Q / nonzero(v.sqrt())
        return scaled * (frobenius(Q) / nonzero(frobenius(scaled)))
