"""The cost model of plan-ranks: its constants and its laws."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from angular_lab.cluster import cost
from angular_lab.cluster.cost import Exchange, RankShare, estimate, messages, outside
from angular_lab.cluster.machine import Machine
from angular_muown import AngularMuown
from angular_muown.distributed.assignment import Assignment, MatrixTask
from angular_muown.params.layout import Slice2D
from angular_muown.stages import orthogonalize, reductions

FREE = Machine(latency=0.0)


class ByteCounter(TorchDispatchMode):
    """Count the bytes of all tensors that operations read and write; views cost nothing."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [
            [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
            for tree in ((args, kwargs), out)
        ]
        storages = [{t.untyped_storage().data_ptr() for t in side} for side in tensors]
        if function._schema.is_mutable or not storages[0] & storages[1]:
            self.total += sum(t.nbytes for side in tensors for t in side)
        return out


def test_row_bytes_are_those_of_a_step_without_its_polar_factor(monkeypatch) -> None:
    monkeypatch.setitem(orthogonalize.ORTHOGONALIZERS, "polar_express", lambda X: X)
    monkeypatch.setattr(reductions, "may_look", lambda X: False)  # as on a GPU
    W = torch.nn.Parameter(torch.randn(512, 512))
    optimizer = AngularMuown([W])
    W.grad = torch.randn_like(W)
    optimizer.step()
    with ByteCounter() as counter:
        optimizer.step()
    assert counter.total / W.numel() == pytest.approx(cost.ROW_BYTES, rel=0.02)


def _exchange(shapes, places, copies=1, budget=1 << 40, may_sum=False) -> Exchange:
    def parts(m, n):
        each = -(-m // places)
        rows = [(min(m, i * each), min(m, (i + 1) * each)) for i in range(places)]
        return tuple(Slice2D(r, (0, n), m, n) for r in rows)

    tasks = [MatrixTask(f"w{i}", m, n, parts(m, n), 2) for i, (m, n) in enumerate(shapes)]
    tasks = tuple(replace(task, may_sum=may_sum) for task in tasks)
    return Exchange(Assignment(tasks, places, copies, budget), stride=1, copy_stride=places)


def test_polar_operations_are_those_of_polar_express() -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize.polar_express(torch.randn(48, 80))
    (task,) = _exchange([(48, 80)], 2).plan.tasks
    assert counter.get_total_flops() == cost.polar_operations(task.cost)


def test_the_slowest_owner_sets_the_time_of_the_products() -> None:
    one, three = (_exchange([(64, 64)] * n, 2).products(FREE) for n in (1, 3))
    assert three == pytest.approx(2 * one)


def test_wire_time_within_and_between_nodes() -> None:
    """Two matrices on two ranks: each sends half a matrix there and half a matrix back."""
    exchange = _exchange([(64, 64)] * 2, 2)
    size = 2 * 64 * 64
    near = replace(FREE, bandwidth=10.0, internode=1.0, ranks_per_node=2)
    assert exchange.wire(near) == pytest.approx(size / 10e9)
    assert exchange.wire(replace(near, ranks_per_node=1)) == pytest.approx(size / 1e9)
    assert exchange.wire(replace(near, latency=3.0)) == pytest.approx(size / 10e9 + 2 * 3e-6)


def test_copies_of_whole_matrices_only_gather_results() -> None:
    exchange = _exchange([(64, 64)] * 2, 1, copies=2)
    size = 2 * 64 * 64
    assert exchange.wire(replace(FREE, bandwidth=10.0)) == pytest.approx(size / 10e9)


@pytest.mark.parametrize(
    ("size", "stride", "share"), [(1, 1, 0), (8, 1, 0), (16, 1, 8 / 15), (4, 8, 1), (4, 4, 2 / 3)]
)
def test_share_of_peers_in_other_nodes(size, stride, share) -> None:
    assert outside(size, stride, per_node=8) == pytest.approx(share)


def test_empty_parts_are_not_sent() -> None:
    """3 rows on 4 ranks: the last has none. The owner gets two parts and gives two back."""
    assert messages(_exchange([(3, 5)], 4).plan).tolist() == [2, 1, 1, 0]
    assert messages(_exchange([(8, 8)] * 4, 4).plan).tolist() == [6] * 4
    assert messages(_exchange([(8, 8)] * 8, 4, budget=1).plan).tolist() == [12] * 4


@pytest.mark.parametrize(("budget", "rounds"), [(1 << 40, 1), (1, 4)])
def test_products_and_wire_overlap_except_for_one_round(budget, rounds) -> None:
    exchange = _exchange([(64, 64)] * 8, 2, budget=budget)
    assert len(exchange.plan.rounds) == rounds
    products, wire = exchange.products(FREE), exchange.wire(FREE)
    expected = max(products, wire) + min(products, wire) / rounds
    assert exchange.overlapped(FREE) == pytest.approx(expected)


def test_gram_sums_divide_the_products_among_ranks() -> None:
    moved, summed = (_exchange([(4096, 16)], 2, may_sum=may_sum) for may_sum in (False, True))
    assert summed.plan.summed == [0]
    assert 0 < summed.products(FREE) < moved.products(FREE)
    assert summed.wire(FREE) == pytest.approx(3 * 4 * 16 * 16 / 450e9)


def test_an_estimate_is_a_sum_over_sets_of_ranks() -> None:
    exchange = _exchange([(64, 64)] * 4, 2)
    share = RankShare(10, 5, 3, local_matrices=1, local_cost=1e8, state_bytes=0)
    none, one, two = (estimate([exchange] * k, share, Machine()) for k in (0, 1, 2))
    for a, b, c in zip(none, one, two, strict=True):
        assert c - b == pytest.approx(b - a)
        assert b > a
    assert none.products == pytest.approx(cost.polar_operations(1e8) / 500e12)
    assert none.total == pytest.approx(none.rows + none.products)
