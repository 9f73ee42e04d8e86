"""Assignment: which rank orthogonalizes which matrix, in which round, and how many bytes move.

It depends on shapes alone. Every rank therefore computes the same assignment without communication,
and a plan for thousands of ranks can be inspected on one machine. Ranks are numbered copy by copy:
place i in copy c is rank c * places + i.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace

import torch
from torch import Tensor

from angular_muown.params.layout import Slice2D
from angular_muown.stages.orthogonalize import GRAM_RESTART, POLAR_EXPRESS

GRAM_SUMS = -(-len(POLAR_EXPRESS) // GRAM_RESTART)  # all-reduces per polar factor
DOMINANT = 1.1  # a matrix of more than this many mean shares of a rank is reported
GRAM_BYTES = 4  # per entry, at least: the Gram matrix squares the condition number


@dataclass(frozen=True)
class MatrixTask:
    """A matrix that ranks step together."""

    name: str
    m: int
    n: int
    parts: tuple[Slice2D, ...]  # the part at each place in a copy
    width: int  # bytes per entry in transit
    operands: int = 1  # matrices of this shape sent to the owner; one comes back
    may_sum: bool = False  # True if the iteration can use summed Gram matrices
    block: int = 0  # which block of its parameter the matrix is
    number: int = 0  # and which matrix of a stack

    @property
    def cost(self) -> int:
        """Proportional to the FLOPs of an iteration, s^2 (2 l + s), for short side s and long l."""
        s, long = sorted((self.m, self.n))
        return s * s * (2 * long + s)

    @property
    def bytes(self) -> int:
        return self.m * self.n * self.width

    @property
    def others_bytes(self) -> float:
        """Approximate bytes that the owner lacks: all parts but one."""
        return self.bytes * (1 - 1 / len(self.parts))

    @property
    def sum_bytes(self) -> float:
        """Bytes that all ranks together send to sum the Gram matrices."""
        entries = GRAM_SUMS * min(self.m, self.n) ** 2
        return 2 * (len(self.parts) - 1) * entries * max(GRAM_BYTES, self.width)

    @property
    def sums(self) -> bool:
        """True if ranks should keep their parts and sum Gram matrices instead of using an owner.

        The long side has to be the sharded one, and summing has to move fewer bytes. It then takes
        fewer operations too.
        """
        if not self.may_sum or len(self.parts) == 1 or self.sum_bytes >= 2 * self.others_bytes:
            return False
        whole = (0, self.m) if self.m <= self.n else (0, self.n)
        short = [part.rows if self.m <= self.n else part.columns for part in self.parts]
        return all(side == whole for side in short)


def longest_first(costs: Sequence[int], ranks: int) -> list[int]:
    """Assign each task, the longest first, to the least loaded rank; ties go to the lower index."""
    owners, loads = [0] * len(costs), [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for task in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        owners[task] = rank
        heapreplace(loads, (load + costs[task], rank))
    return owners


@dataclass(frozen=True)
class Assignment:
    tasks: tuple[MatrixTask, ...]
    places: int  # ranks that hold the parts of one copy
    copies: int
    budget: int  # bytes per rank and round; only a single matrix may exceed it

    @cached_property
    def moved(self) -> "Assignment":
        """The same tasks with an owner for every matrix, as monitors require."""
        tasks = tuple(replace(task, may_sum=False) for task in self.tasks)
        return replace(self, tasks=tasks)

    @cached_property
    def summed(self) -> list[int]:
        """Tasks whose ranks sum Gram matrices; all others have an owner."""
        return [i for i, task in enumerate(self.tasks) if task.sums]

    @cached_property
    def owners(self) -> dict[int, int]:
        moved = [i for i, task in enumerate(self.tasks) if not task.sums]
        ranks = longest_first([self.tasks[i].cost for i in moved], self.places * self.copies)
        # Take copies in turn: each sends the others as many bytes as the copy that owns the most.
        places = (divmod(rank, self.copies) for rank in ranks)
        return {i: c * self.places + place for i, (place, c) in zip(moved, places, strict=True)}

    @cached_property
    def rounds(self) -> list[list[int]]:
        """Tasks that are in the buffers together. The rank that owns the most sets the number."""
        rounds: list[list[int]] = []
        filled: dict[int, tuple[int, int]] = {}  # by owner: its last round and the bytes in it
        share = self.budget / self.copies
        for i in sorted(self.owners, key=lambda i: (-self.tasks[i].cost, i)):
            owner, size = self.owners[i], self.tasks[i].bytes
            k, used = filled.get(owner, (0, 0))
            if used and used + size > share:
                k, used = k + 1, 0
            filled[owner] = (k, used + size)
            while len(rounds) <= k:
                rounds.append([])
            rounds[k].append(i)
        return [sorted(tasks) for tasks in rounds]

    @cached_property
    def _sizes(self) -> dict[int, Tensor]:
        """Entries of each part, by the identity of `parts`: many tasks share one tuple."""
        distinct = {id(task.parts): task.parts for task in self.tasks}
        return {
            key: torch.tensor([part.size for part in parts], dtype=torch.float64)
            for key, parts in distinct.items()
        }

    def sizes(self, task: int) -> Tensor:
        """Return the number of entries in each part of a task."""
        return self._sizes[id(self.tasks[task].parts)]

    def place(self, task: int) -> tuple[int, int]:
        """Return the copy and the place in it that own a task."""
        return divmod(self.owners[task], self.places)

    def gathered(self, tasks: Iterable[int]) -> Tensor:
        """Return the bytes that each copy contributes to the all-gather of a round, by place.

        Contributions to an all-gather have equal sizes: the largest one counts.
        """
        computed = torch.zeros(self.copies, self.places, dtype=torch.float64)
        for i in tasks if self.copies > 1 else ():
            computed[self.place(i)[0]] += self.sizes(i) * self.tasks[i].width
        return computed.amax(dim=0)

    @cached_property
    def loads(self) -> Tensor:
        loads = torch.zeros(self.places * self.copies, dtype=torch.float64)
        for task, owner in self.owners.items():
            loads[owner] += self.tasks[task].cost
        return loads

    @property
    def imbalance(self) -> float:
        """The largest load of a rank divided by the mean; 1 is balanced."""
        return float(self.loads.max() / self.loads.mean()) if self.owners else 1.0

    @property
    def dominant(self) -> tuple[str, float] | None:
        """The most expensive matrix and its cost in mean shares of a rank, if above `DOMINANT`.

        No other choice of owners could correct this imbalance.
        """
        if not self.owners:
            return None
        longest = self.tasks[max(self.owners, key=lambda i: self.tasks[i].cost)]
        shares = longest.cost / float(self.loads.mean())
        return (longest.name, shares) if shares > DOMINANT else None

    @cached_property
    def traffic(self) -> tuple[Tensor, Tensor]:
        """Bytes that each rank sends and receives in a step, not counting sums and headers."""
        sent = torch.zeros(self.copies, self.places, dtype=torch.float64)
        received = torch.zeros_like(sent)
        for i in self.owners:
            task, (copy, place) = self.tasks[i], self.place(i)
            parts = self.sizes(i) * task.width
            parts[place] = 0
            sent[copy] += task.operands * parts
            received[copy, place] += task.operands * parts.sum()
            sent[copy, place] += parts.sum()  # and back
            received[copy] += parts
        for tasks in self.rounds:
            shared = (self.copies - 1) * self.gathered(tasks)
            sent, received = sent + shared, received + shared
        return sent.flatten(), received.flatten()

    @cached_property
    def peaks(self) -> Tensor:
        """Peak bytes in each rank's communication buffers.

        A round needs parts and whole matrices, in both directions, and the gathered results. Two
        rounds are in flight at a time; kernels keep the parts of a third. Float32 copies of parts
        and the iterations' workspace are not included.
        """
        peak = torch.zeros(self.copies, self.places, dtype=torch.float64)
        for tasks in self.rounds:
            buffers = torch.zeros_like(peak)
            for i in tasks:
                task, (copy, place) = self.tasks[i], self.place(i)
                buffers[copy] += (task.operands + 1) * self.sizes(i) * task.width
                buffers[copy, place] += (task.operands + 1) * task.bytes
            buffers += (self.copies + 1) * self.gathered(tasks)
            peak = torch.maximum(peak, buffers)
        return min(2, len(self.rounds)) * peak.flatten()


MAX_RANK_LINES = 16  # a table for more ranks shows least, mean and most instead
UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass(frozen=True)
class ExchangePlan:
    """One assignment for each set of ranks that share work. Printed as a table, a line per rank."""

    assignments: Sequence[Assignment]

    def __str__(self) -> str:
        if not self.assignments:
            return "nothing is exchanged: this rank steps its parameters alone"
        return "\n\n".join(map(_table, self.assignments))


def _table(plan: Assignment) -> str:
    ranks = plan.places * plan.copies
    shape = f"{plan.copies} copies of {plan.places} parts" if plan.copies > 1 else "1 copy"
    lines = [
        f"{len(plan.tasks)} matrices over {ranks} ranks ({shape}), {len(plan.rounds)} rounds; "
        f"imbalance {plan.imbalance:.3f}"
    ]
    if plan.summed:
        moved = sum(plan.tasks[i].sum_bytes for i in plan.summed) / plan.places
        lines.append(f"{len(plan.summed)} sum Gram matrices in place, {_size(moved)} per rank")
    owned = torch.zeros(ranks)
    for owner in plan.owners.values():
        owned[owner] += 1
    sent, received = plan.traffic
    columns = (owned, plan.loads / plan.loads.mean().clamp(min=1), sent, received, plan.peaks)
    lines.append(f"{'part':>6} {'owns':>6} {'work':>6} {'sends':>9} {'receives':>9} {'buffers':>9}")
    if ranks <= MAX_RANK_LINES:
        names = [f"{i // plan.places}.{i % plan.places}" for i in range(ranks)]
        names = names if plan.copies > 1 else [str(i) for i in range(ranks)]
        lines += [_line(name, [c[i] for c in columns]) for i, name in enumerate(names)]
    else:
        measures = (("least", Tensor.min), ("mean", Tensor.mean), ("most", Tensor.max))
        lines += [_line(name, [of(column) for column in columns]) for name, of in measures]
    if plan.dominant:
        name, shares = plan.dominant
        lines.append(
            f"a single matrix, {name}, is {shares:.2f} times a rank's mean share: "
            "more ranks would not make the step faster"
        )
    return "\n".join(lines)


def _line(name: str, values: Sequence[Tensor]) -> str:
    owns, work, *sizes = map(float, values)
    return f"{name:>6} {owns:>6.4g} {work:>6.2f} " + " ".join(f"{_size(x):>9}" for x in sizes)


def _size(count: float) -> str:
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} {UNITS[-1]}"
