"""torchtitan: its optimizers container, its models, and a run of its trainer on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from angular_muown import AngularMuown, Muown
from angular_muown.integrations.torchtitan import angular_muown, fused_qkv
from tests.integrations.scripts import EXAMPLES, assert_falls


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel").model
    config.layers = config.layers[:1]
    return config.build()


def test_the_trainer_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """In a separate process, where torchtitan uses the CPU as its accelerator."""
    script = EXAMPLES / "torchtitan_llama.py"
    run = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path), "--steps", "12"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert_falls(result["losses"], 0.8)
    assert result["resumed"] == result["losses"][6:]
    assert result["same_weights"]


def test_one_optimizer_holds_all_parameters_as_planned(llama: nn.Module) -> None:
    config = angular_muown(lr=0.03, aux_lr=1e-3, aux_weight_decay=0.1, warmup_steps=7)
    container = config.build(model_parts=[llama])
    (optimizer,) = container.optimizers
    assert isinstance(optimizer, AngularMuown)
    assigned = {
        name: (group["algorithm"], group["lr"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert assigned == {
        "tok_embeddings.weight": ("adamw", 1e-3),
        "layers.0.attention_norm.weight": ("adamw", 1e-3),
        "layers.0.ffn_norm.weight": ("adamw", 1e-3),
        "layers.0.attention.qkv_linear.wqkv.weight": ("matrix", 0.03),
        "layers.0.attention.wo.weight": ("matrix", 0.03),
        "layers.0.feed_forward.w1.weight": ("matrix", 0.03),
        "layers.0.feed_forward.w2.weight": ("matrix", 0.03),
        "layers.0.feed_forward.w3.weight": ("matrix", 0.03),
        "norm.weight": ("adamw", 1e-3),
        "lm_head.weight": ("adamw", 1e-3),
    }
    blocks = {g["param_names"][0]: g["blocks"] for g in optimizer.param_groups if g["blocks"]}
    assert blocks == fused_qkv(llama)
    assert all(group["warmup_steps"] == 7 for group in optimizer.param_groups)


def test_a_pipeline_stage_may_have_no_head(llama: nn.Module) -> None:
    container = angular_muown().build(model_parts=[llama.layers])
    assert sum(len(g["params"]) for g in container.optimizers[0].param_groups) == 7


def test_fused_row_blocks_match_the_forward_pass(llama: nn.Module) -> None:
    """All rows of a block end up in the same head of q, k or v."""
    from torchtitan.models.common.attention import FusedQKVLinear

    module = llama.get_submodule("layers.0.attention.qkv_linear")
    assert isinstance(module, FusedQKVLinear)
    ((name, blocks),) = fused_qkv(llama).items()
    assert llama.get_parameter(name) is module.wqkv.weight
    block_numbers = [torch.full((size,), float(i)) for i, size in enumerate(blocks)]
    width = module.wqkv.weight.shape[1]
    with torch.no_grad():
        module.wqkv.weight.copy_(torch.cat(block_numbers)[:, None].expand(-1, width) / width)
        q, k, v = module(torch.ones(1, 1, width))
    heads = len(blocks) // 3
    for part, first in ((q, 0), (k, 1), (v, 2)):
        expected = torch.arange(heads).mul(3).add(first).float()
        outputs = part.reshape(heads, -1)
        torch.testing.assert_close(outputs, expected[:, None].expand_as(outputs))


@pytest.fixture(scope="module")
def deepseek() -> nn.Module:
    from torchtitan.models.deepseek_v3 import model_registry

    config = model_registry("debugmodel").model
    moe = next(layer for layer in config.layers if getattr(layer, "moe", None) is not None)
    config.layers = [moe]
    return config.build()


@pytest.mark.parametrize("stacks", [None, "custom", ["custom", "*.inner_experts.w1*"]], ids=str)
def test_experts_are_stacks_and_routers_go_to_adamw(deepseek: nn.Module, stacks: Any) -> None:
    """Also in addition to stacks that the user declares, whether or not these are experts."""
    model, values = deepseek, {}
    if stacks:
        model = nn.Module()
        model.body, model.custom = deepseek, nn.Parameter(torch.ones(2, 3, 4))
        values = {"plan": {"stacks": stacks, "head": "body.lm_head.*"}}
    groups = angular_muown(**values).build(model_parts=[model]).optimizers[0].param_groups
    assigned = {name: (g["algorithm"], g["view"]) for g in groups for name in g["param_names"]}
    experts = {name: kind for name, kind in assigned.items() if ".inner_experts." in name}
    assert len(experts) == 3
    assert set(experts.values()) == {("matrix", "stack")}
    routers = [kind for name, kind in assigned.items() if ".router." in name]
    assert routers == [("adamw", "matrix")]


def test_the_flat_state_dict_resumes_a_run(llama: nn.Module) -> None:
    def set_gradients() -> None:
        torch.manual_seed(0)
        for p in llama.parameters():
            p.grad = torch.randn_like(p)

    first = angular_muown(decay_scale=0.5).build(model_parts=[llama])
    set_gradients()
    first.step()
    saved = {k: v.clone() if torch.is_tensor(v) else v for k, v in first.state_dict().items()}
    weights = {name: p.detach().clone() for name, p in llama.named_parameters()}
    expected = _after_a_step(first, llama, set_gradients)
    with torch.no_grad():
        for name, p in llama.named_parameters():
            p.copy_(weights[name])
            p.grad = None
    second = angular_muown(decay_scale=0.5).build(model_parts=[llama])
    second.load_state_dict(saved)
    for name, value in _after_a_step(second, llama, set_gradients).items():
        assert torch.equal(value, expected[name]), name


def _after_a_step(container: Any, model: nn.Module, set_gradients: Any) -> dict[str, torch.Tensor]:
    set_gradients()
    container.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_member_and_plan_arguments_are_passed_on(llama: nn.Module) -> None:
    overrides = {"overrides": {"*.w2.weight": {"lr": 0.5}}}
    container = angular_muown(member="Muown", plan=overrides).build(model_parts=[llama])
    optimizer = container.optimizers[0]
    assert isinstance(optimizer, Muown)
    assert 0.5 in [group["lr"] for group in optimizer.param_groups]


def test_average_is_passed_on(llama: nn.Module) -> None:
    optimizer = angular_muown(average=0.1).build(model_parts=[llama]).optimizers[0]
    for p in llama.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all("average" in optimizer.state[p] for p in llama.parameters())


def test_every_member_is_available_by_name() -> None:
    import angular_muown as family
    from angular_muown.engine import Engine
    from angular_muown.integrations.torchtitan import MEMBERS

    public = (getattr(family, name) for name in family.__all__)
    kinds = (kind for kind in public if isinstance(kind, type) and kind is not Engine)
    expected = [kind for kind in kinds if issubclass(kind, Engine)]
    assert {*MEMBERS.values()} == {*expected}
    assert all(MEMBERS[kind.__name__] is kind for kind in expected)


def test_errors_say_what_to_do(llama: nn.Module) -> None:
    from torchtitan.components.optimizer import ParamGroupConfig

    with pytest.raises(ValueError, match="member='Adam' must be one of AngularMuown, Muown"):
        angular_muown(member="Adam").build(model_parts=[llama])
    config = angular_muown()
    config.param_groups = [ParamGroupConfig(pattern=".*", optimizer_name="AngularMuown")]
    with pytest.raises(ValueError, match="must be empty, because plan makes the groups"):
        config.build(model_parts=[llama])
