"""Charts of a sphere: W keeps one Frobenius norm g, and its direction learns as a whole.

g is the norm that a matrix has when it is first seen. It is stored, one number for each matrix:
read off the weights anew at every step, it would wander with the rounding of 16-bit weights.
"""

from math import expm1, log, sqrt

import torch
from torch import Tensor

from angular_muown.stages.charts import Rows, Split, nonzero
from angular_muown.stages.sums import Summing, Whole

ROUNDING = 2.0**-7  # the most that rounding to bf16 can change a norm, relative to it
GAIN_OF_ONE = log(expm1(1.0))  # where softplus is 1


def gain(x: Tensor) -> Tensor:
    """Softplus, shifted: of 0, with which states start, it is 1.

    By exp and log1p: torch's softplus and sigmoid round some entries differently on the CPU,
    depending on how many there are, and a stack would not be its matrices one by one.
    """
    y = x + GAIN_OF_ONE
    return y.clamp(min=0) + torch.log1p(torch.exp(-y.abs()))


def gain_slope(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-(x + GAIN_OF_ONE)))


def find_norm(X: Tensor, rows: Rows, sums: Whole) -> Tensor:
    """g. It is stored with a minus sign for a matrix that is on its way to g.

    Where X's norm is not g and rounding cannot be the reason, somebody changed the weight: the
    weight wins, and its norm is the new g. A matrix at zero has no norm to keep. It grows, as
    under Muon, until it has the norm of unit rows, sqrt(m).
    """
    norm, stored = sums.frobenius(X), rows["matrix_norm"]
    seen = torch.where(norm == 0, torch.full_like(norm, -sqrt(sums.shape(X)[0])), norm)
    kept = torch.where(stored > 0, (norm - stored).abs() <= ROUNDING * stored, norm < -stored)
    rows["matrix_norm"] = torch.where(kept, stored, seen)
    return rows["matrix_norm"].abs()


def land(X: Tensor, g: Tensor, rows: Rows, sums: Whole) -> Tensor:
    """g X / |X|_F; a matrix on its way to the sphere is left alone until it arrives."""
    norm = sums.frobenius(X)
    inside = (rows["matrix_norm"] < 0) & (norm < 1)
    rows["matrix_norm"] = torch.where(inside, -g, g)
    return g * torch.where(inside, X, X / nonzero(norm))


class Sphere(Summing):
    """W = g U with |U|_F = 1: T = G, as Muon's; retraction by normalisation."""

    rows = ("matrix_norm",)

    def split(self, W: Tensor, G: Tensor, rows: Rows) -> Split:
        g = find_norm(W, rows, self.sums)
        return Split(W / g, g, G, W.new_zeros(()))

    def join(self, at: Split, step: Tensor, g: Tensor, rows: Rows) -> Tensor:
        return land(at.U + step, g, rows, self.sums)


class GainedSphere(Summing):
    """W = Diag(a) (g U) Diag(b) with |U|_F = 1 and gains a of the rows, b of the columns.

    U is read off W with the stored gains, so a weight that was changed from outside stays as it
    is. T = Diag(a) G Diag(b), the plain chain rule. r is the gradient for the products a_i b_j.
    A step is meant for a sphere of the paper's radius, sqrt(max(m, n)).
    """

    rows = ("matrix_norm", "row_gain", "column_gain")

    def split(self, W: Tensor, G: Tensor, rows: Rows) -> Split:
        gains = gain(rows["row_gain"]) * gain(rows["column_gain"])
        gU = W / gains
        g = find_norm(gU, rows, self.sums)
        return Split(gU / g, g, gains * G, G * gU)

    def join(self, at: Split, step: Tensor, g: Tensor, rows: Rows) -> Tensor:
        gains = gain(rows["row_gain"]) * gain(rows["column_gain"])
        step = step / sqrt(max(self.sums.shape(step)))
        return gains * land(at.U + step, g, rows, self.sums)
