"""A line's values on the first seed, which choose one, and how they grow at an edge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from angular_lab.experiments.definition import Line
from angular_lab.experiments.statistics import BestRate, best_rate
from angular_lab.sweeps.trials import Entry


@dataclass(frozen=True)
class Grid:
    """A line on the first seed. No best until all values are done, and none where all diverged."""

    entries: list[Entry]
    best: BestRate | None = None

    @property
    def done(self) -> bool:
        return all(entry.done for entry in self.entries)


def make_grid(line: Line, make: Callable[[float], Entry], extend: int = 0) -> Grid:
    """Its values, with those that were added at an edge: as their folders tell, or on request.
    Where all diverged, smaller ones are the edge to try."""
    values = list(line.values)
    for rounds in count():
        found = Grid([make(value) for value in values])
        if not found.done:
            return found
        best = _best(found.entries)
        edge = best.extend if best else ("below",)
        if len(edge) != 1 or len(values) < 2:  # a single value is no grid to extend
            break
        more = _next(values, edge[0])
        if rounds >= extend and not make(more).there:
            break
        values = sorted([*values, more])
    return Grid(found.entries, best)


def with_added(values: Sequence[float], there: Callable[[float], bool]) -> list[float]:
    """With those beyond the edges that a grid could have grown by, as far as they are there."""
    ordered = sorted(values)
    for edge in ("below", "above") if len(ordered) > 1 else ():
        while there(more := _next(ordered, edge)):
            ordered = sorted([*ordered, more])
    return ordered


def _best(entries: list[Entry]) -> BestRate | None:
    losses = {entry.value: entry.loss for entry in entries}
    return best_rate(losses) if any(loss < inf for loss in losses.values()) else None


def _next(values: Sequence[float], edge: str) -> float:
    """One more value at the edge, as far from it as its neighbour is, in ratio."""
    ordered = sorted(values)
    last, neighbour = (ordered[0], ordered[1]) if edge == "below" else (ordered[-1], ordered[-2])
    return last**2 / neighbour
