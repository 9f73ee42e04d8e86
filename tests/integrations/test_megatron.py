"""Megatron-LM: views of its weights, and megatron-core 0.16.1 on one and on two gloo ranks.

The registry of 0.19 is replaced by a fake with the same interface.
"""

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
from tests.integrations.scripts import EXAMPLES, assert_falls
from tests.lab.runs import free_port
from tests.ranks import results

STEPS, RANKS = 3, 2
SIZES = [4, 2, 2]  # row counts of q, k and v in a query group
KINDS: dict[str, dict[str, Any]] = {
    "column parallel": {"partition_dim": 0},
    "row parallel": {"partition_dim": 1},
    "interleaved q, k, v": {"partition_dim": 0, "is_qkv": True},
    "gate and up": {"partition_dim": 0, "partition_stride": 2},
    "replicated": {},
}


def tensors(shape: tuple[int, int]) -> list[Tensor]:
    """Return a weight and a gradient for each step."""
    torch.manual_seed(0)
    return [torch.randn(shape) for _ in range(STEPS + 1)]


def parameter(W: Tensor, attributes: dict[str, Any]) -> nn.Parameter:
    p = nn.Parameter(W.clone())
    for name, value in attributes.items():
        setattr(p, name, value)
    return p


def take_steps(
    p: nn.Parameter, gradients: list[Tensor], groups: Any = None
) -> MegatronAngularMuown:
    optimizer = MegatronAngularMuown(
        [p], 0.1, qkv_split_shapes=SIZES, pg_collection=groups, decay_scale=0.5
    )
    for G in gradients:
        p.grad = G.clone()
        optimizer.step()
    return optimizer


def by_parts(W: Tensor, gradients: list[Tensor], rows: list[list[int]]) -> tuple[Tensor, ...]:
    """Return W, momentum and exp_avg of AngularMuown with one parameter per part."""
    parts = [nn.Parameter(W[r].clone()) for r in rows]
    optimizer = AngularMuown(parts, lr=0.1, decay_scale=0.5)
    for G in gradients:
        for p, r in zip(parts, rows, strict=True):
            p.grad = G[r].clone()
        optimizer.step()
    order = torch.tensor([i for r in rows for i in r]).argsort()
    states = [optimizer.state[p] for p in parts]
    results = (parts, [s["momentum_buffer"] for s in states], [s["exp_avg"] for s in states])
    return tuple(torch.cat([*pieces]).detach()[order] for pieces in results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_stepped_as_its_separate_matrices(kind: str) -> None:
    W, *gradients = tensors((16, 12))
    rows = [list(range(16))]
    if kind == "interleaved q, k, v":
        rows = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    if kind == "gate and up":
        rows = [list(range(8)), list(range(8, 16))]
    p = parameter(W, KINDS[kind])
    optimizer = take_steps(p, gradients)
    state = optimizer.state[p]
    for actual, expected in zip(
        (p.detach(), state["momentum_buffer"], state["exp_avg"]),
        by_parts(W, gradients, rows),
        strict=True,
    ):
        assert torch.equal(actual, expected)
    assert optimizer.param_groups[0]["step"] == STEPS
    assert float(state["step"]) == STEPS
    assert list(optimizer.state) == [p]  # no state of temporary matrices


class ProcessGroups:
    """The attributes of Megatron's ProcessGroupCollection that are used."""

    def __init__(self, tp: Any) -> None:
        self.tp, self.expt_tp = tp, None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(None, "int8"), ("int8", None)])
def test_a_converted_momentum_keeps_moving(
    kind: str, before: str | None, after: str | None
) -> None:
    """What is converted in a temporary view of a weight would be lost."""
    W, *gradients = tensors((16, 12))
    optimizers = []
    p = parameter(W, KINDS[kind])
    for dtype in (before, after):
        optimizers.append(MegatronAngularMuown([p], 0.1, qkv_split_shapes=SIZES, state_dtype=dtype))
    p.grad = gradients[0].clone()
    optimizers[0].step()
    with pytest.warns(UserWarning, match="is converted"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    held = optimizers[1].state[p]["momentum_buffer"].clone()
    p.grad = gradients[1].clone()
    optimizers[1].step()
    momentum = optimizers[1].state[p]["momentum_buffer"]
    assert momentum.dtype == held.dtype == (torch.int8 if after else W.dtype)
    assert not torch.equal(momentum, held)


def on_a_rank() -> dict[str, dict[str, Any]]:
    """Return this rank's part of each kind of weight after the steps, and its state."""
    rank, parts = torch.distributed.get_rank(), {}
    for kind, attributes in KINDS.items():
        W, *gradients = tensors((16, 12))
        dim = attributes.get("partition_dim")

        def shard(t: Tensor, kind: str = kind, dim: int | None = dim) -> Tensor:
            if dim is None:
                return t
            if kind == "gate and up":  # each rank holds a part of both
                return torch.cat([half.chunk(RANKS)[rank] for half in t.chunk(2)])
            return t.chunk(RANKS, dim)[rank]

        p = parameter(shard(W), attributes)
        groups = ProcessGroups(torch.distributed.group.WORLD)
        state = take_steps(p, [shard(G) for G in gradients], groups).state[p]
        parts[kind] = {"p": p.detach(), **state}
    return parts


def test_two_ranks_take_the_same_step_as_one() -> None:
    """Bit for bit, or up to rounding if rows are split, which changes the order of their sums."""
    ranks = results(RANKS, on_a_rank)
    for kind, attributes in KINDS.items():
        W, *gradients = tensors((16, 12))
        p = parameter(W, attributes)
        state = take_steps(p, gradients).state[p]
        parts = [rank[kind] for rank in ranks]
        for name, whole in {"p": p.detach(), **state}.items():
            pieces = [part[name] for part in parts]
            dim = attributes.get("partition_dim")
            if dim is None or name == "step" or (dim == 1 and whole.shape[1] == 1):
                assert all(torch.equal(piece, pieces[0]) for piece in pieces), (kind, name)
                joined = pieces[0]
            elif kind == "gate and up":
                halves = [torch.cat([t.chunk(2)[i] for t in pieces]) for i in (0, 1)]
                joined = torch.cat(halves)
            else:
                joined = torch.cat(pieces, dim)
            if dim == 1:
                largest = float(whole.abs().max())
                torch.testing.assert_close(joined, whole, rtol=0, atol=1e-6 * largest)
            else:
                assert torch.equal(joined, whole), (kind, name)


def test_a_loaded_state_dict_continues_bit_for_bit() -> None:
    W, *gradients = tensors((16, 12))
    uninterrupted, resumed = (parameter(W, KINDS["interleaved q, k, v"]) for _ in range(2))
    take_steps(uninterrupted, [*gradients, *gradients])
    saved = take_steps(resumed, gradients).state_dict()
    optimizer = MegatronAngularMuown([resumed], 0.1, qkv_split_shapes=SIZES, decay_scale=0.5)
    host.init_states(optimizer)
    optimizer.load_state_dict(saved)
    for G in gradients:
        resumed.grad = G.clone()
        optimizer.step()
    assert torch.equal(resumed, uninterrupted)


@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
def test_a_copy_takes_the_same_step_as_the_original(method: str) -> None:
    W, G, *_ = tensors((16, 12))
    original = take_steps(parameter(W, KINDS["interleaved q, k, v"]), [G])
    if method == "deepcopy":
        copied = copy.deepcopy(original)
        # deepcopy of a parameter drops its attributes
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
    original.pg_collection = ProcessGroups(None)
    with pytest.raises(TypeError, match="create a new one and load the state_dict of this one"):
        copy.deepcopy(original)


def test_errors_say_what_to_do() -> None:
    p = parameter(torch.randn(10, 4), KINDS["interleaved q, k, v"])
    with pytest.raises(ValueError, match=r"10 rows and qkv_split_shapes=\[4, 2, 2\]"):
        take_steps(p, [torch.randn(10, 4)])
    p = parameter(torch.randn(5, 4), KINDS["gate and up"])
    with pytest.raises(ValueError, match="5 rows and partition_stride=2: it must divide"):
        take_steps(p, [torch.randn(5, 4)])
    optimizer = MegatronAngularMuown([{"params": [nn.Parameter(torch.randn(4, 4))]}])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.randn(16))]
    with pytest.raises(
        ValueError, match=r"shape \(16,\) is not a matrix.*use_distributed_optimizer=F"
    ):
        optimizer.step()
    with pytest.raises(
        ValueError, match=r"average=0\.1: .*copies of these weights; set average=None"
    ):
        MegatronAngularMuown([nn.Parameter(torch.randn(4, 4))], average=0.1)
    model = nn.Linear(4, 4)
    optimizer = MegatronAngularMuown([model.weight])
    AngleMonitor(model, optimizer)
    model.weight.grad = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="AngleMonitor does not support Megatron's weights"):
        optimizer.step()


def test_a_group_may_be_empty_on_a_rank() -> None:
    optimizer = MegatronAngularMuown([{"params": []}, {"params": [nn.Parameter(torch.ones(2, 2))]}])
    optimizer.param_groups[1]["params"][0].grad = torch.randn(2, 2)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [0, 1]


def run_example(out: Path, ranks: int, code: str) -> None:
    port = str(free_port())
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"from megatron_gpt import *\n{code}"],
            env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": _paths()},
            cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, output


def _paths() -> str:
    return os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])


SAVE_ASSIGNMENT = """
with use_the_cpu():
    from megatron.core.optimizer import OptimizerConfig
    from angular_muown.integrations.megatron import get_angular_muown_optimizer
    model = make_model()
    names = {p: name for name, p in model.module.named_parameters()}
    assigned = {}
    for part in make_optimizer(model, 20).chained_optimizers:
        params = [names[p] for group in part.optimizer.param_groups for p in group["params"]]
        assigned.setdefault(type(part.optimizer).__name__, []).extend(params)
    Path("assigned.json").write_text(json.dumps(assigned))
    try:
        get_angular_muown_optimizer(OptimizerConfig(lr=0.02), [model], average=0.1)
    except ValueError as error:
        Path("rejected.txt").write_text(str(error))
    get_angular_muown_optimizer(OptimizerConfig(lr=0.02), [model])
"""
HIDDEN = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
          "mlp.linear_fc2")  # fmt: skip


def check_assignment(assigned: dict[str, list[str]]) -> None:
    """Assert that AngularMuown has the hidden matrices, and Adam all other parameters."""
    matrices = assigned.pop("MegatronAngularMuown")
    assert {*matrices} == {f"decoder.layers.{i}.{name}.weight" for i in (0, 1) for name in HIDDEN}
    (rest,) = assigned.values()
    norms = ("input_layernorm", "pre_mlp_layernorm")
    tables = ("embedding.word_embeddings", "embedding.position_embeddings", "output_layer")
    expected = {f"decoder.layers.{i}.{norm}.weight" for i in (0, 1) for norm in norms}
    expected |= {f"{name}.weight" for name in (*tables, "decoder.final_layernorm")}
    assert {*rest} == expected
    assert len(matrices) + len(rest) == len({*matrices, *rest})


def test_megatron_trains_and_resumes_on_one_and_two_ranks(tmp_path: Path) -> None:
    """Two ranks save, and two ranks or one resume from that.

    One rank from the start takes the same steps, up to the order of float32 sums.
    """
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run_example(tmp_path, 2, "main(Path('two'), 8)")
    run_example(tmp_path, 1, f"main(Path('one'), 8)\nmain(Path('two'), 8)\n{SAVE_ASSIGNMENT}")
    check_assignment(json.loads((tmp_path / "assigned.json").read_text()))
    assert (tmp_path / "rejected.txt").read_text().startswith("average=0.1: ")
    one, two, two_to_one = (
        json.loads((tmp_path / name).read_text())
        for name in ("one/result-1.json", "two/result-2.json", "two/result-1.json")
    )
    assert_falls(one["losses"], 0.85)
    assert one["resumed"] == one["losses"][4:]  # bit for bit
    assert two["resumed"] == two["losses"][4:]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two_to_one["losses"] == []
    assert two_to_one["resumed"] == pytest.approx(one["resumed"], rel=1e-5)


@pytest.fixture(scope="module")
def megatron() -> Any:
    with warnings.catch_warnings():  # Megatron warns about optional packages
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


def test_register_adds_an_entry_to_the_registry(
    megatron: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    head = parameter(torch.ones(2, 2), {"is_embedding_or_output_parameter": True})
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
def test_embeddings_and_routers_are_recognized_by_name(name: str, hidden: bool) -> None:
    """The registry provides nothing else."""
    assert host.is_matrix(nn.Parameter(torch.ones(2, 2)), name) == hidden


def test_embedding_modules_are_recognized_whatever_their_name(megatron: Any) -> None:
    model = nn.ModuleDict({"positions": nn.Embedding(4, 4), "map": nn.Linear(4, 4)})
    host.mark([model])
    matrices = [name for name, p in model.named_parameters() if host.is_matrix(p, name)]
    assert matrices == ["map.weight"]


def test_without_a_registry_the_error_names_the_function(megatron: Any) -> None:
    with pytest.raises(ImportError, match=r"added in 0\.19: use get_angular_muown_optimizer"):
        host.register()


@pytest.mark.parametrize("axis", [0, 1])
def test_row_vectors_have_their_own_shape_and_offset_in_a_checkpoint(
    megatron: Any, axis: int
) -> None:
    from megatron.core.dist_checkpointing import optimizer as module
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    host.save_row_vectors()
    make = module.make_sharded_optimizer_tensor
    host.save_row_vectors()
    assert module.make_sharded_optimizer_tensor is make
    vectors = []
    for rank in range(2):
        weight = ShardedTensor.from_rank_offsets(
            "w", torch.ones(4, 6), (axis, rank, 2), replica_id=(0, 0, 0)
        )
        vectors.append(make(weight, torch.ones(4, 1), "state.exp_avg"))
        momentum = make(weight, torch.ones(4, 6), "state.momentum_buffer")
        assert momentum.global_shape == weight.global_shape
        with pytest.raises(AssertionError, match="does not match model shape"):
            make(weight, torch.ones(3, 1), "state.exp_avg")
    rows_are_sharded = axis == 0
    assert [v.global_shape for v in vectors] == [(8, 1) if rows_are_sharded else (4, 1)] * 2
    offsets = [(0, 0), (4, 0)] if rows_are_sharded else [(0, 0)] * 2
    assert [v.global_offset for v in vectors] == offsets
    assert [is_main_replica(v.replica_id) for v in vectors] == [True, rows_are_sharded]


def test_unsupported_megatron_configs_are_rejected(megatron: Any) -> None:
    config = megatron.optimizer.OptimizerConfig(lr=0.02, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="use_distributed_optimizer=True, fp16=False"):
        host.get_angular_muown_optimizer(config, [])
    config = megatron.optimizer.OptimizerConfig(lr=0.02, optimizer="sgd")
    with pytest.raises(ValueError, match="optimizer='sgd' must be 'adam'"):
        host.get_angular_muown_optimizer(config, [])
