"""The family's equation, and what a stage must provide. A recipe has one field per stage.

Recipes are built from a group's plain values at every step (`recipe(group)`) and never stored: a
function in a group would break `torch.load(weights_only=True)`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from angular_muown.params.options import Group, learning_rates
from angular_muown.params.stacks import Stack
from angular_muown.stages.charts import Split, row_signs, surely_none
from angular_muown.stages.context import Context
from angular_muown.stages.momentum import heavy_ball
from angular_muown.stages.normalize import AsIs, RowSecondMoment
from angular_muown.stages.orthogonalize import ORTHOGONALIZERS, Orthogonalizer, polar_express
from angular_muown.stages.radius import RADII, Adam, Fixed, LogAdam
from angular_muown.stages.scale import SCALES
from angular_muown.stages.tangent import TANGENT, Free

# Called with (parameter, number of matrices) pairs; U before the step and Q, (count, m, n), of all
# of them; and the radians by which rows turned, (count, m), or None if W is not written yet.
Observer = Callable[[Sequence[tuple[Tensor, int]], Tensor, Tensor, Tensor | None], None]

# An update paused at the polar factor: it yields X and U, and is sent Q.
Equation = Generator[tuple[Tensor, Tensor], Tensor, None]


class Stage(Protocol):
    """`state_names` are the vectors that a stage keeps between steps; they start at zero.

    A name says what its vector has entries for: rows, columns or matrices (`layout.vector_axes`).
    """

    @property
    def state_names(self) -> tuple[str, ...]: ...


class Chart(Stage, Protocol):
    """Read a weight and its gradient as directions and lengths; write the moved ones back."""

    def split(self, W: Tensor, G: Tensor, context: Context) -> Split: ...
    def join(self, at: Split, step: Tensor, g: Tensor, context: Context) -> Tensor: ...


class Tangent(Stage, Protocol):
    """Relate the polar factor to the tangent space at U.

    `send` and `receive` see this rank's parts of matrices. The call in between sees whole matrices,
    perhaps on another rank. What it must know and report about rows travels in X and Q.
    """

    @property
    def needs_directions(self) -> bool:
        """True if the call uses U; otherwise U does not travel between ranks."""
        ...

    def send(self, X: Tensor, U: Tensor, context: Context) -> Tensor: ...
    def __call__(self, polar: Orthogonalizer, X: Tensor, U: Tensor) -> Tensor: ...
    def receive(self, Q: Tensor, U: Tensor, context: Context) -> Tensor: ...


class Normalize(Stage, Protocol):
    def __call__(self, Q: Tensor, context: Context) -> Tensor: ...


class Radius(Stage, Protocol):
    """Move the lengths g along their gradient r."""

    @property
    def signed(self) -> bool:
        """True if a length may cross zero."""
        ...

    def __call__(self, g: Tensor, r: Tensor, context: Context) -> Tensor: ...


@dataclass(frozen=True)
class Recipe:
    """The stages of one optimizer, at one step.

    Args:
        chart: how a weight is read as directions and lengths.
        orthogonalize: maps X to its polar factor.
        scale: s(m, n), the factor that makes one learning rate fit every shape.
        normalize: what happens to the polar factor before it becomes a step.
        radius: how lengths follow their gradient.
        kappa: the angular multiplier at this step.
        tangent: how the polar factor respects the tangent space.
    """

    chart: Chart
    orthogonalize: Orthogonalizer
    scale: Callable[[int, int], float]
    normalize: Normalize = field(default_factory=AsIs)
    radius: Radius = field(default_factory=Fixed)
    kappa: float | Tensor = 1.0
    tangent: Tangent = field(default_factory=Free)

    @property
    def state_names(self) -> tuple[str, ...]:
        stages = (self.chart, self.tangent, self.normalize, self.radius)
        return tuple(name for stage in stages for name in stage.state_names)


def resume(equation: Equation, Q: Tensor) -> None:
    """Resume a paused update with its polar factor and run it to completion."""
    with suppress(StopIteration):
        equation.send(Q)


def polar_of(group: Group) -> Orthogonalizer:
    name = group["orthogonalize"]
    return polar_express if name == TANGENT else ORTHOGONALIZERS[name]


def scale_of(group: Group) -> Callable[[int, int], float]:
    return SCALES[group["scale"]]


def radius_of(group: Group) -> Adam | LogAdam | Fixed:
    return RADII[group["radius"]](group["betas"], group["eps"])


def normalize_of(group: Group) -> Normalize:
    return AsIs() if group["row_beta"] is None else RowSecondMoment(group["row_beta"])


def update(stack: Stack, recipe: Recipe, group: Group) -> Equation:
    """Take one step of every matrix in a stack: the family's equation, top to bottom.

    It pauses where it needs whole matrices. If they are sharded, each rank computes its part of
    everything else.
    """
    lr, radius_lr = learning_rates(group, stack.compute)
    state = stack.gather_state()
    context = Context(state, stack.reductions, lr, radius_lr, stack.t)
    at = recipe.chart.split(stack.gather_W(), stack.gather_G(), context)
    M, X = heavy_ball(stack.gather_M(state), at.T, group["momentum"], group["nesterov"])
    Q = yield recipe.tangent.send(X, at.U, context), at.U  # the polar factor of X
    Q = recipe.tangent.receive(Q, at.U, context)
    Q = recipe.normalize(Q, context)
    # Decoupled decay, W <- (1 - lr weight_decay) W: since W = g U, it shrinks through g alone.
    g = at.g * (1 - lr * group["weight_decay"]) if group["weight_decay"] else at.g
    g = recipe.radius(g, at.r, context)
    W = recipe.chart.join(at, -lr * recipe.kappa * recipe.scale(*stack.shape) * Q, g, context)
    if recipe.radius.signed and not surely_none(g < 0):
        # A row whose length crossed zero turns around, and so does what is stored along it.
        signs = row_signs(g)
        M = M * signs
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"] * signs
    stack.write(W, M, state)


def update_alone(
    stack: Stack, recipe: Recipe, group: Group, observers: Sequence[Observer] = ()
) -> None:
    """Take a step of matrices that are entirely on this rank."""
    equation = update(stack, recipe, group)
    X, U = next(equation)
    Q = recipe.tangent(recipe.orthogonalize, X, U)
    for observe in observers:
        observe(stack.counts_by_parameter, U, recipe.tangent.receive(Q, U, Context({})), None)
    resume(equation, Q)
