import numpy as np

from tests.reference import Adam, adam_rms, polar, row_normalized


class Muown:
    """Weight normalization inside the optimizer: stores R, with W = Diag(g / |R|) R."""

    normalized = False

    def __init__(self, W: np.ndarray, lr: float):
        self.R, self.g = W.copy(), np.linalg.norm(W, axis=1)
        self.M, self.v, self.adam, self.lr = np.zeros_like(W), np.zeros(len(W)), Adam(len(W)), lr

    def step(self, G: np.ndarray) -> np.ndarray:
        m, n = G.shape
        r, T = np.zeros(m), np.zeros((m, n))
        for i in range(m):
            rho = np.linalg.norm(self.R[i])
            r[i] = G[i] @ self.R[i] / rho
            T[i] = self.g[i] / rho * (G[i] - r[i] * self.R[i] / rho)
        self.M = 0.95 * self.M + T
        Q = polar(T + 0.95 * self.M)
        if self.normalized:
            Q = row_normalized(Q, self.v)
        self.R = self.R - self.lr * adam_rms(m, n) * Q
        self.g = self.g - self.lr * self.adam.direction(r)
        return (self.g / np.linalg.norm(self.R, axis=1))[:, None] * self.R


class NorMuown(Muown):
    normalized = True
