"""Tensor parallelism: the passes and gradients of one model, divided among ranks.

tests/lab/training/test_ranks.py trains with it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from angular_lab.config.spec import ModelSpec, Spec
from angular_lab.models import tensor_parallel
from angular_lab.training import build
from angular_lab.training.ranks import Ranks
from tests.lab.tiny import SPECS, scrambled, text
from tests.ranks import results

MODELS = [SPECS["dense"], replace(SPECS["dense"], kv_heads=2)]


def _divided_passes() -> list[dict[str, Tensor]]:
    """Return logits, gradients and norms of both models, gathered on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return [_divided_pass(spec, mesh) for spec in MODELS]


def _divided_pass(spec: ModelSpec, mesh: Any) -> dict[str, Tensor]:
    model = scrambled(spec).double()
    tensor_parallel.divide(model.layers, mesh)
    tokens, targets = text()
    outputs = {"logits": model(tokens).detach()}
    model(tokens, targets).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        outputs[name] = gradient.clone()
    layer = model.layers[0]
    assert layer.attn.qkv.weight.placements == layer.mlp.gate_up.weight.placements == (Shard(0),)
    assert layer.attn.out.weight.placements == layer.mlp.down.weight.placements == (Shard(1),)
    parameters = list(model.parameters())
    bound = 0.5 * float(tensor_parallel.clip_gradients(parameters, float("inf")))
    outputs["norm"] = tensor_parallel.clip_gradients(parameters, bound)
    outputs["clipped"] = tensor_parallel.clip_gradients(parameters, float("inf"))
    return outputs


def test_logits_gradients_and_clipping_equal_those_of_the_whole_model() -> None:
    for outputs_of_rank in results(2, _divided_passes):
        for spec, outputs in zip(MODELS, outputs_of_rank, strict=True):
            model, (tokens, targets) = scrambled(spec).double(), text()
            logits = model(tokens)
            model(tokens, targets).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            torch.testing.assert_close(outputs.pop("logits"), logits, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(outputs.pop("norm"), norm, rtol=1e-12, atol=0)
            clipped = norm / 2 * norm / (norm + 1e-6)  # torch's clipping adds the constant
            torch.testing.assert_close(outputs.pop("clipped"), clipped, rtol=1e-12, atol=0)
            assert outputs.keys() == dict(model.named_parameters()).keys()
            for name, p in model.named_parameters():
                torch.testing.assert_close(outputs[name], p.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("world", "values", "message"),
    [
        (3, {"tensor": 2}, "tensor=2 does not divide the number of ranks, 3"),
        (4, {"tensor": 2}, "parallel=ddp with tensor=2 on 4 ranks: .* set parallel=fsdp"),
        (3, {"tensor": 3}, "tensor=3 does not divide model.heads=4"),
        (4, {"tensor": 4, "model": replace(SPECS["dense"], kv_heads=2)},
         "tensor=4 does not divide model.kv_heads=2"),
        (2, {"tensor": 2, "model": SPECS["moe"]}, "tensor=2 with model.kind=moe: only dense"),
    ],
)  # fmt: skip
def test_impossible_divisions_are_rejected(
    world: int, values: dict[str, Any], message: str
) -> None:
    spec = Spec(**{"model": SPECS["dense"], **values})
    with pytest.raises(ValueError, match=message):
        build.tensor_ranks(spec, Ranks(0, world, torch.device("cpu")))


def test_tensor_must_be_positive_and_does_not_matter_in_one_process() -> None:
    with pytest.raises(ValueError, match="tensor=0: it must be at least 1"):
        Spec(tensor=0)
    ranks = Ranks(0, 1, torch.device("cpu"))
    assert build.tensor_ranks(Spec(tensor=8), ranks) is ranks


def test_ranks_of_a_group_read_the_same_data() -> None:
    ranks = [Ranks(i, 6, torch.device("cpu"), tensor=2) for i in range(6)]
    assert [r.data_rank for r in ranks] == [0, 0, 1, 1, 2, 2]
    assert {r.data_world for r in ranks} == {3}
