"""Charts: how a weight is read as direction and row lengths, and how it is written back.

Every chart works on (..., m, n); row vectors are (..., m, 1) so that they broadcast over a row.
W is the only truth: lengths and directions are read off it at every step, so weights that were
changed from outside (a checkpoint, an EMA swap, pruning) are simply the next starting point.
"""

from math import sqrt
from typing import NamedTuple, Self

import torch
from torch import Tensor

from angular_muown.stages import sums as reductions
from angular_muown.stages.sums import WHOLE, Summing, Whole

Rows = dict[str, Tensor]
ROUNDING = 8  # times terms: units of rounding below which a difference of row vectors is nothing


class Split(NamedTuple):
    """A weight and its gradient, read in a chart."""

    U: Tensor  # the point that the step moves: W itself, or its rows at unit length
    g: Tensor  # row lengths; W = g U
    T: Tensor  # the gradient for the point
    r: Tensor  # the gradient for the row lengths; with gains of columns, to be summed


def nonzero(x: Tensor) -> Tensor:
    """A divisor: 1 in place of an exact zero. A floor such as 1e-7 would bend small values too."""
    return x.masked_fill(x.logical_not(), 1.0)


def surely_none(mask: Tensor) -> bool:
    """Whether no entry is true, as far as the host may know. What is left out then changes no
    bit."""
    return reductions.may_look(mask) and not bool(mask.any())


def normalize_rows(X: Tensor, sums: Whole = WHOLE) -> Tensor:
    return X / nonzero(sums.row_norm(X))


def chord_angle(chord: Tensor) -> Tensor:
    """Radians between unit vectors that are so far apart: 2 asin(|v - u| / 2). arccos cannot see
    below 3e-4 rad in float32."""
    return 2 * torch.asin((chord / 2).clamp(max=1))


def tangent_part(X: Tensor, U: Tensor, sums: Whole = WHOLE) -> Tensor:
    """X_i - <X_i, U_i> U_i, for unit rows U_i."""
    return X - sums.rows(X * U) * U


def without_rounding(X: Tensor, whole: Tensor, terms: float, sums: Whole = WHOLE) -> Tensor:
    """X, a difference taken from `whole`, with exact zeros for the rows that are only its rounding.

    Largest entries are compared: squares of 1e30 would leave the range of float32. A row that is
    no number stays, to be seen.
    """
    noise = ROUNDING * terms * torch.finfo(X.dtype).eps * sums.row_largest(whole)
    return torch.where(sums.row_largest(X) <= noise, torch.zeros_like(X), X)


def polar_coordinates(W: Tensor, G: Tensor, sums: Whole) -> tuple[Tensor, Tensor, Tensor]:
    """Unit rows U, lengths g >= 0 and the radial gradient r_i = <G_i, U_i>.

    A row at zero has no direction. It leaves along -G_i, its steepest descent, while Adam grows
    its length from 0: continuous, and at most one learning rate long at the first step.
    """
    g = sums.row_norm(W)
    at_zero = g == 0
    length = g
    if not surely_none(at_zero):
        W = torch.where(at_zero, -G, W)
        length = nonzero(sums.row_norm(W))
    U = W / length
    return U, g, sums.rows(G * U)


class Flat(Summing):
    """W itself, at the one length g = 1: nothing radial, the whole gradient moves the weight."""

    rows = ()

    def split(self, W: Tensor, G: Tensor, rows: Rows) -> Split:
        return Split(W, W.new_ones(()), G, W.new_zeros(()))

    def join(self, at: Split, step: Tensor, g: Tensor, rows: Rows) -> Tensor:
        return g * at.U + step


class Oblique(Summing):
    """W = Diag(g) U with unit rows: T = g (G - r U), retraction by row normalisation."""

    rows = ()

    def split(self, W: Tensor, G: Tensor, rows: Rows) -> Split:
        U, g, r = polar_coordinates(W, G, self.sums)
        return Split(U, g, g * (G - r * U), r)

    def join(self, at: Split, step: Tensor, g: Tensor, rows: Rows) -> Tensor:
        moved = at.U + step
        return g * (moved / nonzero(self.sums.plain_row_norm(moved)))


class Geodesic(Oblique):
    """The same along great circles: a tangent step of length theta turns its row by theta.

    With steps of a given length, a row turns as far for a T_i of any size. So what G_i - r_i U_i
    leaves of a gradient along its row is no T_i: under 2 sqrt(n) units of rounding were measured.
    Rounding that came with the gradient, as in bf16, cannot be told from a gradient.
    """

    def split(self, W: Tensor, G: Tensor, rows: Rows) -> Split:
        at = super().split(W, G, rows)
        terms = sqrt(self.sums.shape(G)[1])
        return at._replace(T=without_rounding(at.T, at.g * G, terms, self.sums))

    def join(self, at: Split, step: Tensor, g: Tensor, rows: Rows) -> Tensor:
        theta = self.sums.row_norm(step)
        turned = theta.cos() * at.U + theta.sin() / nonzero(theta) * step
        return g * normalize_rows(turned, self.sums)


class WeightNorm(Summing):
    """W = Diag(g / rho) R with R = rho U: the stored row norm rho divides the angle of a step.

    Only rho is stored; R's direction is W's. T = (g / rho)(G - r U), the published code's rule.
    A stored norm of 0 means "not set yet": it starts at the row's length, as R starts at W.
    """

    rows = ("stored_norm",)

    def split(self, W: Tensor, G: Tensor, rows: Rows) -> Split:
        U, g, r = polar_coordinates(W, G, self.sums)
        rows["stored_norm"] = rho = torch.where(rows["stored_norm"] == 0, g, rows["stored_norm"])
        return Split(U, g, g / nonzero(rho) * (G - r * U), r)

    def join(self, at: Split, step: Tensor, g: Tensor, rows: Rows) -> Tensor:
        rho = rows["stored_norm"]
        R = rho * at.U + step
        # A row that has not left zero keeps its direction U: R has no length to carry it yet.
        R = torch.where(rho == 0, at.U, R)
        rows["stored_norm"] = torch.where(rho == 0, rho, self.sums.row_norm(R))
        return g * normalize_rows(R, self.sums)


class ColumnGained(Summing):
    """W = V Diag(b) with gains b > 0 of the columns, where `inner` reads V = Diag(g) U by its rows.

    log b is stored; it starts at 0. V is read off W with it, so a weight that was changed from
    outside is the next starting point here too. The chain rule gives V the gradient G Diag(b), and
    log b_j the gradient sum_i W_ij G_ij = sum_i g_i r_ij with r_ij = G_ij b_j U_ij. This matrix is
    the r of the split: its row sums are the gradient for the row lengths.
    """

    def __init__(self, inner: Oblique) -> None:
        self.inner = inner

    @property
    def rows(self) -> tuple[str, ...]:
        return ("column_log_gain", *self.inner.rows)

    def over(self, sums: Whole) -> Self:
        stage = super().over(sums)
        stage.inner = self.inner.over(sums)
        return stage

    def split(self, W: Tensor, G: Tensor, rows: Rows) -> Split:
        b = rows["column_log_gain"].exp()
        at = self.inner.split(W / b, G * b, rows)
        return at._replace(r=G * b * at.U)

    def join(self, at: Split, step: Tensor, g: Tensor, rows: Rows) -> Tensor:
        return self.inner.join(at, step, g, rows) * rows["column_log_gain"].exp()


def row_signs(g: Tensor) -> Tensor:
    """-1 where a length crossed zero. The row g U with g < 0 is |g| (-U): since lengths are read
    off W as >= 0, everything stored that points along the row has to turn with it."""
    return 1 - 2 * (g < 0).to(g.dtype)
