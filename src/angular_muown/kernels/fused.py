"""The fused step of a group: tables, chunks through a bounded work buffer, a graph of launches.

All addresses and numbers are read from small tensors on the device, so the launches of a step are
the same from step to step whatever moves: gradients, learning rate, kappa, momentum.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from angular_muown.cuda_graph import is_recording
from angular_muown.kernels.columns import (
    BETA,
    BETA1,
    BETA2,
    DECAY,
    EPS,
    NUMBERS,
    RADIUS_LR,
    ROW_BETA,
    SEED,
    STEP,
)
from angular_muown.kernels.coverage import covers, is_plain, knows
from angular_muown.kernels.launch import Batch, Choices, Chunk, divide, launch, record
from angular_muown.kernels.pointers import PinnedRing, Where, dtypes_of, table, where
from angular_muown.kernels.polar_chain import SCALE, allocate, chain_for
from angular_muown.params.layout import Layout
from angular_muown.params.options import Group
from angular_muown.params.rounding import hash_seed
from angular_muown.stages.charts import normalize_rows
from angular_muown.stages.context import State
from angular_muown.stages.normalize import RowSecondMoment
from angular_muown.stages.radius import ByAdam
from angular_muown.update import Observer, Recipe

Observers = Sequence[Observer]
SPARES = 4  # graphs that can be recorded between two steps


class FusedStep:
    """The covered parameters of one group."""

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[State],
        layout: Layout,
        choices: Choices,
        budget: int,
        capturable: bool,
    ) -> None:
        self.params, self.states, self.choices = list(params), list(states), choices
        self.layout = layout
        self.device = params[0].device
        self.dtypes = [dtypes_of(p, state) for p, state in zip(params, states, strict=True)]
        self.draws = any(choices.draws(dtype) for dtype, *_ in self.dtypes)
        self.known = table(params, states, layout)
        self.batches, self.margin = self._batches()
        self.room = divide(budget, [batch.words for batch in self.batches])
        self.lines = torch.empty_like(self.known.fixed, device=self.device)
        size = NUMBERS * len(self.batches) + 2 * len(self.known.owner)
        self.values = torch.empty(size, dtype=torch.float32, device=self.device)
        self.addresses, self.numbers = PinnedRing(self.lines), PinnedRing(self.values)
        self.seen: Where | None = None
        self.recorded: list[Tensor] = []  # lines that graphs of the user read at every replay
        self.spares: list[Tensor] = []  # where further such graphs may read theirs
        self.capturable = capturable
        self.owner = self.known.owner.to(self.device if capturable else "cpu")
        self.owners: list[int] = self.known.owner.tolist()
        if not capturable:  # side by side, so that one addition advances them all
            counters = torch.stack([state["step"] for state in states])
            for state, step in zip(states, counters.unbind(), strict=True):
                state["step"] = step
            self.counters = counters
        self.steps = [state["step"] for state in states]
        self.chunks: list[Chunk] = []
        self.launched = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def _batches(self) -> tuple[list[Batch], float]:
        iteration = self.choices.iteration
        batches, start = [], 0
        for kind, count in self.known.kinds.items():
            chain = chain_for(kind[0], kind[1], iteration)
            places = allocate(kind[0], kind[1], chain)
            batches.append(Batch(kind, start, count, chain, places))
            start += count
        return batches, iteration.margin

    @property
    def stream(self) -> int:
        """float16 words of a lane's part of the work buffer."""
        return max(batch.chunk(self.room) * batch.words for batch in self.batches)

    @property
    def workspace(self) -> int:
        return self.room.streams * self.stream

    def use(self, work: Tensor) -> None:
        """Lay the chunks out in a buffer of `workspace` words: the longest first, each in the lane
        that has least to do."""
        self.chunks, self.graph = [], None
        ages = self.values[NUMBERS * len(self.batches) :]
        loads = [0.0] * self.room.streams
        for cost, index, first, count in sorted(self._pieces(), reverse=True):
            batch, stream = self.batches[index], loads.index(min(loads))
            loads[stream] += cost
            at = batch.start + first
            self.chunks.append(
                Chunk(
                    self.choices,
                    batch,
                    SCALE / self.margin,
                    first,
                    count,
                    self.lines[at:],
                    self.values[NUMBERS * index :],
                    ages[2 * at :],
                    work[stream * self.stream :],
                    stream,
                    self.room.cublas,
                )
            )

    def _pieces(self) -> Iterator[tuple[float, int, int, int]]:
        """Modelled time, batch, and which of its matrices."""
        for index, batch in enumerate(self.batches):
            size = batch.chunk(self.room)
            for first in range(0, batch.count, size):
                count = min(size, batch.count - first)
                yield count * batch.microseconds, index, first, count

    def look(self) -> Where:
        """Where weights, gradients and state lie now; the last answer itself where nothing moved,
        because the same object is compared at once."""
        places = where(self.params, self.states)
        return self.seen if self.seen is not None and places == self.seen else places

    def count(self) -> Tensor:
        """Advance Adam's counters, in place: a graph of the user has recorded these tensors."""
        if not self.capturable:
            self.counters += 1
            return self.counters
        torch._foreach_add_(self.steps, 1)
        return torch.stack(self.steps)

    def refresh(self, places: Where) -> None:
        """Bring addresses onto the device. While a graph is recorded, from a place on the host
        that the graph reads again whenever it is replayed; it then overwrites ours."""
        if is_recording():
            self.recorded.append(self.spares.pop())
            self.recorded[-1].copy_(self.known.lines(places))
            self.lines.copy_(self.recorded[-1], non_blocking=True)
            self.seen = places
            return
        if self.recorded or places != self.seen:
            self.addresses.send(self.known.lines(places))
            self.seen = places
        if self.capturable and self.device.type == "cuda":
            while len(self.spares) < SPARES:
                self.spares.append(torch.empty_like(self.known.fixed, pin_memory=True))

    def run(self, observers: Observers = ()) -> None:
        """The launches, from the second step on as one graph: a hundred launches cost the host
        more time than the GPU needs for a small model. An observed step is launched as it is."""
        if observers:
            for chunk in self.chunks:
                self._show(chunk, observers)
        elif self.device.type != "cuda" or is_recording():
            launch(self.chunks, self.device, self.room.streams)
        elif not self.launched:  # compiles, and allocates what libraries allocate at first use
            launch(self.chunks, self.device, self.room.streams)
            self.launched = True
        else:
            if self.graph is None:
                self.graph = record(self.chunks, self.device, self.room.streams)
            self.graph.replay()

    def _show(self, chunk: Chunk, observers: Observers) -> None:
        """Run a chunk and tell about it: U from before, the angles from the kernel that wrote W."""
        found = [
            (p, W)
            for p, kind in zip(self.params, self.dtypes, strict=True)
            for piece in self.layout.cut(p.detach())
            if (*piece.shape[1:], *kind) == chunk.batch.kind
            for W in piece
        ][chunk.first : chunk.first + chunk.count]
        U = normalize_rows(torch.stack([W for _, W in found]).float())
        chunk.run(observed=True)
        Q, angles = chunk.Q, chunk.angles
        for observe in observers:
            observe([(p, 1) for p, _ in found], U, Q, angles)


# A step's scalars for the kernels: two per matrix, a dozen per kind of matrix.

Rate = float | Tensor
WORDS = 1 << 32  # values of a 32-bit word


def write_numbers(
    step: FusedStep, group: Group, recipe: Recipe, lr: Rate, radius_lr: Rate, t: Tensor
) -> None:
    """`t`: Adam's count of each parameter, this step included."""
    if group["capturable"]:
        ages = torch.stack([1 - beta ** t.double() for beta in _betas(recipe)], dim=-1)[step.owner]
        _on_device(step, group, recipe, lr, radius_lr, ages)
    else:
        step.numbers.send(_on_host(step, group, recipe, float(lr), float(radius_lr), t.tolist()))


def _on_host(
    step: FusedStep,
    group: Group,
    recipe: Recipe,
    lr: float,
    radius_lr: float,
    counts: list[float],
) -> Tensor:
    """In double precision until they are written down; plain numbers cost the host less than
    tensors of a few elements."""
    values: list[float] = []
    for m, n, *_ in step.known.kinds:
        turn = lr * float(recipe.kappa) * recipe.scale(m, n)
        values += _line(group, recipe, turn, radius_lr, 1 - lr * group["weight_decay"])
    end = len(values)
    ages = {t: [1 - beta**t for beta in _betas(recipe)] for t in set(counts)}
    if len(ages) == 1:  # all parameters of one age, as nearly always
        values += ages[counts[0]] * len(step.owners)
    else:
        for parameter in step.owners:
            values += ages[counts[parameter]]
    out = torch.tensor(values, dtype=torch.float32, device="cpu")
    if step.draws:
        out.view(torch.int32)[SEED:end:NUMBERS] = _signed(hash_seed(group["step"]))
    return out


def _on_device(
    step: FusedStep,
    group: Group,
    recipe: Recipe,
    lr: Rate,
    radius_lr: Rate,
    ages: Tensor,
) -> None:
    """The same without a look from the host: what a graph can replay."""
    kinds = step.known.kinds
    lines = step.values[: NUMBERS * len(kinds)].view(len(kinds), NUMBERS)
    for row, (m, n, *_) in zip(lines, kinds, strict=True):
        for column, value in enumerate(_line(group, recipe, 0.0, 0.0, 0.0)):
            if column not in (STEP, RADIUS_LR, DECAY, SEED):
                row[column].fill_(value)
        row[STEP] = lr * recipe.kappa * recipe.scale(m, n)
    lines[:, RADIUS_LR] = radius_lr
    lines[:, DECAY] = 1 - lr * group["weight_decay"]
    lines.view(torch.int32)[:, SEED] = _signed(hash_seed(group["step"])).to(torch.int32)
    step.values[lines.numel() :].view(-1, 2).copy_(ages)


def _betas(recipe: Recipe) -> tuple[float, float]:
    return recipe.radius.betas if isinstance(recipe.radius, ByAdam) else (0.0, 0.0)


def _line(group: Group, recipe: Recipe, turn: float, radius_lr: float, decay: float) -> list[float]:
    """A stage's numbers are its own: a member of the user's may have others than the group."""
    line = [0.0] * NUMBERS
    line[BETA] = group["momentum"]
    if isinstance(recipe.normalize, RowSecondMoment):
        line[ROW_BETA] = recipe.normalize.beta
    line[BETA1], line[BETA2] = _betas(recipe)
    if isinstance(recipe.radius, ByAdam):
        line[EPS] = recipe.radius.eps
    line[STEP], line[RADIUS_LR], line[DECAY] = turn, radius_lr, decay
    return line


def _signed(word: Any) -> Any:
    return (word + WORDS // 2) % WORDS - WORDS // 2


# An optimizer's fused steps, one per group, and the work buffer that they share.


class FusedGroups:
    """Holds nothing that a step needs to be right: dropped at any time, it is made again."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # bytes
        self.steps: dict[int, tuple[Any, FusedStep | None, list[Tensor]]] = {}
        self.work: dict[torch.device, Tensor] = {}
        self.kept: list[FusedStep | Tensor] = []  # what graphs of the user read

    @staticmethod
    def of(groups: Sequence[Group]) -> "FusedGroups":
        """With the work buffer that the groups' `workspace` allows."""
        matrices = [group for group in groups if group["algorithm"] == "matrix"]
        sizes = [
            g["workspace"] * p.numel() * p.element_size() for g in matrices for p in g["params"]
        ]
        return FusedGroups(int(sum(sizes)))

    def advance(
        self,
        index: int,
        params: Sequence[Tensor],
        states: Sequence[State],
        group: Group,
        recipe: Recipe,
        rates: tuple[float | Tensor, float | Tensor],
        observers: Observers = (),
    ) -> list[Tensor]:
        """Step what the kernels cover; what they do not is returned."""
        if not knows(recipe):
            return list(params)
        step, places, rest = self._prepared(index, params, states, group, recipe)
        if step is not None and places is not None:
            if is_recording() and not step.spares:
                raise RuntimeError(
                    f"{SPARES} graphs were recorded since the last step: take one in between"
                )
            device = torch.cuda.device(step.device) if step.device.type == "cuda" else nullcontext()
            with device:
                step.refresh(places)
                write_numbers(step, group, recipe, *rates, step.count())
                self._lend(step)
                step.run(observers)
        return rest

    def _lend(self, step: FusedStep) -> None:
        """One buffer for all steps on a device; it grows with the first step of each of them."""
        if step.chunks:
            return
        work, users = self.work.get(step.device), [step]
        if work is None or work.numel() < step.workspace:
            others = [other for _, other, _ in self.steps.values() if other is not None]
            users += [o for o in others if o.device == step.device and o is not step and o.chunks]
            if work is not None and any(user.recorded for user in users):
                self.kept.append(work)
            work = torch.empty(step.workspace, dtype=torch.float16, device=step.device)
            self.work[step.device] = work
        for user in users:
            user.use(work)

    def _prepared(
        self,
        index: int,
        params: Sequence[Tensor],
        states: Sequence[State],
        group: Group,
        recipe: Recipe,
    ) -> tuple[FusedStep | None, Where | None, list[Tensor]]:
        layout, choices = Layout.of(group), Choices.of(recipe, group)
        key = (choices, layout, [id(p) for p in params])
        known, step, rest = self.steps.get(index, (None, None, []))
        places = step.look() if step is not None and key == known else None
        if key == known and (step is None or self._still_fits(step, places)):
            return step, places, rest
        if is_recording():
            raise RuntimeError(
                "parameters, gradients, state or settings have changed since the last step (or "
                "there was none): take a step before recording one"
            )
        if step is not None and step.recorded:
            self.kept.append(step)
        pairs = [(p, s) for p, s in zip(params, states, strict=True) if covers(p, s, layout)]
        own = [(p, s) for p, s in pairs if p.device == pairs[0][0].device]
        step = None
        if own:
            covered, kept = zip(*own, strict=True)
            capturable = group["capturable"]
            step = FusedStep(covered, kept, layout, choices, self.budget, capturable)
            places = step.look()
        taken = {id(p) for p, _ in own}
        rest = [p for p in params if id(p) not in taken]
        self.steps[index] = (key, step, rest)
        return step, places, rest

    @staticmethod
    def _still_fits(step: FusedStep, places: Where | None) -> bool:
        """Gradients may come at new places; weights and state that moved are looked at anew."""
        if places is None or step.seen is None or places.own != step.seen.own:
            return False
        if places == step.seen:
            return True
        known = zip(step.params, step.states, step.dtypes, strict=True)
        return all(
            p.grad is not None and is_plain(p.grad, p.device) and dtypes_of(p, s) == kind
            for p, s, kind in known
        )
