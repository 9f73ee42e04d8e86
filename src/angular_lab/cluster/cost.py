"""What a step over many ranks should take: a model, not a measurement.

A step has four parts. Rows: every rank reads and writes its own parts, at the speed of its memory.
Alone: matrices that lie whole on a rank are orthogonalized there. Products: owners orthogonalize
what comes to them; the longest work counts, because all wait for it. Wire: the slowest rank's
bytes, and so many microseconds for each message. Products and wire overlap but for one round.
Seconds and bytes throughout; docs/distributed.md has the formulas in words.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from angular_lab.cluster.machine import Machine, Team
from angular_muown.distributed.assignment import GRAM_BYTES, GRAM_SUMS, Assignment, MatrixTask

ITERATIONS = 5  # of Polar Express and of the quintic
# Bytes that a step moves in memory for an entry of a float32 matrix on its rank: tensors read and
# written by the operations of `update.update`, counted one by one in
# tests/lab/cluster/test_rank_cost.py; then packing and unpacking: 4 to 2, 2 to 2; back 2 to 4,
# 4 to 4.
ROW_BYTES = 208
PACKING_BYTES = 24
# For an entry at its owner: put together 4, stacked 4, to float32 6, largest entry 4, divided 8,
# norm 4, divided 8, to bf16 6; cut and packed for the way back 14.
OWNER_BYTES = 58
ADAMW_BYTES = 28  # fused: weight, gradient, two moments read; all but the gradient written


@dataclass(frozen=True)
class Exchange:
    """A plan, and how far apart its ranks are."""

    plan: Assignment
    teams: tuple[Team, Team]  # inside a copy; of the copies

    def products(self, machine: Machine) -> float:
        """Of the rank with the longest work; matrices by sums are worked on by all."""
        plan = self.plan
        longest = polar_operations(float(plan.loads.max())) if plan.owners else 0.0
        summed = sum(_sum_operations(plan.tasks[i]) for i in plan.summed)
        return (longest + summed) / (machine.tflops * 1e12)

    def wire(self, machine: Machine) -> float:
        plan = self.plan
        near_owners, near_copies = (1 - t.outside(machine.ranks_per_node) for t in self.teams)
        gathered = self._gathered()
        times = messages(plan) * machine.latency * 1e-6
        slowest = torch.zeros_like(times)
        for bytes_moved in plan.traffic:
            near = near_owners * (bytes_moved - gathered) + near_copies * gathered
            far = bytes_moved - near
            seconds = torch.maximum(near / machine.bandwidth, far / machine.internode) * 1e-9
            slowest = torch.maximum(slowest, seconds)
        sums = sum(_sum_bytes(plan.tasks[i]) for i in plan.summed)
        rate = machine.bandwidth if near_owners == 1 else machine.internode
        return float((times + slowest).max()) + sums * 1e-9 / rate

    def _gathered(self) -> Tensor:
        plan = self.plan
        rounds = [plan.gathered(tasks) for tasks in plan.rounds]
        total = (plan.copies - 1) * sum(rounds, torch.zeros(plan.places, dtype=torch.float64))
        return total.repeat(plan.copies)

    def owner_bytes(self) -> float:
        """Moved in memory by the rank that owns most entries."""
        entries = torch.zeros(self.plan.places * self.plan.copies, dtype=torch.float64)
        for i, owner in self.plan.owners.items():
            entries[owner] += self.plan.tasks[i].m * self.plan.tasks[i].n
        return OWNER_BYTES * float(entries.max())

    def overlapped(self, machine: Machine) -> float:
        """Both at once, but for the first round's way there and the last one's back."""
        products, wire = self.products(machine), self.wire(machine)
        return max(products, wire) + min(products, wire) / max(1, len(self.plan.rounds))


def polar_operations(cost: float) -> float:
    """For s^2 (2l + s): a multiplication and an addition for each, in every iteration."""
    return ITERATIONS * 2 * cost


def _sum_operations(task: MatrixTask) -> float:
    """On the largest part: X X^T and P X at every start, four products of Gram matrices for an
    iteration."""
    s, largest = min(task.m, task.n), max(part.size for part in task.parts)
    return GRAM_SUMS * 4 * s * largest + ITERATIONS * 4 * 2 * s**3


def _sum_bytes(task: MatrixTask) -> float:
    """A ring sends a float32 Gram matrix nearly twice for its sum."""
    ranks = len(task.parts)
    return GRAM_SUMS * 2 * (ranks - 1) / ranks * GRAM_BYTES * min(task.m, task.n) ** 2


def messages(plan: Assignment) -> Tensor:
    """That each rank sends in a step: parts to owners, parts back, a ring between copies. What is
    empty is not sent."""
    count = torch.zeros(plan.copies, plan.places, dtype=torch.float64)
    for tasks in plan.rounds:
        owned: dict[tuple[int, int], Tensor] = {}
        for i in tasks:
            place, has_part = plan.place(i), plan.sizes(i) > 0
            owned[place] = owned[place] | has_part if place in owned else has_part
        for (copy, place), has_part in owned.items():
            there = has_part.double()
            there[place] = 0
            count[copy] += there
            count[copy, place] += there.sum()
        count += plan.copies - 1
    return count.flatten()


@dataclass(frozen=True)
class Estimate:
    products: float
    wire: float
    rows: float
    total: float


def estimate(
    exchanges: list[Exchange], alone: float, matrix: int, shared: int, adamw: int, machine: Machine
) -> Estimate:
    """Of matrices that lie whole on the rank, the operations; of its parts, the entries of all
    matrices, of those among them that are exchanged, and of AdamW's parameters. Sets of ranks take
    their turns."""
    moved = ROW_BYTES * matrix + PACKING_BYTES * shared + ADAMW_BYTES * adamw
    rows = (moved + sum(x.owner_bytes() for x in exchanges)) / (machine.memory * 1e9)
    by_rank = alone / (machine.tflops * 1e12)
    return Estimate(
        by_rank + sum(x.products(machine) for x in exchanges),
        sum(x.wire(machine) for x in exchanges),
        rows,
        rows + by_rank + sum(x.overlapped(machine) for x in exchanges),
    )
