import numpy as np

from tests.reference import polar


def projected(X: np.ndarray, U: np.ndarray) -> np.ndarray:
    return np.stack([x - (x @ u) * u for x, u in zip(X, U, strict=True)])


def constrained_polar(
    X: np.ndarray, U: np.ndarray, multiplier: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 2: the dual of max <X, Q> with <Q_i, U_i> = 0, by damped coordinate curvatures,
    from the last multiplier. Returns Q and the new one."""
    X = projected(X, U)
    X, length = X / np.linalg.norm(X), 1.0
    for _ in range(steps):
        trial = multiplier - length * _newton_step(X + multiplier[:, None] * U, U)
        if _nuclear(X + trial[:, None] * U) < _nuclear(X + multiplier[:, None] * U):
            multiplier = trial
        else:
            length /= 2
    return projected(polar(X + multiplier[:, None] * U), U), multiplier


def _nuclear(X: np.ndarray) -> float:
    return np.linalg.svd(X, compute_uv=False).sum()


def _newton_step(X: np.ndarray, U: np.ndarray) -> np.ndarray:
    A, S, Vh = np.linalg.svd(X, full_matrices=False)
    S, Q, step = S + 0.05 * S.mean(), A @ Vh, np.zeros(len(X))
    for i in range(len(X)):
        along = A[i] if X.shape[0] <= X.shape[1] else Vh @ U[i]
        step[i] = Q[i] @ U[i] / (along**2 / S).sum()
    return step
