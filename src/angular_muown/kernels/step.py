"""The fused step of a group: tables, chunks through a bounded work buffer, a graph of launches.

All addresses and numbers are read from small tensors on the device, so the launches of a step are
the same from step to step whatever moves: gradients, learning rate, kappa, momentum.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from angular_muown.capture import is_recording
from angular_muown.kernels.chunks import Batch, Choices, Chunk
from angular_muown.kernels.columns import NUMBERS
from angular_muown.kernels.dispatch import ITERATIONS
from angular_muown.kernels.lanes import launch, record
from angular_muown.kernels.mailbox import Mailbox
from angular_muown.kernels.room import divide
from angular_muown.kernels.schedule import SCALE, allocate, chain_for
from angular_muown.kernels.tables import Where, dtypes_of, table, where
from angular_muown.layout import Layout
from angular_muown.recipe import Observer
from angular_muown.stages.charts import normalize_rows

Observers = Sequence[Observer]
SPARES = 4  # graphs that can be recorded between two steps


class FusedStep:
    """The covered parameters of one group."""

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
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
        self.addresses, self.numbers = Mailbox(self.lines), Mailbox(self.values)
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
        triples, margin = ITERATIONS[self.choices.iteration]
        batches, start = [], 0
        for kind, count in self.known.kinds.items():
            chain = chain_for(kind[0], kind[1], triples)
            places = allocate(kind[0], kind[1], chain)
            batches.append(Batch(kind, start, count, chain, places))
            start += count
        return batches, margin

    @property
    def lane(self) -> int:
        """float16 words of a lane's part of the work buffer."""
        return max(batch.chunk(self.room) * batch.words for batch in self.batches)

    @property
    def workspace(self) -> int:
        return self.room.lanes * self.lane

    def use(self, work: Tensor) -> None:
        """Lay the chunks out in a buffer of `workspace` words: the longest first, each in the lane
        that has least to do."""
        self.chunks, self.graph = [], None
        ages = self.values[NUMBERS * len(self.batches) :]
        loads = [0.0] * self.room.lanes
        for cost, index, first, count in sorted(self._pieces(), reverse=True):
            batch, lane = self.batches[index], loads.index(min(loads))
            loads[lane] += cost
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
                    work[lane * self.lane :],
                    lane,
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
            launch(self.chunks, self.device, self.room.lanes)
        elif not self.launched:  # compiles, and allocates what libraries allocate at first use
            launch(self.chunks, self.device, self.room.lanes)
            self.launched = True
        else:
            if self.graph is None:
                self.graph = record(self.chunks, self.device, self.room.lanes)
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
