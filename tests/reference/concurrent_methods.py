import numpy as np

from tests.reference import Adam, polar


class Hyperball:
    """arXiv 2606.16899, based on Muon: the norms of the weight and of the update are fixed."""

    def __init__(self, W: np.ndarray, lr: float):
        self.W, self.M, self.lr, self.R = W.copy(), np.zeros_like(W), lr, np.linalg.norm(W)

    def step(self, G: np.ndarray) -> np.ndarray:
        self.M = 0.95 * self.M + G
        u = polar(G + 0.95 * self.M)
        V = self.W - self.lr * self.R * u / np.linalg.norm(u)
        self.W = self.R * V / np.linalg.norm(V)
        return self.W


class MagnitudeDirection:
    """arXiv 2606.25971: stores a direction, and gain variables x for rows and y for columns.

    The sphere has the radius of the initial weight, and Muon's update is scaled by it.
    """

    def __init__(self, W: np.ndarray, lr: float, radius_lr: float):
        m, n = W.shape
        self.V, self.R, self.M = W.copy(), np.linalg.norm(W), np.zeros_like(W)
        self.x, self.y = (np.full(size, np.log(np.e - 1)) for size in (m, n))
        self.adam_x, self.adam_y = Adam(m), Adam(n)
        self.lr, self.radius_lr = lr, radius_lr

    def step(self, G: np.ndarray) -> np.ndarray:
        m, n = G.shape
        a, b = np.log1p(np.exp(self.x)), np.log1p(np.exp(self.y))
        x_gradient, y_gradient, T = np.zeros(m), np.zeros(n), np.zeros((m, n))
        for i in range(m):
            T[i] = a[i] * G[i] * b
            x_gradient[i] = (G[i] * self.V[i] * b).sum() / (1 + np.exp(-self.x[i]))
            y_gradient += G[i] * self.V[i] * a[i] / (1 + np.exp(-self.y))
        self.M = 0.95 * self.M + T
        update = max(m / n, n / m) ** 0.5 * polar(T + 0.95 * self.M)
        V = self.V - self.lr * self.R / max(m, n) ** 0.5 * update
        self.V = self.R * V / np.linalg.norm(V)
        self.x = self.x - self.radius_lr * self.adam_x.direction(x_gradient)
        self.y = self.y - self.radius_lr * self.adam_y.direction(y_gradient)
        a, b = np.log1p(np.exp(self.x)), np.log1p(np.exp(self.y))
        return a[:, None] * self.V * b
