"""Traffic: where the packets of a round are in this rank's buffers, in bytes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from angular_muown.distributed.assignment import Assignment
from angular_muown.distributed.mesh import Sharding
from angular_muown.kernels.columns import HEADER

WORD = 2  # bytes of a float16
Pair = tuple[int, int]  # a task, and the rank that holds a part of its matrix


@dataclass
class Buffers:
    """The bytes of a round in transit.

    Q's rows arrive where the packets left from. If copies share the work, those of all copies are
    gathered behind each other. Without ranks that hold other parts, the packets stay where they are
    written, and `returning` is what this copy contributes.
    """

    outgoing: Tensor
    incoming: Tensor
    returning: Tensor
    gathered: Tensor


@dataclass
class Traffic:
    """The order of a round's packets in its buffers, and how many bytes go to each rank.

    Args:
        tasks: of the round.
        headed: for each task of the plan, True if its packets have a header on the way back too.
    """

    tasks: list[int]
    plan: Assignment
    sharding: Sharding
    headed: Sequence[bool]
    sent: dict[Pair, int] = field(init=False)  # this rank's packets, in `outgoing`
    received: dict[Pair, int] = field(init=False)  # those of its matrices, in `incoming`
    returned: dict[Pair, int] = field(init=False)  # in `returning`
    results: dict[int, int] = field(init=False)  # of task: this rank's part of Q
    share: int = 0  # bytes that every copy contributes

    def __post_init__(self) -> None:
        shards = self.sharding.shards
        self.copy = self.sharding.replicas.index if self.plan.copies > 1 else 0
        owned: dict[Pair, list[int]] = defaultdict(list)
        for i in self.tasks:
            owned[self.plan.place(i)].append(i)
        self._owned, ranks = owned, range(shards.size)
        here = [[(i, shards.index) for i in owned[self.copy, r]] for r in ranks]
        mine = [[(i, r) for i in owned[self.copy, shards.index]] for r in ranks]
        self.sent, self.sent_sizes = self._lay_out(here, True)
        self.received, self.received_sizes = self._lay_out(mine, True)
        self.returned, self.returned_sizes = self._lay_out(mine, False)
        self._lay_out_results()

    def _lay_out_results(self) -> None:
        shards, copies = self.sharding.shards, range(self.plan.copies)
        totals, offsets = [], []
        for copy in copies:
            pairs = [[(i, shards.index) for i in self._owned[copy, r]] for r in range(shards.size)]
            where, sizes = self._lay_out(pairs, False)
            offsets.append(where)
            totals.append(sum(sizes))
            if copy == self.copy:
                self.result_sizes = sizes
        self.share = max(totals) if self.plan.copies > 1 else 0
        self.results = {
            i: copy * self.share + at for copy in copies for (i, _), at in offsets[copy].items()
        }

    def _lay_out(self, pairs: list[list[Pair]], there: bool) -> tuple[dict[Pair, int], list[int]]:
        """Return the offset of every pair's packets, and the bytes of each list of pairs."""
        flat = [pair for some in pairs for pair in some]
        sizes = [self._bytes(*pair, there) for pair in flat]
        offsets = dict(zip(flat, accumulate(sizes, initial=0), strict=False))
        return offsets, [sum(self._bytes(*pair, there) for pair in some) for some in pairs]

    def _bytes(self, i: int, rank: int, there: bool) -> int:
        rows, _ = self.plan.tasks[i].parts[rank][:2]
        return (rows[1] - rows[0]) * self.row_bytes(i, rank, there)

    def row_bytes(self, i: int, rank: int, there: bool) -> int:
        """Return the bytes of a packet of a rank's part, on the way there or back."""
        start, stop = self.plan.tasks[i].parts[rank].columns
        return (stop - start + HEADER * (there or self.headed[i])) * WORD

    @property
    def buffer_sizes(self) -> tuple[int, int, int, int]:
        """Bytes of the round's buffers: outgoing, incoming, returning, gathered."""
        sent, results = sum(self.sent_sizes), sum(self.result_sizes)
        gathered = self.plan.copies * self.share
        if not self.sharding.shards.communicates:
            return sent, 0, max(results, self.share), gathered
        received, returned = sum(self.received_sizes), sum(self.returned_sizes)
        return max(sent, results, self.share), received, returned, gathered

    def buffers(self, pools: Sequence[Sequence[Tensor]], round_number: int) -> Buffers:
        """Select the buffers of this round from each pool, which take turns."""
        outgoing, incoming, returning, gathered = (p[round_number % len(p)] for p in pools)
        if not self.sharding.shards.communicates:
            incoming = outgoing
        return Buffers(outgoing, incoming, returning, gathered)

    def packet(self, i: int, buffers: Buffers) -> int:
        """Return the address where this rank writes its packets of a task, or 0."""
        at = self.sent.get((i, self.sharding.shards.index))
        return 0 if at is None else buffers.outgoing.data_ptr() + at

    def result(self, i: int, buffers: Buffers) -> int:
        """Return the address where this rank's part of Q arrives."""
        if self.share:
            return buffers.gathered.data_ptr() + self.results[i]
        if self.sharding.shards.communicates:
            return buffers.outgoing.data_ptr() + self.results[i]
        return buffers.returning.data_ptr() + self.results[i]

    def owned_lines(self, tasks: Iterable[int], buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Return the address of every packet of some owned matrices, there and back."""
        return (
            self._lines(tasks, self.received, buffers.incoming, True),
            self._lines(tasks, self.returned, buffers.returning, False),
        )

    def _lines(
        self, tasks: Iterable[int], offsets: dict[Pair, int], buffer: Tensor, there: bool
    ) -> Tensor:
        """Return lines as packets.py describes them."""
        lines = []
        for i in tasks:
            task, columns = self.plan.tasks[i], self.column_parts(i)
            line = torch.zeros(len(columns), task.m, dtype=torch.int64, device="cpu")
            for rank, part in enumerate(task.parts):
                if part.size:
                    (first, stop), step = part.rows, self.row_bytes(i, rank, there)
                    start = buffer.data_ptr() + offsets[i, rank]
                    end = start + (stop - first) * step
                    addresses = torch.arange(start, end, step, device="cpu")
                    line[columns.index(part.columns), first:stop] = addresses
            lines.append(line.flatten())
        return torch.stack(lines).to(buffer.device)

    def column_parts(self, i: int) -> list[Pair]:
        """Return the ranges of columns that ranks hold of a matrix."""
        return sorted({part.columns for part in self.plan.tasks[i].parts if part.size})
