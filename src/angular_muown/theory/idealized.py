"""Algorithm 2 of the paper, the subject of the convergence theorem, as an optimizer."""

from collections.abc import Callable, Iterable
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from angular_muown.stages.charts import polar_coordinates
from angular_muown.stages.context import State
from angular_muown.stages.reductions import LOCAL, row_norm
from angular_muown.theory.manifold import exponential, project, retract, transport
from angular_muown.theory.polar_solver import TangentPolar, dual_steps, tangent_polar

Move = Callable[[Tensor, Tensor], Tensor]

RETRACTIONS: dict[str, Move] = {"normalize": retract, "exponential": exponential}
# (M, U, new U) -> the M of the next step
TRANSPORTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda M, U, V: M,  # as in the paper: M accumulates in the ambient space
    "project": lambda M, U, V: project(M, V),
    "parallel": transport,
}


Check = Callable[[object], bool]
Rule = tuple[Check, str]  # the check, and what a valid value is


def _within(low: float, high: float) -> Check:
    """Accept a number in [low, high], or a tensor of them: one per problem of a batch."""

    def is_valid(x: object) -> bool:
        if isinstance(x, Tensor):
            return x.is_floating_point() and bool(((x >= low) & (x <= high)).all())
        return isinstance(x, int | float) and not isinstance(x, bool) and low <= x <= high

    return is_valid


def _integer(minimum: int) -> Rule:
    def is_valid(x: object) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= minimum

    return is_valid, f"an integer >= {minimum}"


def _one_of(choices: Iterable[str]) -> Rule:
    names = tuple(choices)
    return (lambda x: x in names), "one of " + ", ".join(map(repr, names))


# Separate from the library's rules (params/options.py), which do not allow tensors per problem.
RULES: dict[str, Rule] = {
    "lr": (_within(0, float_info.max), "a finite number >= 0, or a tensor of them"),
    "momentum": (_within(0, 1), "a number in [0, 1], or a tensor of them"),
    "inner_steps": _integer(0),
    "iterations": _integer(1),
    "tolerance": (_within(0, float_info.max), "a finite number >= 0"),
    "retraction": _one_of(RETRACTIONS),
    "transport": _one_of(TRANSPORTS),
}


class IdealizedAngularMuown(torch.optim.Optimizer):
    """Directional update with a tangent-constrained polar factor and fixed row lengths.

        T = g (G - r U)                                       tangent gradient
        M = beta M + (1 - beta) T;  M = T in the first step
        D = argmin <M, D>  over  |D|_op <= 1, <D_i, U_i> = 0
        U <- rownormalize(U + lr D)

    Args:
        params: matrices (..., m, n) without zero rows.
        lr, momentum: eta and beta; `parameters` computes the theorem's values. A batch of problems
            may have tensors that broadcast, such as (k, 1, 1).
        inner_steps: 0 solves for D to `tolerance`; k takes k dual steps from the last multiplier.
        iterations, tolerance: arguments of `tangent_polar`.
        retraction: "normalize", or "exponential" to move along great circles.
        transport: how M moves to the next point: "none", "project" or "parallel".

    For proofs and measurements, not for training. It is not a member of the family, whose `step`
    starts the momentum at zero and also updates the row lengths. For training with this direction,
    use AngularMuown with orthogonalize="tangent".

    Paper: Huebler, Lion, Orvieto, He: Muown Implicitly Performs Angular Step-size Decay, 2026.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float | Tensor,
        *,
        inner_steps: int = 0,
        iterations: int = 50,
        tolerance: float = 1e-6,
        retraction: str = "normalize",
        transport: str = "none",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "inner_steps": inner_steps,
            "iterations": iterations,
            "tolerance": tolerance,
            "retraction": retraction,
            "transport": transport,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, or raise ValueError if a value or a parameter is invalid."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            _check_group(self.param_groups[index], index)
        except ValueError:
            del self.param_groups[index]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    if "momentum_buffer" not in self.state[p]:
                        _check_rows(p, f"parameter {i} of group {index}")
                    _advance(p, self.state[p], group)
        return loss


def _check_group(group: dict[str, Any], index: int) -> None:
    for key, (is_valid, requirement) in RULES.items():
        if not is_valid(group[key]):
            raise ValueError(f"{key}={group[key]!r} is not valid: it must be {requirement}")
    for i, p in enumerate(group["params"]):
        name, shape = f"parameter {i} of group {index}", tuple(p.shape)
        if not p.is_floating_point():
            raise ValueError(f"{name} is {p.dtype}: it must be real floating point")
        if p.dim() < 2:
            raise ValueError(f"{name} has the shape {shape}: it must be (..., m, n)")
        if p.numel() == 0:
            raise ValueError(f"{name} (shape {shape}) has no entries: leave it out of params")


def _check_rows(p: Tensor, name: str) -> None:
    """Raise if a row is zero. The first step checks: weights may be filled until then."""
    if bool((row_norm(p) == 0).any()):
        raise ValueError(f"{name} has a row of zeros, which has no direction: initialize it")


def _advance(p: Tensor, state: State, group: dict[str, Any]) -> None:
    assert p.grad is not None
    U, g, r = polar_coordinates(p, p.grad, LOCAL)
    T = g * (p.grad - r * U)
    beta = group["momentum"]
    M = beta * state["momentum_buffer"] + (1 - beta) * T if "momentum_buffer" in state else T
    direction = _direction(M, U, state.get("multiplier"), group)
    V = RETRACTIONS[group["retraction"]](U, group["lr"] * direction.D)
    state["momentum_buffer"] = TRANSPORTS[group["transport"]](M, U, V)
    state["multiplier"], state["gap"] = direction.multiplier, direction.gap
    p.copy_(g * V)


def _direction(
    M: Tensor, U: Tensor, multiplier: Tensor | None, group: dict[str, Any]
) -> TangentPolar:
    if group["inner_steps"]:
        return dual_steps(M, U, multiplier, group["inner_steps"])
    return tangent_polar(M, U, group["iterations"], multiplier, group["tolerance"])
