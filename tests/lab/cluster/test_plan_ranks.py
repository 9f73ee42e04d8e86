"""plan-ranks: real placements and plans for ranks that nobody has, and what real ranks then do."""

import json
from itertools import product

import pytest
import torch
import torch.distributed as dist

from angular_lab.cli.cluster import rank_counts
from angular_lab.cli.main import main
from angular_lab.cluster.machine import Machine
from angular_lab.cluster.models import MODELS, Grid, Shapes, meta_model, pretended, sharded_model
from angular_lab.cluster.simulate import plan_ranks, table
from angular_muown import AngularMuown, plan
from tests.ranks import results

TINY = Shapes(vocabulary=40, layers=2, width=24, mlp=50, heads=4, kv_heads=2, size=6)
MIXTURE = Shapes(
    vocabulary=40, layers=2, width=24, mlp=36, heads=2, kv_heads=2, size=10, latent_q=14,
    latent_kv=8, rotary=4, experts=6, expert_mlp=12, shared_mlp=10, dense_layers=1,
)  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), [("llama-8b", 8.03), ("llama-70b", 70.6),
                                                ("moe-1t", 1026)])  # fmt: skip
def test_models_have_the_published_number_of_parameters(name, billions) -> None:
    found = sum(p.numel() for p in meta_model(MODELS[name]).parameters())
    assert found / 1e9 == pytest.approx(billions, rel=2e-3)


def test_llama_8b_is_even_on_64_ranks_and_one_matrix_dominates_on_512() -> None:
    machine = Machine()
    even = plan_ranks(MODELS["llama-8b"], 64, machine)
    assert even.imbalance <= 1.10
    assert not even.dominant
    half, full = (plan_ranks(MODELS["llama-8b"], ranks, machine) for ranks in (128, 512))
    assert full.products == half.products  # a matrix is not divided
    ((name, share),) = full.dominant
    assert share == pytest.approx(full.imbalance)
    assert f"{name}, is more than a rank's mean share" in table([even, half, full])
    assert "*" not in table([even, half])


def _chunk(rows: int, ranks: int, rank: int) -> int:
    each = -(-rows // ranks)
    return max(0, min(rows, (rank + 1) * each) - rank * each)


def test_figures_are_the_sums_of_a_plan_made_by_hand() -> None:
    """Matrices one by one to who has least to do; bytes by who sends what to whom."""
    ranks = 6
    named = meta_model(TINY).named_parameters()
    matrices = [tuple(p.shape) for name, p in named if p.ndim == 2 and "layers" in name]
    assert len(matrices) == 14

    def cost(shape):
        return min(shape) ** 2 * (2 * max(shape) + min(shape))

    work, owned, moved = [0] * ranks, [0] * ranks, torch.zeros(ranks, ranks)
    for shape in sorted(matrices, key=cost, reverse=True):
        owner = min(range(ranks), key=lambda r: (work[r], r))
        work[owner] += cost(shape)
        owned[owner] += 1
        for rank in range(ranks):
            if rank != owner:
                size = 2 * _chunk(shape[0], ranks, rank) * shape[1]
                moved[rank, owner] += size
                moved[owner, rank] += size
    found = plan_ranks(TINY, ranks, Machine())
    assert (found.owned_least, found.owned_most) == (min(owned), max(owned))
    assert found.imbalance == pytest.approx(max(work) * ranks / sum(work))
    assert found.sent == moved.sum(1).max()


def _stepped(shapes: Shapes, replicas: int) -> tuple[int, int]:
    """Bytes of the state after a real step on this rank, and those that it sent to others."""
    grid = Grid.of(shapes, dist.get_world_size(), replicas)
    model = sharded_model(shapes, grid).to_empty(device="cpu")
    sent, swap, gather = 0, dist.all_to_all_single, dist.all_gather_single

    def counted(received, send, sizes, counts, group=None, **rest):
        nonlocal sent
        sent += sum(counts) - counts[dist.get_rank(group)]
        return swap(received, send, sizes, counts, group=group, **rest)

    def gathered(to, own, group=None, **rest):
        nonlocal sent
        if own.dtype == torch.uint8:  # matrices; agreements are numbers
            sent += own.numel() * (dist.get_world_size(group) - 1)
        return gather(to, own, group=group, **rest)

    dist.all_to_all_single, dist.all_gather_single = counted, gathered
    stacks = ["*.experts.*"] if shapes.experts else []
    optimizer = AngularMuown(plan(model, stacks=stacks), wire_dtype="bfloat16")
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p.detach().to_local())
        p.grad = torch.ones_like(p)
    optimizer.step()
    dist.all_to_all_single, dist.all_gather_single = swap, gather
    states = [t for state in optimizer.state.values() for t in state.values()]
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in states), sent


CASES = ((TINY, 1), (TINY, 2), (MIXTURE, 1), (MIXTURE, 2))


def _all_stepped() -> list[tuple[int, int]]:
    return [_stepped(shapes, replicas) for shapes, replicas in CASES]


def test_real_ranks_hold_and_send_what_was_planned() -> None:
    found = [plan_ranks(shapes, 4, Machine(), replicas) for shapes, replicas in CASES]
    of_ranks = results(4, _all_stepped)
    for case, planned in enumerate(found):
        states, sent = zip(*(of_rank[case] for of_rank in of_ranks), strict=True)
        assert max(states) == planned.state, CASES[case]
        assert max(sent) == planned.sent, CASES[case]


def test_copied_layers_lie_as_those_that_torch_cut() -> None:
    """The last layer, cut by fully_shard itself where the model has one layer less."""
    grid = Grid.of(MIXTURE, 8)
    with pretended(8):
        model = sharded_model(Shapes(**{**vars(MIXTURE), "layers": 4}), grid)
        layers = model.get_submodule("layers")
        last, cut = (dict(layers.get_submodule(i).named_parameters()) for i in "31")
        assert last.keys() == cut.keys()
        for name in cut:
            assert last[name].placements == cut[name].placements
            assert last[name].to_local().shape == cut[name].to_local().shape
            assert last[name] is not cut[name]


def test_experts_are_divided_first_and_then_cut() -> None:
    few, many = (plan_ranks(MIXTURE, ranks, Machine()) for ranks in (2, 12))
    assert (few.expert_ranks, many.expert_ranks) == (2, 6)
    whole = plan_ranks(MIXTURE, 6, Machine())  # one expert of each stack on every rank
    dense = [n for n, p in meta_model(MIXTURE).named_parameters() if p.ndim == 2 and "layers" in n]
    matrices = len([n for n in dense if "router" not in n])
    assert 6 * whole.owned_least <= matrices + 6 * 3 <= 6 * whole.owned_most
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("64", [64]), ("8,96", [8, 96]), ("8..64", [8, 16, 32, 64]), ("6..30", [6, 12, 24])],
)
def test_rank_counts(text, numbers) -> None:
    assert rank_counts(text) == numbers


@pytest.mark.parametrize(
    "text", ["", "8...64", "64..8", "0", "0..8", "-8", "a,b", "8..", "9999999"]
)
def test_bad_rank_counts(text, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["plan-ranks", "--model", "llama-8b", f"--ranks={text}"])
    assert f"--ranks: {text!r}: write 8..16384" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hsdp", "0"], "--hsdp 0: it must be at least 1"),
        (["--hsdp", "3"], "--hsdp 3 does not divide 8 ranks"),
        (["--bandwidth", "0"], "--bandwidth 0: it must be above 0"),
        (["--ranks-per-node", "-1"], "--ranks-per-node -1: it must be above 0"),
        (["--latency", "-1"], "--latency -1: it must be above 0"),
    ],
)
def test_bad_options(options, words, capsys) -> None:
    assert main(["plan-ranks", "--model", "llama-8b", "--ranks", "8", *options]) == 2
    assert words in capsys.readouterr().err


def test_the_command(tmp_path, capsys) -> None:
    command = ["plan-ranks", "--model", "llama-8b", "--ranks", "8..32", "--hsdp", "2"]
    assert main([*command, "--out", str(tmp_path), "--plot", str(tmp_path / "own.png")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["ranks", "8", "16", "32"]
    saved = json.loads((tmp_path / "plan_llama-8b.json").read_text())
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == saved
    assert [f["ranks"] for f in saved["figures"]] == [8, 16, 32]
    for name in ("plan_llama-8b.png", "own.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_wider_wires_move_more() -> None:
    narrow, wide = (plan_ranks(TINY, 4, Machine(), 1, kind) for kind in ("bfloat16", "float32"))
    assert wide.sent == 2 * narrow.sent
    assert plan_ranks(TINY, 4, Machine()).sent == narrow.sent


def test_many_numbers_one_after_the_other() -> None:
    """Each has process groups of its own, which are gone afterwards."""
    for ranks, replicas in product((2, 8), (1, 2)):
        assert plan_ranks(TINY, ranks, Machine(), replicas).ranks == ranks
        assert not dist.is_initialized()
