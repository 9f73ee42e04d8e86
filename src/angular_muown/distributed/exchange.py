"""The exchange: matrices that lie over ranks, whole at their owners for the polar factor.

A step of such matrices pauses in `update.update` where it needs them whole. A round of them makes
a journey: every rank sends its parts to the owners, the owners orthogonalize, the parts of the
result come back, and ranks that hold copies of one part give each other what their owners made.
While the owners are at work on one round, the next is on its way.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, promote_types

from angular_muown.distributed.assignment import Assignment
from angular_muown.distributed.collectives import all_gather, swap
from angular_muown.distributed.mesh import Spread, local
from angular_muown.params.layout import Layout
from angular_muown.params.stacks import Leaf, Stack
from angular_muown.stages.orthogonalize import SUMMABLE, iteration_dtype
from angular_muown.stages.tangent import Free
from angular_muown.update import Equation, Observer, Recipe, finish

Start = Callable[[list[int]], list[tuple[Stack, list[int], Equation]]]


@dataclass
class Work:
    """A parameter of a step that ranks share."""

    name: str
    parameter: Tensor
    spread: Spread
    layout: Layout
    recipe: Recipe
    group: dict[str, Any]
    index: int  # of the group
    noise: int | Tensor | None = None
    opened: Leaf | None = None

    @property
    def leaf(self) -> Leaf:
        assert self.opened is not None, "a work is opened before its step"
        return self.opened

    @property
    def wire(self) -> torch.dtype:
        """What entries travel as: what the polar factor is computed in anyway."""
        if self.group["wire_dtype"] is not None:
            return getattr(torch, self.group["wire_dtype"])
        part = local(self.parameter)
        iterates = self.recipe.orthogonalize in SUMMABLE and type(self.recipe.tangent) is Free
        return iteration_dtype(part) if iterates else promote_types(part.dtype, torch.float32)


@dataclass
class Road:
    """What a journey needs to know."""

    spread: Spread
    plan: Assignment
    work_of: list[Work]  # by job
    observers: Sequence[Observer]


@dataclass
class Journey:
    """One round: depart, work, arrive."""

    road: Road
    jobs: list[int]
    steps: list[tuple[Stack, list[int], Equation]]
    operands: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # our parts, by job
    results: dict[int, Tensor] = field(default_factory=dict)
    sent: Any = None

    def __post_init__(self) -> None:
        plan = self.road.plan
        self.by_owner: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in self.jobs:
            self.by_owner[plan.place(i)].append(i)

    def of_copy(self, copy: int) -> list[int]:
        """Jobs whose owners are in a copy, owner by owner."""
        places = range(self.road.plan.places)
        return [i for place in places for i in self.by_owner.get((copy, place), ())]

    def owned_by(self, place: int) -> list[int]:
        return self.by_owner.get((self.road.spread.replicas.index, place), [])

    def depart(self) -> "Journey":
        for _, jobs, equation in self.steps:
            X, U = next(equation)
            for j, job in enumerate(jobs):
                self.operands[job] = (X[j], U[j])[: self._operands(job)]
        inside = self.road.spread.inside
        if inside.acts:
            out = [
                [self._packed(job, t) for job in self.owned_by(place) for t in self.operands[job]]
                for place in range(inside.size)
            ]
            mine = self.owned_by(inside.index)
            sizes = [sum(map(self._arriving(place), mine)) for place in range(inside.size)]
            self.sent = swap(out, sizes, inside.group, self._device)
        return self

    def work(self) -> None:
        """The polar factors of what is ours, batched by shape, and their way back."""
        inside = self.road.spread.inside
        mine = self.owned_by(inside.index)
        whole = self._assembled(mine) if inside.acts else {i: self.operands[i] for i in mine}
        self.operands, self.sent = {}, None
        batches: dict[Any, list[int]] = defaultdict(list)
        for i in mine:
            job, work = self.road.plan.jobs[i], self.road.work_of[i]
            batches[job.m, job.n, work.index, work.wire].append(i)
        for batch in batches.values():
            self._orthogonalize(batch, whole)
        if inside.acts:
            out = [
                [
                    self._packed(i, _part(self.results[i], self.road.plan.jobs[i].parts[place]))
                    for i in mine
                ]
                for place in range(inside.size)
            ]
            sizes = [sum(map(self._returning, self.owned_by(p))) for p in range(inside.size)]
            self.results = {}
            self.sent = swap(out, sizes, inside.group, self._device)

    def _orthogonalize(self, batch: list[int], whole: dict[int, tuple[Tensor, ...]]) -> None:
        recipe = self.road.work_of[batch[0]].recipe
        dtype = self.road.work_of[batch[0]].leaf.compute
        operands = [
            torch.stack([whole[i][k] for i in batch]).to(dtype) for k in range(len(whole[batch[0]]))
        ]
        X, U = operands if len(operands) == 2 else (operands[0], operands[0])
        try:
            Q = recipe.tangent(recipe.orthogonalize, X, U)
        except Exception as error:
            names = ", ".join(dict.fromkeys(self.road.work_of[i].name for i in batch))
            error.add_note(f"in the polar factor of {names}")
            raise
        for observe in self.road.observers:
            parts = [(self.road.work_of[i].leaf.parameter, 1) for i in batch]
            observe(parts, U, recipe.tangent.receive(Q, U, {}), None)
        self.results.update(zip(batch, Q, strict=True))

    def arrive(self) -> None:
        """Q for our parts, and the end of the steps."""
        inside = self.road.spread.inside
        if inside.acts:
            received = self.sent()
            for place in range(inside.size):
                at = 0
                for i in self.owned_by(place):
                    self.results[i], at = self._unpacked(i, received[place], at, inside.index)
        if self.road.spread.replicas.acts:
            self._share()
        for stack, jobs, equation in self.steps:
            Q = torch.stack([self.results[i].to(stack.compute) for i in jobs])
            finish(equation, Q)

    def _share(self) -> None:
        """Copies of our part give us what their owners made of it, and we give ours."""
        team, plan = self.road.spread.replicas, self.road.plan
        place = self.road.spread.inside.index
        size = int(plan.gathered(self.jobs)[place])
        own = torch.zeros(size, dtype=torch.uint8, device=self._device)
        packed = [self._packed(i, self.results[i]) for i in self.of_copy(team.index)]
        if packed:
            torch.cat(packed, out=own[: sum(t.numel() for t in packed)])
        all_of_it = torch.empty(team.size * size, dtype=torch.uint8, device=self._device)
        if size:  # copies of an empty part have nothing to give
            all_gather(all_of_it, own, team)
        for copy in range(team.size):
            buffer = all_of_it[copy * size : (copy + 1) * size]
            at = 0
            for i in self.of_copy(copy):
                self.results[i], at = self._unpacked(i, buffer, at, place)

    def _assembled(self, mine: list[int]) -> dict[int, tuple[Tensor, ...]]:
        received, found = self.sent(), {}
        at = [0] * len(received)
        for i in mine:
            job = self.road.plan.jobs[i]
            wholes = []
            for _ in range(self._operands(i)):
                X = torch.empty(job.m, job.n, dtype=self.road.work_of[i].wire, device=self._device)
                for place, buffer in enumerate(received):
                    part, at[place] = self._unpacked(i, buffer, at[place], place)
                    _part(X, job.parts[place]).copy_(part)
                wholes.append(X)
            found[i] = tuple(wholes)
        return found

    @property
    def _device(self) -> torch.device:
        return self.road.work_of[self.jobs[0]].leaf.working.device

    def _operands(self, job: int) -> int:
        return 2 if self.road.observers else self.road.plan.jobs[job].operands

    def _arriving(self, place: int) -> Callable[[int], int]:
        jobs = self.road.plan.jobs
        return lambda i: jobs[i].parts[place].size * jobs[i].width * self._operands(i)

    def _returning(self, i: int) -> int:
        job = self.road.plan.jobs[i]
        return job.parts[self.road.spread.inside.index].size * job.width

    def _packed(self, job: int, part: Tensor) -> Tensor:
        wire = self.road.work_of[job].wire
        part = part.to(wire).contiguous()
        # Not flatten(): a contiguous tensor of one entry may have any stride.
        return part.as_strided((part.numel(),), (1,)).view(torch.uint8)

    def _unpacked(self, i: int, buffer: Tensor, at: int, place: int) -> tuple[Tensor, int]:
        job, wire = self.road.plan.jobs[i], self.road.work_of[i].wire
        part = job.parts[place]
        stop = at + part.size * job.width
        found = buffer[at:stop]
        if found.storage_offset() % job.width:  # behind narrower entries
            found = found.clone()
        (top, bottom), (left, right) = part.rows, part.columns
        return found.view(wire).view(bottom - top, right - left), stop


def _part(X: Tensor, window: Any) -> Tensor:
    return X[slice(*window.rows), slice(*window.columns)]
