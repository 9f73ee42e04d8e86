"""Charts: how a weight is read as directions and row lengths, and how it is written back.

Every chart works on (..., m, n). Row vectors are (..., m, 1) and broadcast over a row. W is the
only truth: each step reads lengths and directions from it, so a weight that was changed from
outside (a checkpoint, an EMA swap, pruning) is simply the next starting point.
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
    """Replace exact zeros by 1, for a divisor. A floor such as 1e-7 would distort small values."""
    return x.masked_fill(x.logical_not(), 1.0)


def surely_none(mask: Tensor) -> bool:
    """True if the host can see that no entry is true. Work that is skipped then changes no bit."""
    return reductions.may_look(mask) and not bool(mask.any())


def normalize_rows(X: Tensor, over: Reductions = LOCAL) -> Tensor:
    return X / nonzero(over.row_norm(X))


def chord_angle(chord: Tensor) -> Tensor:
    """Return the angle in radians between unit vectors at distance |v - u|: 2 asin(|v - u| / 2).

    arccos of their inner product cannot resolve angles below 3e-4 rad in float32.
    """
    return 2 * torch.asin((chord / 2).clamp(max=1))


def radial(X: Tensor, U: Tensor, over: Reductions = LOCAL) -> Tensor:
    """Return the component of each row along a unit row: <X_i, U_i>."""
    return over.row_sum(X * U)


def project(X: Tensor, U: Tensor, over: Reductions = LOCAL) -> Tensor:
    """Project X onto the tangent space at unit rows U: X_i - <X_i, U_i> U_i."""
    return X - radial(X, U, over) * U


def polar_coordinates(W: Tensor, G: Tensor, over: Reductions) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit rows U, lengths g >= 0 and the radial gradient r_i = <G_i, U_i>.

    A zero row has no direction: it takes -G_i, its steepest descent, and Adam grows its length
    from 0. The weight stays continuous and moves by at most one learning rate at the first step.
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
    """W itself, with g = 1: nothing is radial, and the whole gradient moves the weight."""

    state_names = ()

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split:
        return Split(W, W.new_ones(()), G, W.new_zeros(()))

    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor:
        return g * at.U + step


class Oblique:
    """W = Diag(g) U with unit rows: T = g (G - r U), retraction by row normalization."""

    state_names = ()

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split:
        U, g, r = polar_coordinates(W, G, context.reductions)
        return Split(U, g, g * (G - r * U), r)

    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor:
        moved = at.U + step
        return g * (moved / nonzero(context.reductions.unscaled_row_norm(moved)))


class WeightNorm:
    """W = Diag(g / rho) R with R = rho U: the stored row norm rho divides the angle of a step.

    Only rho is stored; R has W's direction. T = (g / rho)(G - r U), as in the published code. A
    stored norm of 0 means "not set yet": it starts at the row's length, since R starts at W.
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
        # A row still at zero keeps its direction U: R has no length yet to represent it.
        R = torch.where(rho == 0, at.U, R)
        norm = context.reductions.row_norm(R)
        context.state["stored_norm"] = torch.where(rho == 0, rho, norm)
        return g * normalize_rows(R, context.reductions)


def row_signs(g: Tensor) -> Tensor:
    """Return -1 for rows whose length crossed zero, and 1 for all others.

    The row g U with g < 0 is |g| (-U). The next step reads its length from W as |g|, so everything
    stored along the row must change sign with it.
    """
    return 1 - 2 * (g < 0).to(g.dtype)


# Charts of a sphere: W keeps one Frobenius norm g, and its direction learns as a whole.
#
# g is the norm of a matrix when it is first seen. It is stored, one number per matrix: read from
# the weights at every step, it would drift with the rounding of 16-bit weights.

ROUNDING = 2.0**-7  # bound on the relative change of a norm by rounding to bf16
GAIN_OF_ONE = log(expm1(1.0))  # where softplus is 1


def gain(x: Tensor) -> Tensor:
    """Return softplus, shifted so that 0, the initial state, gives 1.

    Written with exp and log1p: on the CPU, torch's softplus and sigmoid round some entries
    differently depending on the tensor's size, and a stack would differ from its matrices.
    """
    y = x + GAIN_OF_ONE
    return y.clamp(min=0) + torch.log1p(torch.exp(-y.abs()))


def gain_slope(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-(x + GAIN_OF_ONE)))


def gains_of(context: Context) -> Tensor:
    """Return a_i b_j from the stored free variables."""
    return gain(context.state["row_gain"]) * gain(context.state["column_gain"])


def find_norm(X: Tensor, context: Context) -> Tensor:
    """Return g, which is stored with a minus sign while a matrix is growing towards it.

    If X's norm differs from g by more than rounding explains, the weight was changed from outside:
    its norm becomes the new g. A zero matrix has no norm to keep. It grows, as under Muon, until it
    has the norm of unit rows, sqrt(m).
    """
    over, stored = context.reductions, context.state["matrix_norm"]
    norm = over.frobenius(X)
    seen = torch.where(norm == 0, torch.full_like(norm, -sqrt(over.shape(X)[0])), norm)
    is_kept = torch.where(stored > 0, (norm - stored).abs() <= ROUNDING * stored, norm < -stored)
    context.state["matrix_norm"] = torch.where(is_kept, stored, seen)
    return context.state["matrix_norm"].abs()


def land(X: Tensor, g: Tensor, context: Context) -> Tensor:
    """Return g X / |X|_F; a matrix that is still growing is not rescaled before it reaches g."""
    norm = context.reductions.frobenius(X)
    inside = (context.state["matrix_norm"] < 0) & (norm < 1)
    context.state["matrix_norm"] = torch.where(inside, -g, g)
    return g * torch.where(inside, X, X / nonzero(norm))


class Sphere:
    """W = g U with |U|_F = 1: T = G, as in Muon; retraction by normalization."""

    state_names = ("matrix_norm",)

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split:
        g = find_norm(W, context)
        return Split(W / g, g, G, W.new_zeros(()))

    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor:
        return land(at.U + step, g, context)


class GainedSphere:
    """W = Diag(a) (g U) Diag(b) with |U|_F = 1, row gains a and column gains b.

    U is computed from W with the stored gains, so a weight that was changed from outside is kept.
    T = Diag(a) G Diag(b), the plain chain rule. r is the gradient for the products a_i b_j. Steps
    are scaled for a sphere of the paper's radius, sqrt(max(m, n)).
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
