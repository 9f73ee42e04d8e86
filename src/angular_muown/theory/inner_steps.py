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
# the polar factor jumps and is not tangent. docs/log.md has what less and more of it leave.
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
    """sigma / phi for the singular values, with eps in proportion to their mean. So Q is near the
    gradient of the nuclear norm, and the gradient of no function. <X, Q> is at most
    0.301 SOFTNESS, 1.5%, below |X|_*: sigma (1 - sigma / phi) <= 0.301 eps, summed. A step that
    lowers the one may raise the other within this; the proven gap is of |X|_* itself.
    """
    polar = SmoothPolar.of(X, X.new_zeros(()))
    return polar._replace(eps=nonzero(SOFTNESS * polar.S.mean(dim=-1, keepdim=True))).Q
