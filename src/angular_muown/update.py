"""The family's equation, and what its stages must offer: a recipe has one field per arrow.

Recipes are made from a param group's plain values at every step (`recipe(group)`), never stored:
a function in a group would break `torch.load(weights_only=True)`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from torch import Tensor

from angular_muown.params.options import rates
from angular_muown.params.stacks import Stack
from angular_muown.stages.charts import Rows, Split, row_signs, surely_none
from angular_muown.stages.momentum import heavy_ball
from angular_muown.stages.normalize import AsIs, RowSecondMoment
from angular_muown.stages.orthogonalize import ORTHOGONALIZERS, polar_express
from angular_muown.stages.radius import RADII, Adam, Fixed, LogAdam
from angular_muown.stages.reductions import WHOLE, Whole
from angular_muown.stages.scale import SCALES
from angular_muown.stages.tangent import TANGENT, Free, Polar

# Parameters with their number of matrices; U before the step and Q, (count, m, n), of all of them;
# the radians that rows turned by, (count, m). None instead of these: W is still to be written.
Observer = Callable[[Sequence[tuple[Tensor, int]], Tensor, Tensor, Tensor | None], None]

# A step up to its pause, where it gives X and U and wants Q.
Equation = Generator[tuple[Tensor, Tensor], Tensor, None]


class Stage(Protocol):
    """`rows` names the vectors that a stage keeps between steps; they start at zero. A name says
    what the vector has entries for: rows, or else columns or matrices (see `layout.spans`)."""

    @property
    def rows(self) -> tuple[str, ...]: ...

    def over(self, sums: Whole) -> Self: ...


class Chart(Stage, Protocol):
    def split(self, W: Tensor, G: Tensor, rows: Rows) -> Split: ...
    def join(self, at: Split, step: Tensor, g: Tensor, rows: Rows) -> Tensor: ...


class Tangent(Stage, Protocol):
    """`send` and `receive` see the parts of matrices that are here, the call in between whole ones,
    wherever that is: what it shall know and tell of the rows travels in X and in Q."""

    def send(self, X: Tensor, U: Tensor, rows: Rows) -> Tensor: ...
    def __call__(self, polar: Polar, X: Tensor, U: Tensor) -> Tensor: ...
    def receive(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor: ...


class Normalize(Stage, Protocol):
    def __call__(self, Q: Tensor, U: Tensor, rows: Rows) -> Tensor: ...


class Radius(Stage, Protocol):
    @property
    def signed(self) -> bool: ...
    def __call__(
        self, g: Tensor, r: Tensor, rows: Rows, lr: float | Tensor, t: float | Tensor
    ) -> Tensor: ...


@dataclass(frozen=True)
class Recipe:
    chart: Chart
    orthogonalize: Polar
    scale: Callable[[int, int], float]
    normalize: Normalize = field(default_factory=AsIs)
    radius: Radius = field(default_factory=Fixed)
    kappa: float | Tensor = 1.0  # the angular multiplier at this step
    tangent: Tangent = field(default_factory=Free)

    def over(self, sums: Whole) -> "Recipe":
        """The same, for matrices whose sums are taken by `sums`."""
        if sums is WHOLE:
            return self
        names = ("chart", "tangent", "normalize", "radius")
        return replace(self, **{name: getattr(self, name).over(sums) for name in names})

    @property
    def rows(self) -> tuple[str, ...]:
        stages = (self.chart, self.tangent, self.normalize, self.radius)
        return tuple(name for stage in stages for name in stage.rows)


def finish(equation: Equation, Q: Tensor) -> None:
    """Give a step what it waits for; it ends."""
    with suppress(StopIteration):
        equation.send(Q)


def polar_of(group: dict[str, Any]) -> Polar:
    name = group["orthogonalize"]
    return polar_express if name == TANGENT else ORTHOGONALIZERS[name]


def scale_of(group: dict[str, Any]) -> Callable[[int, int], float]:
    return SCALES[group["scale"]]


def radius_of(group: dict[str, Any]) -> Adam | LogAdam | Fixed:
    return RADII[group["radius"]](group["betas"], group["eps"])


def rows_of(group: dict[str, Any]) -> Normalize:
    return AsIs() if group["row_beta"] is None else RowSecondMoment(group["row_beta"])


def update(stack: Stack, recipe: Recipe, group: dict[str, Any]) -> Equation:
    """One step of every matrix of a stack: the family's equation, top to bottom.

    It pauses at the only place where matrices must be whole: where they lie over ranks, each rank
    computes its part of all the rest.
    """
    recipe = recipe.over(stack.sums)
    (lr, radius_lr), rows = rates(group, stack.compute), stack.gather_rows()
    at = recipe.chart.split(stack.gather_W(), stack.gather_G(), rows)
    M, X = heavy_ball(stack.gather_M(), at.T, group["momentum"], group["nesterov"])
    Q = yield recipe.tangent.send(X, at.U, rows), at.U  # the polar factor of X
    Q = recipe.tangent.receive(Q, at.U, rows)
    Q = recipe.normalize(Q, at.U, rows)
    # Decoupled decay, W <- (1 - lr weight_decay) W: since W = g U, it shrinks through g alone.
    g = at.g * (1 - lr * group["weight_decay"]) if group["weight_decay"] else at.g
    g = recipe.radius(g, at.r, rows, radius_lr, stack.t)
    W = recipe.chart.join(at, -lr * recipe.kappa * recipe.scale(*stack.shape) * Q, g, rows)
    if recipe.radius.signed and not surely_none(g < 0):
        signs = row_signs(g)  # rows whose length crossed zero turn round, with all along them
        M, rows["exp_avg"] = M * signs, rows["exp_avg"] * signs
    stack.write(W, M, rows)


def update_alone(
    stack: Stack, recipe: Recipe, group: dict[str, Any], observers: Sequence[Observer] = ()
) -> None:
    """The step of matrices that are all here."""
    equation = update(stack, recipe, group)
    X, U = next(equation)
    Q = recipe.tangent(recipe.orthogonalize, X, U)
    for observe in observers:
        observe(stack.parts, U, recipe.tangent.receive(Q, U, {}), None)
    finish(equation, Q)
