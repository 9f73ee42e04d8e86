"""The papers' algorithms in plain numpy: float64, loops over rows, exact polar factors by SVD.

Independent of the package. Row lengths are stored with their sign, as in the published algorithm.
"""

import numpy as np


def polar(X: np.ndarray) -> np.ndarray:
    """Return the polar factor of X. Null directions, such as a row of zeros, give zero."""
    U, S, Vh = np.linalg.svd(X, full_matrices=False)
    return (U * (S > 1e-14 * S[0])) @ Vh


def fan_ratio(m: int, n: int) -> float:
    return max(1.0, m / n) ** 0.5


def adam_rms(m: int, n: int) -> float:
    return 0.2 * max(m, n) ** 0.5


class Adam:
    """Adam (Kingma and Ba) for one vector."""

    def __init__(self, size: int) -> None:
        self.m, self.v, self.t = np.zeros(size), np.zeros(size), 0

    def direction(self, r: np.ndarray) -> np.ndarray:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * r
        self.v = 0.95 * self.v + 0.05 * r**2
        m_hat, v_hat = self.m / (1 - 0.9**self.t), self.v / (1 - 0.95**self.t)
        return m_hat / (np.sqrt(v_hat) + 1e-8)


def row_normalized(Q: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Normalize rows as NorMuon does. Updates v in place."""
    out = np.zeros_like(Q)
    for i in range(len(Q)):
        v[i] = 0.95 * v[i] + 0.05 * np.mean(Q[i] ** 2)
        out[i] = Q[i] / np.sqrt(v[i])
    return out * np.linalg.norm(Q) / np.linalg.norm(out)
