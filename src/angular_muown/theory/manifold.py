"""The oblique manifold: matrices with unit rows. Everything works row by row on (..., m, n)."""

import torch
from torch import Tensor

from angular_muown.stages.charts import normalize_rows, tangent_part
from angular_muown.stages.reductions import row_norm
from angular_muown.stages.tangent import along


def radial(A: Tensor, U: Tensor) -> Tensor:
    """<A_i, U_i>, as (..., m, 1)."""
    return along(A, U)


def project(A: Tensor, U: Tensor) -> Tensor:
    """The part of A tangent at U: A_i - <A_i, U_i> U_i."""
    return tangent_part(A, U)


def retract(U: Tensor, V: Tensor) -> Tensor:
    """(U_i + V_i) / |U_i + V_i|: turns a row by arctan |V_i| if V is tangent."""
    return normalize_rows(U + V)


def exponential(U: Tensor, V: Tensor) -> Tensor:
    """cos|V_i| U_i + sin|V_i| V_i / |V_i|: the great circle, turns a row by |V_i|."""
    length = row_norm(V)
    return torch.cos(length) * U + torch.sinc(length / torch.pi) * V


def transport(A: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """A carried from U to the rows V along great circles: an isometry of the tangent spaces.

    A_i - <A_i, V_i> / (1 + <U_i, V_i>) (U_i + V_i); not defined for V_i = -U_i.
    """
    return A - radial(A, V) / (1 + radial(U, V)) * (U + V)
