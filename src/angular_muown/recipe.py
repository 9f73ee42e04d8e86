"""A recipe: one field per arrow of the flow in `engine.update`, and what each stage must offer.

Recipes are made from a param group's plain values at every step (`recipe(group)`), never stored:
a function in a group would break `torch.load(weights_only=True)`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from torch import Tensor

from angular_muown.stages.charts import Rows, Split
from angular_muown.stages.normalize import AsIs, RowSecondMoment
from angular_muown.stages.orthogonalize import ORTHOGONALIZERS, polar_express
from angular_muown.stages.radius import RADII, Adam, Fixed, LogAdam
from angular_muown.stages.scale import SCALES
from angular_muown.stages.sums import WHOLE, Whole
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
