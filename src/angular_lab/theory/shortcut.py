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
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from angular_lab.recipes import recipe
from angular_lab.runs import train
from angular_lab.spec import Spec
from angular_muown.theory import dual_steps, project, radial, tangent_polar

LOOKS = (1, 5, 20, 50, 100, 150, 200, 250, 300)
INNER_STEPS = (1, 2, 3)
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
    return replace(base, model=model, steps=6, batch=2, eval_tokens=64, save_every=6)


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
    """While it is open, optimizers of the family report what they orthogonalize at those steps."""
    step = 0

    def start(optimizer: Any, *_: Any) -> None:
        nonlocal step
        step += 1
        names = {
            p: name
            for group in optimizer.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

        def observe(parts: Sequence[Part], U: Tensor, Q: Tensor, turned: Tensor | None) -> None:
            taken = 0
            for p, count in parts:
                X = lookahead(p, U[taken : taken + count], optimizer)
                for i in range(count):
                    label = names[p] + (f"[{i}]" if count > 1 else "")
                    rows.append({"step": step, "matrix": label, **look(X[i], U[taken + i])})
                taken += count

        others = tuple(x for x in optimizer.observers if not hasattr(x, "of_shortcut"))
        observe.of_shortcut = True  # pyrefly: ignore
        optimizer.observers = (*others, observe) if step in looks else others

    hook = register_optimizer_step_pre_hook(start)
    try:
        yield
    finally:
        hook.remove()


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


def look(X: Tensor, U: Tensor) -> dict[str, Any]:
    """One matrix: the shortcut, a few dual steps, and the solution."""
    U = U.double()
    U = U / U.norm(dim=-1, keepdim=True)
    exact = tangent_polar(X, U, tolerance=TOLERANCE)
    best = -float((X * exact.D).sum())
    shortcut = dual_steps(X, U, torch.zeros(len(X), dtype=X.dtype), 0)
    cosine = float((shortcut.D * exact.D).sum() / (shortcut.D.norm() * exact.D.norm()))
    P, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return {
        "shape": list(X.shape),
        "dual_gap": float(torch.linalg.matrix_norm(X, ord="nuc")) / best - 1,
        "lost": 1 + float((X * shortcut.D).sum()) / best,
        "norm": float(torch.linalg.matrix_norm(project(P @ Vh, U), ord=2)),
        "angle": degrees(acos(min(1.0, cosine))),
        "lost_after": [
            1 + float((X * dual_steps(X, U, None, k).D).sum()) / best for k in INNER_STEPS
        ],
        "radial_share": float((radial(X, U).abs().squeeze(-1) / X.norm(dim=-1)).mean()),
        "solver_gap": float(exact.gap),
    }
