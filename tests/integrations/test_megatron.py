"""Megatron-LM: the views of its weights as laws, megatron-core 0.16.1 itself on one and on two
ranks over gloo, the registry of 0.19 by a stand-in with its interface."""

import copy
import json
import os
import pickle
import subprocess
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngleMonitor, AngularMuown
from angular_muown.integrations.megatron import MegatronAngularMuown
from angular_muown.integrations.megatron import optimizer as host
from tests.angular_lab.runs import free_port
from tests.integrations.scripts import EXAMPLES, assert_falls
from tests.ranks import results

STEPS, RANKS = 3, 2
SIZES = [4, 2, 2]  # rows of q, k and v in a query group
KINDS: dict[str, dict[str, Any]] = {
    "column parallel": {"partition_dim": 0},
    "row parallel": {"partition_dim": 1},
    "interleaved q, k, v": {"partition_dim": 0, "is_qkv": True},
    "gate and up": {"partition_dim": 0, "partition_stride": 2},
    "not spread": {},
}


def tensors(shape: tuple[int, int]) -> list[Tensor]:
    """A weight and gradients for it."""
    torch.manual_seed(0)
    return [torch.randn(shape) for _ in range(STEPS + 1)]


def marked(W: Tensor, marks: dict[str, Any]) -> nn.Parameter:
    p = nn.Parameter(W.clone())
    for name, value in marks.items():
        setattr(p, name, value)
    return p


def stepped(p: nn.Parameter, gradients: list[Tensor], groups: Any = None) -> MegatronAngularMuown:
    optimizer = MegatronAngularMuown(
        [p], 0.1, qkv_split_shapes=SIZES, pg_collection=groups, decay_scale=0.5
    )
    for G in gradients:
        p.grad = G.clone()
        optimizer.step()
    return optimizer


def by_parts(W: Tensor, gradients: list[Tensor], rows: list[list[int]]) -> tuple[Tensor, ...]:
    """The same by AngularMuown itself, with a parameter for each part: W, momentum, exp_avg."""
    parts = [nn.Parameter(W[r].clone()) for r in rows]
    optimizer = AngularMuown(parts, lr=0.1, decay_scale=0.5)
    for G in gradients:
        for p, r in zip(parts, rows, strict=True):
            p.grad = G[r].clone()
        optimizer.step()
    order = torch.tensor([i for r in rows for i in r]).argsort()
    states = [optimizer.state[p] for p in parts]
    found = (parts, [s["momentum_buffer"] for s in states], [s["exp_avg"] for s in states])
    return tuple(torch.cat([*pieces]).detach()[order] for pieces in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_stepped_as_the_matrices_that_it_holds(kind: str) -> None:
    W, *gradients = tensors((16, 12))
    rows = [list(range(16))]
    if kind == "interleaved q, k, v":
        rows = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    if kind == "gate and up":
        rows = [list(range(8)), list(range(8, 16))]
    p = marked(W, KINDS[kind])
    optimizer = stepped(p, gradients)
    state = optimizer.state[p]
    for ours, wanted in zip(
        (p.detach(), state["momentum_buffer"], state["exp_avg"]),
        by_parts(W, gradients, rows),
        strict=True,
    ):
        assert torch.equal(ours, wanted)
    assert optimizer.param_groups[0]["step"] == STEPS
    assert float(state["step"]) == STEPS
    assert list(optimizer.state) == [p]  # what the engine saw for a step is gone


class Ranks:
    """Megatron's process groups, as far as they are looked at."""

    def __init__(self, tp: Any) -> None:
        self.tp, self.expt_tp = tp, None


def on_a_rank() -> dict[str, dict[str, Any]]:
    """What a rank has of each kind of weight after its steps, and its state."""
    rank, found = torch.distributed.get_rank(), {}
    for kind, marks in KINDS.items():
        W, *gradients = tensors((16, 12))
        dim = marks.get("partition_dim")

        def own(t: Tensor, kind: str = kind, dim: int | None = dim) -> Tensor:
            if dim is None:
                return t
            if kind == "gate and up":  # each rank has a part of both
                return torch.cat([half.chunk(RANKS)[rank] for half in t.chunk(2)])
            return t.chunk(RANKS, dim)[rank]

        p = marked(own(W), marks)
        groups = Ranks(torch.distributed.group.WORLD)
        state = stepped(p, [own(G) for G in gradients], groups).state[p]
        found[kind] = {"p": p.detach(), **state}
    return found


def test_two_ranks_step_as_one_does() -> None:
    """Row lengths, row products and the polar factor of a spread weight are those of the whole: bit
    for bit, or where rows are cut, whose sums are added over ranks in another order, nearly so."""
    ranks = results(RANKS, on_a_rank)
    for kind, marks in KINDS.items():
        W, *gradients = tensors((16, 12))
        p = marked(W, marks)
        state = stepped(p, gradients).state[p]
        parts = [rank[kind] for rank in ranks]
        for name, whole in {"p": p.detach(), **state}.items():
            found = [part[name] for part in parts]
            dim = marks.get("partition_dim")
            if dim is None or name == "step" or (dim == 1 and whole.shape[1] == 1):
                assert all(torch.equal(piece, found[0]) for piece in found), (kind, name)
                joined = found[0]
            elif kind == "gate and up":
                halves = [torch.cat([t.chunk(2)[i] for t in found]) for i in (0, 1)]
                joined = torch.cat(halves)
            else:
                joined = torch.cat(found, dim)
            if dim == 1:
                largest = float(whole.abs().max())
                torch.testing.assert_close(joined, whole, rtol=0, atol=1e-6 * largest)
            else:
                assert torch.equal(joined, whole), (kind, name)


def test_the_state_comes_back_through_a_state_dict() -> None:
    W, *gradients = tensors((16, 12))
    whole, half = (marked(W, KINDS["interleaved q, k, v"]) for _ in range(2))
    stepped(whole, [*gradients, *gradients])
    saved = stepped(half, gradients).state_dict()
    optimizer = MegatronAngularMuown([half], 0.1, qkv_split_shapes=SIZES, decay_scale=0.5)
    host.init_all(optimizer)
    optimizer.load_state_dict(saved)
    for G in gradients:
        half.grad = G.clone()
        optimizer.step()
    assert torch.equal(half, whole)


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_a_copy_steps_as_the_original(through: str) -> None:
    W, G, *_ = tensors((16, 12))
    original = stepped(marked(W, KINDS["interleaved q, k, v"]), [G])
    if through == "deepcopy":
        copied = copy.deepcopy(original)
        # a copy of a parameter has none of its attributes, whoever copies it
        copied.param_groups[0]["params"][0].is_qkv = True
    else:
        copied = pickle.loads(pickle.dumps(original))
    assert copied.process_group is False
    results = []
    for optimizer in (original, copied):
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = G.clone()
        optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)
    original.pg_collection = Ranks(None)
    with pytest.raises(TypeError, match="make a new one and load this one's state_dict"):
        copy.deepcopy(original)


def test_errors_say_what_to_do() -> None:
    p = marked(torch.randn(10, 4), KINDS["interleaved q, k, v"])
    with pytest.raises(ValueError, match=r"10 rows and qkv_split_shapes=\[4, 2, 2\]"):
        stepped(p, [torch.randn(10, 4)])
    p = marked(torch.randn(5, 4), KINDS["gate and up"])
    with pytest.raises(ValueError, match="5 rows and partition_stride=2: it must divide"):
        stepped(p, [torch.randn(5, 4)])
    optimizer = MegatronAngularMuown([{"params": [nn.Parameter(torch.randn(4, 4))]}])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.randn(16))]
    with pytest.raises(ValueError, match=r"shape \(16,\) is no matrix: .*distributed optimizer"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"average=0\.1: .*copies of the weights .*at None"):
        MegatronAngularMuown([nn.Parameter(torch.randn(4, 4))], average=0.1)
    model = nn.Linear(4, 4)
    optimizer = MegatronAngularMuown([model.weight])
    AngleMonitor(model, optimizer)
    model.weight.grad = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="AngleMonitor cannot name the matrices of Megatron's"):
        optimizer.step()


def test_a_rank_may_have_an_empty_group() -> None:
    optimizer = MegatronAngularMuown([{"params": []}, {"params": [nn.Parameter(torch.ones(2, 2))]}])
    optimizer.param_groups[1]["params"][0].grad = torch.randn(2, 2)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [0, 1]


def run_example(out: Path, ranks: int, code: str) -> None:
    port = str(free_port())
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", f"from megatron_gpt import *\n{code}"],
            env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": _paths()},
            cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for process in started:
        text, _ = process.communicate()
        assert process.returncode == 0, text


def _paths() -> str:
    return os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])


PLACED = """
with use_the_cpu():
    from megatron.core.optimizer import OptimizerConfig
    from angular_muown.integrations.megatron import get_angular_muown_optimizer
    model = make_model()
    names = {p: name for name, p in model.module.named_parameters()}
    placed = {}
    for part in make_optimizer(model).chained_optimizers:
        found = [names[p] for group in part.optimizer.param_groups for p in group["params"]]
        placed.setdefault(type(part.optimizer).__name__, []).extend(found)
    Path("placed.json").write_text(json.dumps(placed))
    try:
        get_angular_muown_optimizer(OptimizerConfig(lr=0.02), [model], average=0.1)
    except ValueError as error:
        Path("refused.txt").write_text(str(error))
    get_angular_muown_optimizer(OptimizerConfig(lr=0.02), [model])
"""
HIDDEN = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
          "mlp.linear_fc2")  # fmt: skip


def assert_placed(placed: dict[str, list[str]]) -> None:
    """What landed where on the example's model, position embeddings among the rest."""
    matrices = placed.pop("MegatronAngularMuown")
    assert {*matrices} == {f"decoder.layers.{i}.{name}.weight" for i in (0, 1) for name in HIDDEN}
    (rest,) = placed.values()
    norms = ("input_layernorm", "pre_mlp_layernorm")
    tables = ("embedding.word_embeddings", "embedding.position_embeddings", "output_layer")
    wanted = {f"decoder.layers.{i}.{norm}.weight" for i in (0, 1) for norm in norms}
    wanted |= {f"{name}.weight" for name in (*tables, "decoder.final_layernorm")}
    assert {*rest} == wanted
    assert len(matrices) + len(rest) == len({*matrices, *rest})


def test_megatron_trains_and_resumes_on_one_and_two_ranks(tmp_path: Path) -> None:
    """Two ranks save; both they and a single rank go on from that. A single rank alone does the
    same steps, up to the order in which float32 sums are taken."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run_example(tmp_path, 2, "main(Path('two'), 8)")
    run_example(tmp_path, 1, f"main(Path('one'), 8)\nmain(Path('two'), 8)\n{PLACED}")
    assert_placed(json.loads((tmp_path / "placed.json").read_text()))
    assert (tmp_path / "refused.txt").read_text().startswith("average=0.1: ")
    alone, both, after = (
        json.loads((tmp_path / name).read_text())
        for name in ("one/result-1.json", "two/result-2.json", "two/result-1.json")
    )
    assert_falls(alone["losses"], 0.85)
    assert alone["resumed"] == alone["losses"][4:]  # bit for bit
    assert both["resumed"] == both["losses"][4:]
    assert both["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert after["losses"] == []
    assert after["resumed"] == pytest.approx(alone["resumed"], rel=1e-5)


@pytest.fixture(scope="module")
def megatron() -> Any:
    with warnings.catch_warnings():  # its own, about packages that it does without
        warnings.simplefilter("ignore")
        import megatron.core.optimizer
    return megatron.core


@dataclass
class Entry:
    """The fields of EmergingOptimizerEntry in megatron-core 0.19."""

    optimizer_cls: type
    init_state_fn: Any
    config_to_kwargs: Any
    default_param_overrides: dict[Any, dict[str, Any]]


def test_the_registry_gets_an_entry(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.optimizer.emerging_optimizers"
    registry: Any = types.ModuleType(name)
    registry.EmergingOptimizerEntry, registry._EMERGING_OPTIMIZERS = Entry, {}
    monkeypatch.setitem(sys.modules, name, registry)
    host.register(aux_lr=1e-3, warmup_steps=7)
    entry = registry._EMERGING_OPTIMIZERS["angular_muown"]
    assert entry.optimizer_cls is MegatronAngularMuown

    shape = types.SimpleNamespace(num_attention_heads=8, num_query_groups=4, kv_channels=16)
    config = megatron.optimizer.OptimizerConfig(lr=0.03, weight_decay=0.2)
    values = entry.config_to_kwargs(config, [types.SimpleNamespace(config=shape)], None)
    optimizer = entry.optimizer_cls([nn.Parameter(torch.ones(2, 2))], **values)
    assert optimizer.qkv_split_shapes == [32, 16, 16]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["warmup_steps"]) == (0.03, 0.2, 7)
    entry.init_state_fn(optimizer)
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq"} <= optimizer.state_dict()["state"][0].keys()

    ((key, override),) = entry.default_param_overrides.items()
    assert override == {"lr": 1e-3, "max_lr": 1e-3, "optimizer": "adam"}
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    head = marked(torch.ones(2, 2), {"is_embedding_or_output_parameter": True})
    assert not key.matches(matrix, "decoder.layers.0.mlp.linear_fc1.weight")
    assert key.matches(matrix, "decoder.layers.0.mlp.router.weight")
    assert key.matches(vector, "decoder.final_layernorm.weight")
    assert key.matches(head, "output_layer.weight")


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("module.decoder.layers.0.mlp.linear_fc1.weight", True),
        ("module.embedding.word_embeddings.weight", False),
        ("module.embedding.position_embeddings.weight", False),
        ("embedding.tokentype_embeddings.weight", False),
        ("position_embeddings.weight", False),
        ("decoder.layers.0.mlp.router.weight", False),
        ("decoder.layers.0.mlp.shared_experts.gate_weight", False),
    ],
)
def test_names_alone_tell_tables_and_routers(name: str, hidden: bool) -> None:
    """All that the registry shows."""
    assert host.is_matrix(nn.Parameter(torch.ones(2, 2)), name) == hidden


def test_what_an_embedding_owns_is_no_matrix_whatever_its_name(megatron: Any) -> None:
    model = nn.ModuleDict({"places": nn.Embedding(4, 4), "map": nn.Linear(4, 4)})
    host.mark([model])
    found = [name for name, p in model.named_parameters() if host.is_matrix(p, name)]
    assert found == ["map.weight"]


def test_without_a_registry_the_error_names_the_function(megatron: Any) -> None:
    with pytest.raises(ImportError, match=r"came with 0\.19: use get_angular_muown_optimizer"):
        host.register()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_vector_has_a_place_of_its_own_in_a_checkpoint(megatron: Any, axis: int) -> None:
    from megatron.core.dist_checkpointing import optimizer as module
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    host.save_row_vectors()
    made = module.make_sharded_optimizer_tensor
    host.save_row_vectors()
    assert module.make_sharded_optimizer_tensor is made
    vectors = []
    for rank in range(2):
        weight = ShardedTensor.from_rank_offsets(
            "w", torch.ones(4, 6), (axis, rank, 2), replica_id=(0, 0, 0)
        )
        vectors.append(made(weight, torch.ones(4, 1), "state.exp_avg"))
        momentum = made(weight, torch.ones(4, 6), "state.momentum_buffer")
        assert momentum.global_shape == weight.global_shape
        with pytest.raises(AssertionError, match="does not match model shape"):
            made(weight, torch.ones(3, 1), "state.exp_avg")
    sharding = axis == 0
    assert [v.global_shape for v in vectors] == [(8, 1) if sharding else (4, 1)] * 2
    assert [v.global_offset for v in vectors] == ([(0, 0), (4, 0)] if sharding else [(0, 0)] * 2)
    assert [is_main_replica(v.replica_id) for v in vectors] == [True, sharding]


def test_what_needs_flat_or_scaled_gradients_is_refused(megatron: Any) -> None:
    config = megatron.optimizer.OptimizerConfig(lr=0.02, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="use_distributed_optimizer=True, fp16=False"):
        host.get_angular_muown_optimizer(config, [])
    config = megatron.optimizer.OptimizerConfig(lr=0.02, optimizer="sgd")
    with pytest.raises(ValueError, match="optimizer='sgd': it is for the rest"):
        host.get_angular_muown_optimizer(config, [])
