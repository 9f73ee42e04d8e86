"""The oblique manifold: matrices with unit rows. All functions act row by row on (..., m, n)."""

import torch
from torch import Tensor

from angular_muown.stages.charts import normalize_rows, project, radial
from angular_muown.stages.reductions import row_norm

__all__ = ["exponential", "project", "radial", "retract", "transport"]


def retract(U: Tensor, V: Tensor) -> Tensor:
    """Return (U_i + V_i) / |U_i + V_i|. A tangent V rotates row i by arctan |V_i|."""
    return normalize_rows(U + V)


def exponential(U: Tensor, V: Tensor) -> Tensor:
    """Move along great circles: cos|V_i| U_i + sin|V_i| V_i / |V_i| rotates row i by |V_i|."""
    length = row_norm(V)
    return torch.cos(length) * U + torch.sinc(length / torch.pi) * V


def transport(A: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """Parallel-transport A along great circles from the rows of U to the rows of V.

    A_i - <A_i, V_i> / (1 + <U_i, V_i>) (U_i + V_i), an isometry of the tangent spaces. It is
    undefined for V_i = -U_i.
    """
    return A - radial(A, V) / (1 + radial(U, V)) * (U + V)
