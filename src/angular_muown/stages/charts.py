"""Charts: how a weight is read as direction and row lengths, and how it is written back.

Every chart works on (..., m, n); row vectors are (..., m, 1) so that they broadcast over a row.
W is the only truth: lengths and directions are read off it at every step, so weights that were
changed from outside (a checkpoint, an EMA swap, pruning) are simply the next starting point.
"""

from math import expm1, log, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from angular_muown.stages import reductions
from angular_muown.stages.context import Context
from angular_muown.stages.reductions import LOCAL, Reductions


class Split(NamedTuple):
    """A weight and its gradient, read in a chart."""

    U: Tensor  # the point that the step moves: W itself, or its rows at unit length
    g: Tensor  # row lengths; W = g U
    T: Tensor  # the gradient for the point
    r: Tensor  # the gradient for the row lengths; with gains, for the products of two


def nonzero(x: Tensor) -> Tensor:
    """A divisor: 1 in place of an exact zero. A floor such as 1e-7 would bend small values too."""
    return x.masked_fill(x.logical_not(), 1.0)


def surely_none(mask: Tensor) -> bool:
    """Whether no entry is true, as far as the host may know. What is left out then changes no
    bit."""
    return reductions.may_look(mask) and not bool(mask.any())


def normalize_rows(X: Tensor, over: Reductions = LOCAL) -> Tensor:
    return X / nonzero(over.row_norm(X))


def chord_angle(chord: Tensor) -> Tensor:
    """Radians between unit vectors that are so far apart: 2 asin(|v - u| / 2). arccos cannot see
    below 3e-4 rad in float32."""
    return 2 * torch.asin((chord / 2).clamp(max=1))


def tangent_part(X: Tensor, U: Tensor, over: Reductions = LOCAL) -> Tensor:
    """X_i - <X_i, U_i> U_i, for unit rows U_i."""
    return X - over.row_sum(X * U) * U


def polar_coordinates(W: Tensor, G: Tensor, over: Reductions) -> tuple[Tensor, Tensor, Tensor]:
    """Unit rows U, lengths g >= 0 and the radial gradient r_i = <G_i, U_i>.

    A row at zero has no direction. It leaves along -G_i, its steepest descent, while Adam grows
    its length from 0: continuous, and at most one learning rate long at the first step.
    """
    g = over.row_norm(W)
    at_zero = g == 0
    length = g
    if not surely_none(at_zero):
        W = torch.where(at_zero, -G, W)
        length = nonzero(over.row_norm(W))
    U = W / length
    return U, g, over.row_sum(G * U)


class Flat:
    """W itself, at the one length g = 1: nothing radial, the whole gradient moves the weight."""

    state_names = ()

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split:
        return Split(W, W.new_ones(()), G, W.new_zeros(()))

    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor:
        return g * at.U + step


class Oblique:
    """W = Diag(g) U with unit rows: T = g (G - r U), retraction by row normalisation."""

    state_names = ()

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split:
        U, g, r = polar_coordinates(W, G, context.reductions)
        return Split(U, g, g * (G - r * U), r)

    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor:
        moved = at.U + step
        return g * (moved / nonzero(context.reductions.unscaled_row_norm(moved)))


class WeightNorm:
    """W = Diag(g / rho) R with R = rho U: the stored row norm rho divides the angle of a step.

    Only rho is stored; R's direction is W's. T = (g / rho)(G - r U), the published code's rule.
    A stored norm of 0 means "not set yet": it starts at the row's length, as R starts at W.
    """

    state_names = ("stored_norm",)

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split:
        U, g, r = polar_coordinates(W, G, context.reductions)
        rho = context.state["stored_norm"]
        rho = context.state["stored_norm"] = torch.where(rho == 0, g, rho)
        return Split(U, g, g / nonzero(rho) * (G - r * U), r)

    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor:
        rho = context.state["stored_norm"]
        R = rho * at.U + step
        # A row that has not left zero keeps its direction U: R has no length to carry it yet.
        R = torch.where(rho == 0, at.U, R)
        norm = context.reductions.row_norm(R)
        context.state["stored_norm"] = torch.where(rho == 0, rho, norm)
        return g * normalize_rows(R, context.reductions)


def row_signs(g: Tensor) -> Tensor:
    """-1 where a length crossed zero. The row g U with g < 0 is |g| (-U): since lengths are read
    off W as >= 0, everything stored that points along the row has to turn with it."""
    return 1 - 2 * (g < 0).to(g.dtype)


# Charts of a sphere: W keeps one Frobenius norm g, and its direction learns as a whole.
#
# g is the norm that a matrix has when it is first seen. It is stored, one number for each matrix:
# read off the weights anew at every step, it would wander with the rounding of 16-bit weights.

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


def gains_of(context: Context) -> Tensor:
    """a_i b_j, from the stored free variables of both."""
    return gain(context.state["row_gain"]) * gain(context.state["column_gain"])


def find_norm(X: Tensor, context: Context) -> Tensor:
    """g. It is stored with a minus sign for a matrix that is on its way to g.

    Where X's norm is not g and rounding cannot be the reason, somebody changed the weight: the
    weight wins, and its norm is the new g. A matrix at zero has no norm to keep. It grows, as
    under Muon, until it has the norm of unit rows, sqrt(m).
    """
    over, stored = context.reductions, context.state["matrix_norm"]
    norm = over.frobenius(X)
    seen = torch.where(norm == 0, torch.full_like(norm, -sqrt(over.shape(X)[0])), norm)
    kept = torch.where(stored > 0, (norm - stored).abs() <= ROUNDING * stored, norm < -stored)
    context.state["matrix_norm"] = torch.where(kept, stored, seen)
    return context.state["matrix_norm"].abs()


def land(X: Tensor, g: Tensor, context: Context) -> Tensor:
    """g X / |X|_F; a matrix on its way to the sphere is left alone until it arrives."""
    norm = context.reductions.frobenius(X)
    inside = (context.state["matrix_norm"] < 0) & (norm < 1)
    context.state["matrix_norm"] = torch.where(inside, -g, g)
    return g * torch.where(inside, X, X / nonzero(norm))


class Sphere:
    """W = g U with |U|_F = 1: T = G, as Muon's; retraction by normalisation."""

    state_names = ("matrix_norm",)

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split:
        g = find_norm(W, context)
        return Split(W / g, g, G, W.new_zeros(()))

    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor:
        return land(at.U + step, g, context)


class GainedSphere:
    """W = Diag(a) (g U) Diag(b) with |U|_F = 1 and gains a of the rows, b of the columns.

    U is read off W with the stored gains, so a weight that was changed from outside stays as it
    is. T = Diag(a) G Diag(b), the plain chain rule. r is the gradient for the products a_i b_j.
    A step is meant for a sphere of the paper's radius, sqrt(max(m, n)).
    """

    state_names = ("matrix_norm", "row_gain", "column_gain")

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split:
        gains = gains_of(context)
        gU = W / gains
        g = find_norm(gU, context)
        return Split(gU / g, g, gains * G, G * gU)

    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor:
        gains = gains_of(context)
        step = step / sqrt(max(context.reductions.shape(step)))
        return gains * land(at.U + step, g, context)
