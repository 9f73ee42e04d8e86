"""The cost model of plan-ranks: its constants, its laws."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from angular_lab.cluster.cost import ROW_BYTES, Exchange, estimate, messages, polar_operations
from angular_lab.cluster.machine import Machine, Team
from angular_muown import AngularMuown
from angular_muown.distributed.assignment import Assignment, MatrixTask
from angular_muown.params.layout import Slice2D
from angular_muown.stages import orthogonalize, reductions


class Counted(TorchDispatchMode):
    """Bytes of all tensors that operations read and write; views cost nothing."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [
            [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
            for tree in ((args, kwargs), out)
        ]
        places = [{t.untyped_storage().data_ptr() for t in side} for side in tensors]
        if function._schema.is_mutable or not places[0] & places[1]:
            self.total += sum(t.nbytes for side in tensors for t in side)
        return out


def test_row_bytes_are_what_the_engine_moves(monkeypatch) -> None:
    """A step whose polar factor is left out, counted operation by operation."""
    monkeypatch.setitem(orthogonalize.ORTHOGONALIZERS, "polar_express", lambda X: X)
    monkeypatch.setattr(reductions, "may_look", lambda X: False)  # as on a GPU
    W = torch.nn.Parameter(torch.randn(512, 512))
    optimizer = AngularMuown([W])
    W.grad = torch.randn_like(W)
    optimizer.step()
    with Counted() as counted:
        optimizer.step()
    assert counted.total / W.numel() == pytest.approx(ROW_BYTES, rel=0.02)


def _plan(shapes, places, copies=1, budget=1 << 40) -> Assignment:
    def parts(m, n):
        each = -(-m // places)
        rows = [(min(m, i * each), min(m, (i + 1) * each)) for i in range(places)]
        return tuple(Slice2D(r, (0, n), m, n) for r in rows)

    tasks = tuple(MatrixTask(f"w{i}", m, n, parts(m, n), 2) for i, (m, n) in enumerate(shapes))
    return Assignment(tasks, places, copies, budget)


def _exchange(plan: Assignment) -> Exchange:
    return Exchange(plan, (Team(plan.places), Team(plan.copies, plan.places)))


FREE = Machine(latency=0.0)


def test_products_are_the_operations_of_five_iterations() -> None:
    """Counted by torch on the real iteration."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        orthogonalize.polar_express(torch.randn(48, 80))
    (task,) = _plan([(48, 80)], 2).tasks
    assert counter.get_total_flops() == polar_operations(task.cost)


def test_the_rank_with_most_to_do_counts() -> None:
    plan = _plan([(64, 64)] * 3, 2)
    one = _plan([(64, 64)], 2)
    assert _exchange(plan).products(FREE) == pytest.approx(2 * _exchange(one).products(FREE))


def test_bytes_over_bandwidth_in_a_node_and_out_of_it() -> None:
    """Two matrices on two ranks: each sends half a matrix there and half a matrix back."""
    exchange = _exchange(_plan([(64, 64)] * 2, 2))
    size = 2 * 64 * 64
    near = replace(FREE, bandwidth=10.0, internode=1.0, ranks_per_node=2)
    assert exchange.wire(near) == pytest.approx(size / 10e9)
    assert exchange.wire(replace(near, ranks_per_node=1)) == pytest.approx(size / 1e9)
    assert exchange.wire(replace(near, latency=3.0)) == pytest.approx(size / 10e9 + 2 * 3e-6)


def test_copies_give_each_other_what_they_made() -> None:
    """Copies of whole matrices (DDP): nothing but the gather; in other nodes by their stride."""
    exchange = _exchange(_plan([(64, 64)] * 2, 1, copies=2))
    size = 2 * 64 * 64
    assert exchange.wire(replace(FREE, bandwidth=10.0)) == pytest.approx(size / 10e9)


@pytest.mark.parametrize(
    ("team", "share"),
    [(Team(1), 0), (Team(8), 0), (Team(16), 8 / 15), (Team(4, 8), 1), (Team(4, 4), 2 / 3)],
)
def test_who_is_in_another_node(team, share) -> None:
    assert team.outside(8) == pytest.approx(share)


def test_messages_of_parts_that_are_not_empty() -> None:
    """3 rows on 4 ranks: the last has none. The owner gets two parts and gives two back."""
    assert messages(_plan([(3, 5)], 4)).tolist() == [2, 1, 1, 0]
    assert messages(_plan([(8, 8)] * 4, 4)).tolist() == [6] * 4
    assert messages(_plan([(8, 8)] * 4, 4, budget=1)).tolist() == [6] * 4
    assert messages(_plan([(8, 8)] * 8, 4, budget=1)).tolist() == [12] * 4


def test_an_overlap_hides_the_shorter_but_for_a_round() -> None:
    whole, cut = _plan([(64, 64)] * 8, 2), _plan([(64, 64)] * 8, 2, budget=1)
    assert (len(whole.rounds), len(cut.rounds)) == (1, 4)
    for plan, left in ((whole, 1.0), (cut, 0.25)):
        exchange = _exchange(plan)
        products, wire = exchange.products(FREE), exchange.wire(FREE)
        hidden = max(products, wire) + left * min(products, wire)
        assert exchange.overlapped(FREE) == pytest.approx(hidden)


def test_the_gram_way_divides_the_products() -> None:
    """A tall matrix whose rows are spread: every rank works on its part, nothing has an owner."""
    tall = replace(_plan([(4096, 16)], 2).tasks[0], may_sum=True)
    plan = Assignment((tall,), 2, 1, 1 << 40)
    assert plan.summed == [0]
    moved = _exchange(_plan([(4096, 16)], 2))
    summed = _exchange(plan)
    assert 0 < summed.products(FREE) < moved.products(FREE)
    assert summed.wire(FREE) == pytest.approx(3 * 4 * 16 * 16 / 450e9)


def test_an_estimate_is_a_sum_over_sets_of_ranks() -> None:
    exchange = _exchange(_plan([(64, 64)] * 4, 2))
    one, two = (estimate([exchange] * k, 1e9, 10, 5, 3, Machine()) for k in (1, 2))
    alone = estimate([], 1e9, 10, 5, 3, Machine())
    for key in ("products", "wire", "rows", "total"):
        a, b, c = (getattr(found, key) for found in (alone, one, two))
        assert c - b == pytest.approx(b - a)
        assert b > a
    assert alone.total == pytest.approx(alone.rows + alone.products)
