import numpy as np


def tangent_polar(M: np.ndarray, U: np.ndarray, solver: str = "CLARABEL") -> np.ndarray:
    """Return argmin <M, D> over |D|_op <= 1, <D_i, U_i> = 0, by a generic cone solver."""
    import cvxpy  # here, so that tests can import this module without it

    D = cvxpy.Variable(M.shape)
    tangent = cvxpy.sum(cvxpy.multiply(D, U), axis=1) == 0
    problem = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.sum(cvxpy.multiply(M, D))), [cvxpy.sigma_max(D) <= 1, tangent]
    )
    problem.solve(solver=solver, **({"eps": 1e-9, "max_iters": 50_000} if solver == "SCS" else {}))
    return D.value


class IdealizedAngularMuown:
    """Algorithm 2 of the paper: unit rows U, fixed lengths g."""

    def __init__(self, W: np.ndarray, lr: float, momentum: float):
        self.g = np.linalg.norm(W, axis=1)
        self.U, self.M = W / self.g[:, None], None
        self.lr, self.momentum = lr, momentum

    def step(self, G: np.ndarray) -> np.ndarray:
        T = np.zeros_like(G)
        for i in range(len(G)):
            T[i] = self.g[i] * (G[i] - (G[i] @ self.U[i]) * self.U[i])
        self.M = T if self.M is None else self.momentum * self.M + (1 - self.momentum) * T
        D = tangent_polar(self.M, self.U)
        for i in range(len(G)):
            row = self.U[i] + self.lr * D[i]
            self.U[i] = row / np.linalg.norm(row)
        return self.g[:, None] * self.U
