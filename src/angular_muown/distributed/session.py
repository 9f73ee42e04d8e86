"""Sharing: the steps of parameters that lie over ranks, from the plan to the last round.

Every rank goes through the same collectives whatever its gradients: sizes follow from shapes
alone, and a parameter without a gradient takes part with zeros and stays as it is. So ranks that
disagree get an error; none of them waits for ever.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from angular_muown.distributed.agreement import Agreement
from angular_muown.distributed.assignment import Assignment, ExchangePlan, Job
from angular_muown.distributed.exchange import Journey, Road, Work
from angular_muown.distributed.mesh import (
    Spread,
    Team,
    has_ranks,
    is_sharded,
    local,
    spread_of,
    team_of,
    team_of_group,
)
from angular_muown.distributed.reductions import Parts
from angular_muown.kernels.coverage import runs_on
from angular_muown.params.layout import Layout
from angular_muown.params.options import Group, parameter_names, seed
from angular_muown.params.stacks import Piece, Stack, kind_of
from angular_muown.stages.orthogonalize import SUMMABLE, polar_of_parts
from angular_muown.stages.tangent import Free
from angular_muown.update import Equation, Observer, Recipe, finish, update


class Sharing:
    """Parameters with the same ranks inside a copy and the same copies."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.key = key_of(works)
        self.spread = works[0].spread  # teams are the same for all, windows are not
        found = [(job, number) for number, work in enumerate(works) for job in jobs_of(work)]
        self.numbers = [number for _, number in found]  # the work of each job
        # Not of the parts, which differ: all ranks have to find the same rounds.
        sizes = [works[number].group["workspace"] * job.bytes for job, number in found]
        places, copies = self.spread.inside.size, self.spread.replicas.size
        jobs = tuple(job for job, _ in found)
        self.plan = Assignment(jobs, places, copies, int(sum(sizes) / places))
        self.agreement = Agreement(self.spread.everyone, works)

    def run(self, works: Sequence[Work], observers: Sequence[Observer]) -> None:
        work_of = [works[number] for number in self.numbers]
        pieces = [single for work in works for single in singles(work)]
        plan = self.plan.moved if observers else self.plan
        road = Road(self.spread, plan, work_of, observers)

        def start(jobs: list[int]) -> list[tuple[Stack, list[int], Equation]]:
            found = list(self._stacks(jobs, pieces, work_of))
            works = [work_of[ids[0]] for _, ids in found]
            return [
                (stack, ids, update(stack, work.recipe, work.group))
                for (stack, ids), work in zip(found, works, strict=True)
            ]

        for _, ids, equation in start(plan.summed):
            X, _ = next(equation)
            job, work = self.plan.jobs[ids[0]], work_of[ids[0]]
            sums = sums_of(work, (job.m, job.n))
            finish(equation, polar_of_parts(work.recipe.orthogonalize, X, sums))
        travel(road, start)

    def _stacks(
        self, jobs: list[int], pieces: list[Piece], work_of: list[Work]
    ) -> Iterator[tuple[Stack, list[int]]]:
        """As `views.stacks`, with an order and a choice that are the same on every rank."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for i in jobs:
            parts = self.plan.jobs[i].parts
            groups[work_of[i].index, parts, kind_of(pieces[i])].append(i)
        for ids in groups.values():
            work, sides = work_of[ids[0]], pieces[ids[0]].sides
            stack = [pieces[i] for i in ids]
            yield Stack(stack, work.group["maximize"], work.noise, sums_of(work, sides)), ids


def travel(road: Road, start: Any) -> None:
    """Depart a round ahead, and finish a round behind what the owners work on."""
    before, now = None, None
    for jobs in (*road.plan.rounds, None, None):
        ahead = None if jobs is None else Journey(road, jobs, start(jobs)).depart()
        if now is not None:
            now.work()
        if before is not None:
            before.arrive()
        before, now = now, ahead


def sums_of(work: Work, sides: tuple[int, int]) -> Parts:
    return Parts(sides, work.spread.row_teams, work.spread.column_teams)


def singles(work: Work) -> Iterator[Piece]:
    for piece in work.leaf.pieces(work.recipe.rows):
        yield from piece.singles


def jobs_of(work: Work) -> list[Job]:
    """The matrices of a parameter, in the order of `singles`."""
    layout, spread = work.layout, work.spread
    m, n = spread.window.m, spread.window.n
    count = layout.canonical(local(work.parameter)).shape[0]
    plain = type(work.recipe.tangent) is Free
    summable = plain and work.recipe.orthogonalize in SUMMABLE
    found = []
    for b, block in enumerate(layout.grid(m, n)):
        parts = spread.parts_of(block)
        for e in range(count):
            name = f"{work.name}[{b}, {e}]"
            width, operands = work.wire.itemsize, 1 if plain else 2
            found.append(Job(name, block.m, block.n, parts, width, operands, summable))
    return found


def key_of(works: Sequence[Work]) -> Any:
    """What a plan depends on."""
    return [
        (
            (work.name, work.parameter.shape, work.parameter.dtype),
            work.spread,
            work.layout,
            work.wire,
            work.recipe.orthogonalize,
            type(work.recipe.tangent) is Free,
            work.group["workspace"],
        )
        for work in works
    ]


def holders_of_copies(p: Tensor, process_group: Any) -> Team | None:
    """Ranks that share the work on a plain parameter, because they all have it."""
    if process_group is False or not has_ranks():
        return None
    if process_group is None and runs_on(p.device):
        return None  # by kernels every rank steps its copy faster than it could fetch the result
    team = team_of_group(dist.group.WORLD if process_group is None else process_group)
    return team if team.size > 1 else None


def plan_of(works: Sequence[Work]) -> ExchangePlan:
    return ExchangePlan([sharing.plan for sharing, _ in Exchanges().of(works)])


def teams_of(p: Tensor, process_group: Any) -> Sequence[Team]:
    """Ranks that own other matrices of p than this one."""
    if is_sharded(p):
        return [team_of(p.device_mesh, [i]) for i in range(p.device_mesh.ndim)]
    team = holders_of_copies(p, process_group)
    return () if team is None else (team,)


class Exchanges:
    """All of an optimizer. Holds nothing that a step needs to be right; never saved."""

    def __init__(self) -> None:
        self.known: dict[Any, Sharing] = {}
        self.teams: list[tuple[int, ...]] = []  # ranks that shared the last step
        # by group and place in it
        self.places: dict[tuple[int, int], tuple[Any, Spread | None]] = {}
        self.alike: dict[Any, Spread | None] = {}  # one for all parameters that lie the same way

    def works(self, group: Group, index: int, recipe: Recipe, process_group: Any) -> list[Work]:
        """The parameters of a group that lie over ranks, or that ranks have copies of."""
        layout, found = Layout.of(group), []
        names = parameter_names(group, index)
        for at, (p, name) in enumerate(zip(group["params"], names, strict=True)):
            team = None if is_sharded(p) else holders_of_copies(p, process_group)
            if (team is None and not is_sharded(p)) or p.ndim < 2:  # flattened: refused later
                continue
            place = (p.device_mesh, p.placements) if is_sharded(p) else (team,)
            key = (layout, p.shape, *place)
            known = self.places.get((index, at))
            if known is None or known[0] != key:
                alike = (*key, local(p).shape)
                if alike not in self.alike:
                    self.alike[alike] = spread_of(p, layout, team, name)
                known = self.places[index, at] = (key, self.alike[alike])
            if known[1] is not None:
                found.append(Work(name, p, known[1], layout, recipe, group, index, seed(group)))
        return found

    def of(self, works: Sequence[Work]) -> Iterator[tuple[Sharing, list[Work]]]:
        groups: dict[Any, list[Work]] = defaultdict(list)
        for work in works:
            groups[work.spread.inside, work.spread.replicas].append(work)
        for teams, members in groups.items():
            known = self.known.get(teams)
            if known is None or known.key != key_of(members):
                known = self.known[teams] = Sharing(members)
            yield known, members

    def check(self, works: Sequence[Work], groups: Sequence[Group], observed: bool) -> None:
        """Whether the ranks are about to do the same."""
        for sharing, members in self.of(works):
            sharing.agreement.check(members, groups, observed)

    def run(self, works: Sequence[Work], observers: Sequence[Observer] = ()) -> None:
        for sharing, members in self.of(works):
            sharing.run(members, observers)
