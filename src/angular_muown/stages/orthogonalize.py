"""Orthogonalizers: the polar factor of (..., m, n), tall or wide, the only step that needs a whole
matrix. The direction of the input counts, never its size: 1e-30 X and 1e30 X give the same result,
zero gives zero, and the input is not written."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from angular_muown.stages.charts import nonzero
from angular_muown.stages.reductions import WHOLE, Whole

Triple = tuple[float, float, float]

# X <- a X + (b A + c A^2) X with A = X X^T. Polar Express (Amsel et al. 2025, arXiv 2505.16932),
# five steps for singular values in [1e-3, 1], which come out in [0.863, 1.131].
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.237312490495555, -23.157747414558198, 16.680568411445915),
    (4.082441999064836, -2.8930477353325887, 0.5252849256975651),
    (3.9263479922546556, -2.8547468034765293, 0.5318022422894989),
    (3.2982187133085143, -2.4245419810267062, 0.48632008358844075),
    (2.320007312889811, -1.6862169729967622, 0.42068027340235137),
)
POLAR_EXPRESS_MARGIN = 1.01  # input at norm 1/1.01: rounding must not leave the interval
QUINTIC: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),) * 5  # Keller Jordan's Muon, 2024
GRAM_ASPECT = 2.0  # above it the Gram form needs fewer operations than the ordinary one
GRAM_RESTART = 2  # iterations between two fresh Gram matrices: rounding grows with every square


def polar_express(X: Tensor) -> Tensor:
    """Five steps of Polar Express: the default."""
    return _on_short_side(X, lambda X: _iterate(X, POLAR_EXPRESS), POLAR_EXPRESS_MARGIN)


def newton_schulz(X: Tensor) -> Tensor:
    """Five steps of the fixed quintic: singular values above about 0.01 of the norm end between
    0.7 and 1.2, smaller ones below."""
    return _on_short_side(X, lambda X: _iterate(X, QUINTIC), 1.0)


def gram(X: Tensor) -> Tensor:
    """Polar Express on the small Gram matrix where the aspect ratio is above 2.

    With A = X X^T and P = a I + b A + c A^2, a step is X <- P X and A <- P A P: all of it happens
    on the short side, and the long side is touched only at a restart and at the end.
    """
    m, n = X.shape[-2:]
    if max(m, n) <= GRAM_ASPECT * min(m, n):
        return polar_express(X)
    return _on_short_side(X, lambda X: _iterate_gram(X, POLAR_EXPRESS), POLAR_EXPRESS_MARGIN)


def svd(X: Tensor) -> Tensor:
    """U V^T from the singular value decomposition: exact, in float32 or float64.

    Directions below the rounding error of the largest singular value are noise and give zero. So
    are rows and columns that this error hides: empty ones stay empty, as in the iterations. A
    matrix that is not finite gives NaN, as in the iterations too: LAPACK would raise for all.
    """
    X_unit = unit(X, 1.0)
    finite = X_unit.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    X_unit = torch.where(finite, X_unit, 0.0)
    U, S, Vh = torch.linalg.svd(X_unit, full_matrices=False)
    error = S[..., :1] * torch.finfo(S.dtype).eps
    kept = (S > max(X.shape[-2:]) * error).to(S.dtype).unsqueeze(-2)
    seen = [
        torch.linalg.vector_norm(X_unit, dim=d, keepdim=True) > error[..., None] for d in (-1, -2)
    ]
    Q = (U * kept) @ Vh * seen[0] * seen[1]
    return torch.where(finite, Q, torch.nan).to(X.dtype)


ORTHOGONALIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "polar_express": polar_express,
    "newton_schulz": newton_schulz,
    "gram": gram,
    "svd": svd,
}


def iteration_dtype(X: Tensor) -> torch.dtype:
    """bf16 on an accelerator, as published; float32 on the CPU, where products in bf16 are slower;
    float64 stays, so that references can be met."""
    if X.dtype == torch.float64:
        return torch.float64
    return torch.float32 if X.device.type == "cpu" else torch.bfloat16


def unit(X: Tensor, margin: float, sums: Whole = WHOLE) -> Tensor:
    """X / (margin |X|_F) in at least float32. The largest entry is taken out first: squares of
    1e-30 or 1e30 would leave the range of float32."""
    X = X.to(torch.promote_types(X.dtype, torch.float32))
    X = X / nonzero(sums.largest(X))
    return X / nonzero(margin * sums.entries(X.square()).sqrt())


# Iterations that need Gram matrices only, so that ranks with parts of the long side can add up
# theirs and keep the parts.
SUMMABLE: dict[Callable[[Tensor], Tensor], tuple[Sequence[Triple], float]] = {
    polar_express: (POLAR_EXPRESS, POLAR_EXPRESS_MARGIN),
    gram: (POLAR_EXPRESS, POLAR_EXPRESS_MARGIN),
    newton_schulz: (QUINTIC, 1.0),
}


def polar_of_parts(polar: Callable[[Tensor], Tensor], X: Tensor, sums: Whole) -> Tensor:
    """The part of the polar factor that belongs to a part of X, cut along the long side."""
    triples, margin = SUMMABLE[polar]
    return _on_short_side(X, lambda Y: _iterate_gram(Y, triples, sums.parts), margin, sums)


def _on_short_side(
    X: Tensor, iterate: Callable[[Tensor], Tensor], margin: float, sums: Whole = WHOLE
) -> Tensor:
    """Run an iteration on (batch, short, long) and give the result X's shape and dtype."""
    m, n = sums.shape(X)
    tall = m > n
    Y = unit(X, margin, sums).to(iteration_dtype(X))
    Y = Y.mT if tall else Y
    batch = Y.shape[:-2].numel()  # not -1, which is ambiguous for a part without entries
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
    # The Gram matrix squares the condition number, so its iteration stays in float32 or float64.
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
