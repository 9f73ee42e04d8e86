import numpy as np

from tests.reference import Adam, fan_ratio, polar, row_normalized
from tests.reference.tangent import constrained_polar, projected, rotated


class AngularMuown:
    """Algorithm 1 of the paper, with signed lengths g kept beside unit rows U.

    The settings of the last line of arguments go beyond it."""

    def __init__(
        self, W: np.ndarray, lr: float, warmup_steps: int = 0, weight_decay: float = 0.0,
        tangent_momentum: bool = False, tangent_steps: int = 0, exact_angle: bool = False,
        row_beta: float | None = None,
    ):  # fmt: skip
        self.g = np.linalg.norm(W, axis=1)
        self.U = W / self.g[:, None]
        self.M, self.adam = np.zeros_like(W), Adam(len(W))
        self.lr, self.warmup_steps, self.weight_decay, self.t = lr, warmup_steps, weight_decay, 0
        self.tangent_momentum, self.tangent_steps = tangent_momentum, tangent_steps
        self.multiplier = np.zeros(len(W))
        self.exact_angle, self.v = exact_angle, None if row_beta is None else np.zeros(len(W))

    def direction(self, X: np.ndarray) -> np.ndarray:
        if self.tangent_steps:
            at = self.multiplier
            Q, self.multiplier = constrained_polar(X, self.U, at, self.tangent_steps)
            return Q
        Q = polar(projected(X, self.U) if self.tangent_momentum else X)
        return Q if self.v is None else row_normalized(Q, self.v)

    def step(self, G: np.ndarray) -> np.ndarray:
        m, n = G.shape
        r, T = np.zeros(m), np.zeros((m, n))
        for i in range(m):
            r[i] = G[i] @ self.U[i]
            T[i] = self.g[i] * (G[i] - r[i] * self.U[i])
        self.M = 0.95 * self.M + T
        Q = self.direction(T + 0.95 * self.M)
        kappa = 1 / (1 + 1e-3 * max(self.t - self.warmup_steps, 0))
        for i in range(m):
            row = self.U[i] - self.lr * kappa * fan_ratio(m, n) * Q[i]
            if self.exact_angle:
                row = rotated(self.U[i], Q[i], self.lr * kappa)
            self.U[i] = row / np.linalg.norm(row)
        self.g = self.g * (1 - self.lr * self.weight_decay) - self.lr * self.adam.direction(r)
        self.t += 1
        return self.g[:, None] * self.U
