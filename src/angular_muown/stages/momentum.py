"""Momentum: heavy ball, with Nesterov's look-ahead."""

from torch import Tensor


def heavy_ball(M: Tensor, T: Tensor, beta: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """M <- beta M + T and the matrix to orthogonalize: T + beta M (Nesterov) or M.

    An EMA differs by the constant 1 - beta, which the polar factor does not see, as long as beta
    stays constant.
    """
    M = beta * M + T
    return M, T + beta * M if nesterov else M
