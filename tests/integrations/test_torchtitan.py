"""torchtitan: its optimizers container, its models, and a run of its trainer on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from angular_muown import AngularMuown, Muown, plan
from angular_muown.integrations.torchtitan import angular_muown
from tests.integrations.scripts import EXAMPLES, assert_falls
from tests.library.row_uses import attention_uses, block_of_rows


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
    config = angular_muown(
        lr=0.03, aux_lr=1e-3, aux_weight_decay=0.1, aux_betas=(0.9, 0.99), warmup_steps=7
    )
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
    assert all(group["warmup_steps"] == 7 for group in optimizer.param_groups)
    betas = {(group["algorithm"], group["betas"]) for group in optimizer.param_groups}
    assert betas == {("matrix", (0.9, 0.95)), ("adamw", (0.9, 0.99))}


def test_a_pipeline_stage_may_have_no_head(llama: nn.Module) -> None:
    container = angular_muown().build(model_parts=[llama.layers])
    assert sum(len(g["params"]) for g in container.optimizers[0].param_groups) == 7


def blocks_of(model: nn.Module, parameter: str) -> torch.Tensor:
    """Return the number of each row's block in plan's cut."""
    group = next(g for g in plan(model) for name, _ in g["params"] if name == parameter)
    return torch.tensor(block_of_rows(group, model.get_parameter(parameter).shape[-2]))


def test_fused_row_blocks_match_the_forward_pass(llama: nn.Module) -> None:
    """The blocks are q, k and v, whose rows alternate."""
    path = "layers.0.attention.qkv_linear"
    blocks = blocks_of(llama, f"{path}.wqkv.weight")
    weight = llama.get_parameter(f"{path}.wqkv.weight")
    for block in range(3):
        with torch.no_grad():
            weight.copy_((blocks == block)[:, None].expand_as(weight))
            outputs = llama.get_submodule(path)(torch.ones(1, 1, weight.shape[1]))
        values = [set(out.unique().tolist()) for out in outputs]
        assert values == [{float(weight.shape[1]) if i == block else 0.0} for i in range(3)]


@pytest.fixture(scope="module")
def deepseek() -> nn.Module:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3 import model_registry

    config = model_registry("debugmodel").model
    moe = next(layer for layer in config.layers if getattr(layer, "moe", None) is not None)
    moe.attention.inner_attention = ScaledDotProductAttention.Config()
    config.layers = [moe]
    return config.build()


@pytest.mark.parametrize(
    ("layer", "uses"), [("wkv_a", ("value", "key")), ("wkv_b", ("key", "value"))]
)
def test_blocks_of_latent_attention_match_the_forward_pass(deepseek, layer, uses) -> None:
    """The latent makes values (and keys), the rope rows keys alone."""
    attention = deepseek.get_submodule("layers.0.attention").double()
    for p in attention.parameters():
        p.data.normal_(std=0.05)

    def forward(tokens: torch.Tensor) -> None:
        x = torch.randn(*tokens.shape, attention.dim, dtype=torch.float64)
        attention(x, None)

    measured = attention_uses(attention, attention.get_submodule(layer), forward)
    blocks = blocks_of(deepseek, f"layers.0.attention.{layer}.weight").tolist()
    assert measured == [uses[block] for block in blocks]


def test_gate_and_up_of_gpt_oss_alternate() -> None:
    """An expert whose weights are 0 outputs something if the bias of a gate row is not 0."""
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    experts = GptOssGroupedExperts.Config(dim=16, hidden_dim=8, num_experts=2).build()
    model = nn.ModuleDict({"experts": experts, "head": nn.Linear(16, 2)})
    blocks = blocks_of(model, "experts.mlp1_weight_EGD")
    for p in experts.parameters():
        p.data.zero_()
    experts.mlp2_weight_EDF.data.fill_(1.0)
    x, first = torch.zeros(1, 16), torch.tensor([1, 0], dtype=torch.int32)
    for row, block in enumerate(blocks):
        experts.mlp1_bias_EG.data.zero_()[0, row] = 1.0
        assert bool(experts(x, first).any()) == (block == 0), row
    assigned = {name: group["algorithm"] for group in plan(model) for name, _ in group["params"]}
    assert assigned["experts.mlp1_bias_EG"] == "adamw"


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
