"""A few cheap dual steps with a warm start, and the proof of what they reached.

`tangent_polar` solves one problem to the end. An optimizer solves a slowly changing one at every
step; there the last multiplier is nearly right, and one or two steps keep it so.
"""

import torch
from torch import Tensor

from angular_muown.stages import tangent
from angular_muown.stages.charts import nonzero
from angular_muown.stages.sums import frobenius
from angular_muown.theory.manifold import project, radial
from angular_muown.theory.smooth_polar import SmoothPolar
from angular_muown.theory.tangent import TangentPolar, feasible, tangency

# Smoothing, of the mean singular value. Square matrices end where a singular value is zero; there
# the polar factor jumps and is not tangent. With less of it the gap of 8 x 8 matrices grows from 1%
# to 8%; with twice as much, the gap is what smoothing costs.
SOFTNESS = 0.05


def dual_steps(M: Tensor, U: Tensor, multiplier: Tensor | None, steps: int) -> TangentPolar:
    """What AngularMuown's orthogonalize="tangent" does, with a smooth polar factor in place of
    Polar Express: so many steps from a multiplier. None is the tangent part of M."""
    along, T = radial(M, U), project(M, U)
    size = nonzero(frobenius(T))  # 1e-30 M takes the same steps
    start = torch.zeros_like(along) if multiplier is None else multiplier.unsqueeze(-1) + along
    found = tangent.dual_steps(_soft, T / size, U, start / size, steps)
    D = feasible(found.Q, U)
    bound = torch.linalg.svdvals(found.X).sum(dim=-1) * size.squeeze(-1, -2)
    gap = (bound + (M * D).sum(dim=(-2, -1))) / nonzero(bound)
    reached = (found.multiplier * size - along).squeeze(-1)
    return TangentPolar(D, reached, gap, tangency(D, U))


def _soft(X: Tensor) -> Tensor:
    polar = SmoothPolar.of(X, X.new_zeros(()))
    return polar._replace(eps=nonzero(SOFTNESS * polar.S.mean(dim=-1, keepdim=True))).Q
