"""plan-ranks: placements and plans of simulated ranks, compared with real ones."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from angular_lab.cli.cluster import rank_counts, table
from angular_lab.cli.main import main
from angular_lab.cluster.machine import Machine
from angular_lab.cluster.models import MODELS, Shapes
from angular_lab.cluster.simulate import Grid, fake_ranks, meta_model, sharded_model, simulate
from angular_muown import AngularMuown, plan
from tests.ranks import results

TINY = Shapes(vocabulary=40, layers=2, width=24, mlp=50, heads=4, kv_heads=2, head_size=6)
MIXTURE = Shapes(
    vocabulary=40, layers=2, width=24, mlp=36, heads=2, kv_heads=2, head_size=10, latent_q=14,
    latent_kv=8, rotary=4, experts=6, expert_mlp=12, shared_mlp=10, dense_layers=1,
)  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), [("llama-8b", 8.03), ("llama-70b", 70.6),
                                                ("moe-1t", 1026)])  # fmt: skip
def test_models_have_the_published_number_of_parameters(name, billions) -> None:
    parameters = sum(p.numel() for p in meta_model(MODELS[name]).parameters())
    assert parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_llama_8b_is_balanced_on_64_ranks_and_one_matrix_dominates_on_512() -> None:
    on_64, on_128, on_512 = (simulate(MODELS["llama-8b"], n, Machine()) for n in (64, 128, 512))
    assert on_64.imbalance <= 1.10
    assert not on_64.dominant
    assert on_512.products == on_128.products  # a matrix is not divided
    ((name, share),) = on_512.dominant
    assert share == pytest.approx(on_512.imbalance)
    assert f"from 512 ranks on, a single matrix, {name}," in table([on_64, on_128, on_512])
    assert "*" not in table([on_64, on_128])


def _chunk(rows: int, ranks: int, rank: int) -> int:
    each = -(-rows // ranks)
    return max(0, min(rows, (rank + 1) * each) - rank * each)


def test_owners_and_bytes_match_a_plan_made_by_hand() -> None:
    """Assign matrices, the longest first, to the least loaded rank and count what it exchanges."""
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
    simulation = simulate(TINY, ranks, Machine())
    assert (simulation.owned_least, simulation.owned_most) == (min(owned), max(owned))
    assert simulation.imbalance == pytest.approx(max(work) * ranks / sum(work))
    assert simulation.sent == moved.sum(1).max()


def _step(shapes: Shapes, replicas: int) -> tuple[int, int]:
    """Take a step on this rank; return the bytes of its state and those sent to other ranks."""
    grid = Grid.of(shapes, dist.get_world_size(), replicas)
    model = sharded_model(shapes, grid).to_empty(device="cpu")
    sent, all_to_all, all_gather = 0, dist.all_to_all_single, dist.all_gather_single

    def counted_all_to_all(received, send, sizes, counts, group=None, **rest):
        nonlocal sent
        sent += sum(counts) - counts[dist.get_rank(group)]
        return all_to_all(received, send, sizes, counts, group=group, **rest)

    def counted_all_gather(gathered, part, group=None, **rest):
        nonlocal sent
        if part.dtype == torch.uint8:  # matrices; agreements are numbers
            sent += part.numel() * (dist.get_world_size(group) - 1)
        return all_gather(gathered, part, group=group, **rest)

    dist.all_to_all_single, dist.all_gather_single = counted_all_to_all, counted_all_gather
    stacks = ["*.experts.*"] if shapes.experts else []
    optimizer = AngularMuown(plan(model, stacks=stacks), wire_dtype="bfloat16")
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p.detach().to_local())
        p.grad = torch.ones_like(p)
    optimizer.step()
    dist.all_to_all_single, dist.all_gather_single = all_to_all, all_gather
    states = [t for state in optimizer.state.values() for t in state.values()]
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in states), sent


CASES = ((TINY, 1), (TINY, 2), (MIXTURE, 1), (MIXTURE, 2))


def _all_steps() -> list[tuple[int, int]]:
    return [_step(shapes, replicas) for shapes, replicas in CASES]


def test_real_ranks_hold_and_send_the_simulated_bytes() -> None:
    simulations = [simulate(shapes, 4, Machine(), replicas) for shapes, replicas in CASES]
    by_rank = results(4, _all_steps)
    for case, simulation in enumerate(simulations):
        states, sent = zip(*(of_rank[case] for of_rank in by_rank), strict=True)
        assert max(states) == simulation.state, CASES[case]
        assert max(sent) == simulation.sent, CASES[case]


def test_copied_layers_have_the_placements_of_sharded_ones() -> None:
    with fake_ranks(8):
        model = sharded_model(replace(MIXTURE, layers=4), Grid.of(MIXTURE, 8))
        layers = model.get_submodule("layers")
        copied, sharded = (dict(layers.get_submodule(i).named_parameters()) for i in "31")
        assert copied.keys() == sharded.keys()
        for name in sharded:
            assert copied[name].placements == sharded[name].placements
            assert copied[name].to_local().shape == sharded[name].to_local().shape
            assert copied[name] is not sharded[name]


def test_experts_are_divided_before_their_rows() -> None:
    on_2, on_6, on_12 = (simulate(MIXTURE, ranks, Machine()) for ranks in (2, 6, 12))
    assert (on_2.expert_ranks, on_12.expert_ranks) == (2, 6)
    # On 6 ranks, each has one expert of each of the three stacks.
    dense = [n for n, p in meta_model(MIXTURE).named_parameters() if p.ndim == 2 and "layers" in n]
    matrices = len([n for n in dense if "router" not in n])
    assert 6 * on_6.owned_least <= matrices + 6 * 3 <= 6 * on_6.owned_most


def test_float32_on_the_wire_doubles_the_bytes() -> None:
    default, narrow, wide = (
        simulate(TINY, 4, Machine(), 1, dtype) for dtype in (None, "bfloat16", "float32")
    )
    assert wide.sent == 2 * narrow.sent
    assert default.sent == narrow.sent
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("text", "counts"),
    [("64", [64]), ("8,96", [8, 96]), ("8..64", [8, 16, 32, 64]), ("6..30", [6, 12, 24])],
)
def test_rank_counts(text, counts) -> None:
    assert rank_counts(text) == counts


@pytest.mark.parametrize("text", ["", "8...64", "64..8", "0", "0..8", "-8", "a,b", "9999999"])
def test_bad_rank_counts_are_explained(text, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["plan-ranks", "--model", "llama-8b", f"--ranks={text}"])
    assert f"--ranks: {text!r}: write 8..16384" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hsdp", "0"], "--hsdp 0: it must be at least 1"),
        (["--hsdp", "3"], "--hsdp 3 does not divide 8 ranks"),
        (["--bandwidth", "0"], "--bandwidth 0: it must be above 0"),
        (["--ranks-per-node", "-1"], "--ranks-per-node -1: it must be above 0"),
        (["--latency", "-1"], "--latency -1: it must be at least 0"),
    ],
)
def test_bad_options_are_explained(options, message, capsys) -> None:
    assert main(["plan-ranks", "--model", "llama-8b", "--ranks", "8", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_a_table_or_json_and_saves_json_and_plots(tmp_path, capsys) -> None:
    command = ["plan-ranks", "--model", "llama-8b", "--hsdp", "2", "--ranks"]
    assert main([*command, "8..16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ranks", "8", "16"]
    plot = tmp_path / "plot.png"
    assert main([*command, "8", "--json", "--out", str(tmp_path), "--plot", str(plot)]) == 0
    saved = json.loads((tmp_path / "plan_llama-8b.json").read_text())
    assert json.loads(capsys.readouterr().out) == saved
    assert [row["ranks"] for row in saved["figures"]] == [8]
    for path in (plot, tmp_path / "plan_llama-8b.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
