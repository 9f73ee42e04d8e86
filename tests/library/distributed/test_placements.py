"""One update, whatever the ranks: every placement gives the weights that one process gives."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from angular_muown import AngularMuown, Muon, NorMuon, plan
from tests.library.family import FAMILY, noise
from tests.library.sharded import GROUPS, PLACEMENTS, made, mesh_of, place, stepped, whole
from tests.ranks import results

SOME = ("rows", "columns", "hsdp", "rows x columns")
SKINNY = [{"shapes": [(4, 200), (150, 3)]}]


def integers(p: Tensor, seed: int) -> Tensor:
    return noise(*p.shape, seed=seed, dtype=p.dtype).mul(3).round()


# an odd number of narrow entries before wide ones
MIXED = [{"shapes": [(5, 3)] * 3, "wire_dtype": x} for x in ("bfloat16", "float64", "float32")]
# state of columns wants channels of a convolution that the ranks divide
EVEN = {"groups": [*GROUPS[:4], {"shapes": [(12, 8, 3, 1)], "view": "conv"}, *GROUPS[5:]]}
FEW = {"groups": GROUPS[:4], "steps": 3}
EXACT = {"lr": 0.02, "orthogonalize": "svd"}
INTEGER = {"lr": 2.0**-5, "momentum": 0.5, "weight_decay": 0.0, "orthogonalize": "svd"}
SINGLE, HALF = {**FEW, "dtype": torch.float32}, {**FEW, "dtype": torch.bfloat16}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "twenty steps": (AngularMuown, {"lr": 0.02}, {"groups": GROUPS[:1]}),
    "every layout": (AngularMuown, {"lr": 0.02}, {"steps": 3}),
    "skinny": (AngularMuown, {"lr": 0.02}, {"groups": SKINNY, "steps": 5}),
    "skinny by the quintic": (Muon, {}, {"groups": SKINNY, "steps": 3}),
    "svd": (AngularMuown, EXACT, FEW),
    "integers": (Muon, INTEGER, {"groups": GROUPS[:1], "gradient": integers}),
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
# Everything on four ranks; the cases that the others vary on all.
BOTH = ["twenty steps", "every layout"]
REST = [case for case in CASES if case not in (*BOTH, "integers")]
RUNS: dict[int, list[tuple[str, str]]] = {
    2: [*product(BOTH, PLACEMENTS)],
    4: [*product([*BOTH, "integers"], PLACEMENTS), *product(REST, SOME)],
    8: [*product(["twenty steps"], PLACEMENTS), *product(["every layout"], SOME)],
}
CELLS = [(world, *run) for world, runs in RUNS.items() for run in runs]


def everywhere(runs: list[tuple[str, str]]) -> dict[tuple[str, str], list[Tensor]]:
    """What one rank does; the harness wants it at the top of a module."""
    return {
        (case, name): stepped(CASES[case][0], CASES[case][1], PLACEMENTS[name], **CASES[case][2])
        for case, name in runs
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Tensor]]:
    return {name: stepped(case[0], case[1], **case[2]) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def together() -> Any:
    """All runs of a number of ranks, in one go."""
    return cache(lambda world: results(world, everywhere, RUNS[world]))


@pytest.mark.parametrize(("world", "case", "placement"), CELLS)
def test_every_placement_gives_the_weights_of_one_process(
    together: Any, alone: Any, world: int, case: str, placement: str
) -> None:
    for rank in together(world):
        for ours, wanted in zip(rank[case, placement], alone[case], strict=True):
            if case == "integers":
                assert torch.equal(ours, wanted), "the exact polar factor, sums without rounding"
            if wanted.dtype == torch.bfloat16:  # rounded by the same noise, but for a last bit
                assert (ours == wanted).double().mean() > 0.98
            tolerance = TOLERANCE.get(case, 1e-12)
            torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world", RUNS)
def test_ranks_agree_to_the_bit(together: Any, world: int) -> None:
    """Also where they are not what one process finds: they would drift apart."""
    first, *others = together(world)
    for key, weights in first.items():
        for rank in others:
            assert all(map(torch.equal, rank[key], weights)), key


def of_the_family(placements: list[str]) -> dict[tuple[str, str], list[Tensor]]:
    return {
        (member.__name__, name): stepped(member, {"lr": 0.02}, PLACEMENTS[name], GROUPS[:4], 2)
        for member in FAMILY
        for name in placements
    }


@pytest.fixture(scope="module")
def family() -> Any:
    return results(4, of_the_family, list(SOME))[0]


@pytest.mark.parametrize("placement", SOME)
@pytest.mark.parametrize("member", FAMILY, ids=lambda member: member.__name__)
def test_the_whole_family(family: Any, member: Any, placement: str) -> None:
    alone = stepped(member, {"lr": 0.02}, groups=GROUPS[:4], steps=2)
    for ours, wanted in zip(family[member.__name__, placement], alone, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def counted(placements: list[str]) -> list[dict[str, Any]]:
    return [_counted(PLACEMENTS[name]) for name in placements]


def _counted(placement: Any) -> dict[str, Any]:
    """Bytes that leave this rank in a step, by what torch was asked to send."""
    import torch.distributed as dist

    own, params = made(GROUPS[:3], placement, torch.float32)
    optimizer = AngularMuown(own, wire_dtype="bfloat16")
    for i, (p, _) in enumerate(params):
        p.grad = place(noise(*p.shape, seed=i, dtype=p.dtype), placement)
    optimizer.step()  # ranks compare their plans
    swap, gather, sent = dist.all_to_all_single, dist.all_gather_single, 0

    def counting_swap(to: Tensor, send: Tensor, sizes: Any, counts: list[int], **kw: Any) -> Any:
        nonlocal sent
        sent += sum(counts) - counts[dist.get_group_rank(kw["group"], dist.get_rank())]
        return swap(to, send, sizes, counts, **kw)

    def counting_gather(to: Tensor, own: Tensor, **kw: Any) -> Any:
        nonlocal sent
        others = dist.get_world_size(kw["group"]) - 1
        sent += own.nbytes * others * (own.dtype == torch.uint8)
        return gather(to, own, **kw)

    dist.all_to_all_single, dist.all_gather_single = counting_swap, counting_gather
    optimizer.step()
    dist.all_to_all_single, dist.all_gather_single = swap, gather
    plan = optimizer.exchange_plan()
    [assignment] = plan.assignments
    return {"sent": sent, "plan": [x.tolist() for x in assignment.traffic], "text": str(plan)}


def test_bytes_on_the_wire_are_what_the_plan_says() -> None:
    names = list(PLACEMENTS)
    entries = sum(torch.Size(shape).numel() for group in GROUPS[:3] for shape in group["shapes"])
    for name, found in zip(names, zip(*results(4, counted, names), strict=True), strict=True):
        sent, received = found[0]["plan"]
        assert sorted(rank["sent"] for rank in found) == sorted(sent), name
        assert sum(sent) == sum(received) > 0
        if name in ("rows", "columns"):
            assert sum(sent) <= 2 * 2 * entries
        assert "imbalance" in found[0]["text"]


def summed() -> list[tuple[int, int]]:
    found = []
    for placement in ("rows", "columns"):
        own, _ = made(SKINNY, PLACEMENTS[placement], torch.float32)
        [plan] = AngularMuown(own).exchange_plan().assignments
        found += [(plan.tasks[i].m, plan.tasks[i].n) for i in plan.summed]
    return found


def test_skinny_matrices_stay_where_they_are() -> None:
    """By rows the tall one adds up Gram matrices, by columns the wide one."""
    assert results(2, summed) == [[(150, 3), (4, 200)]] * 2


TALL = [
    # Parts without a row, kept where they are by the Gram way: three blocks of a fused weight.
    (4, {"shapes": [(1536, 2)], "blocks": 3}),
    (8, {"shapes": [(49, 1)]}),
    # Parts of one entry.
    (3, {"shapes": [(5, 1)]}),
    (3, {"shapes": [(1, 5)]}),
    (3, {"shapes": [(2, 5)]}),
]


def by_rows(group: dict[str, Any]) -> list[Tensor]:
    return stepped(AngularMuown, {"lr": 0.02}, PLACEMENTS["rows"], [group], steps=2)


@pytest.mark.parametrize(("world", "group"), TALL)
def test_parts_of_few_entries_or_none(world: int, group: dict[str, Any]) -> None:
    wanted = stepped(AngularMuown, {"lr": 0.02}, None, [group], steps=2)
    for found in results(world, by_rows, group):
        for p, q in zip(found, wanted, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def fully_sharded() -> Tensor:
    model = nn.Sequential(nn.Linear(2, 1536, bias=False))
    fully_shard(model, mesh=mesh_of((-1,)))
    optimizer = AngularMuown(plan(model, head=None, blocks={"0.weight": 3}))
    model(torch.ones(3, 2)).square().sum().backward()
    optimizer.step()
    return whole(model[0].weight)


def test_a_fused_weight_under_fsdp_with_empty_parts() -> None:
    for found in results(4, fully_sharded):
        assert found.isfinite().all()
