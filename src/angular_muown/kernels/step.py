"""The fused step of a group: tables, chunks through a bounded work buffer, a graph of launches.

All addresses and numbers are read from small tensors on the device, so the launches of a step are
the same from step to step whatever moves: gradients, learning rate, kappa, momentum.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from angular_muown.kernels.chunks import Choices, Chunk, words
from angular_muown.kernels.dispatch import ITERATIONS
from angular_muown.kernels.lanes import LANES, launch, side_stream
from angular_muown.kernels.schedule import SCALE, allocate, chain_for
from angular_muown.kernels.tables import ROW_STATE, Kind, table
from angular_muown.views import Layout

NUMBERS = 12  # scalars per kind of matrix; named in rows.py


class FusedStep:
    """The covered parameters of one group."""

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        layout: Layout,
        choices: Choices,
        budget: int,
    ) -> None:
        self.params, self.states, self.choices = list(params), list(states), choices
        self.device = params[0].device
        self.gradients = [p.grad.dtype for p in params if p.grad is not None]
        self.known = table(params, states, layout)
        self.triples, self.margin = ITERATIONS[choices.iteration]
        self.budget = budget // (2 * LANES)  # float16 words of a lane
        self.lines = torch.empty_like(self.known.fixed, device=self.device)
        size = NUMBERS * len(self.known.kinds) + 2 * len(self.known.owner)
        self.values = torch.empty(size, dtype=torch.float32, device=self.device)
        self.seen: list[tuple[int, int, int]] = []
        self.recorded: list[Tensor] = []
        # Counters of one group side by side, so that one addition advances them all.
        self.steps = torch.stack([state["step"] for state in states])
        self.owner = self.known.owner.to(self.steps.device)
        self.rows: list[dict[str, Tensor]] = []
        for state, step in zip(states, self.steps.unbind(), strict=True):
            state["step"] = step
            self.rows.append({k: state[k] for k in ("step", *ROW_STATE) if k in state})
        self.chunks: list[Chunk] = []
        self.launched = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def _chunk_count(self, kind: Kind, count: int) -> int:
        """Matrices of a kind at a time: as many as fit, evenly."""
        places = allocate(kind[0], kind[1], chain_for(kind[0], kind[1], self.triples))
        fitting = max(1, self.budget // words(kind, places))
        return -(-count // -(-count // fitting))

    @property
    def lane(self) -> int:
        """float16 words of a lane's part of the work buffer."""
        kinds = self.known.kinds.items()
        plans = (
            (kind, allocate(*kind[:2], chain_for(*kind[:2], self.triples))) for kind, _ in kinds
        )
        return max(
            self._chunk_count(k, self.known.kinds[k]) * words(k, places) for k, places in plans
        )

    def use(self, work: Tensor) -> None:
        """Lay the chunks out in a buffer of LANES * self.lane words."""
        self.chunks, self.graph = [], None
        start, ages = 0, self.values[NUMBERS * len(self.known.kinds) :]
        for index, (kind, count) in enumerate(self.known.kinds.items()):
            chain = chain_for(kind[0], kind[1], self.triples)
            places, size = allocate(kind[0], kind[1], chain), self._chunk_count(kind, count)
            for first in range(start, start + count, size):
                place = len(self.chunks) % LANES * self.lane
                self.chunks.append(
                    Chunk(
                        self.choices,
                        kind,
                        chain,
                        places,
                        SCALE / self.margin,
                        min(size, start + count - first),
                        self.lines[first:],
                        self.values[NUMBERS * index :],
                        ages[2 * first :],
                        work[place:],
                    )
                )
            start += count

    def look(self) -> list[tuple[int, int, int]]:
        """Where weights, gradients and momenta lie now."""
        grads: list[Any] = [p.grad for p in self.params]
        return [
            (p.data_ptr(), grad.data_ptr(), state["momentum_buffer"].data_ptr())
            for p, grad, state in zip(self.params, grads, self.states, strict=True)
        ]

    def owns_state(self) -> bool:
        """Whether the row state is still the tensors that the table points at."""
        return all(
            state[name] is kept
            for state, row in zip(self.states, self.rows, strict=True)
            for name, kept in row.items()
        )

    def refresh(self, places: list[tuple[int, int, int]]) -> None:
        """Bring addresses onto the device. While a graph is recorded, from a place on the host
        that the graph may read again whenever it is replayed."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.recorded[-1].copy_(self.known.lines(places, self.rows))
            self.lines.copy_(self.recorded[-1], non_blocking=True)
            self.seen = []
        elif places != self.seen:
            if not self.seen and self.device.type == "cuda":
                self.recorded.append(torch.empty_like(self.known.fixed, pin_memory=True))
            send(self.known.lines(places, self.rows), self.lines)
            self.seen = places

    def run(self) -> None:
        """The launches, from the second step on as one graph: a hundred launches cost the host
        more time than the GPU needs for a small model."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            launch(self.chunks, self.device)
        elif not self.launched:  # compiles, and allocates what libraries allocate at first use
            launch(self.chunks, self.device)
            self.launched = True
        else:
            if self.graph is None:
                self.graph = self._capture()
            self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), side_stream(self.device, "capture")
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # thread_local: other threads (data loaders, NCCL's watchdog) may use the GPU meanwhile
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch(self.chunks, self.device)
            finally:
                graph.capture_end()
        return graph


def send(values: Tensor, to: Tensor) -> None:
    if to.device.type == "cuda":
        values = values.pin_memory()
    to.copy_(values, non_blocking=True)
