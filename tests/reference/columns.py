import numpy as np

from tests.reference import Adam
from tests.reference.angular_muown import AngularMuown


class ColumnGains:
    """W = V Diag(b): AngularMuown for V, which has the gradient G Diag(b), and Adam for log b.

    Of the weight, g, U and b are kept; a factor of b in which its mean square exceeds one goes to
    g. Decay comes before Adam: log b has the gradient of the decayed weight."""

    def __init__(self, W: np.ndarray, lr: float, weight_decay: float = 0.0, exact_angle=False):
        self.of_V = AngularMuown(W, lr, weight_decay=weight_decay, exact_angle=exact_angle)
        self.b, self.adam = np.ones(W.shape[1]), Adam(W.shape[1])
        self.lr, self.kept = lr, 1 - lr * weight_decay

    @property
    def g(self) -> np.ndarray:
        return self.of_V.g

    def step(self, G: np.ndarray) -> np.ndarray:
        of_V, f = self.of_V, np.zeros_like(self.b)
        for i in range(len(G)):
            f += self.kept * of_V.g[i] * of_V.U[i] * self.b * G[i]
        of_V.step(G * self.b)
        b = self.b * np.exp(-self.lr * self.adam.direction(f))
        a = np.sqrt(np.mean(b**2))
        self.b, of_V.g = b / a, of_V.g * a
        return of_V.g[:, None] * of_V.U * self.b
