"""The fused step of matrices whose rows are sharded across ranks, as under FSDP2.

The row kernels work on a rank's own rows. A matrix is whole only at its owner, for the products:

    before    W, G, M of this rank's rows -> packets, in the order of their owners
    exchange  packets to the owners
    products  packets -> X -> Q, whose rows go back in the order of their ranks
    exchange  rows of Q to their ranks
    after     rows of Q and W -> W

Buffers, tables and launches are planned once for a set of parameters. A step refreshes addresses
and scalars, and replays recorded launches.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.distributed.assignment import Assignment
from angular_muown.distributed.collectives import all_to_all
from angular_muown.distributed.exchange import SharedParameter, run_rounds
from angular_muown.distributed.mesh import Sharding, local, local_gradient
from angular_muown.kernels import products
from angular_muown.kernels.columns import (
    ADDRESSES,
    ENTRY,
    FIRST_ROW,
    HEADER,
    PACKET,
    RESULT,
    ROW_STATE,
    SCALARS,
    SEED,
    STATS,
)
from angular_muown.kernels.coverage import select_device
from angular_muown.kernels.fused import as_int32, bias_corrections, host_kind_scalars
from angular_muown.kernels.launch import (
    BLOCK,
    TRANSPOSE_TILE,
    TYPES,
    Choices,
    divide,
    launch_rows,
    record,
    words_of,
)
from angular_muown.kernels.pointers import PinnedRing, table_entry
from angular_muown.kernels.polar_chain import SCALE, Allocation, Product, allocate, chain_for
from angular_muown.kernels.triton.packets import return_kernel
from angular_muown.kernels.triton.rows import (
    after_kernel,
    before_kernel,
    normalize_kernel,
    scales_kernel,
)
from angular_muown.params.options import learning_rates
from angular_muown.params.rounding import hash_seed

WORD = 2  # bytes of a float16
ALIGNMENT = 16  # bytes that a kernel loads at once


class Operands(NamedTuple):
    """The tensors of a parameter that the row kernels read and write, on this rank."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    vectors: list[Tensor | None]  # in the order of ROW_STATE

    @staticmethod
    def of(shared: SharedParameter) -> "Operands":
        """Select this rank's part; without a gradient, zeros and copies, so that nothing moves."""
        p, state = shared.parameter, shared.state
        for name in ROW_STATE:
            # The kernels read float32; a loaded state may have another dtype.
            if name in state and state[name].dtype != torch.float32:
                state[name] = state[name].float()
        vectors = [local(state[name]) if name in state else None for name in ROW_STATE]
        weight, momentum = local(p), local(state["momentum_buffer"])
        if p.grad is None:
            copies = [None if v is None else v.clone() for v in vectors]
            momentum = momentum.to(_readable(momentum), copy=True)
            return Operands(weight.clone(), torch.zeros_like(weight), momentum, copies)
        if not (_is_aligned(weight) and _is_aligned(momentum)) or momentum.dtype not in TYPES:
            # Copies stand in for them; they are stored when the step is over.
            opened = shared.opened
            opened.working = weight = _aligned(weight)
            opened.momentum = momentum = _aligned(momentum.to(_readable(momentum)))
        return Operands(weight, _aligned(local_gradient(p)), momentum, vectors)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.weight.dtype, self.gradient.dtype, self.momentum.dtype

    @property
    def addresses(self) -> list[int]:
        tensors = (self.weight, self.gradient, self.momentum, *self.vectors)
        return [0 if t is None else t.data_ptr() for t in tensors]


def _is_aligned(t: Tensor) -> bool:
    return t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0


def _aligned(t: Tensor) -> Tensor:
    """Return t, or a copy if the kernels cannot read it: FSDP2's gradients may start anywhere."""
    return t if _is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def _readable(momentum: Tensor) -> torch.dtype:
    """The dtype in which the kernels read a momentum, which may have been loaded in another."""
    return momentum.dtype if momentum.dtype in TYPES else torch.float32


class Kind(NamedTuple):
    """What decides the code and the scalars of the row kernels."""

    group: int  # index
    rows: int  # of a matrix on this rank
    m: int
    n: int
    dtypes: tuple[torch.dtype, ...]  # of W, G, M


@dataclass(frozen=True)
class LocalRows:
    """This rank's rows of some matrices of one kind: consecutive entries of the table."""

    kind: Kind
    choices: Choices
    start: int
    count: int
    stats: Tensor  # what `before` leaves for `after`


@dataclass(frozen=True)
class OwnedMatrices:
    """Matrices of one shape that this rank owns. Each has a line of addresses (see packets.py)."""

    m: int
    n: int
    chunk: int  # rows of the parameter on a rank
    norm: float  # Frobenius norm that the iteration starts from
    chain: tuple[Product, ...]
    allocation: Allocation
    arriving: Tensor
    leaving: Tensor

    @property
    def words(self) -> int:
        """float16 words of a matrix in the work buffer, its rows' factors included."""
        return words_of(self.allocation, self.m)


@dataclass
class Buffers:
    """One round's bytes in transit. Results arrive where the packets left from."""

    outgoing: Tensor
    incoming: Tensor
    returning: Tensor


@dataclass
class Traffic:
    """Where each task's rows are in a round's buffers, in bytes, and how many go to each rank."""

    to_owner: dict[int, int]  # of task: its packets in `outgoing`
    result: dict[int, int]  # its rows of Q, in `outgoing` again
    incoming: dict[tuple[int, int], int]  # of task and rank, at the owner
    returning: dict[tuple[int, int], int]
    sizes: dict[str, list[int]]

    @staticmethod
    def of(tasks: list[int], plan: Assignment, sharding: Sharding) -> "Traffic":
        ranks, me = range(sharding.shards.size), sharding.shards.index
        by_owner = {r: [i for i in tasks if plan.place(i)[1] == r] for r in ranks}

        def rows_bytes(i: int, rank: int, extra: int) -> int:
            first, stop = plan.tasks[i].parts[rank].rows
            return (stop - first) * (plan.tasks[i].n + extra) * WORD

        def lay_out(extra: int, pairs: dict[int, list[tuple[int, int]]]) -> tuple[Any, list[int]]:
            flat = [pair for r in ranks for pair in pairs[r]]
            sizes = [rows_bytes(i, rank, extra) for i, rank in flat]
            offsets = dict(zip(flat, accumulate(sizes, initial=0), strict=False))
            return offsets, [sum(rows_bytes(*pair, extra) for pair in pairs[r]) for r in ranks]

        mine = {r: [(i, me) for i in by_owner[r]] for r in ranks}
        owned = {r: [(i, r) for i in by_owner[me]] for r in ranks}
        to_owner, sent = lay_out(HEADER, mine)
        result, results = lay_out(0, mine)
        incoming, received = lay_out(HEADER, owned)
        returning, returned = lay_out(0, owned)
        sizes = {"sent": sent, "received": received, "returned": returned, "results": results}
        return Traffic(
            {i: at for (i, _), at in to_owner.items()},
            {i: at for (i, _), at in result.items()},
            incoming,
            returning,
            sizes,
        )

    @property
    def buffer_sizes(self) -> tuple[int, int, int]:
        """Bytes of the round's buffers: outgoing, incoming, returning."""
        sent, received, returned, results = map(sum, self.sizes.values())
        return max(sent, results), received, returned


@dataclass
class FusedRound:
    """One round: the same three methods as `exchange.Round`."""

    step: "FusedExchange"
    traffic: Traffic
    buffers: Buffers
    local: list[LocalRows]
    owned: list[OwnedMatrices]
    graphs: dict[str, Any] = field(default_factory=dict)
    pending: Callable[[], None] = lambda: None

    def send(self) -> None:
        self._run("before", self._before, self.local)
        self._exchange(self.buffers.outgoing, "sent", self.buffers.incoming, "received")

    def orthogonalize(self) -> None:
        self.pending()
        self._run("products", self._products, self.owned)
        self._exchange(self.buffers.returning, "returned", self.buffers.outgoing, "results")

    def finish(self) -> None:
        self.pending()
        self._run("after", self._after, self.local)

    def _exchange(self, out: Tensor, sent: str, into: Tensor, received: str) -> None:
        sizes = self.traffic.sizes
        send, receive = out[: sum(sizes[sent])], into[: sum(sizes[received])]
        group = self.step.sharding.shards.group
        self.pending = all_to_all(send, sizes[sent], receive, sizes[received], group)

    def _run(self, name: str, work: Callable[[], None], items: Sequence[Any]) -> None:
        """Launch; from the second step on, replay a recording of the launches."""
        if not items:
            return  # torch warns about an empty graph
        if self.step.device.type != "cuda" or self.step.steps == 0:
            work()
            return
        if name not in self.graphs:
            self.graphs[name] = record(work, self.step.device)
        self.graphs[name].replay()

    def _before(self) -> None:
        for rows in self.local:
            kind, choices = rows.kind, rows.choices
            flags = (choices.chart, choices.nesterov, choices.maximize)
            launch_rows(
                before_kernel, kind.rows, kind.n, rows.count,
                self.step.entries[rows.start :], self.step.scalars_of(kind), rows.stats,
                self.step.work, 0, rows.count, kind.rows, kind.n,
                *flags, True, *(TYPES[dtype] for dtype in kind.dtypes),
            )  # fmt: skip

    def _after(self) -> None:
        for rows in self.local:
            kind, choices = rows.kind, rows.choices
            noise = choices.draws(kind.dtypes[0])
            flags = (choices.chart, choices.radius, False, choices.maximize, noise, False)
            launch_rows(
                after_kernel, kind.rows, kind.n, rows.count,
                self.step.entries[rows.start :], self.step.scalars_of(kind),
                self.step.bias_corrections[2 * rows.start :], rows.stats,
                self.step.work, 0, rows.count, kind.rows, kind.n, 1 / SCALE,
                *flags, True, *(TYPES[dtype] for dtype in kind.dtypes),
            )  # fmt: skip

    def _products(self) -> None:
        for owned in self.owned:
            at_once = max(1, self.step.work.numel() // owned.words)
            for first in range(0, len(owned.arriving), at_once):
                self._orthogonalize(owned, first, min(at_once, len(owned.arriving) - first))

    def _orthogonalize(self, owned: OwnedMatrices, first: int, count: int) -> None:
        m, n, size = owned.m, owned.n, owned.allocation.size
        X = self.step.work[: count * size].view(count, size)
        stats = self.step.work[count * size : count * owned.words].view(torch.float32)
        arriving, leaving = owned.arriving[first:], owned.leaving[first:]
        parts, tiles = self.step.sharding.shards.size, -(-n // TRANSPOSE_TILE)
        grid = (-(-m // TRANSPOSE_TILE) * tiles, count)
        packets = (arriving, owned.chunk, parts)
        scale: Any = scales_kernel[(count,)]
        scale(stats, *packets, count, m, n, owned.norm, True, BLOCK)
        normalize: Any = normalize_kernel[grid]
        normalize(stats, X, X, *packets, size, count, m, n, tiles, m < n, True, TRANSPOSE_TILE)
        products.run(X, m, n, owned.chain, owned.allocation, self.step.cublas)
        Q = X[:, owned.allocation.offsets[-1] :]
        copy_back: Any = return_kernel[grid]
        copy_back(leaving, Q, size, m, n, owned.chunk, parts, tiles, TRANSPOSE_TILE)


class FusedExchange:
    """The fused step of an exchange group. It caches plans; a step is correct without it."""

    def __init__(
        self,
        members: Sequence[SharedParameter],
        operands: Sequence[Operands],
        plan: Assignment,
        member_of: Sequence[int],
    ) -> None:
        self.key = fused_key(members, operands)
        self.plan, self.member_of, self.sharding = plan, member_of, members[0].sharding
        self.device = operands[0].weight.device
        self.steps = 0
        self.kinds: dict[Kind, int] = {}  # -> index of its scalars
        self.table: list[list[int]] = []
        self.member_of_entry: list[int] = []
        traffic = [Traffic.of(tasks, plan, self.sharding) for tasks in plan.rounds]
        buffers = self._buffers(traffic)
        self.rounds = [
            FusedRound(
                self,
                one,
                own,
                self._local(tasks, members, operands, one, own),
                self._owned(tasks, members, one, own),
            )
            for tasks, one, own in zip(plan.rounds, traffic, buffers, strict=True)
        ]
        self._allocate(members, operands)

    def _buffers(self, traffic: list[Traffic]) -> list[Buffers]:
        """Make the rounds' buffers, shared between rounds that are not in transit together.

        A round's results arrive in `outgoing` when the next round but one has been sent.
        """
        columns = zip(*(one.buffer_sizes for one in traffic), strict=True)
        pools = [
            [
                torch.empty(max(sizes[i::reach]), dtype=torch.uint8, device=self.device)
                for i in range(min(reach, len(sizes)))
            ]
            for sizes, reach in zip(columns, (3, 2, 2), strict=True)
        ]
        return [Buffers(*(pool[k % len(pool)] for pool in pools)) for k in range(len(traffic))]

    def _allocate(self, members: Sequence[SharedParameter], operands: Sequence[Operands]) -> None:
        words = [owned.words for one in self.rounds for owned in one.owned] or [0]
        totals = [owned.words * len(owned.arriving) for one in self.rounds for owned in one.owned]
        budget = sum(
            shared.group["workspace"] * one.weight.nbytes
            for shared, one in zip(members, operands, strict=True)
        )
        memory = divide(int(budget), words)
        self.cublas = memory.cublas
        # one stream: it may use the memory of all
        size = max(*words, min(memory.streams * memory.words, max(totals, default=0)))
        self.work = torch.empty(size, dtype=torch.float16, device=self.device)
        self.relative = torch.tensor(self.table, dtype=torch.int64, device="cpu").view(-1, ENTRY)
        self.entry_member = torch.tensor(self.member_of_entry, dtype=torch.int64, device="cpu")
        self.entries = torch.empty(self.relative.shape, dtype=torch.int64, device=self.device)
        count = SCALARS * len(self.kinds) + 2 * len(self.table)
        self.values = torch.empty(count, dtype=torch.float32, device=self.device)
        self.address_ring, self.value_ring = PinnedRing(self.entries), PinnedRing(self.values)
        self.seen: list[list[int]] | None = None

    def _local(
        self,
        tasks: list[int],
        members: Sequence[SharedParameter],
        operands: Sequence[Operands],
        traffic: Traffic,
        buffers: Buffers,
    ) -> list[LocalRows]:
        kinds: dict[Kind, list[int]] = defaultdict(list)
        for i in tasks:
            k, task = self.member_of[i], self.plan.tasks[i]
            first, stop = task.parts[self.sharding.shards.index].rows
            if stop > first:
                kind = Kind(members[k].index, stop - first, task.m, task.n, operands[k].dtypes)
                kinds[kind].append(i)
        local_rows = []
        for kind, tasks_of_kind in kinds.items():
            self.kinds.setdefault(kind, len(self.kinds))
            shared = members[self.member_of[tasks_of_kind[0]]]
            choices = Choices.of(shared.recipe, shared.group)
            size = STATS * len(tasks_of_kind) * kind.rows
            stats = torch.empty(size, dtype=torch.float32, device=self.device)
            local_rows.append(LocalRows(kind, choices, len(self.table), len(tasks_of_kind), stats))
            for i in tasks_of_kind:
                self._add_entry(i, members, operands, traffic, buffers)
        return local_rows

    def _add_entry(
        self,
        i: int,
        members: Sequence[SharedParameter],
        operands: Sequence[Operands],
        traffic: Traffic,
        buffers: Buffers,
    ) -> None:
        k, task = self.member_of[i], self.plan.tasks[i]
        first = task.parts[self.sharding.shards.index].rows[0]
        row = members[k].blocks[task.block].rows[0] + first - members[k].sharding.window.rows[0]
        entry = table_entry(row * task.n, row, operands[k].dtypes, task.n, 1)
        entry[FIRST_ROW] = first
        entry[PACKET] = buffers.outgoing.data_ptr() + traffic.to_owner[i]
        entry[RESULT] = buffers.outgoing.data_ptr() + traffic.result[i]
        self.table.append(entry)
        self.member_of_entry.append(k)

    def _owned(
        self,
        tasks: list[int],
        members: Sequence[SharedParameter],
        traffic: Traffic,
        buffers: Buffers,
    ) -> list[OwnedMatrices]:
        shapes: dict[Any, list[int]] = defaultdict(list)
        for i in tasks:
            if self.plan.place(i)[1] == self.sharding.shards.index:
                task, shared = self.plan.tasks[i], members[self.member_of[i]]
                chunk = -(-shared.sharding.window.m // self.sharding.shards.size)
                shapes[task.m, task.n, chunk, shared.recipe.orthogonalize].append(i)
        owned = []
        for (m, n, chunk, iteration), tasks_of_shape in shapes.items():
            chain = chain_for(m, n, iteration)
            lines = [
                self._packet_addresses(tasks_of_shape, members, offsets, buffer, extra)
                for offsets, buffer, extra in (
                    (traffic.incoming, buffers.incoming, HEADER),
                    (traffic.returning, buffers.returning, 0),
                )
            ]
            allocation = allocate(m, n, chain)
            norm = SCALE / iteration.margin
            owned.append(OwnedMatrices(m, n, chunk, norm, chain, allocation, *lines))
        return owned

    def _packet_addresses(
        self,
        tasks: list[int],
        members: Sequence[SharedParameter],
        offsets: dict[tuple[int, int], int],
        buffer: Tensor,
        extra: int,
    ) -> Tensor:
        """Lines as packets.py describes them."""
        lines = []
        for i in tasks:
            task = self.plan.tasks[i]
            row_bytes = (task.n + extra) * WORD
            starts = [
                buffer.data_ptr() + offsets[i, rank] - part.rows[0] * row_bytes
                for rank, part in enumerate(task.parts)
            ]
            lines.append([members[self.member_of[i]].blocks[task.block].rows[0], *starts])
        return torch.tensor(lines, dtype=torch.int64, device="cpu").to(self.device)

    @property
    def bias_corrections(self) -> Tensor:
        return self.values[SCALARS * len(self.kinds) :]

    def scalars_of(self, kind: Kind) -> Tensor:
        return self.values[SCALARS * self.kinds[kind] :]

    def update(self, members: Sequence[SharedParameter], operands: Sequence[Operands]) -> None:
        addresses = [one.addresses for one in operands]
        if addresses != self.seen:
            entries = self.relative.clone()
            now = torch.tensor(addresses, dtype=torch.int64, device="cpu")
            entries[:, ADDRESSES] += now[self.entry_member]
            self.address_ring.send(entries)
            self.seen = addresses
        self.value_ring.send(self._values(members))
        run_rounds(self.rounds)
        self.steps += 1

    def _values(self, members: Sequence[SharedParameter]) -> Tensor:
        """The kinds' scalars, then two bias corrections for each entry."""
        by_group = {shared.index: shared for shared in members}
        values: list[float] = []
        for kind in self.kinds:
            shared = by_group[kind.group]
            group, recipe = shared.group, shared.recipe
            lr, radius_lr = (float(rate) for rate in learning_rates(group, torch.float32))
            values += host_kind_scalars(group, recipe, lr, radius_lr, kind.m, kind.n)
        end = len(values)
        counts = [(shared.index, float(shared.state["step"]) + 1) for shared in members]
        corrections = {
            (i, t): bias_corrections(by_group[i].recipe, t) for i, t in dict.fromkeys(counts)
        }
        for k in self.member_of_entry:
            values += corrections[counts[k]]
        out = torch.tensor(values, dtype=torch.float32, device="cpu")
        seeds = [as_int32(hash_seed(by_group[kind.group].group["step"])) for kind in self.kinds]
        words = torch.tensor(seeds, dtype=torch.int64, device="cpu").to(torch.int32)
        out.view(torch.int32)[SEED:end:SCALARS] = words
        return out


def advance_shards(
    known: FusedExchange | None,
    members: Sequence[SharedParameter],
    plan: Assignment,
    member_of: Sequence[int],
) -> FusedExchange:
    """Take a step of the members, with the launches of `known` if they still fit.

    Args:
        known: what the last call returned.
        plan: the tasks of all members and their owners.
        member_of: the member of each task.
    """
    operands = [Operands.of(shared) for shared in members]
    if known is None or known.key != fused_key(members, operands):
        known = FusedExchange(members, operands, plan, member_of)
    with select_device(known.device):
        known.update(members, operands)
    return known


def fused_key(members: Sequence[SharedParameter], operands: Sequence[Operands]) -> Any:
    """What the tables and launches depend on, besides the exchange group's plan."""
    by_group = {shared.index: shared for shared in members}
    choices = [(i, Choices.of(shared.recipe, shared.group)) for i, shared in by_group.items()]
    return choices, [
        (one.dtypes, one.weight.device, *(v is None for v in one.vectors)) for one in operands
    ]
