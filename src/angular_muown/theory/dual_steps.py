"""A few cheap dual steps with a warm start: the tangent-constrained polar factor inside a loop.

`tangent_polar` solves one problem to the end. An optimizer solves a slowly changing one at every
step; there the last multiplier is nearly right and one or two steps keep it so.
"""

import torch
from torch import Tensor

from angular_muown.stages.charts import nonzero
from angular_muown.theory.manifold import radial
from angular_muown.theory.smooth_polar import SmoothPolar
from angular_muown.theory.tangent import TangentPolar, feasible, pick, tangency

FLOOR = 1e-6  # smoothing relative to the largest singular value: 1/sigma must stay finite


def dual_steps(M: Tensor, U: Tensor, multiplier: Tensor | None, steps: int) -> TangentPolar:
    """lambda_i <- lambda_i - h_i / K_ii, kept where the nuclear norm of M + Diag(lambda) U falls.

    K is the majorizer on the short side: K_ii = ((X X^T)^(-1/2))_ii for wide matrices and
    U_i (X^T X)^(-1/2) U_i^T for tall ones. Without a multiplier the start is the tangent part of M;
    no steps at all give the practical shortcut: its polar factor, made tangent afterwards.
    """
    at_start = -radial(M, U) if multiplier is None else multiplier.unsqueeze(-1)
    current, at = at_start, _at(M, U, at_start)
    for _ in range(steps):
        moved = current - radial(at.Q, U) / at.row_curvature(U)
        then = _at(M, U, moved)
        falls = then.nuclear_norm < at.nuclear_norm
        current = pick(falls, moved, current)
        at = SmoothPolar(*(pick(falls, new, old) for new, old in zip(then, at, strict=True)))
    D, bound = feasible(at.Q, U), at.nuclear_norm
    gap = (bound + (M * D).sum(dim=(-2, -1))) / nonzero(bound)
    return TangentPolar(D, current.squeeze(-1), gap, tangency(D, U))


def _at(M: Tensor, U: Tensor, multiplier: Tensor) -> SmoothPolar:
    polar = SmoothPolar.of(M + multiplier * U, M.new_zeros(()))
    return polar._replace(eps=FLOOR * polar.S[..., :1] + torch.finfo(M.dtype).tiny)
