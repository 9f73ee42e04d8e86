"""What the practical update loses against the exact one, in a real training run.

At some steps of the nano recipe, every hidden matrix is looked at: X is what AngularMuown
orthogonalizes and U its unit rows. The shortcut's direction is the polar factor of X made tangent;
the exact one is solved for. All in float64, aside of the run, which goes on as it would anyway.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import acos, degrees
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from angular_lab.config.named_runs import recipe
from angular_lab.config.spec import Spec
from angular_lab.training.start import train
from angular_muown.theory import dual_steps, feasible, project, radial, tangent_polar

LOOKS = (1, 5, 20, 50, 100, 150, 200, 250, 300)
INNER_STEPS = (1, 2, 3)
FOLLOWED = 5  # steps, the look included
TOLERANCE = 1e-5
Part = tuple[Tensor, int]


def nano_spec(data: str) -> Spec:
    base = recipe("nano")
    optim = replace(base.optim, lr=0.04, aux_lr=4e-3)  # the demo's, results/demo_grid.json
    return replace(base, optim=optim, data=data)


def tiny_spec(data: str) -> Spec:
    """Seconds: for a look at the page, not at the numbers."""
    base = nano_spec(data)
    model = replace(base.model, layers=1, width=24, heads=2, mlp=32, sequence=32)
    schedule = replace(base.schedule, warmup=2)
    values = {"steps": 6, "batch": 2, "eval_tokens": 64, "save_every": 6}
    return replace(base, model=model, schedule=schedule, **values)


def measure(spec: Spec, looks: Sequence[int] = LOOKS) -> dict[str, Any]:
    """Trains aside and returns one row for every matrix of every look."""
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder, watching(rows, looks):
        train(spec, Path(folder) / "run", device="cpu")
    return {
        "recipe": spec.recipe,
        "lr": spec.optim.lr,
        "steps": spec.steps,
        "inner_steps": INNER_STEPS,
        "tolerance": TOLERANCE,
        "rows": rows,
    }


@contextmanager
def watching(rows: list[dict[str, Any]], looks: Sequence[int]) -> Iterator[None]:
    """While it is open, optimizers of the family report what they orthogonalize at those steps.

    Some steps before a look, multipliers are followed by one dual step each, as an optimizer with
    orthogonalize="tangent" would: what the look starts from.
    """
    step, followed = 0, {t - k for t in looks for k in range(FOLLOWED)}
    multipliers: dict[str, Tensor] = {}

    def start(optimizer: Any, *_: Any) -> None:
        nonlocal step
        step += 1
        if step - 1 not in followed:
            multipliers.clear()
        others = tuple(x for x in optimizer.observers if not isinstance(x, Observe))
        observe = Observe(optimizer, multipliers, rows if step in looks else None, step)
        optimizer.observers = (*others, observe) if step in followed else others

    hook = register_optimizer_step_pre_hook(start)
    try:
        yield
    finally:
        hook.remove()


class Observe(NamedTuple):
    """An observer of one step: a dual step for every matrix, and a look where rows are kept."""

    optimizer: Any
    multipliers: dict[str, Tensor]
    rows: list[dict[str, Any]] | None
    step: int

    def __call__(self, parts: Sequence[Part], U: Tensor, Q: Tensor, turned: Tensor | None) -> None:
        names = {
            p: name
            for group in self.optimizer.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        taken = 0
        for p, count in parts:
            X = lookahead(p, U[taken : taken + count], self.optimizer)
            for i in range(count):
                label, at = names[p] + (f"[{i}]" if count > 1 else ""), unit_rows(U[taken + i])
                warm = dual_steps(X[i], at, self.multipliers.get(label), 1)
                self.multipliers[label] = warm.multiplier
                if self.rows is not None:
                    found = look(X[i], at, warm.D)
                    self.rows.append({"step": self.step, "matrix": label, **found})
            taken += count


def unit_rows(U: Tensor) -> Tensor:
    """In float64: rows that are of unit length in float32 only are too long for the solver."""
    U = U.double()
    return U / U.norm(dim=-1, keepdim=True)


def lookahead(p: Tensor, U: Tensor, optimizer: Any) -> Tensor:
    """X = T + beta M of a parameter whose equal row blocks are the matrices of U; the optimizer has
    not written its momentum yet."""
    assert p.grad is not None
    group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
    W, G, M = (
        x.detach().double().reshape(U.shape)
        for x in (p, p.grad, optimizer.state[p]["momentum_buffer"])
    )
    T = W.norm(dim=-1, keepdim=True) * project(G, U.double())
    beta = group["momentum"]
    return T + beta * (beta * M + T)


def look(X: Tensor, U: Tensor, warm: Tensor) -> dict[str, Any]:
    """One matrix: the shortcut, a few dual steps, the direction of one warm one, the solution."""
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
