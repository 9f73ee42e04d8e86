"""Laws of the assignment of matrices to ranks, checked by counting."""

from itertools import pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st

from angular_muown.distributed.assignment import Assignment, ExchangePlan, MatrixTask, longest_first
from angular_muown.params.layout import Slice2D


def by_rows(name: str, m: int, n: int, places: int, **values: object) -> MatrixTask:
    chunk = -(-m // places)
    starts = [min(i * chunk, m) for i in range(places + 1)]
    parts = tuple(Slice2D((a, b), (0, n), m, n) for a, b in pairwise(starts))
    return MatrixTask(name, m, n, parts, 2, **values)  # type: ignore[arg-type]


SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


def assignment(sizes: list[tuple[int, int]], places: int, copies: int, budget: int) -> Assignment:
    tasks = tuple(by_rows(f"w{i}", m, n, places) for i, (m, n) in enumerate(sizes))
    return Assignment(tasks, places, copies, budget)


@given(costs=st.lists(st.integers(1, 100), min_size=1, max_size=7), ranks=st.integers(1, 3))
def test_longest_first_is_within_a_third_of_the_optimum(costs: list[int], ranks: int) -> None:
    def largest_load(owners: tuple[int, ...]) -> int:
        loads = [0] * ranks
        for cost, owner in zip(costs, owners, strict=True):
            loads[owner] += cost
        return max(loads)

    optimum = min(map(largest_load, product(range(ranks), repeat=len(costs))))
    load = largest_load(tuple(longest_first(costs, ranks)))
    assert load <= optimum * (4 / 3 - 1 / (3 * ranks)) + 1e-9  # Graham 1969


@given(sizes=SIZES, places=st.integers(1, 5), copies=st.integers(1, 3), budget=st.integers(1, 4000))
def test_every_matrix_has_an_owner_and_is_in_one_round(
    sizes: list[tuple[int, int]], places: int, copies: int, budget: int
) -> None:
    plan = assignment(sizes, places, copies, budget)
    assert sorted(i for tasks in plan.rounds for i in tasks) == list(range(len(sizes)))
    assert all(plan.rounds), "no round is empty"
    for tasks in plan.rounds:
        for owner in {plan.owners[i] for i in tasks}:
            mine = [plan.tasks[i].bytes for i in tasks if plan.owners[i] == owner]
            assert len(mine) == 1 or sum(mine) * copies <= budget


@given(sizes=SIZES, places=st.integers(1, 5), copies=st.integers(1, 3))
def test_traffic_follows_from_parts_and_owners(
    sizes: list[tuple[int, int]], places: int, copies: int
) -> None:
    plan = assignment(sizes, places, copies, 500)
    sent = torch.zeros(copies, places, dtype=torch.float64)
    for i, task in enumerate(plan.tasks):
        copy, owner = plan.place(i)
        for place, part in enumerate(task.parts):
            if place != owner:
                sent[copy, place] += part.size * 2  # to the owner
                sent[copy, owner] += part.size * 2  # and back
    for tasks in plan.rounds:
        for place in range(places):
            computed = [
                sum(plan.tasks[i].parts[place].size * 2 for i in tasks if plan.place(i)[0] == copy)
                for copy in range(copies)
            ]
            sent[:, place] += (copies - 1) * max(computed)
    out, back = plan.traffic
    torch.testing.assert_close(out, sent.flatten())
    assert out.sum() == back.sum()


def test_the_table_reports_a_dominant_matrix() -> None:
    plan = assignment([(32, 32), (8, 8)], 8, 1, 10**6)
    assert len(set(plan.owners.values())) == 2
    text = str(ExchangePlan([plan]))
    assert "a single matrix, w0, is 7.88 times a rank's mean share" in text
    assert f"imbalance {plan.imbalance:.3f}" in text
    assert str(ExchangePlan([])).startswith("nothing is exchanged")


def test_gram_matrices_are_summed_only_if_that_moves_fewer_bytes() -> None:
    tall, short = (by_rows("w", m, 4, 4, may_sum=True) for m in (400, 40))
    assert tall.sums
    assert not short.sums, "its Gram matrix is not smaller than its parts"
    assert not by_rows("w", 4, 400, 4, may_sum=True).sums, "the long side is not sharded"
    assert not by_rows("w", 400, 4, 4).sums, "the method requires whole matrices"
    plan = Assignment((tall, short), 4, 1, 10**6)
    assert plan.summed == [0]
    assert plan.moved.summed == []
