"""Spread: the ranks that hold parts or copies of the same matrices, and what each of them holds."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from angular_muown.layout import Layout, Window
from angular_muown.placement import dimension, is_sharded, local, own_coordinate, ranges_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Team:
    """Ranks that act together, in the order of their process group, and this one's place."""

    ranks: tuple[int, ...]
    index: int
    group: Any = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def acts(self) -> bool:
        """Whether there is anything to tell one another. One rank has no group, unless a test
        wants to see it talk to itself."""
        return self.group is not None


@dataclass(frozen=True)
class Spread:
    """How the matrices of a parameter lie over ranks that share the work on them."""

    inside: Team  # hold the parts of one copy
    replicas: Team  # hold copies of this part
    everyone: Team  # both
    windows: tuple[Window, ...]  # of each rank inside
    row_teams: tuple[Team, ...] = ()  # hold other columns of this part's rows
    column_teams: tuple[Team, ...] = ()  # hold other rows of this part's columns

    @cached_property
    def window(self) -> Window:
        return self.windows[self.inside.index]

    @cached_property
    def _parts(self) -> dict[Window, tuple[Window, ...]]:
        return {}

    def parts_of(self, block: Window) -> tuple[Window, ...]:
        """What each rank inside has of a block; one object for a block, however often asked."""
        if block not in self._parts:
            self._parts[block] = tuple(window.of_block(block) for window in self.windows)
        return self._parts[block]


def spread_of(p: Tensor, layout: Layout, copies: Team | None, name: str) -> Spread | None:
    """None where this rank steps its part of p without the others. A plain p has `copies`."""
    if is_sharded(p):
        return _spread_on_mesh(p, layout, name)
    if copies is None:
        return None
    m, n = layout.sides(p.shape)
    return Spread(_only(copies), copies, copies, (Window((0, m), (0, n), m, n),))


def _only(team: Team) -> Team:
    return Team((team.ranks[team.index],), 0)


def _spread_on_mesh(p: "DTensor", layout: Layout, name: str) -> Spread | None:
    mesh, inside, copies, axes = p.device_mesh, [], [], {}
    for i, placement in enumerate(p.placements):
        if mesh.size(i) == 1:
            continue
        if placement.is_partial():
            raise ValueError(
                f"parameter {name!r} has the placement {placement} on {mesh}: a parameter is "
                "sharded or replicated"
            )
        along = dimension(placement)
        axes[i] = None if along is None else _axis(layout, along, p.ndim, name)
        if axes[i] is None:
            copies.append(i)
        elif axes[i] != "count":
            inside.append(i)
    if not inside and not copies:
        return None
    team = team_of(mesh, inside)
    return Spread(
        team,
        team_of(mesh, copies),
        team_of(mesh, sorted(inside + copies)),
        tuple(_windows(p, layout, inside, team, name)),
        tuple(team_of(mesh, [i]) for i in inside if axes[i] == "columns"),
        tuple(team_of(mesh, [i]) for i in inside if axes[i] == "rows"),
    )


def _axis(layout: Layout, along: int, dimensions: int, name: str) -> str:
    try:
        return layout.axis(along, dimensions)
    except ValueError as error:
        raise ValueError(f"parameter {name!r} {error}") from None


def _windows(
    p: "DTensor", layout: Layout, inside: list[int], team: Team, name: str
) -> list[Window]:
    mesh, own = p.device_mesh, list(own_coordinate(p))
    sizes_of_mesh, placements, shape = mesh.shape, p.placements, p.shape
    ranks = mesh.mesh.numpy()  # a property that computes: not once for every rank
    found: dict[int, Window] = {}
    for at in product(*(range(mesh.size(i)) for i in inside)):
        coordinate = list(own)
        for i, place in zip(inside, at, strict=True):
            coordinate[i] = place
        ranges = ranges_of(shape, sizes_of_mesh, placements, coordinate)
        found[int(ranks[tuple(coordinate)])] = layout.window(ranges, shape)
        sizes = tuple(stop - start for start, stop in ranges)
        if coordinate == own and sizes != tuple(local(p).shape):
            raise ValueError(
                f"parameter {name!r} (shape {tuple(p.shape)}) with placements {p.placements} on "
                f"{mesh} should have a part of shape {sizes} here, but it has "
                f"{tuple(local(p).shape)}: such a sharding is not known"
            )
    return [found[rank] for rank in team.ranks]


def team_of_group(group: Any) -> Team:
    return Team(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group)


def team_of(mesh: Any, dims: list[int]) -> Team:
    """The ranks that differ from this one along some dimensions of a mesh."""
    own = list(mesh.get_coordinate())
    at = tuple(slice(None) if i in dims else own[i] for i in range(mesh.ndim))
    ranks = mesh.mesh[at].flatten().tolist()
    if len(ranks) == 1:
        return Team((ranks[0],), 0)
    group = _group(mesh, dims)
    ordered = sorted(ranks, key=lambda rank: dist.get_group_rank(group, rank))
    return Team(tuple(ordered), ordered.index(dist.get_rank()), group)


def _group(mesh: Any, dims: list[int]) -> Any:
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if prod(mesh.size(i) for i in dims) == dist.get_world_size():
        return dist.group.WORLD
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no names for its dimensions: give it mesh_dim_names")
    return mesh[tuple(mesh.mesh_dim_names[i] for i in dims)]._flatten().get_group()
