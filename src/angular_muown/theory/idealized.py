"""Algorithm 2 of the paper as an optimizer: what the convergence theorem is about."""

from collections.abc import Callable, Mapping
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from angular_muown.stages.charts import polar_coordinates
from angular_muown.stages.reductions import LOCAL, row_norm
from angular_muown.theory.manifold import exponential, project, retract, transport
from angular_muown.theory.polar_solver import TangentPolar, dual_steps, tangent_polar

Move = Callable[[Tensor, Tensor], Tensor]

RETRACTIONS: dict[str, Move] = {"normalize": retract, "exponential": exponential}
# M, U, the new U -> M to go on with
TRANSPORTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda M, U, V: M,  # the paper's: M adds up in the ambient space
    "project": lambda M, U, V: project(M, V),
    "parallel": transport,
}


def _within(low: float, high: float) -> Callable[[Any], bool]:
    """Of numbers, and of tensors all of whose entries are such: each problem may have its own."""

    def is_valid(x: Any) -> bool:
        if isinstance(x, Tensor):
            return x.is_floating_point() and bool(((x >= low) & (x <= high)).all())
        return isinstance(x, int | float) and not isinstance(x, bool) and low <= x <= high

    return is_valid


def _count(least: int) -> tuple[Callable[[Any], bool], str]:
    def is_valid(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= least

    return is_valid, f"a whole number >= {least}"


def _one_of(known: Mapping[str, Any]) -> tuple[Callable[[Any], bool], str]:
    return (lambda x: x in tuple(known)), "one of " + ", ".join(map(repr, known))


# What a group may hold. The library's rules (params/options.py) are about one number for a group.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_within(0, float_info.max), "a finite number >= 0, or a tensor of them"),
    "momentum": (_within(0, 1), "a number in [0, 1], or a tensor of them"),
    "inner_steps": _count(0),
    "iterations": _count(1),
    "tolerance": (_within(0, float_info.max), "a finite number >= 0"),
    "retraction": _one_of(RETRACTIONS),
    "transport": _one_of(TRANSPORTS),
}


class IdealizedAngularMuown(torch.optim.Optimizer):
    """The directional update with the polar factor kept in the tangent space; row lengths stay.

        T = g (G - r U)                                       tangent gradient
        M = beta M + (1 - beta) T;  M = T at the first step
        D = argmin <M, D>  over  |D|_op <= 1, <D_i, U_i> = 0
        U <- rownormalize(U + lr D)

    Args:
        params: matrices (..., m, n) without zero rows.
        lr, momentum: eta and beta; `theorem.parameters` gives the theorem's. For a stack of
            problems, tensors that broadcast, such as (k, 1, 1).
        inner_steps: 0 solves for D to `tolerance`; k takes k dual steps from the last multiplier.
        iterations, tolerance: of `tangent_polar`.
        retraction: "normalize", or "exponential": along great circles.
        transport: what carries M to the next point: "none", "project" or "parallel".

    It is apart from the family, whose one `step` starts the momentum at zero and moves the row
    lengths as well: for proofs and measurements, not for training. AngularMuown's
    orthogonalize="tangent" is its direction in practice.

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
        """Refuses what it cannot work with, here and not at some step."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            _check_group(self.param_groups[index], index)
        except ValueError:
            del self.param_groups[index]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for number, p in enumerate(group["params"]):
                if p.grad is not None:
                    if "momentum_buffer" not in self.state[p]:
                        _check_rows(p, f"parameter {number} of group {index}")
                    _advance(p, self.state[p], group)
        return loss


def _check_group(group: dict[str, Any], index: int) -> None:
    for key, (is_valid, wanted) in RULES.items():
        if not is_valid(group[key]):
            raise ValueError(f"{key}={group[key]!r} is not valid: it must be {wanted}")
    for number, p in enumerate(group["params"]):
        name, shape = f"parameter {number} of group {index}", tuple(p.shape)
        if not p.is_floating_point():
            raise ValueError(f"{name} is {p.dtype}: real floating point is needed")
        if p.dim() < 2:
            raise ValueError(f"{name} has the shape {shape}: matrices (..., m, n) are needed")
        if p.numel() == 0:
            raise ValueError(f"{name} (shape {shape}) has no entries: leave it out")


def _check_rows(p: Tensor, name: str) -> None:
    """At its first step: until then, weights may be filled."""
    if bool((row_norm(p) == 0).any()):
        raise ValueError(f"{name} has a row of zeros, which has no direction: start elsewhere")


def _advance(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert p.grad is not None
    U, g, r = polar_coordinates(p, p.grad, LOCAL)
    T = g * (p.grad - r * U)
    beta = group["momentum"]
    M = beta * state["momentum_buffer"] + (1 - beta) * T if "momentum_buffer" in state else T
    found = _direction(M, U, state.get("multiplier"), group)
    V = RETRACTIONS[group["retraction"]](U, group["lr"] * found.D)
    state["momentum_buffer"] = TRANSPORTS[group["transport"]](M, U, V)
    state["multiplier"], state["gap"] = found.multiplier, found.gap
    p.copy_(g * V)


def _direction(
    M: Tensor, U: Tensor, multiplier: Tensor | None, group: dict[str, Any]
) -> TangentPolar:
    if group["inner_steps"]:
        return dual_steps(M, U, multiplier, group["inner_steps"])
    return tangent_polar(M, U, group["iterations"], multiplier, group["tolerance"])
