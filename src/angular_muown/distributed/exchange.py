"""The exchange: sharded matrices become whole at their owners for the polar factor.

`update.update` pauses where it needs whole matrices. One round takes some of them through three
stages: every rank sends its parts to the owners; the owners orthogonalize and send parts of the
result back; ranks that hold copies of the same part pass on what their owners computed. While the
owners work on one round, the next one is in transit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, promote_types

from angular_muown.distributed.assignment import Assignment, MatrixTask
from angular_muown.distributed.collectives import all_gather, swap
from angular_muown.distributed.mesh import Sharding, local
from angular_muown.params.layout import Layout, Slice2D
from angular_muown.params.options import Group
from angular_muown.params.stacks import OpenParameter, Stack
from angular_muown.stages.context import Context, State
from angular_muown.stages.orthogonalize import Iteration, iteration_dtype
from angular_muown.update import Equation, Observer, Recipe, resume


@dataclass
class SharedParameter:
    """A parameter whose step is shared between ranks."""

    name: str
    parameter: Tensor
    sharding: Sharding
    layout: Layout
    recipe: Recipe
    group: Group
    index: int  # of the group
    by_kernels: bool = False  # True if the kernels cover its step
    exchange: int = 0  # the same number for parameters that are exchanged together
    noise: int | Tensor | None = None
    state: State = field(default_factory=dict)
    _opened: OpenParameter | None = None

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything about the parameter that a plan depends on."""
        return (
            (self.name, self.parameter.shape, self.parameter.dtype, self.index),
            self.sharding,
            self.layout,
            self.wire_dtype,
            self.recipe.orthogonalize,
            self.recipe.tangent.needs_directions,
            self.group["workspace"],
            self.by_kernels,
        )

    @property
    def opened(self) -> OpenParameter:
        """The parameter open for this step; `close` ends that."""
        if self._opened is None:
            self._opened = OpenParameter(self.parameter, self.state, self.layout, self.sharding)
        return self._opened

    def close(self) -> None:
        """End the step: store what it computed elsewhere, and keep no tensor of it."""
        if self._opened is not None:
            self._opened.close()
        self._opened, self.state = None, {}

    @property
    def blocks(self) -> list[Slice2D]:
        """The matrices that the parameter is cut into, as parts of the whole."""
        return self.layout.grid(self.sharding.window.m, self.sharding.window.n)

    @property
    def iterates(self) -> bool:
        """True if the polar factor is computed by matrix products alone."""
        is_iteration = isinstance(self.recipe.orthogonalize, Iteration)
        return is_iteration and not self.recipe.tangent.needs_directions

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of entries in transit: by default, the one the polar factor is computed in."""
        if self.group["wire_dtype"] is not None:
            return getattr(torch, self.group["wire_dtype"])
        part = local(self.parameter)
        return iteration_dtype(part) if self.iterates else promote_types(part.dtype, torch.float32)


PausedStack = tuple[Stack, list[int], Equation]  # with the number of each matrix's task


@dataclass(frozen=True)
class Exchange:
    """What all rounds of a step have in common."""

    sharding: Sharding
    plan: Assignment
    parameter_of: list[SharedParameter]  # by task
    observers: Sequence[Observer]
    start: Callable[[list[int]], list[PausedStack]]  # begin the updates of these tasks

    @property
    def device(self) -> torch.device:
        return self.parameter_of[0].opened.working.device

    def rounds(self) -> "Iterator[Round]":
        for tasks in self.plan.rounds:
            yield Round(self, tasks, self.start(tasks))


class RoundMethods(Protocol):
    """The stages of a round, in this order."""

    def send(self) -> None: ...
    def orthogonalize(self) -> None: ...
    def finish(self) -> None: ...


def run_rounds(rounds: Iterable[RoundMethods]) -> None:
    """Send one round ahead of the one that the owners work on, and finish one behind it."""
    before, now = None, None
    for ahead in chain(rounds, (None, None)):
        if ahead is not None:
            ahead.send()
        if now is not None:
            now.orthogonalize()
        if before is not None:
            before.finish()
        before, now = now, ahead


@dataclass
class Round:
    """Tasks that travel to their owners and back together."""

    exchange: Exchange
    tasks: list[int]
    paused: list[PausedStack]
    operands: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # this rank's, by task
    results: dict[int, Tensor] = field(default_factory=dict)
    received: Callable[[], list[Tensor]] | None = None  # waits for the collective in flight

    def __post_init__(self) -> None:
        self.by_owner: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in self.tasks:
            self.by_owner[self.exchange.plan.place(i)].append(i)

    def send(self) -> None:
        """Run the updates up to their pause, and send this rank's parts to the owners."""
        for _, tasks, equation in self.paused:
            X, U = next(equation)
            for j, i in enumerate(tasks):
                self.operands[i] = (X[j], U[j])[: self._operand_count(i)]
        shards = self.exchange.sharding.shards
        if not shards.communicates:
            return
        out = [
            [self._pack(i, t) for i in self._owned_by(place) for t in self.operands[i]]
            for place in range(shards.size)
        ]
        mine = self._owned_by(shards.index)
        sizes = [
            sum(self._part_bytes(i, place) * self._operand_count(i) for i in mine)
            for place in range(shards.size)
        ]
        self.received = swap(out, sizes, shards.group, self.exchange.device)

    def orthogonalize(self) -> None:
        """Compute the polar factors that this rank owns, batched by shape, and send them back."""
        shards = self.exchange.sharding.shards
        mine = self._owned_by(shards.index)
        whole = self._assemble(mine) if shards.communicates else self.operands
        self.operands = {}
        batches: dict[tuple[int, int, int, torch.dtype], list[int]] = defaultdict(list)
        for i in mine:
            task, shared = self._task(i), self._shared(i)
            batches[task.m, task.n, shared.index, shared.wire_dtype].append(i)
        for batch in batches.values():
            self._orthogonalize_batch(batch, whole)
        if not shards.communicates:
            return
        out = [
            [self._pack(i, _part(self.results[i], self._task(i).parts[place])) for i in mine]
            for place in range(shards.size)
        ]
        sizes = [
            sum(self._part_bytes(i, shards.index) for i in self._owned_by(place))
            for place in range(shards.size)
        ]
        self.results = {}
        self.received = swap(out, sizes, shards.group, self.exchange.device)

    def _orthogonalize_batch(self, batch: list[int], whole: dict[int, tuple[Tensor, ...]]) -> None:
        shared = [self._shared(i) for i in batch]
        recipe, dtype = shared[0].recipe, shared[0].opened.compute
        operands = [
            torch.stack([whole[i][k] for i in batch]).to(dtype) for k in range(len(whole[batch[0]]))
        ]
        X, U = operands if len(operands) == 2 else (operands[0], operands[0])
        try:
            Q = recipe.tangent(recipe.orthogonalize, X, U)
        except Exception as error:
            names = ", ".join(dict.fromkeys(one.name for one in shared))
            error.add_note(f"in the polar factor of {names}")
            raise
        for observe in self.exchange.observers:
            parameters = [(one.parameter, 1) for one in shared]
            observe(parameters, U, recipe.tangent.receive(Q, U, Context({})), None)
        self.results.update(zip(batch, Q, strict=True))

    def finish(self) -> None:
        """Receive Q for this rank's parts and run the updates to completion."""
        shards = self.exchange.sharding.shards
        if self.received is not None:
            for place, buffer in enumerate(self.received()):
                offset = 0
                for i in self._owned_by(place):
                    self.results[i], offset = self._unpack(i, buffer, offset, shards.index)
        if self.exchange.sharding.replicas.communicates:
            self._share_with_replicas()
        for stack, tasks, equation in self.paused:
            resume(equation, torch.stack([self.results[i].to(stack.compute) for i in tasks]))

    def _share_with_replicas(self) -> None:
        """Gather what the owners in each copy computed for this rank's part."""
        replicas, place = self.exchange.sharding.replicas, self.exchange.sharding.shards.index
        size, device = int(self.exchange.plan.gathered(self.tasks)[place]), self.exchange.device
        mine = torch.zeros(size, dtype=torch.uint8, device=device)
        packed = [self._pack(i, self.results[i]) for i in self._owned_in_copy(replicas.index)]
        if packed:
            torch.cat(packed, out=mine[: sum(t.numel() for t in packed)])
        gathered = torch.empty(replicas.size * size, dtype=torch.uint8, device=device)
        if size:  # copies of an empty part have nothing to send
            all_gather(gathered, mine, replicas)
        for copy in range(replicas.size):
            buffer, offset = gathered[copy * size : (copy + 1) * size], 0
            for i in self._owned_in_copy(copy):
                self.results[i], offset = self._unpack(i, buffer, offset, place)

    def _assemble(self, mine: list[int]) -> dict[int, tuple[Tensor, ...]]:
        """Assemble whole matrices from the received parts."""
        assert self.received is not None
        buffers, whole = self.received(), {}
        offsets = [0] * len(buffers)
        for i in mine:
            task, dtype = self._task(i), self._shared(i).wire_dtype
            operands = []
            for _ in range(self._operand_count(i)):
                X = torch.empty(task.m, task.n, dtype=dtype, device=self.exchange.device)
                for place, buffer in enumerate(buffers):
                    part, offsets[place] = self._unpack(i, buffer, offsets[place], place)
                    _part(X, task.parts[place]).copy_(part)
                operands.append(X)
            whole[i] = tuple(operands)
        return whole

    def _task(self, i: int) -> MatrixTask:
        return self.exchange.plan.tasks[i]

    def _shared(self, i: int) -> SharedParameter:
        return self.exchange.parameter_of[i]

    def _owned_by(self, place: int) -> list[int]:
        """Return the tasks of the owner at a place in this rank's copy."""
        return self.by_owner.get((self.exchange.sharding.replicas.index, place), [])

    def _owned_in_copy(self, copy: int) -> list[int]:
        """Return the tasks of all owners in a copy, owner by owner."""
        places = range(self.exchange.plan.places)
        return [i for place in places for i in self.by_owner.get((copy, place), ())]

    def _operand_count(self, i: int) -> int:
        return 2 if self.exchange.observers else self._task(i).operands

    def _part_bytes(self, i: int, place: int) -> int:
        return self._task(i).parts[place].size * self._task(i).width

    def _pack(self, i: int, part: Tensor) -> Tensor:
        part = part.to(self._shared(i).wire_dtype).contiguous()
        # Not flatten(): a contiguous tensor of one entry may have any stride.
        return part.as_strided((part.numel(),), (1,)).view(torch.uint8)

    def _unpack(self, i: int, buffer: Tensor, start: int, place: int) -> tuple[Tensor, int]:
        """Return the part that starts at byte `start`, and the byte where the next part starts."""
        task, stop = self._task(i), start + self._part_bytes(i, place)
        data = buffer[start:stop]
        if data.storage_offset() % task.width:  # unaligned, because it follows narrower entries
            data = data.clone()
        (top, bottom), (left, right) = task.parts[place].rows, task.parts[place].columns
        return data.view(self._shared(i).wire_dtype).view(bottom - top, right - left), stop


def _part(X: Tensor, window: Slice2D) -> Tensor:
    return X[slice(*window.rows), slice(*window.columns)]
