"""Momentum: heavy ball, with Nesterov's look-ahead."""

from torch import Tensor


def heavy_ball(M: Tensor, T: Tensor, beta: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """Return M <- beta M + T and the matrix to orthogonalize: T + beta M (Nesterov) or M.

    An exponential average differs by the factor 1 - beta. The polar factor ignores it as long as
    beta is constant.
    """
    M = beta * M + T
    return M, T + beta * M if nesterov else M
