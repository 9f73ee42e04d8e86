"""Assignment: which rank orthogonalizes which matrix, in which round, and what that moves.

Arithmetic on shapes alone, so every rank finds the same without asking, and a plan for thousands
of ranks can be looked at on one machine. Ranks are numbered replica by replica: rank (c, i) of
copy c and place i inside it is c * places + i.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace

import torch
from torch import Tensor

from angular_muown.params.layout import Slice2D
from angular_muown.stages.orthogonalize import GRAM_RESTART, POLAR_EXPRESS

GRAM_SUMS = -(-len(POLAR_EXPRESS) // GRAM_RESTART)  # all-reduces of a Gram matrix
DOMINANT = 1.1  # times the mean share of a rank
GRAM_BYTES = 4  # of an entry: the Gram matrix squares the condition number


@dataclass(frozen=True)
class MatrixTask:
    """A matrix that lies over ranks."""

    name: str
    m: int
    n: int
    parts: tuple[Slice2D, ...]  # what each rank inside has of it
    width: int  # bytes on the wire of an entry
    operands: int = 1  # matrices of this shape that go to the owner; one comes back
    may_sum: bool = False  # whether the method allows the Gram way

    @property
    def cost(self) -> int:
        """Proportional to the operations of an iteration: s^2 (2 l + s)."""
        s, long = sorted((self.m, self.n))
        return s * s * (2 * long + s)

    @property
    def bytes(self) -> int:
        return self.m * self.n * self.width

    @property
    def others_bytes(self) -> float:
        """What does not lie at the owner, about: all of it but one part."""
        return self.bytes * (1 - 1 / len(self.parts))

    @property
    def sum_bytes(self) -> float:
        """That all ranks together send to add up the Gram matrices."""
        entries = GRAM_SUMS * min(self.m, self.n) ** 2
        return 2 * (len(self.parts) - 1) * entries * max(GRAM_BYTES, self.width)

    @property
    def sums(self) -> bool:
        """Whether every rank inside should keep its part and add up Gram matrices: where the long
        side is spread, and that moves fewer bytes. Then it takes fewer operations too."""
        if not self.may_sum or len(self.parts) == 1 or self.sum_bytes >= 2 * self.others_bytes:
            return False
        whole = (0, self.m) if self.m <= self.n else (0, self.n)
        short = [part.rows if self.m <= self.n else part.columns for part in self.parts]
        return all(side == whole for side in short)


def longest_first(costs: Sequence[int], ranks: int) -> list[int]:
    """An owner for each job: the longest first, to whom has least to do; ties go by number."""
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
    places: int  # ranks inside a copy
    copies: int
    budget: int  # bytes of a rank's work in a round, exceeded by a single matrix only

    @cached_property
    def moved(self) -> "Assignment":
        """The same with every matrix whole at an owner, where it can be looked at."""
        tasks = tuple(replace(task, may_sum=False) for task in self.tasks)
        return replace(self, tasks=tasks)

    @cached_property
    def summed(self) -> list[int]:
        return [i for i, task in enumerate(self.tasks) if task.sums]

    @cached_property
    def owners(self) -> dict[int, int]:
        moved = [i for i, task in enumerate(self.tasks) if not task.sums]
        found = longest_first([self.tasks[i].cost for i in moved], self.places * self.copies)
        # Ties go to the copies in turn: each gives the others as much as the one that made most.
        places = (divmod(number, self.copies) for number in found)
        return {i: c * self.places + place for i, (place, c) in zip(moved, places, strict=True)}

    @cached_property
    def rounds(self) -> list[list[int]]:
        """Jobs that pass through the buffers together. A rank that owns much makes more rounds."""
        rounds: list[list[int]] = []
        filled: dict[int, tuple[int, int]] = {}  # by owner: its round, and the bytes in it
        share = self.budget / self.copies
        for i in sorted(self.owners, key=lambda i: (-self.tasks[i].cost, i)):
            owner, size = self.owners[i], self.tasks[i].bytes
            at, used = filled.get(owner, (0, 0))
            if used and used + size > share:
                at, used = at + 1, 0
            filled[owner] = (at, used + size)
            while len(rounds) <= at:
                rounds.append([])
            rounds[at].append(i)
        return [sorted(tasks) for tasks in rounds]

    @cached_property
    def _sizes(self) -> dict[int, Tensor]:
        """By the identity of parts, which most jobs share: entries of each."""
        different = {id(task.parts): task.parts for task in self.tasks}
        return {
            key: torch.tensor([part.size for part in parts], dtype=torch.float64)
            for key, parts in different.items()
        }

    def sizes(self, task: int) -> Tensor:
        """Entries of each part of a job."""
        return self._sizes[id(self.tasks[task].parts)]

    def place(self, task: int) -> tuple[int, int]:
        """The copy and the place inside it that own a job."""
        return divmod(self.owners[task], self.places)

    def gathered(self, tasks: Iterable[int]) -> Tensor:
        """Bytes that copies of each place give to one another after a round: the most of any."""
        found = torch.zeros(self.copies, self.places, dtype=torch.float64)
        for i in tasks if self.copies > 1 else ():
            found[self.place(i)[0]] += self.sizes(i) * self.tasks[i].width
        return found.amax(dim=0)

    @cached_property
    def loads(self) -> Tensor:
        loads = torch.zeros(self.places * self.copies, dtype=torch.float64)
        for task, owner in self.owners.items():
            loads[owner] += self.tasks[task].cost
        return loads

    @property
    def imbalance(self) -> float:
        """The longest work of a rank over the mean: 1 is even."""
        return float(self.loads.max() / self.loads.mean()) if self.owners else 1.0

    @property
    def dominant(self) -> tuple[str, float] | None:
        """A matrix that makes an imbalance which no other choice of owners could mend, and how
        many times a rank's mean share its work is."""
        if not self.owners:
            return None
        longest = max(self.owners, key=lambda i: self.tasks[i].cost)
        share = self.tasks[longest].cost / float(self.loads.mean())
        return (self.tasks[longest].name, share) if share > DOMINANT else None

    @cached_property
    def traffic(self) -> tuple[Tensor, Tensor]:
        """Bytes that each rank sends and receives in a step, but for sums."""
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
        """Bytes in the wire's buffers of a rank in its fullest round: parts and whole matrices,
        there and back, and what is gathered; two rounds are on their way at a time. Float32 copies
        of parts and the iterations' own memory come on top."""
        peak = torch.zeros(self.copies, self.places, dtype=torch.float64)
        for tasks in self.rounds:
            held = torch.zeros_like(peak)
            for i in tasks:
                task, (copy, place) = self.tasks[i], self.place(i)
                held[copy] += (task.operands + 1) * self.sizes(i) * task.width
                held[copy, place] += (task.operands + 1) * task.bytes
            held += (self.copies + 1) * self.gathered(tasks)
            peak = torch.maximum(peak, held)
        return min(2, len(self.rounds)) * peak.flatten()


# What ranks that share a step do and move, as a table: a line for each part of a copy, in the
# order of the ranks that hold them.

SHOWN = 16  # ranks that get a line of their own
UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass(frozen=True)
class ExchangePlan:
    """One assignment for each set of ranks that share work; most models have one."""

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
        lines.append(f"{len(plan.summed)} stay and add up Gram matrices, {_size(moved)} a rank")
    owned = torch.zeros(ranks)
    for owner in plan.owners.values():
        owned[owner] += 1
    sent, received = plan.traffic
    columns = (owned, plan.loads / plan.loads.mean().clamp(min=1), sent, received, plan.peaks)
    lines.append(f"{'part':>6} {'owns':>6} {'work':>6} {'sends':>9} {'receives':>9} {'buffers':>9}")
    if ranks <= SHOWN:
        names = [f"{i // plan.places}.{i % plan.places}" for i in range(ranks)]
        names = names if plan.copies > 1 else [str(i) for i in range(ranks)]
        lines += [_line(name, [c[i] for c in columns]) for i, name in enumerate(names)]
    else:
        measures = (("least", Tensor.min), ("mean", Tensor.mean), ("most", Tensor.max))
        lines += [_line(name, [of(column) for column in columns]) for name, of in measures]
    if plan.dominant:
        lines.append(dominance(*plan.dominant))
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


def dominance(name: str, share: float) -> str:
    return (
        f"a single matrix, {name}, is {share:.2f} times a rank's mean share: "
        "more ranks do not make the step shorter"
    )
