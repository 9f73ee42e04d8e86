"""Every placement gives the weights that one process gives."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from angular_muown import AngularMuown, Muon, NorMuon, plan
from tests.library.family import FAMILY, noise
from tests.library.sharded import GROUPS, PLACEMENTS, make_groups, mesh_of, place, stepped, whole
from tests.ranks import results

MAIN_PLACEMENTS = ("rows", "columns", "hsdp", "rows x columns")
SKINNY = [{"shapes": [(4, 200), (150, 3)]}]


def integers(p: Tensor, seed: int) -> Tensor:
    return noise(*p.shape, seed=seed, dtype=p.dtype).mul(3).round()


# An odd number of narrow entries before wide ones.
MIXED = [{"shapes": [(5, 3)] * 3, "wire_dtype": x} for x in ("bfloat16", "float64", "float32")]
FEW = {"groups": GROUPS[:4], "steps": 3}
EXACT = {"lr": 0.02, "orthogonalize": "svd"}
INTEGER = {"lr": 2.0**-5, "momentum": 0.5, "weight_decay": 0.0, "orthogonalize": "svd"}
SINGLE, HALF = {**FEW, "dtype": torch.float32}, {**FEW, "dtype": torch.bfloat16}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "six steps": (AngularMuown, {"lr": 0.02}, {"groups": GROUPS[:1], "steps": 6}),
    "every layout": (AngularMuown, {"lr": 0.02}, {"steps": 3}),
    "skinny": (AngularMuown, {"lr": 0.02}, {"groups": SKINNY, "steps": 5}),
    "skinny by the quintic": (Muon, {}, {"groups": SKINNY, "steps": 3}),
    "svd": (AngularMuown, EXACT, FEW),
    "integers": (Muon, INTEGER, {"groups": GROUPS[:1], "steps": 6, "gradient": integers}),
    "float32": (AngularMuown, {"lr": 0.02}, SINGLE),
    "bf16 on the wire": (AngularMuown, {"lr": 0.02, "wire_dtype": "bfloat16"}, SINGLE),
    "bf16 weights": (AngularMuown, EXACT, HALF),
    "a master copy": (AngularMuown, {**EXACT, "write_back": "master"}, HALF),
    "many rounds": (NorMuon, {"workspace": 1e-6}, FEW),
    "mixed widths": (AngularMuown, {"lr": 0.02, "workspace": 9.0}, {"groups": MIXED, "steps": 2}),
}
TOLERANCE = {"float32": 1e-5, "bf16 on the wire": 2e-3, "mixed widths": 2e-3}
TOLERANCE |= dict.fromkeys(("skinny", "skinny by the quintic"), 1e-9)
TOLERANCE |= dict.fromkeys(("bf16 weights", "a master copy"), 2.0**-7)  # a last bit may flip
# Four ranks run every case; two and eight ranks run only the basic ones. Skinny matrices are summed
# along their long side, whichever that is. The rest needs copies, rows and columns once.
BASIC = ["six steps", "every layout"]
LONG_SIDE = ["skinny", "skinny by the quintic"]
REST = [case for case in CASES if case not in (*BASIC, *LONG_SIDE, "integers")]
RUNS: dict[int, list[tuple[str, str]]] = {
    2: [*product(BASIC, PLACEMENTS)],
    4: [
        *product([*BASIC, "integers"], PLACEMENTS),
        *product(LONG_SIDE, MAIN_PLACEMENTS),
        *product(REST, ["hsdp", "rows x columns"]),
    ],
    8: [*product(["six steps"], PLACEMENTS), *product(["every layout"], MAIN_PLACEMENTS)],
}
CELLS = [(world, *run) for world, runs in RUNS.items() for run in runs]


def run_cases(runs: list[tuple[str, str]]) -> dict[tuple[str, str], list[Tensor]]:
    return {
        (case, name): stepped(CASES[case][0], CASES[case][1], PLACEMENTS[name], **CASES[case][2])
        for case, name in runs
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Tensor]]:
    return {name: stepped(case[0], case[1], **case[2]) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def together() -> Any:
    """Run all cases of a number of ranks in one set of processes."""
    return cache(lambda world: results(world, run_cases, RUNS[world]))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case", "placement"), CELLS)
def test_every_placement_gives_the_weights_of_one_process(
    together: Any, alone: Any, world: int, case: str, placement: str
) -> None:
    for rank in together(world):
        for ours, expected in zip(rank[case, placement], alone[case], strict=True):
            if case == "integers":
                assert torch.equal(ours, expected), (
                    "the polar factor is exact, and sums of integers do not round"
                )
            if expected.dtype == torch.bfloat16:  # the same rounding noise; a last bit may flip
                assert (ours == expected).double().mean() > 0.98
            tolerance = TOLERANCE.get(case, 1e-12)
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("world", RUNS)
def test_ranks_agree_to_the_last_bit(together: Any, world: int) -> None:
    """Otherwise they would drift apart."""
    first, *others = together(world)
    for key, weights in first.items():
        for rank in others:
            assert all(map(torch.equal, rank[key], weights)), key


def step_family(placements: list[str]) -> dict[tuple[str, str], list[Tensor]]:
    return {
        (member.__name__, name): stepped(member, {"lr": 0.02}, PLACEMENTS[name], GROUPS[:4], 2)
        for member in FAMILY
        for name in placements
    }


@pytest.fixture(scope="module")
def family() -> Any:
    return results(4, step_family, ["rows", "rows x columns"])[0]


# What differs between members is what they sum over sharded rows or columns, not over copies.
@pytest.mark.slow
@pytest.mark.parametrize("placement", ["rows", "rows x columns"])
@pytest.mark.parametrize("member", FAMILY, ids=lambda member: member.__name__)
def test_every_member_gives_the_weights_of_one_process(
    family: Any, member: Any, placement: str
) -> None:
    alone = stepped(member, {"lr": 0.02}, groups=GROUPS[:4], steps=2)
    for ours, expected in zip(family[member.__name__, placement], alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def count_bytes(placements: list[str]) -> list[dict[str, Any]]:
    return [_count_bytes(PLACEMENTS[name]) for name in placements]


def _count_bytes(placement: Any) -> dict[str, Any]:
    """Count the bytes that this rank passes to torch's collectives in a step."""
    import torch.distributed as dist

    groups, params = make_groups(GROUPS[:3], placement, torch.float32)
    optimizer = AngularMuown(groups, wire_dtype="bfloat16")
    for i, (p, _) in enumerate(params):
        p.grad = place(noise(*p.shape, seed=i, dtype=p.dtype), placement)
    optimizer.step()  # the first step also compares plans
    swap, gather, sent = dist.all_to_all_single, dist.all_gather_single, 0

    def counting_swap(
        output: Tensor, send: Tensor, sizes: Any, counts: list[int], **kw: Any
    ) -> Any:
        nonlocal sent
        sent += sum(counts) - counts[dist.get_group_rank(kw["group"], dist.get_rank())]
        return swap(output, send, sizes, counts, **kw)

    def counting_gather(output: Tensor, part: Tensor, **kw: Any) -> Any:
        nonlocal sent
        others = dist.get_world_size(kw["group"]) - 1
        sent += part.nbytes * others * (part.dtype == torch.uint8)
        return gather(output, part, **kw)

    dist.all_to_all_single, dist.all_gather_single = counting_swap, counting_gather
    optimizer.step()
    dist.all_to_all_single, dist.all_gather_single = swap, gather
    plan = optimizer.exchange_plan()
    [assignment] = plan.assignments
    return {"sent": sent, "plan": [x.tolist() for x in assignment.traffic], "text": str(plan)}


def test_ranks_send_the_bytes_that_the_plan_predicts() -> None:
    names = list(PLACEMENTS)
    entries = sum(torch.Size(shape).numel() for group in GROUPS[:3] for shape in group["shapes"])
    by_placement = zip(*results(4, count_bytes, names), strict=True)
    for name, ranks in zip(names, by_placement, strict=True):
        sent, received = ranks[0]["plan"]
        assert sorted(rank["sent"] for rank in ranks) == sorted(sent), name
        assert sum(sent) == sum(received) > 0
        if name in ("rows", "columns"):
            assert sum(sent) <= 2 * 2 * entries
        assert "imbalance" in ranks[0]["text"]


def summed() -> list[tuple[int, int]]:
    shapes = []
    for placement in ("rows", "columns"):
        groups, _ = make_groups(SKINNY, PLACEMENTS[placement], torch.float32)
        [plan] = AngularMuown(groups).exchange_plan().assignments
        shapes += [(plan.tasks[i].m, plan.tasks[i].n) for i in plan.summed]
    return shapes


def test_skinny_matrices_sum_gram_matrices_instead_of_moving() -> None:
    """The tall one if rows are sharded, the wide one if columns are."""
    assert results(2, summed) == [[(150, 3), (4, 200)]] * 2


SMALL_PARTS = [
    # Parts without rows: three blocks of a fused weight that sum Gram matrices.
    (4, {"shapes": [(1536, 2)], "blocks": 3}),
    (8, {"shapes": [(49, 1)]}),
    # Parts with one entry.
    (3, {"shapes": [(5, 1)]}),
    (3, {"shapes": [(1, 5)]}),
    (3, {"shapes": [(2, 5)]}),
]


def by_rows(group: dict[str, Any]) -> list[Tensor]:
    return stepped(AngularMuown, {"lr": 0.02}, PLACEMENTS["rows"], [group], steps=2)


@pytest.mark.parametrize(("world", "group"), SMALL_PARTS)
def test_parts_may_have_few_entries_or_none(world: int, group: dict[str, Any]) -> None:
    expected = stepped(AngularMuown, {"lr": 0.02}, None, [group], steps=2)
    for weights in results(world, by_rows, group):
        for p, q in zip(weights, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def fully_sharded() -> Tensor:
    model = nn.Sequential(nn.Linear(2, 1536, bias=False))
    fully_shard(model, mesh=mesh_of((-1,)))
    optimizer = AngularMuown(plan(model, head=None, blocks={"0.weight": 3}))
    model(torch.ones(3, 2)).square().sum().backward()
    optimizer.step()
    return whole(model[0].weight)


def test_a_fused_weight_under_fsdp_may_have_empty_parts() -> None:
    for weight in results(4, fully_sharded):
        assert weight.isfinite().all()
