"""The table of fused layouts, against the forward passes of the classes that it names."""

from functools import cache

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from angular_muown import plan
from angular_muown.params.fused_layouts import FUSED_LAYOUTS
from tests.integrations.tiny_models import DECODER, ENDS, HEADS, LATENT, NEOX, build
from tests.library.row_uses import (
    attention_uses,
    block_of_rows,
    expert_uses,
    gate_uses,
    is_local,
    is_silent,
)

QKV, GLU = ("query", "key", "value"), ("gate", "up")
# model -> (the layer's path, the uses of its blocks in order)
ATTENTION = {
    "gpt2": ("transformer.h.0.attn.c_attn", QKV),
    "gpt_neox": ("gpt_neox.layers.0.attention.query_key_value", QKV),
    "bloom": ("transformer.h.0.self_attention.query_key_value", QKV),
    "falcon": ("transformer.h.0.self_attention.query_key_value", QKV),
    "falcon_multi_query": ("transformer.h.0.self_attention.query_key_value", QKV),
    "falcon_per_head": ("transformer.h.0.self_attention.query_key_value", QKV),
    "phi3": ("model.layers.0.self_attn.qkv_proj", QKV),
    "mpt": ("transformer.blocks.0.attn.Wqkv", QKV),
    "modernbert": ("model.layers.0.attn.Wqkv", QKV),
    # The latent makes values (and keys), the rope rows keys alone.
    "deepseek_v3": ("model.layers.0.self_attn.kv_a_proj_with_mqa", ("value", "key")),
    "deepseek_v3 up": ("model.layers.0.self_attn.kv_b_proj", ("key", "value")),
    "deepseek_v2": ("model.layers.0.self_attn.kv_a_proj_with_mqa", ("value", "key")),
    "deepseek_v2 up": ("model.layers.0.self_attn.kv_b_proj", ("key", "value")),
    "minicpm3": ("model.layers.0.self_attn.kv_a_proj_with_mqa", ("value", "key")),
    "minicpm3 up": ("model.layers.0.self_attn.kv_b_proj", ("key", "value")),
    "persimmon": ("model.layers.0.self_attn.query_key_value", QKV),
    "bigcode": ("transformer.h.0.attn.c_attn", QKV),
    "bigcode_multi_query": ("transformer.h.0.attn.c_attn", QKV),
}
GATES = {
    "glm": ("model.layers.0.mlp.gate_up_proj", GLU),
    "glm4": ("model.layers.0.mlp.gate_up_proj", GLU),
    "phi3": ("model.layers.0.mlp.gate_up_proj", GLU),
    "modernbert": ("model.layers.0.mlp.Wi", GLU),
}
EXPERTS = {
    "mixtral": "model.layers.0.mlp.experts",
    "qwen3_moe": "model.layers.0.mlp.experts",
    "deepseek_v3": "model.layers.1.mlp.experts",
    "gpt_oss": "model.layers.0.mlp.experts",
}


BIGCODE = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 4, **ENDS}
DEEPSEEK = {**DECODER, **HEADS, **LATENT, "num_key_value_heads": 4, "num_hidden_layers": 1}
# Classes that only this file builds: prefix of the class, configuration.
MORE = {
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "first_k_dense_replace": 1}),
    "minicpm3": ("MiniCPM3", DEEPSEEK),
    "persimmon": ("Persimmon", {**NEOX, **ENDS}),
    "bigcode": ("GPTBigCode", {**BIGCODE, "multi_query": False}),
    "bigcode_multi_query": ("GPTBigCode", BIGCODE),
    "glm": ("Glm", {**DECODER, **HEADS}),
    "glm4": ("Glm4", {**DECODER, **HEADS}),
}
MIXER = "backbone.layers.0.mixer"


@cache
def in_float64(name: str) -> nn.Module:
    """Build a model with random vectors, too: zero biases would hide what they do."""
    name = name.split()[0]
    if name in MORE:
        kind, values = MORE[name]
        config = getattr(hf, f"{kind}Config")(**values)
        model = getattr(hf, f"{kind}ForCausalLM")(config).double().eval()
    else:
        model = build(name).double().eval()
    model.set_experts_implementation("eager")  # the others have no float64
    for p in model.parameters():
        p.data.normal_(std=0.3)
    return model


def blocks_of(model: nn.Module, parameter: str) -> list[int]:
    """Return the number of each row's block in plan's cut."""
    group = next(g for g in plan(model) for name, _ in g["params"] if name == parameter)
    shape = model.get_parameter(parameter).shape
    return block_of_rows(group, shape[-1 if group.get("transposed") else -2])


def uses_of_blocks(model: nn.Module, parameter: str, uses: list[str]) -> list[set[str]]:
    """Return the uses of the rows of each block that plan cuts the parameter into."""
    blocks = blocks_of(model, parameter)
    return [{u for u, b in zip(uses, blocks, strict=True) if b == j} for j in sorted({*blocks})]


def run(model: nn.Module):
    def forward(tokens: Tensor) -> None:
        model(input_ids=tokens)

    return forward


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # GPTBigCode
@pytest.mark.parametrize("name", ATTENTION)
def test_each_block_of_a_fused_projection_is_a_query_a_key_or_a_value(name) -> None:
    path, expected = ATTENTION[name]
    model = in_float64(name)
    owner, layer = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
    uses = attention_uses(owner, layer, run(model))
    assert uses_of_blocks(model, f"{path}.weight", uses) == [{use} for use in expected]


@pytest.mark.parametrize("name", GATES)
def test_each_block_of_a_gated_mlp_is_the_gate_or_up(name) -> None:
    path, expected = GATES[name]
    model = in_float64(name)
    owner, layer = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
    uses = gate_uses(owner, layer, run(model))
    assert uses_of_blocks(model, f"{path}.weight", uses) == [{use} for use in expected]


@pytest.mark.parametrize("name", EXPERTS)
def test_each_block_of_an_expert_is_the_gate_or_up(name) -> None:
    model = in_float64(name)
    experts = model.get_submodule(EXPERTS[name])
    with torch.no_grad():
        uses = expert_uses(experts, experts.is_transposed)
    blocks = uses_of_blocks(model, f"{EXPERTS[name]}.gate_up_proj", uses)
    assert blocks == [{"gate"}, {"up"}]


@pytest.mark.parametrize(("name", "gate"), [("mamba", 1), ("mamba2", 0)])
def test_one_block_of_mambas_inputs_is_the_gate(name, gate) -> None:
    """Only the gate of a position is not carried on to later ones."""
    model = in_float64(name)
    mixer = model.get_submodule(MIXER)
    local = is_local(mixer, mixer.in_proj, run(model))
    assert local == [block == gate for block in blocks_of(model, f"{MIXER}.in_proj.weight")]


@pytest.mark.parametrize(
    ("name", "layer", "steps", "B", "C"),
    [("mamba", "x_proj", 0, 1, 2), ("mamba2", "in_proj", 4, 2, 3)],
)
def test_b_c_and_time_steps_of_mamba_are_separate_blocks(name, layer, steps, B, C) -> None:
    """Nothing enters the state if B is 0, and nothing leaves it if C is 0."""
    model = in_float64(name)
    mixer = model.get_submodule(MIXER)
    mixer.conv1d.bias.data.zero_()
    blocks = blocks_of(model, f"{MIXER}.{layer}.weight")
    for zero, other in ((B, C), (C, B)):
        zeros = [block == zero for block in blocks]
        silent = is_silent(mixer, getattr(mixer, layer), run(model), zeros)
        assert silent == [block in (steps, other) for block in blocks]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_every_entry_of_the_table_is_checked() -> None:
    mambas = [("mamba", "in_proj"), ("mamba", "x_proj"), ("mamba2", "in_proj")]
    checked = [(name, path) for table in (ATTENTION, GATES) for name, (path, _) in table.items()]
    checked += [(name, f"{MIXER}.{layer}") for name, layer in mambas]
    keys = set()
    for name, path in checked:
        owner, _, attribute = path.rpartition(".")
        keys.add(f"{type(in_float64(name).get_submodule(owner)).__name__}.{attribute}")
    elsewhere = {
        "CausalSelfAttention.c_attn",  # tests/library/params/test_fused_layouts.py
        "FusedQKVLinear.wqkv", "Attention.wkv_a", "Attention.wkv_b",  # test_torchtitan.py
        "GptOssGroupedExperts.mlp1_weight_EGD",
    }  # fmt: skip
    assert FUSED_LAYOUTS.keys() - elsewhere == keys & FUSED_LAYOUTS.keys()
    assert keys - FUSED_LAYOUTS.keys() == {"GPT2Attention.c_attn"}, "known by its Conv1D"
