"""The fused step of a group: tables, chunks through a bounded work buffer, a graph of launches.

Kernels read all addresses and scalars from small tensors on the device. So the launches are the
same at every step, even if gradients move or the learning rate, kappa or momentum changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from angular_muown.cuda_graph import is_recording
from angular_muown.distributed.mesh import is_sharded, local, local_gradient
from angular_muown.kernels.columns import (
    BETA,
    BETA1,
    BETA2,
    DECAY,
    EPS,
    RADIUS_LR,
    ROW_BETA,
    SCALARS,
    SEED,
    STEP,
)
from angular_muown.kernels.coverage import covers, is_plain, knows, select_device
from angular_muown.kernels.launch import Batch, Choices, Chunk, Recording, divide, launch
from angular_muown.kernels.pointers import (
    Addresses,
    PinnedRing,
    addresses_of,
    build_table,
    dtypes_of,
)
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
# A quarter of a small model holds few matrices: its step would be mostly launches.
LEAST_WORK = 64 * 2**20  # bytes
SPARE_TABLES = 4  # graphs that can be recorded between two steps


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
        self.draws = any(choices.needs_seed(*dtypes) for dtypes in self.dtypes)
        self.table = build_table(params, states, layout)
        self.batches, self.margin = self._batches()
        self.budget = divide(budget, [batch.words for batch in self.batches])
        self.entries = torch.empty_like(self.table.relative, device=self.device)
        size = SCALARS * len(self.batches) + 2 * len(self.table.owner)
        self.scalars = torch.empty(size, dtype=torch.float32, device=self.device)
        self.entry_ring, self.scalar_ring = PinnedRing(self.entries), PinnedRing(self.scalars)
        self.addresses: Addresses | None = None  # that `entries` holds
        self.recorded: list[Tensor] = []  # entries that the user's graphs copy at every replay
        self.spares: list[Tensor] = []  # pinned memory for the entries of further graphs
        self.capturable = capturable
        self.owner = self.table.owner.to(self.device if capturable else "cpu")
        self.owners: list[int] = self.table.owner.tolist()
        if not capturable:  # in one tensor, so that a single addition advances all counters
            counters = torch.stack([state["step"] for state in states])
            for state, step in zip(states, counters.unbind(), strict=True):
                state["step"] = step
            self.counters = counters
        self.steps = [state["step"] for state in states]
        self.chunks: list[Chunk] = []
        self.recording = Recording([], self.device)

    def _batches(self) -> tuple[list[Batch], float]:
        iteration = self.choices.iteration
        batches, start = [], 0
        for kind, count in self.table.kinds.items():
            chain = chain_for(kind[0], kind[1], iteration)
            allocation = allocate(kind[0], kind[1], chain)
            batches.append(Batch(kind, start, count, chain, allocation))
            start += count
        return batches, iteration.margin

    @property
    def stream_words(self) -> int:
        """float16 words of each stream's part of the work buffer."""
        return max(batch.chunk_size(self.budget) * batch.words for batch in self.batches)

    @property
    def work_words(self) -> int:
        """float16 words of the work buffer."""
        return self.budget.streams * self.stream_words

    def use(self, work: Tensor) -> None:
        """Assign all chunks to streams and to parts of a work buffer.

        The longest chunk goes first, each to the stream with the least work so far.
        """
        self.chunks = []
        bias_corrections = self.scalars[SCALARS * len(self.batches) :]
        loads = [0.0] * self.budget.streams
        for cost, index, first, count in sorted(self._chunks(), reverse=True):
            batch, stream = self.batches[index], loads.index(min(loads))
            loads[stream] += cost
            entry = batch.start + first
            self.chunks.append(
                Chunk(
                    self.choices,
                    batch,
                    SCALE / self.margin,
                    first,
                    count,
                    self.entries[entry:],
                    self.scalars[SCALARS * index :],
                    bias_corrections[2 * entry :],
                    work[stream * self.stream_words :],
                    stream,
                    self.budget.cublas,
                )
            )

        self.recording = Recording(self.chunks, self.device)

    def _chunks(self) -> Iterator[tuple[float, int, int, int]]:
        """Yield the estimated time, batch, first matrix and number of matrices of each chunk."""
        for index, batch in enumerate(self.batches):
            size = batch.chunk_size(self.budget)
            for first in range(0, batch.count, size):
                count = min(size, batch.count - first)
                yield count * batch.microseconds, index, first, count

    def current_addresses(self) -> Addresses:
        """Return the addresses of weights, gradients and state.

        If nothing moved, this is the object of the last step, which compares equal at once.
        """
        current = addresses_of(self.params, self.states)
        return (
            self.addresses if self.addresses is not None and current == self.addresses else current
        )

    def advance_counters(self) -> Tensor:
        """Advance Adam's counters in place, because a user's graph may have recorded them."""
        if not self.capturable:
            self.counters += 1
            return self.counters
        torch._foreach_add_(self.steps, 1)
        return torch.stack(self.steps)

    def send(self, addresses: Addresses) -> None:
        """Copy the addresses to the device.

        While a graph is recorded, they are copied from host memory that every replay of the graph
        reads again. A replay therefore overwrites the current entries.
        """
        if is_recording():
            self.recorded.append(self.spares.pop())
            self.recorded[-1].copy_(self.table.resolve(addresses))
            self.entries.copy_(self.recorded[-1], non_blocking=True)
            self.addresses = addresses
            return
        if self.recorded or addresses != self.addresses:
            self.entry_ring.send(self.table.resolve(addresses))
            self.addresses = addresses
        if self.capturable and self.device.type == "cuda":
            while len(self.spares) < SPARE_TABLES:
                self.spares.append(torch.empty_like(self.table.relative, pin_memory=True))

    def run(self, observers: Observers = ()) -> None:
        """Launch the step, from the second one on as a graph.

        A step with observers, and one that the user records, is never a graph.
        """
        if observers:
            for chunk in self.chunks:
                self._run_observed(chunk, observers)
        elif is_recording():
            self._launch()
        else:
            self.recording.run(self._launch)

    def _launch(self) -> None:
        launch(self.chunks, self.device, self.budget.streams)

    def _run_observed(self, chunk: Chunk, observers: Observers) -> None:
        """Run a chunk and call the observers, with U from before and the angles of the new W."""
        matrices = [
            (p, W)
            for p, dtypes in zip(self.params, self.dtypes, strict=True)
            for piece in self.layout.cut(p.detach())
            if (*piece.shape[1:], *dtypes) == chunk.batch.kind
            for W in piece
        ][chunk.first : chunk.first + chunk.count]
        U = normalize_rows(torch.stack([W for _, W in matrices]).float())
        chunk.run(observed=True)
        Q, angles = chunk.Q, chunk.angles
        for observe in observers:
            observe([(p, 1) for p, _ in matrices], U, Q, angles)


# A step's scalars for the kernels: two bias corrections per matrix, a dozen per kind of matrix.

Scalar = float | Tensor
UINT32_RANGE = 1 << 32


def write_scalars(
    step: FusedStep, group: Group, recipe: Recipe, lr: Scalar, radius_lr: Scalar, t: Tensor
) -> None:
    """Write a step's scalars to the device; `t` is Adam's count per parameter, with this step."""
    if group["capturable"]:
        per_parameter = torch.stack([1 - beta ** t.double() for beta in _betas(recipe)], dim=-1)
        _write_on_device(step, group, recipe, lr, radius_lr, per_parameter[step.owner])
    else:
        values = _host_scalars(step, group, recipe, float(lr), float(radius_lr), t.tolist())
        step.scalar_ring.send(values)


def _host_scalars(
    step: FusedStep,
    group: Group,
    recipe: Recipe,
    lr: float,
    radius_lr: float,
    counts: list[float],
) -> Tensor:
    """Compute all scalars as Python floats, which cost the host less than small tensors."""
    values: list[float] = []
    for m, n, *_ in step.table.kinds:
        values += host_kind_scalars(group, recipe, lr, radius_lr, m, n)
    end = len(values)
    corrections = {t: bias_corrections(recipe, t) for t in set(counts)}
    if len(corrections) == 1:  # the usual case: all parameters have taken the same number of steps
        values += corrections[counts[0]] * len(step.owners)
    else:
        for parameter in step.owners:
            values += corrections[counts[parameter]]
    out = torch.tensor(values, dtype=torch.float32, device="cpu")
    if step.draws:
        out.view(torch.int32)[SEED:end:SCALARS] = as_int32(hash_seed(group["step"]))
    return out


def host_kind_scalars(
    group: Group, recipe: Recipe, lr: float, radius_lr: float, m: int, n: int
) -> list[float]:
    """Return the scalars of m x n matrices as Python floats."""
    step_size = lr * float(recipe.kappa) * recipe.scale(m, n)
    return kind_scalars(group, recipe, step_size, radius_lr, 1 - lr * group["weight_decay"])


def _write_on_device(
    step: FusedStep,
    group: Group,
    recipe: Recipe,
    lr: Scalar,
    radius_lr: Scalar,
    bias_corrections: Tensor,
) -> None:
    """Compute all scalars on the device, without synchronization, so that a graph can replay it."""
    kinds = step.table.kinds
    rows = step.scalars[: SCALARS * len(kinds)].view(len(kinds), SCALARS)
    for row, (m, n, *_) in zip(rows, kinds, strict=True):
        for column, value in enumerate(kind_scalars(group, recipe, 0.0, 0.0, 0.0)):
            if column not in (STEP, RADIUS_LR, DECAY, SEED):
                row[column].fill_(value)
        row[STEP] = lr * recipe.kappa * recipe.scale(m, n)
    rows[:, RADIUS_LR] = radius_lr
    rows[:, DECAY] = 1 - lr * group["weight_decay"]
    rows.view(torch.int32)[:, SEED] = as_int32(hash_seed(group["step"])).to(torch.int32)
    step.scalars[rows.numel() :].view(-1, 2).copy_(bias_corrections)


def _betas(recipe: Recipe) -> tuple[float, float]:
    return recipe.radius.betas if isinstance(recipe.radius, ByAdam) else (0.0, 0.0)


def bias_corrections(recipe: Recipe, t: float) -> list[float]:
    return [1 - beta**t for beta in _betas(recipe)]


def kind_scalars(
    group: Group, recipe: Recipe, step_size: float, radius_lr: float, decay: float
) -> list[float]:
    """Return the scalars of one kind of matrix.

    They come from the recipe's stages where possible: a user's subclass may override the group's.
    """
    scalars = [0.0] * SCALARS
    scalars[BETA] = group["momentum"]
    if isinstance(recipe.normalize, RowSecondMoment):
        scalars[ROW_BETA] = recipe.normalize.beta
    scalars[BETA1], scalars[BETA2] = _betas(recipe)
    if isinstance(recipe.radius, ByAdam):
        scalars[EPS] = recipe.radius.eps
    scalars[STEP], scalars[RADIUS_LR], scalars[DECAY] = step_size, radius_lr, decay
    return scalars


def as_int32(word: Any) -> Any:
    """Return the signed integer with the same 32 bits."""
    return (word + UINT32_RANGE // 2) % UINT32_RANGE - UINT32_RANGE // 2


# An optimizer's fused steps, one per group, and the work buffer that they share.


class FusedGroups:
    """A cache: it can be dropped at any time, and the next step builds it again."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # bytes
        self.steps: dict[int, tuple[Any, FusedStep | None, list[Tensor]]] = {}
        self.work: dict[torch.device, Tensor] = {}
        self.part_states: dict[int, State] = {}  # of DTensors, by id: this rank's parts
        self.retained: list[FusedStep | Tensor] = []  # kept alive because the user's graphs use it

    @staticmethod
    def of(groups: Sequence[Group]) -> "FusedGroups":
        """Return an empty cache with the memory budget that the groups' `workspace` allows, and
        at least LEAST_WORK."""
        matrices = [group for group in groups if group["algorithm"] == "matrix"]
        sizes = [
            g["workspace"] * local(p).numel() * p.element_size()
            for g in matrices
            for p in g["params"]
        ]
        return FusedGroups(max(LEAST_WORK, int(sum(sizes))))

    def advance(
        self,
        index: int,
        params: Sequence[Tensor],
        states: Sequence[State],
        group: Group,
        recipe: Recipe,
        learning_rates: tuple[Scalar, Scalar],
        observers: Observers = (),
    ) -> list[Tensor]:
        """Step the parameters that the kernels cover; return the others.

        Args:
            index: of the group; the key of its fused step.
            learning_rates: of the matrices, and of their row lengths.
        """
        if not knows(recipe):
            return list(params)
        if any(map(is_sharded, params)):
            if observers:  # who know whole parameters
                return list(params)
            return self._advance_parts(index, params, states, group, recipe, learning_rates)
        step, addresses, rest = self._prepare(index, params, states, group, recipe)
        if step is not None and addresses is not None:
            if is_recording() and not step.spares:
                raise RuntimeError(
                    f"{SPARE_TABLES} graphs were recorded since the last step: take a step before "
                    "recording another"
                )
            with select_device(step.device):
                step.send(addresses)
                write_scalars(step, group, recipe, *learning_rates, step.advance_counters())
                self._provide_buffer(step)
                step.run(observers)
        return rest

    def _advance_parts(
        self,
        index: int,
        params: Sequence[Tensor],
        states: Sequence[State],
        group: Group,
        recipe: Recipe,
        learning_rates: tuple[Scalar, Scalar],
    ) -> list[Tensor]:
        """Step this rank's parts of DTensors, such as whole experts, as plain parameters."""
        parts = [local(p) for p in params]
        parts_of_state = [self.part_states.setdefault(id(p), {}) for p in params]
        for p, part, state, own in zip(params, parts, states, parts_of_state, strict=True):
            own.clear()  # of what a converted state no longer has
            own.update({name: local(value) for name, value in state.items()})
            if part is not p:
                part.grad = local_gradient(p)
        try:
            rest = self.advance(index, parts, parts_of_state, group, recipe, learning_rates)
        finally:
            for p, part in zip(params, parts, strict=True):
                if part is not p:
                    part.grad = None
        for state, own in zip(states, parts_of_state, strict=True):
            state["step"] = own["step"]  # which a new step has put next to the others
        whole = dict(zip(map(id, parts), params, strict=True))
        return [whole[id(part)] for part in rest]

    def _provide_buffer(self, step: FusedStep) -> None:
        """Give a new step the work buffer that all steps on its device share; grow it if needed."""
        if step.chunks:
            return
        work, users = self.work.get(step.device), [step]
        if work is None or work.numel() < step.work_words:
            others = [other for _, other, _ in self.steps.values() if other is not None]
            users += [o for o in others if o.device == step.device and o is not step and o.chunks]
            if work is not None and any(user.recorded for user in users):
                self.retained.append(work)
            work = torch.empty(step.work_words, dtype=torch.float16, device=step.device)
            self.work[step.device] = work
        for user in users:
            user.use(work)

    def _prepare(
        self,
        index: int,
        params: Sequence[Tensor],
        states: Sequence[State],
        group: Group,
        recipe: Recipe,
    ) -> tuple[FusedStep | None, Addresses | None, list[Tensor]]:
        """Return the group's fused step, its addresses, and the parameters that are not covered.

        A new fused step replaces the previous one if parameters, settings or addresses changed.
        """
        layout, choices = Layout.of(group), Choices.of(recipe, group)
        key = (choices, layout, [id(p) for p in params])
        last_key, step, rest = self.steps.get(index, (None, None, []))
        addresses = step.current_addresses() if step is not None and key == last_key else None
        if key == last_key and (step is None or self._still_fits(step, addresses)):
            return step, addresses, rest
        if is_recording():
            raise RuntimeError(
                "parameters, gradients, state or settings have changed since the last step (or "
                "there was none): take a step before recording one"
            )
        if step is not None and step.recorded:
            self.retained.append(step)
        pairs = [(p, s) for p, s in zip(params, states, strict=True) if covers(p, s, layout)]
        pairs = [(p, s) for p, s in pairs if p.device == pairs[0][0].device]
        step = None
        if pairs:
            covered, covered_states = zip(*pairs, strict=True)
            capturable = group["capturable"]
            step = FusedStep(covered, covered_states, layout, choices, self.budget, capturable)
            addresses = step.current_addresses()
        covered_ids = {id(p) for p, _ in pairs}
        rest = [p for p in params if id(p) not in covered_ids]
        self.steps[index] = (key, step, rest)
        return step, addresses, rest

    @staticmethod
    def _still_fits(step: FusedStep, addresses: Addresses | None) -> bool:
        """True if only gradients moved, and the new ones are still covered."""
        last = step.addresses
        if addresses is None or last is None or addresses.persistent != last.persistent:
            return False
        if addresses == last:
            return True
        parameters = zip(step.params, step.states, step.dtypes, strict=True)
        return all(
            p.grad is not None and is_plain(p.grad, p.device) and dtypes_of(p, s) == dtypes
            for p, s, dtypes in parameters
        )
