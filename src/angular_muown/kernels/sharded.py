"""The fused step of matrices whose parts are on several ranks, or whose copies share the work.

The row kernels work on a rank's own rows. A matrix is whole only at its owner, for the products:

    before    W, G, M of this rank's part -> packets, in the order of their owners
    exchange  packets to the owners
    products  packets -> X -> Q, whose rows go back in the order of their ranks
    exchange  rows of Q to their ranks, and from there to other copies of the same part
    after     rows of Q and W -> W

If columns are sharded, ranks share rows, and a row's norms are sums over ranks: one packed
all-reduce for all matrices before the first round, and one in each round before `after`.

Buffers, tables and launches are planned once for a set of parameters. A step refreshes addresses
and scalars, and replays recorded launches.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor

from angular_muown.distributed.assignment import Assignment
from angular_muown.distributed.collectives import all_to_all, start_all_gather
from angular_muown.distributed.exchange import SharedParameter, run_rounds
from angular_muown.distributed.mesh import RankGroup, local
from angular_muown.distributed.reductions import max_in_place, sum_in_place
from angular_muown.kernels import products
from angular_muown.kernels.columns import (
    ADDRESSES,
    ENTRY,
    FIRST_COLUMN,
    FIRST_ROW,
    FLAT,
    PACKET,
    RESULT,
    SCALARS,
    SEED,
    STATS,
    SUMS,
)
from angular_muown.kernels.coverage import select_device
from angular_muown.kernels.fused import as_int32, bias_corrections, host_kind_scalars
from angular_muown.kernels.launch import (
    BLOCK,
    TRANSPOSE_TILE,
    TYPES,
    Choices,
    Recording,
    divide,
    launch_rows,
    words_of,
)
from angular_muown.kernels.operands import Operands
from angular_muown.kernels.pointers import PinnedRing, matrix_offsets, table_entry
from angular_muown.kernels.polar_chain import SCALE, Allocation, Product, allocate, chain_for
from angular_muown.kernels.traffic import Buffers, Traffic
from angular_muown.kernels.triton.packets import return_kernel
from angular_muown.kernels.triton.rows import (
    after_kernel,
    before_kernel,
    maxima_kernel,
    moved_kernel,
    normalize_kernel,
    restore_kernel,
    scales_kernel,
    squares_kernel,
    sums_kernel,
)
from angular_muown.params.options import learning_rates
from angular_muown.params.rounding import hash_seed


class Kind(NamedTuple):
    """What decides the code and the scalars of the row kernels."""

    group: int  # index
    rows: int  # of a matrix on this rank
    width: int  # columns on this rank
    m: int
    n: int
    dtypes: tuple[torch.dtype, ...]  # of W, G, M
    row_groups: tuple[RankGroup, ...]  # that share the rows
    scale_groups: tuple[RankGroup, ...]  # that share the scales of an 8-bit momentum


@dataclass
class LocalRows:
    """This rank's parts of some matrices of one kind: consecutive entries of the table."""

    kind: Kind
    choices: Choices
    start: int
    count: int
    stats: Tensor  # what `before` leaves for `after`
    sums: Tensor  # over all columns, if ranks share rows
    squares: Tensor  # of moved rows, likewise
    maxima: Tensor  # of the new momentum's rows, if ranks share scales

    @property
    def size(self) -> int:
        return self.count * self.kind.rows

    @property
    def summed(self) -> bool:
        return bool(self.kind.row_groups)

    @property
    def scaled(self) -> bool:
        return bool(self.kind.scale_groups)

    @property
    def types(self) -> list[Any]:
        return [TYPES[dtype] for dtype in self.kind.dtypes]


@dataclass(frozen=True)
class OwnedMatrices:
    """Matrices of one shape that this rank owns. Each has a line of addresses (see packets.py)."""

    m: int
    n: int
    column_parts: tuple[tuple[int, int], ...]
    norm: float  # Frobenius norm that the iteration starts from
    factors: bool  # NorMuon's
    chain: tuple[Product, ...]
    allocation: Allocation
    arriving: Tensor
    leaving: Tensor

    @property
    def packets(self) -> int:
        return self.m * len(self.column_parts)

    @property
    def words(self) -> int:
        """float16 words of a matrix in the work buffer, its rows' factors included."""
        return words_of(self.allocation, self.packets)


Sums = list[tuple[Tensor, tuple[RankGroup, ...]]]  # to be summed over these ranks


@dataclass
class FusedRound:
    """One round: the same three methods as `exchange.Round`."""

    step: "FusedExchange"
    traffic: Traffic
    buffers: Buffers
    local: list[LocalRows]
    owned: list[OwnedMatrices]
    squares: Sums = field(default_factory=list)
    pending: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        device = self.step.device
        self.before, self.after = Recording(self.local, device), Recording(self.local, device)
        self.products = Recording(self.owned, device)
        self.moved = Recording([one for one in self.local if one.summed], device)

    def send(self) -> None:
        self.before.run(self._before)
        if self.step.sharding.shards.communicates:
            one, sizes = self.buffers, (self.traffic.sent_sizes, self.traffic.received_sizes)
            self.pending = self._exchange(one.outgoing, one.incoming, *sizes)

    def orthogonalize(self) -> None:
        self.pending()
        self.products.run(self._products)
        if self.step.sharding.shards.communicates:
            one, sizes = self.buffers, (self.traffic.returned_sizes, self.traffic.result_sizes)
            self.pending = self._exchange(one.returning, one.outgoing, *sizes)
        else:
            self.pending = self._gather(self.buffers.returning)

    def finish(self) -> None:
        self.pending()
        if self.step.sharding.shards.communicates:
            self._gather(self.buffers.outgoing)()
        self.moved.run(self._moved)
        sum_in_place(self.squares)
        self.after.run(self._after)

    def _exchange(
        self, out: Tensor, into: Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], None]:
        group = self.step.sharding.shards.group
        return all_to_all(out[: sum(sent)], sent, into[: sum(received)], received, group)

    def _gather(self, contribution: Tensor) -> Callable[[], None]:
        """Pass this copy's part of Q on to the ranks that hold copies of the same part."""
        size = self.traffic.share
        if not size:
            return lambda: None
        gathered = self.buffers.gathered[: self.step.plan.copies * size]
        return start_all_gather(gathered, contribution[:size], self.step.sharding.replicas)

    def _before(self) -> None:
        for rows in self.local:
            kind, choices = rows.kind, rows.choices
            flags = (choices.chart, choices.nesterov, choices.maximize, choices.factors)
            launch_rows(
                before_kernel, kind.rows, kind.width, rows.count,
                self.step.entries[rows.start :], self.step.scalars_of(kind), rows.stats, rows.sums,
                rows.maxima, self.step.work, 0, rows.count, kind.rows, kind.width,
                *flags, True, rows.summed, rows.scaled, *rows.types,
                eight_bit=kind.dtypes[-1] == torch.int8, summed=rows.summed,
            )  # fmt: skip

    def _moved(self) -> None:
        for rows in self.local:
            if rows.summed:
                kind, choices = rows.kind, rows.choices
                launch_rows(
                    moved_kernel, kind.rows, kind.width, rows.count,
                    self.step.entries[rows.start :], self.step.scalars_of(kind),
                    rows.sums, rows.squares, rows.count, kind.rows, kind.width, kind.n, 1 / SCALE,
                    choices.chart, choices.factors, choices.maximize, *rows.types[:2],
                )  # fmt: skip

    def _after(self) -> None:
        for rows in self.local:
            kind, choices = rows.kind, rows.choices
            noise = choices.draws(kind.dtypes[0])
            flags = (choices.chart, choices.radius, choices.factors, choices.maximize, noise, False)
            launch_rows(
                after_kernel, kind.rows, kind.width, rows.count,
                self.step.entries[rows.start :], self.step.scalars_of(kind),
                self.step.bias_corrections[2 * rows.start :], rows.stats, rows.sums, rows.squares,
                self.step.work, 0, rows.count, kind.rows, kind.width, kind.n, 1 / SCALE,
                *flags, True, rows.summed, *rows.types,
            )  # fmt: skip

    def _products(self) -> None:
        for owned in self.owned:
            at_once = max(1, self.step.work.numel() // owned.words)
            for first in range(0, len(owned.arriving), at_once):
                self._orthogonalize(owned, first, min(at_once, len(owned.arriving) - first))

    def _orthogonalize(self, owned: OwnedMatrices, first: int, count: int) -> None:
        m, n, size, packets = owned.m, owned.n, owned.allocation.size, owned.packets
        X = self.step.work[: count * size].view(count, size)
        stats = self.step.work[count * size : count * owned.words].view(torch.float32)
        arriving, leaving = owned.arriving[first:], owned.leaving[first:]
        scale: Any = scales_kernel[(count,)]
        scale(stats, arriving, count, packets, owned.norm, True, BLOCK)
        for part, grid in self._column_parts(owned, count):
            normalize: Any = normalize_kernel[grid]
            shape = (size, count, m, n, packets)
            normalize(stats, X, X, arriving, *shape, *part, m < n, True, TRANSPOSE_TILE)
        products.run(X, m, n, owned.chain, owned.allocation, self.step.cublas)
        Q = X[:, owned.allocation.offsets[-1] :]
        if owned.factors:
            launch_rows(squares_kernel, m, n, count, stats, Q, size, count, m, n, 1 / SCALE)
            restore: Any = restore_kernel[(count,)]
            restore(arriving, stats, packets, count, m, n, BLOCK)
        for part, grid in self._column_parts(owned, count):
            copy_back: Any = return_kernel[grid]
            shape = (size, count, m, n, packets)
            copy_back(leaving, Q, stats, *shape, *part, owned.factors, TRANSPOSE_TILE)

    @staticmethod
    def _column_parts(owned: OwnedMatrices, count: int) -> list[tuple[Any, Any]]:
        """For each column part: first packet, first column, width and tiles; and the grid."""
        parts = []
        for k, (start, stop) in enumerate(owned.column_parts):
            tiles = -(-(stop - start) // TRANSPOSE_TILE)
            grid = (-(-owned.m // TRANSPOSE_TILE) * tiles, count)
            parts.append(((k * owned.m, start, stop - start, tiles), grid))
        return parts


class FusedExchange:
    """The fused step of an exchange group. It caches plans; a step is correct without it."""

    def __init__(
        self,
        members: Sequence[SharedParameter],
        operands: Operands,
        plan: Assignment,
        member_of: Sequence[int],
    ) -> None:
        self.key = fused_key(members, operands)
        self.operands = operands
        self.plan, self.member_of, self.sharding = plan, member_of, members[0].sharding
        self.device = operands.device
        self.choices = {one.index: Choices.of(one.recipe, one.group) for one in members}
        self.kinds: dict[Kind, int] = {}  # -> index of its scalars
        self.table: list[list[int]] = []
        self.member_of_entry: list[int] = []
        self.sums: Sums = []
        self.maxima: Sums = []  # likewise, but the largest
        headed = [self.choices[members[k].index].factors for k in member_of]
        traffic = [Traffic(tasks, plan, self.sharding, headed) for tasks in plan.rounds]
        pools = self._pools(traffic)
        # Rounds do not keep the exchange alive: with it, their buffers are freed at once.
        self.rounds = [
            FusedRound(
                proxy(self),
                one,
                own := one.buffers(pools, k),
                self._local(tasks, members, one, own),
                self._owned(tasks, members, one, own),
            )
            for k, (tasks, one) in enumerate(zip(plan.rounds, traffic, strict=True))
        ]
        self._allocate(members)
        self._allocate_sums(members)
        self._allocate_maxima(members)
        self.draws = any(self.choices[k.group].needs_seed(*k.dtypes) for k in self.kinds)
        self.summed = [rows for one in self.rounds for rows in one.local if rows.summed]
        self.scaled = [rows for one in self.rounds for rows in one.local if rows.scaled]
        self.sum_rows = Recording(self.summed, self.device)
        self.find_maxima = Recording(self.scaled, self.device)

    def _pools(self, traffic: list[Traffic]) -> list[list[Tensor]]:
        """Make the rounds' buffers, shared between rounds that are not in transit together.

        A round's results arrive in `outgoing` when the next round but one has been sent.
        """
        sizes = [one.buffer_sizes for one in traffic]
        return [
            [
                torch.empty(
                    max(s[k] for s in sizes[i::reach]), dtype=torch.uint8, device=self.device
                )
                for i in range(min(reach, len(sizes)))
            ]
            for k, reach in enumerate((3, 2, 2, 2))
        ]

    def _allocate(self, members: Sequence[SharedParameter]) -> None:
        words = [owned.words for one in self.rounds for owned in one.owned] or [0]
        totals = [owned.words * len(owned.arriving) for one in self.rounds for owned in one.owned]
        budget = sum(
            shared.group["workspace"] * size
            for shared, size in zip(members, self.operands.sizes, strict=True)
        )
        memory = divide(int(budget), words)
        self.cublas = memory.cublas
        # one stream: it may use the memory of all
        size = max(*words, min(memory.streams * memory.words, max(totals, default=0)))
        self.work = torch.empty(size, dtype=torch.float16, device=self.device)
        self.relative = torch.tensor(self.table, dtype=torch.int64, device="cpu")
        self.relative = self.relative.view(len(self.table), ENTRY)
        self.entry_member = torch.tensor(self.member_of_entry, dtype=torch.int64, device="cpu")
        self.entries = torch.empty(self.relative.shape, dtype=torch.int64, device=self.device)
        count = SCALARS * len(self.kinds) + 2 * len(self.table)
        self.values = torch.empty(count, dtype=torch.float32, device=self.device)
        self.address_ring, self.value_ring = PinnedRing(self.entries), PinnedRing(self.values)
        self.seen: list[list[int]] | None = None

    def bind(self, members: Sequence[SharedParameter], operands: Operands) -> None:
        """Use these tensors from now on.

        Adam's counters move into one tensor, so that a single addition advances all of them.
        """
        self.counters = torch.stack([shared.state["step"] for shared in members])
        for shared, step in zip(members, self.counters.unbind(), strict=True):
            shared.state["step"] = step
        self.operands = operands
        operands.remember(members)

    def _allocate_sums(self, members: Sequence[SharedParameter]) -> None:
        """Make the packed sums: one tensor per set of ranks for the step, and one per round."""
        # In the order of the members, which is the same on all ranks: two sets of ranks that reduce
        # in opposite orders would wait for each other.
        for ranks in dict.fromkeys(shared.sharding.row_groups for shared in members):
            step_rows = []
            for one in self.rounds:
                some = [rows for rows in one.local if rows.summed and rows.kind.row_groups == ranks]
                step_rows += some
                if some:
                    squares, own = self._packed([rows.size for rows in some])
                    one.squares.append((squares, ranks))
                    for rows, part in zip(some, own, strict=True):
                        rows.squares = part
            if step_rows:
                sums, own = self._packed([SUMS * rows.size for rows in step_rows])
                self.sums.append((sums, ranks))
                for rows, part in zip(step_rows, own, strict=True):
                    rows.sums = part

    def _allocate_maxima(self, members: Sequence[SharedParameter]) -> None:
        """Make the packed maxima, one tensor per set of ranks, in the same order on all ranks."""
        for ranks in dict.fromkeys(shared.sharding.row_groups for shared in members):
            local_rows = [rows for one in self.rounds for rows in one.local]
            some = [rows for rows in local_rows if rows.scaled and rows.kind.scale_groups == ranks]
            if some:
                maxima, own = self._packed([rows.size for rows in some], torch.float32)
                self.maxima.append((maxima, ranks))
                for rows, part in zip(some, own, strict=True):
                    rows.maxima = part

    def _packed(
        self, sizes: list[int], dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        packed = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        return packed, packed.split(sizes)

    def _find_maxima(self) -> None:
        for rows in self.scaled:
            kind, choices = rows.kind, rows.choices
            launch_rows(
                maxima_kernel, kind.rows, kind.width, rows.count,
                self.entries[rows.start :], self.scalars_of(kind), rows.stats, rows.sums,
                rows.maxima, rows.count, kind.rows, kind.width,
                choices.chart, choices.maximize, rows.summed, *rows.types,
            )  # fmt: skip

    def _sum_rows(self) -> None:
        for rows in self.summed:
            kind = rows.kind
            launch_rows(
                sums_kernel, kind.rows, kind.width, rows.count,
                self.entries[rows.start :], rows.sums, rows.count, kind.rows, kind.width,
                rows.choices.maximize, *rows.types[:2],
            )  # fmt: skip

    def _local(
        self,
        tasks: list[int],
        members: Sequence[SharedParameter],
        traffic: Traffic,
        buffers: Buffers,
    ) -> list[LocalRows]:
        kinds: dict[Kind, list[int]] = defaultdict(list)
        for i in tasks:
            shared, task = members[self.member_of[i]], self.plan.tasks[i]
            (top, bottom), (left, right) = task.parts[self.sharding.shards.index][:2]
            if bottom > top:
                flat = self.choices[shared.index].chart == FLAT
                row_groups = () if flat else shared.sharding.row_groups
                dtypes = self.operands.dtypes[self.member_of[i]]
                scale_groups = shared.sharding.row_groups if dtypes[2] == torch.int8 else ()
                sizes = (bottom - top, right - left, task.m, task.n)
                kind = Kind(shared.index, *sizes, dtypes, row_groups, scale_groups)
                kinds[kind].append(i)
        local_rows = []
        for kind, tasks_of_kind in kinds.items():
            self.kinds.setdefault(kind, len(self.kinds))
            count, start = len(tasks_of_kind), len(self.table)
            size = STATS * count * kind.rows
            stats = torch.empty(size, dtype=torch.float32, device=self.device)
            none = (stats,) * 3  # of sums and maxima, where no rank shares rows
            choices = self.choices[kind.group]
            local_rows.append(LocalRows(kind, choices, start, count, stats, *none))
            for i in tasks_of_kind:
                self._add_entry(i, members, traffic, buffers)
        return local_rows

    def _add_entry(
        self, i: int, members: Sequence[SharedParameter], traffic: Traffic, buffers: Buffers
    ) -> None:
        k, task = self.member_of[i], self.plan.tasks[i]
        shared, part = members[k], task.parts[self.sharding.shards.index]
        shape, window = local(shared.parameter).shape, shared.sharding.window
        place = matrix_offsets(shape, shared.layout, window)[task.block]
        start, state_start = place.offsets[task.number], place.state_offsets[task.number]
        dtypes = self.operands.dtypes[k]
        entry = table_entry(start, state_start, dtypes, place.stride, place.state_stride)
        entry[FIRST_ROW], entry[FIRST_COLUMN] = part.rows[0], part.columns[0]
        entry[PACKET] = traffic.packet(i, buffers)
        entry[RESULT] = traffic.result(i, buffers)
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
            if self.plan.place(i) == (traffic.copy, self.sharding.shards.index):
                task, shared = self.plan.tasks[i], members[self.member_of[i]]
                factors = self.choices[shared.index].factors
                parts = tuple(traffic.column_parts(i))
                shapes[task.m, task.n, parts, factors, shared.recipe.orthogonalize].append(i)
        owned = []
        for (m, n, parts, factors, iteration), tasks_of_shape in shapes.items():
            chain = chain_for(m, n, iteration)
            lines = traffic.owned_lines(tasks_of_shape, buffers)
            norm, allocation = SCALE / iteration.margin, allocate(m, n, chain)
            owned.append(OwnedMatrices(m, n, parts, norm, factors, chain, allocation, *lines))
        return owned

    @property
    def bias_corrections(self) -> Tensor:
        return self.values[SCALARS * len(self.kinds) :]

    def scalars_of(self, kind: Kind) -> Tensor:
        return self.values[SCALARS * self.kinds[kind] :]

    def update(self, members: Sequence[SharedParameter]) -> list[Tensor]:
        """Take a step; return the counters to advance."""
        addresses = self.operands.addresses
        if addresses != self.seen:
            entries = self.relative.clone()
            now = torch.tensor(addresses, dtype=torch.int64, device="cpu").mT
            entries[:, ADDRESSES] += now[self.entry_member]
            self.address_ring.send(entries)
            self.seen = list(addresses)
        self.value_ring.send(self._values(members))
        self.sum_rows.run(self._sum_rows)
        sum_in_place(self.sums)
        self.find_maxima.run(self._find_maxima)
        max_in_place(self.maxima)
        run_rounds(self.rounds)
        self.operands.release()
        if not self.operands.stand_in:
            return [self.counters]
        stepped = [shared for shared in members if shared.parameter.grad is not None]
        return [shared.state["step"] for shared in stepped]

    def _values(self, members: Sequence[SharedParameter]) -> Tensor:
        """The kinds' scalars, then two bias corrections for each entry."""
        by_group = {shared.index: shared for shared in members}
        values: list[float] = []
        rates = {i: learning_rates(one.group, torch.float32) for i, one in by_group.items()}
        for kind in self.kinds:
            group, recipe = by_group[kind.group].group, by_group[kind.group].recipe
            lr, radius_lr = rates[kind.group]
            values += host_kind_scalars(group, recipe, float(lr), float(radius_lr), kind.m, kind.n)
        end = len(values)
        counts = [t + 1 for t in self.counters.tolist()]
        if len(by_group) == 1 and len(set(counts)) == 1:  # the usual case
            recipe = members[0].recipe
            values += bias_corrections(recipe, counts[0]) * len(self.member_of_entry)
        else:
            for k in self.member_of_entry:
                values += bias_corrections(members[k].recipe, counts[k])
        out = torch.tensor(values, dtype=torch.float32, device="cpu")
        if self.draws:
            seeds = [as_int32(hash_seed(by_group[kind.group].group["step"])) for kind in self.kinds]
            words = torch.tensor(seeds, dtype=torch.int64, device="cpu").to(torch.int32)
            out.view(torch.int32)[SEED:end:SCALARS] = words
        return out


def advance_shards(
    known: FusedExchange | None,
    members: Sequence[SharedParameter],
    plan: Assignment,
    member_of: Sequence[int],
) -> tuple[FusedExchange, list[Tensor]]:
    """Take a step of the members, with the launches of `known` if they still fit.

    Args:
        known: what the last call returned.
        plan: the tasks of all members and their owners.
        member_of: the member of each task.

    Returns:
        What the next call takes, and the counters to advance.
    """
    fits = known is not None and known.operands.refresh(members)
    if known is None or not fits or known.key[0] != _choices(members):
        operands = Operands(members)
        if known is None or known.key != fused_key(members, operands):
            known = FusedExchange(members, operands, plan, member_of)
        known.bind(members, operands)
    with select_device(known.device):
        return known, known.update(members)


def fused_key(members: Sequence[SharedParameter], operands: Operands) -> tuple[Any, ...]:
    """What the tables and launches depend on, besides the exchange group's plan."""
    return _choices(members), operands.dtypes, operands.kept, operands.device


def _choices(members: Sequence[SharedParameter]) -> list[tuple[int, Choices]]:
    by_group = {shared.index: shared for shared in members}
    return [(i, Choices.of(shared.recipe, shared.group)) for i, shared in by_group.items()]
