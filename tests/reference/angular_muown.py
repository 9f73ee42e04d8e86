import numpy as np

from tests.reference import Adam, fan_ratio, polar
from tests.reference.tangent import constrained_polar


class AngularMuown:
    """Algorithm 1 of the paper, with signed lengths g and unit rows U.

    With tangent_steps, the direction is that of Algorithm 2.
    """

    def __init__(
        self, W: np.ndarray, lr: float, warmup_steps: int = 0, weight_decay: float = 0.0,
        tangent_steps: int = 0,
    ):  # fmt: skip
        self.g = np.linalg.norm(W, axis=1)
        self.U = W / self.g[:, None]
        self.M, self.adam = np.zeros_like(W), Adam(len(W))
        self.lr, self.warmup_steps, self.weight_decay, self.t = lr, warmup_steps, weight_decay, 0
        self.tangent_steps, self.multiplier = tangent_steps, np.zeros(len(W))

    def direction(self, X: np.ndarray) -> np.ndarray:
        if self.tangent_steps:
            Q, self.multiplier = constrained_polar(X, self.U, self.multiplier, self.tangent_steps)
            return Q
        return polar(X)

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
            self.U[i] = row / np.linalg.norm(row)
        self.g = self.g * (1 - self.lr * self.weight_decay) - self.lr * self.adam.direction(r)
        self.t += 1
        return self.g[:, None] * self.U
