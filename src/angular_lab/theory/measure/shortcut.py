"""What the practical update loses against the exact one in a real training run.

At a few steps of the nano run, every hidden matrix is measured: X is the matrix that AngularMuown
orthogonalizes, U its unit rows. The practical direction is the tangent part of the polar factor of
X; the exact direction is solved for. All of it is computed in float64 next to the run, which it
does not change.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import acos, degrees
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from angular_lab.config.named_runs import nano
from angular_lab.config.overrides import override
from angular_lab.config.spec import Spec
from angular_lab.training.start import train
from angular_muown.theory import dual_steps, feasible, project, radial, tangent_polar

SAMPLED_STEPS = (1, 5, 20, 50, 100, 150, 200, 250, 300)
INNER_STEPS = (1, 2, 3)
WARM_STEPS = 5  # for which a multiplier is followed, the sampled step included
TOLERANCE = 1e-5
LEARNING_RATES = ("optim.lr=0.04", "optim.aux_lr=4e-3")  # the demo's, results/demo_grid.json
QUICK = ("steps=6", "batch=2", "eval_tokens=64", "save_every=6", "schedule.warmup=2",
         "model.layers=1", "model.width=24", "model.heads=2", "model.mlp=32",
         "model.sequence=32")  # fmt: skip


def nano_spec(data: str, quick: bool = False) -> Spec:
    return override(nano(), [*LEARNING_RATES, f"data={data}", *(QUICK if quick else ())])


def measure(data: str, quick: bool = False) -> dict[str, Any]:
    """Train in a temporary folder and return one row per matrix and sampled step."""
    spec = nano_spec(data, quick)
    with TemporaryDirectory() as folder, watch((1, 3, 6) if quick else SAMPLED_STEPS) as rows:
        train(spec, Path(folder) / "run", device="cpu")
    return {
        "recipe": "nano",
        "lr": spec.optim.lr,
        "steps": spec.steps,
        "inner_steps": INNER_STEPS,
        "tolerance": TOLERANCE,
        "rows": rows,
    }


@contextmanager
def watch(sampled: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
    """Measure every optimizer of the family that steps in this context, at the sampled steps.

    The yielded list receives the rows.
    """
    watcher = Watcher(sampled)
    hook = register_optimizer_step_pre_hook(watcher.before_step)
    try:
        yield watcher.rows
    finally:
        hook.remove()


class Watcher:
    """Observe an optimizer: one dual step per matrix and step, and a row per sampled step.

    The dual steps begin a few steps before a sampled one and follow each multiplier as an optimizer
    with orthogonalize="tangent" would.
    """

    def __init__(self, sampled: Sequence[int]) -> None:
        self.sampled = sampled
        self.followed = {t - k for t in sampled for k in range(WARM_STEPS)}
        self.step = 0
        self.state: Any = {}  # the optimizer's
        self.names_and_groups: dict[Tensor, tuple[str, dict[str, Any]]] = {}
        self.multipliers: dict[str, Tensor] = {}
        self.rows: list[dict[str, Any]] = []

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Add this observer to the optimizer for the steps that are followed."""
        self.step += 1
        self.state = optimizer.state
        self.names_and_groups = {
            p: (name, group)
            for group in optimizer.param_groups
            for p, name in zip(group["params"], group["param_names"], strict=True)
        }
        if self.step - 1 not in self.followed:
            self.multipliers.clear()
        others = tuple(observer for observer in optimizer.observers if observer is not self)
        optimizer.observers = (*others, self) if self.step in self.followed else others

    def __call__(
        self, counts: Sequence[tuple[Tensor, int]], U: Tensor, Q: Tensor, turned: Tensor | None
    ) -> None:
        rest = U
        for p, count in counts:
            U, rest = rest[:count], rest[count:]
            name, group = self.names_and_groups[p]
            X = lookahead(p, U, self.state[p]["momentum_buffer"], group["momentum"])
            for i in range(count):
                self._measure(name + (f"[{i}]" if count > 1 else ""), X[i], unit_rows(U[i]))

    def _measure(self, matrix: str, X: Tensor, U: Tensor) -> None:
        warm = dual_steps(X, U, self.multipliers.get(matrix), 1)
        self.multipliers[matrix] = warm.multiplier
        if self.step in self.sampled:
            self.rows.append({"step": self.step, "matrix": matrix, **compare(X, U, warm.D)})


def unit_rows(U: Tensor) -> Tensor:
    """Normalize in float64: for the solver, the rounding of float32 rows is too large."""
    U = U.double()
    return U / U.norm(dim=-1, keepdim=True)


def lookahead(p: Tensor, U: Tensor, M: Tensor, beta: float) -> Tensor:
    """Return X = T + beta M of a parameter whose equal row blocks are the matrices of U.

    M is the momentum before this step.
    """
    assert p.grad is not None
    W, G, M = (x.detach().double().reshape(U.shape) for x in (p, p.grad, M))
    T = W.norm(dim=-1, keepdim=True) * project(G, U.double())
    return T + beta * (beta * M + T)


def compare(X: Tensor, U: Tensor, warm: Tensor) -> dict[str, Any]:
    """Compare directions for one matrix with the solution: the practical one, those after a few
    dual steps, and `warm`, the one after a dual step from the previous multiplier."""
    exact = tangent_polar(X, U, tolerance=TOLERANCE)
    best = -float((X * exact.D).sum())
    P, _, Vh = torch.linalg.svd(X, full_matrices=False)
    shortcut = feasible(P @ Vh, U)
    cosine = float((shortcut * exact.D).sum() / (shortcut.norm() * exact.D.norm()))

    def lost(D: Tensor) -> float:
        return 1 + float((X * D).sum()) / best

    return {
        "shape": list(X.shape),
        "dual_gap": float(torch.linalg.matrix_norm(X, ord="nuc")) / best - 1,
        "lost": lost(shortcut),
        "norm": float(torch.linalg.matrix_norm(project(P @ Vh, U), ord=2)),
        "angle": degrees(acos(min(1.0, cosine))),
        "lost_after": [lost(dual_steps(X, U, None, k).D) for k in INNER_STEPS],
        "lost_warm": lost(warm),
        "radial_share": float((radial(X, U).abs().squeeze(-1) / X.norm(dim=-1)).mean()),
        "solver_gap": float(exact.gap),
    }
