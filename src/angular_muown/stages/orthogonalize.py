"""Orthogonalizers: the polar factor Q of matrices (..., m, n), tall or wide.

This is the only stage that needs whole matrices. Only the input's direction matters: 1e-30 X and
1e30 X give the same Q. Zero gives zero. The input is not modified.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angular_muown.stages.charts import nonzero
from angular_muown.stages.reductions import LOCAL, Reductions

Triple = tuple[float, float, float]

GRAM_ASPECT = 2.0  # above it the Gram form takes fewer operations than the ordinary one
GRAM_RESTART = 2  # iterations between two fresh Gram matrices: rounding grows with every square


@dataclass(frozen=True)
class Iteration:
    """X <- a X + (b A + c A^2) X with A = X X^T, once for each triple (a, b, c).

    This is the definition. Two executors carry it out: the methods below with torch's products, and
    the GPU kernels (kernels/polar_chain.py) in float16, with the same steps spelled so that less is
    lost to rounding. In the Gram form, P = a I + b A + c A^2, X <- P X and A <- P A P: it works on
    the short side and touches the long side only at a restart and at the end.
    """

    name: str
    coefficients: tuple[Triple, ...]
    margin: float  # the input has Frobenius norm 1/margin
    # Above GRAM_ASPECT, take the Gram form. False leaves the choice to the executor: the ordinary
    # form with torch's products, the cheaper one with the kernels.
    gram: bool = False

    def takes_gram_form(self, m: int, n: int) -> bool:
        return self.gram and max(m, n) > GRAM_ASPECT * min(m, n)

    def __call__(self, X: Tensor) -> Tensor:
        iterate = _iterate_gram if self.takes_gram_form(*X.shape[-2:]) else _iterate
        return _on_short_side(X, lambda Y: iterate(Y, self.coefficients), self.margin)

    def of_part(self, X: Tensor, over: Reductions) -> Tensor:
        """Return this rank's part of Q for matrices that are sharded along their long side.

        Ranks add up their Gram matrices and keep their parts of X.
        """
        total = over.across_ranks
        return _on_short_side(
            X, lambda Y: _iterate_gram(Y, self.coefficients, total), self.margin, over
        )


# Amsel et al. 2025, arXiv 2505.16932: five steps for singular values in [1e-3, 1], which end in
# [0.863, 1.131].
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.237312490495555, -23.157747414558198, 16.680568411445915),
    (4.082441999064836, -2.8930477353325887, 0.5252849256975651),
    (3.9263479922546556, -2.8547468034765293, 0.5318022422894989),
    (3.2982187133085143, -2.4245419810267062, 0.48632008358844075),
    (2.320007312889811, -1.6862169729967622, 0.42068027340235137),
)
POLAR_EXPRESS_MARGIN = 1.01  # rounding must not leave the interval
# Keller Jordan's Muon, 2024: singular values above about 0.01 of the norm end between 0.7 and 1.2,
# smaller ones below.
QUINTIC: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),) * 5

polar_express = Iteration("polar_express", POLAR_EXPRESS, POLAR_EXPRESS_MARGIN)
newton_schulz = Iteration("newton_schulz", QUINTIC, 1.0)
gram = Iteration("gram", POLAR_EXPRESS, POLAR_EXPRESS_MARGIN, gram=True)


def svd(X: Tensor) -> Tensor:
    """Return U V^T from the singular value decomposition: exact, in float32 or float64.

    Directions below the rounding error of the largest singular value are noise and give zero, and
    so do rows and columns below it: empty ones stay empty, as in the iterations. A matrix that is
    not finite gives NaN, also as in the iterations: LAPACK would raise for the whole stack.
    """
    X_unit = unit(X, 1.0)
    finite = X_unit.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    X_unit = torch.where(finite, X_unit, 0.0)
    U, S, Vh = torch.linalg.svd(X_unit, full_matrices=False)
    error = S[..., :1] * torch.finfo(S.dtype).eps
    significant = (S > max(X.shape[-2:]) * error).to(S.dtype).unsqueeze(-2)
    seen = [
        torch.linalg.vector_norm(X_unit, dim=d, keepdim=True) > error[..., None] for d in (-1, -2)
    ]
    Q = (U * significant) @ Vh * seen[0] * seen[1]
    return torch.where(finite, Q, torch.nan).to(X.dtype)


Orthogonalizer = Iteration | Callable[[Tensor], Tensor]
ORTHOGONALIZERS: dict[str, Orthogonalizer] = {
    "polar_express": polar_express,
    "newton_schulz": newton_schulz,
    "gram": gram,
    "svd": svd,
}


def iteration_dtype(X: Tensor) -> torch.dtype:
    """Return bf16 on an accelerator, as published, and float32 on the CPU, where bf16 is slower.

    float64 stays float64, so that references can be matched.
    """
    if X.dtype == torch.float64:
        return torch.float64
    return torch.float32 if X.device.type == "cpu" else torch.bfloat16


def unit(X: Tensor, margin: float, over: Reductions = LOCAL) -> Tensor:
    """Return X / (margin |X|_F) in at least float32.

    The largest entry is divided out first: squares of 1e-30 or 1e30 are out of float32's range.
    """
    X = X.to(torch.promote_types(X.dtype, torch.float32))
    X = X / nonzero(over.max(X))
    return X / nonzero(margin * over.total(X.square()).sqrt())


def _on_short_side(
    X: Tensor, iterate: Callable[[Tensor], Tensor], margin: float, over: Reductions = LOCAL
) -> Tensor:
    """Run an iteration on (batch, short, long); return its result with X's shape and dtype."""
    m, n = over.shape(X)
    tall = m > n
    Y = unit(X, margin, over).to(iteration_dtype(X))
    Y = Y.mT if tall else Y
    batch = Y.shape[:-2].numel()  # not -1, which is ambiguous for an empty part
    Y = iterate(Y.reshape(batch, *Y.shape[-2:])).reshape(Y.shape)
    return (Y.mT if tall else Y).to(X.dtype)


def _iterate(X: Tensor, triples: Sequence[Triple]) -> Tensor:
    for a, b, c in triples:
        A = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def _iterate_gram(
    X: Tensor, triples: Sequence[Triple], total: Callable[[Tensor], Tensor] = lambda A: A
) -> Tensor:
    # The Gram matrix squares the condition number, so iterate on it in float32 or float64.
    small = torch.promote_types(X.dtype, torch.float32)
    eye = torch.eye(X.shape[-2], dtype=small, device=X.device)
    for start in range(0, len(triples), GRAM_RESTART):
        A = total(torch.bmm(X, X.mT).to(small))
        P = eye.expand_as(A)
        for a, b, c in triples[start : start + GRAM_RESTART]:
            p = torch.baddbmm(A, A, A, beta=b, alpha=c) + a * eye
            P = torch.bmm(p, P)
            A = torch.bmm(p, torch.bmm(A, p))
        X = torch.bmm(P.to(X.dtype), X)
    return X
