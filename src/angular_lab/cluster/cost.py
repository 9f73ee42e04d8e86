"""Estimated times of a step on many ranks: a model, not a measurement.

A step has four parts. Rows: every rank reads and writes its own shards at the speed of its memory.
Local matrices: a rank orthogonalizes those that it holds entirely. Products: owners orthogonalize
the matrices sent to them; the slowest owner counts, because all ranks wait for it. Wire: the bytes
of the slowest rank and a latency per message. Products and wire overlap except for one round.
Units are seconds and bytes; docs/explanation/distributed.md explains the formulas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angular_lab.cluster.machine import Machine
from angular_muown.distributed.assignment import GRAM_BYTES, GRAM_SUMS, Assignment, MatrixTask

ITERATIONS = 5  # of Polar Express and of the quintic
# Memory traffic per entry of a float32 matrix on its rank: the tensors that the operations of
# `update.update` read and write, counted in tests/lab/cluster/test_cost.py.
ROW_BYTES = 208
PACKING_BYTES = 24  # packed 4 to 2, unpacked 2 to 2; on the way back 2 to 4 and 4 to 4
# Per entry at its owner: joined 4, stacked 4, to float32 6, largest entry 4, divided 8, norm 4,
# divided 8, to bf16 6; split and packed for the way back 14.
OWNER_BYTES = 58
ADAMW_BYTES = 28  # fused: weight, gradient, two moments read; all but the gradient written


class RankShare(NamedTuple):
    """What one rank holds."""

    matrix_entries: int
    exchanged_entries: int  # of these, in parameters whose matrices are exchanged
    adamw_entries: int
    local_matrices: int  # entirely on this rank
    local_cost: float  # s^2 (2l + s), summed over the local matrices
    state_bytes: int


@dataclass(frozen=True)
class Exchange:
    """The library's plan for one set of ranks, and the distance between them in rank numbers."""

    plan: Assignment
    stride: int  # between the ranks of a copy
    copy_stride: int  # between the copies

    def products(self, machine: Machine) -> float:
        """Time of the slowest owner; all ranks work on matrices by Gram sums."""
        plan = self.plan
        longest = polar_operations(float(plan.loads.max())) if plan.owners else 0.0
        summed = sum(_sum_operations(plan.tasks[i]) for i in plan.summed)
        return (longest + summed) / (machine.tflops * 1e12)

    def wire(self, machine: Machine) -> float:
        plan = self.plan
        near_owners = 1 - outside(plan.places, self.stride, machine.ranks_per_node)
        near_copies = 1 - outside(plan.copies, self.copy_stride, machine.ranks_per_node)
        gathered = self._gathered()
        latencies = messages(plan) * machine.latency * 1e-6
        slowest = torch.zeros_like(latencies)
        for bytes_moved in plan.traffic:
            near = near_owners * (bytes_moved - gathered) + near_copies * gathered
            far = bytes_moved - near
            seconds = torch.maximum(near / machine.bandwidth, far / machine.internode) * 1e-9
            slowest = torch.maximum(slowest, seconds)
        sums = sum(_sum_bytes(plan.tasks[i]) for i in plan.summed)
        speed = machine.bandwidth if near_owners == 1 else machine.internode
        return float((latencies + slowest).max()) + sums * 1e-9 / speed

    def _gathered(self) -> Tensor:
        plan = self.plan
        rounds = [plan.gathered(tasks) for tasks in plan.rounds]
        total = (plan.copies - 1) * sum(rounds, torch.zeros(plan.places, dtype=torch.float64))
        return total.repeat(plan.copies)

    def owner_bytes(self) -> float:
        """Memory traffic of the rank that owns the most entries."""
        entries = torch.zeros(self.plan.places * self.plan.copies, dtype=torch.float64)
        for i, owner in self.plan.owners.items():
            entries[owner] += self.plan.tasks[i].m * self.plan.tasks[i].n
        return OWNER_BYTES * float(entries.max())

    def overlapped(self, machine: Machine) -> float:
        """Time of both; only the first round's way there and the last one's back do not overlap."""
        products, wire = self.products(machine), self.wire(machine)
        return max(products, wire) + min(products, wire) / max(1, len(self.plan.rounds))


def outside(size: int, stride: int, per_node: int) -> float:
    """Return the share of a rank's peers in other nodes, for `size` ranks `stride` apart."""
    if size == 1:
        return 0.0
    near = min(size, max(1, per_node // stride))
    return (size - near) / (size - 1)


def polar_operations(cost: float) -> float:
    """Return the operations for a cost of s^2 (2l + s): multiply and add, in every iteration."""
    return ITERATIONS * 2 * cost


def _sum_operations(task: MatrixTask) -> float:
    """X X^T and P X of the largest part per sum, four Gram products per iteration."""
    s, largest = min(task.m, task.n), max(part.size for part in task.parts)
    return GRAM_SUMS * 4 * s * largest + ITERATIONS * 4 * 2 * s**3


def _sum_bytes(task: MatrixTask) -> float:
    """A ring sends a float32 Gram matrix nearly twice for its sum."""
    ranks = len(task.parts)
    return GRAM_SUMS * 2 * (ranks - 1) / ranks * GRAM_BYTES * min(task.m, task.n) ** 2


def messages(plan: Assignment) -> Tensor:
    """Return how many messages each rank sends in a step: parts to owners, parts back, and a ring
    between copies. Empty parts are not sent."""
    count = torch.zeros(plan.copies, plan.places, dtype=torch.float64)
    for tasks in plan.rounds:
        senders: dict[tuple[int, int], Tensor] = {}  # by owner
        for i in tasks:
            owner, has_part = plan.place(i), plan.sizes(i) > 0
            senders[owner] = senders[owner] | has_part if owner in senders else has_part
        for (copy, place), has_part in senders.items():
            sends = has_part.double()
            sends[place] = 0
            count[copy] += sends
            count[copy, place] += sends.sum()
        count += plan.copies - 1
    return count.flatten()


class Estimate(NamedTuple):
    """Seconds per step."""

    products: float
    wire: float
    rows: float
    total: float


def estimate(exchanges: Sequence[Exchange], share: RankShare, machine: Machine) -> Estimate:
    """Estimate a step of a rank with this share. Sets of ranks exchange one after the other."""
    traffic = (
        ROW_BYTES * share.matrix_entries
        + PACKING_BYTES * share.exchanged_entries
        + ADAMW_BYTES * share.adamw_entries
        + sum(x.owner_bytes() for x in exchanges)
    )
    rows = traffic / (machine.memory * 1e9)
    local = polar_operations(share.local_cost) / (machine.tflops * 1e12)
    return Estimate(
        local + sum(x.products(machine) for x in exchanges),
        sum(x.wire(machine) for x in exchanges),
        rows,
        rows + local + sum(x.overlapped(machine) for x in exchanges),
    )
