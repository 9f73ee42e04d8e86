"""Ranks that divide the products of a layer train as one process does."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from angular_lab.config.spec import ModelSpec, Spec
from angular_lab.models import tensor_parallel
from angular_lab.training import build
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import train
from tests.lab.runs import lines, tiny, train_on
from tests.lab.tiny import SPECS, scrambled, text
from tests.ranks import results

STEPS = 50
WAYS = {"tp": (2, {"tensor": 2}), "fsdp x tp": (4, {"tensor": 2, "parallel": "fsdp"})}


MODEL = ModelSpec(vocabulary=257, sequence=32, layers=1, width=32, heads=2, mlp=64)


def spec_of(data, **values) -> Spec:
    values = {"model": MODEL, **values}
    return tiny(data, steps=STEPS, eval_every=25, save_every=25, angle_every=0, **values)


def numbers(out, *keys: str) -> list[float]:
    parsed = [json.loads(line) for line in lines(out)]
    assert [line["step"] for line in parsed] == list(range(1, STEPS + 1))
    return [line[key] for line in parsed for key in keys if key in line]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    train(spec_of(data), out)
    return out


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_curve_is_that_of_one_process_and_one_process_goes_on(
    data, tmp_path, alone, way
) -> None:
    """Losses, evaluations and norms; then the run is cut at its middle and resumed by one."""
    world, values = WAYS[way]
    spec, out = spec_of(data, **values), tmp_path / "run"
    train_on(world, spec, out)
    keys = ("loss", "val_loss", "grad_norm")
    assert max(numbers(alone, "grad_norm")) > spec.clip  # it is clipped
    assert numbers(out, *keys) == pytest.approx(numbers(alone, *keys), abs=1e-5)
    (out / "DONE").unlink()
    for path in (out / "checkpoints").iterdir():
        if not path.name.endswith("25"):
            shutil.rmtree(path)
    train(spec, out, resume=True)
    assert numbers(out, *keys) == pytest.approx(numbers(alone, *keys), abs=1e-5)


def test_angles_micro_batches_and_a_resume_by_more_ranks(data, tmp_path) -> None:
    """One process begins, four go on; ranks that work on the same sequences evaluate them once."""
    values = {"steps": 6, "eval_tokens": 160, "eval_every": 3, "save_every": 3, "angle_every": 2,
              "micro_batch": 1, "tensor": 2, "parallel": "fsdp"}  # fmt: skip
    spec = tiny(data, **values)
    train(replace(spec, tensor=1), tmp_path / "alone")
    shutil.copytree(tmp_path / "alone", tmp_path / "four")
    content = json.loads((tmp_path / "four" / "spec.json").read_text())
    content["spec"]["tensor"] = 2  # one process cannot start it: it did resume it
    (tmp_path / "four" / "spec.json").write_text(json.dumps(content))
    (tmp_path / "four" / "DONE").unlink()
    shutil.rmtree(tmp_path / "four" / "checkpoints" / "step_00000006")
    train_on(4, spec, tmp_path / "four")
    pairs = zip(lines(tmp_path / "alone"), lines(tmp_path / "four"), strict=True)
    for one, four in (tuple(map(json.loads, pair)) for pair in pairs):
        assert one.keys() == four.keys()
        assert list(four.values()) == pytest.approx(list(one.values()), rel=1e-3, abs=1e-4)
    assert lines(tmp_path / "alone") != lines(tmp_path / "four")  # they did compute


def _passed(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Logits and gradients on this rank, whole; and what the weights' placements are."""
    model = scrambled(spec).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    tensor_parallel.divide(model.layers, mesh)
    tokens, targets = text()
    found = {"logits": model(tokens).detach()}
    model(tokens, targets).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name] = whole.clone()
    layer = model.layers[0]
    assert layer.attn.qkv.weight.placements == layer.mlp.gate_up.weight.placements == (Shard(0),)
    assert layer.attn.out.weight.placements == layer.mlp.down.weight.placements == (Shard(1),)
    bound = 0.5 * float(tensor_parallel.clip_gradients(list(model.parameters()), float("inf")))
    found["norm"] = tensor_parallel.clip_gradients(list(model.parameters()), bound)
    found["clipped"] = tensor_parallel.clip_gradients(list(model.parameters()), float("inf"))
    return found


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_logits_gradients_and_clipping_are_those_of_the_whole_model(kv_heads) -> None:
    spec = replace(SPECS["dense"], kv_heads=kv_heads)
    model, (tokens, targets) = scrambled(spec).double(), text()  # processors sum in other orders
    logits = model(tokens)
    model(tokens, targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    for found in results(2, _passed, spec):
        torch.testing.assert_close(found.pop("logits"), logits, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.pop("norm"), norm, rtol=1e-12, atol=0)
        clipped = norm / 2 * norm / (norm + 1e-6)  # torch's clipping adds it
        torch.testing.assert_close(found.pop("clipped"), clipped, rtol=1e-12, atol=0)
        assert found.keys() == dict(model.named_parameters()).keys()
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("world", "values", "words"),
    [
        (3, {"tensor": 2}, "tensor=2 does not divide the number of ranks, 3"),
        (4, {"tensor": 2}, "parallel=ddp with tensor=2 on 4 ranks: .* set parallel=fsdp"),
        (3, {"tensor": 3}, "tensor=3 does not divide model.heads=4"),
        (4, {"tensor": 4, "model": replace(SPECS["dense"], kv_heads=2)},
         "tensor=4 does not divide model.kv_heads=2"),
        (2, {"tensor": 2, "model": SPECS["moe"]}, "tensor=2 with model.kind=moe: only dense"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided(world, values, words) -> None:
    spec = Spec(**{"model": SPECS["dense"], **values})
    with pytest.raises(ValueError, match=words):
        build.tensor_ranks(spec, Ranks(0, world, torch.device("cpu")))


def test_the_field_is_checked_and_one_process_needs_none_of_it() -> None:
    with pytest.raises(ValueError, match="tensor=0: it must be at least 1"):
        Spec(tensor=0)
    ranks = Ranks(0, 1, torch.device("cpu"))
    assert build.tensor_ranks(Spec(tensor=8), ranks) is ranks


def test_ranks_of_a_group_read_the_same() -> None:
    ranks = [Ranks(i, 6, torch.device("cpu"), tensor=2) for i in range(6)]
    assert [r.data_rank for r in ranks] == [0, 0, 1, 1, 2, 2]
    assert {r.data_world for r in ranks} == {3}
