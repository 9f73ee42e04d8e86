"""How `plan` assigns the parameters of common model classes, and what that means for a step.

The table lists every parameter with two or more dimensions, in the terms of the printed plan. AdamW
takes all vectors and scalars.
"""

from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, Conv1D, LlamaConfig, LlamaModel

from angular_muown import AngularMuown, plan
from tests.integrations.tiny_models import DECODER, ENCODER, MODELS, build, loss_of

HIDDEN, EMBEDDING = ("matrix", "whole", "hidden"), ("adamw", "", "embedding")
HEAD, TIED, ROUTER = ("adamw", "", "head"), ("adamw", "", "tied head"), ("adamw", "", "router")
DEPTHWISE, VECTORS = ("adamw", "", "depthwise"), ("adamw", "", "vectors of experts")
CONV, TRANSPOSED = ("matrix", "conv", "Conv2d"), ("matrix", "transposed", "Conv1D")

DECODER_TABLE = {
    "model.embed_tokens.weight": EMBEDDING,
    "lm_head.weight": HEAD,
    "model.layers.?.self_attn.[qkvo]_proj.weight": HIDDEN,
}
MLP = {"model.layers.?.mlp.*_proj.weight": HIDDEN}
BERT = {
    "bert.embeddings.*.weight": EMBEDDING,
    "bert.encoder.layer.?.attention.self.*.weight": HIDDEN,
    "bert.encoder.layer.?.*.dense.weight": HIDDEN,
}


def experts(kind: str, up: str, down: str) -> dict[str, tuple[str, str, str]]:
    return {
        "model.layers.?.mlp.experts.gate_up_proj": ("matrix", up, kind),
        "model.layers.?.mlp.experts.down_proj": ("matrix", down, kind),
    }


TABLE = {
    "llama": {**DECODER_TABLE, **MLP},
    "qwen2": {
        "model.embed_tokens.weight": TIED,
        "model.layers.?.self_attn.[qkvo]_proj.weight": HIDDEN,
        **MLP,
    },
    "qwen3_moe": {
        **DECODER_TABLE,
        "model.layers.?.mlp.gate.weight": ROUTER,
        **experts("Qwen3MoeExperts", "stack, 2 x rows", "stack"),
    },
    "mixtral": {
        **DECODER_TABLE,
        "model.layers.?.mlp.gate.weight": ROUTER,
        **experts("MixtralExperts", "stack, 2 x rows", "stack"),
    },
    "gpt_oss": {  # gate and up rows alternate, so they are not blocks
        **DECODER_TABLE,
        "model.layers.?.mlp.router.weight": ROUTER,
        "model.layers.?.mlp.experts.*_bias": VECTORS,
        **experts("GptOssExperts", "stack, transposed", "stack, transposed"),
    },
    "gpt2": {
        "transformer.wte.weight": TIED,
        "transformer.wpe.weight": EMBEDDING,
        "transformer.h.?.attn.c_attn.weight": ("matrix", "transposed, 3 x rows", "Conv1D"),
        "transformer.h.?.attn.c_proj.weight": TRANSPOSED,
        "transformer.h.?.mlp.*.weight": TRANSPOSED,
    },
    "bert_mlm": {
        "bert.embeddings.word_embeddings.weight": TIED,
        "bert.embeddings.[pt]*.weight": EMBEDDING,
        **dict(list(BERT.items())[1:]),
        "cls.predictions.transform.dense.weight": HIDDEN,
    },
    "bert_classes": {**BERT, "bert.pooler.dense.weight": HIDDEN, "classifier.weight": HEAD},
    "t5": {
        "shared.weight": TIED,
        "*.relative_attention_bias.weight": EMBEDDING,
        "*coder.block.?.layer.?.*Attention.[qkvo].weight": HIDDEN,
        "*coder.block.?.layer.?.DenseReluDense.w[io].weight": HIDDEN,
    },
    "mamba2": {
        "backbone.embeddings.weight": EMBEDDING,
        "backbone.layers.?.mixer.conv1d.weight": DEPTHWISE,
        "backbone.layers.?.mixer.*_proj.weight": HIDDEN,
        "lm_head.weight": HEAD,
    },
    "mamba": {
        "backbone.embeddings.weight": TIED,
        "backbone.layers.?.mixer.conv1d.weight": DEPTHWISE,
        "backbone.layers.?.mixer.A_log": ("adamw", "", "state space"),
        "backbone.layers.?.mixer.*_proj.weight": HIDDEN,
    },
    "vit": {
        "vit.embeddings.*": EMBEDDING,
        "vit.layers.?.attention.*.weight": HIDDEN,
        "vit.layers.?.mlp.*.weight": HIDDEN,
        "classifier.weight": HEAD,
    },
    "resnet": {
        "resnet.embedder.*.convolution.weight": ("adamw", "", "input convolution"),
        "resnet.encoder.*.convolution.weight": CONV,
        "classifier.1.weight": HEAD,
    },
    "convnext": {
        "convnext.embeddings.patch_embeddings.weight": EMBEDDING,
        "*.dwconv.weight": DEPTHWISE,
        "*.pwconv?.weight": HIDDEN,
        "*.downsampling_layer.1.weight": CONV,
        "classifier.weight": HEAD,
    },
}


def assignments(model: nn.Module) -> dict[str, tuple[str, str, str]]:
    """Return the rule, cut and reason of every parameter, as the printed plan shows them."""
    groups = plan(model)
    rows = [groups._line(name, p, group) for group in groups for name, p in group["params"]]
    return {name: (rule, cut, why) for name, _, rule, cut, _, _, why in rows}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_assigned_as_in_the_table(name) -> None:
    model, used = build(name), set()
    assigned = assignments(model)
    parameters = dict(model.named_parameters())
    assert assigned.keys() == parameters.keys(), "each exactly once, tied ones under one name"
    for key, p in parameters.items():
        if p.ndim < 2:
            assert assigned[key][0] == "adamw", key
            continue
        matching = [pattern for pattern in TABLE[name] if fnmatchcase(key, pattern)]
        assert len(matching) == 1, f"{key} matches {matching}"
        assert assigned[key] == TABLE[name][matching[0]], key
        used.update(matching)
    assert used == TABLE[name].keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_few_steps_lower_the_loss(name) -> None:
    model = build(name)
    optimizer = AngularMuown(plan(model, aux_lr=3e-3), lr=0.01)
    first = loss_of(model, name)
    for _ in range(8):
        optimizer.zero_grad()
        loss_of(model, name).backward()
        optimizer.step()
    assert loss_of(model, name) < first


def step_with(model: nn.Module, gradients: dict[str, torch.Tensor], **options) -> None:
    """Take two steps, to include momentum."""
    optimizer = AngularMuown(plan(model, **options), lr=0.1)
    for factor in (1.0, -0.3):
        for name, p in model.named_parameters():
            p.grad = factor * gradients[name]
        optimizer.step()


def test_a_transposed_fused_layer_is_stepped_as_three_linear_layers() -> None:
    """As the table states for GPT-2."""
    attention = build("gpt2").transformer.h[0].attn
    fused = nn.ModuleDict({"attn": attention})
    gradients = {name: torch.randn_like(p) for name, p in fused.named_parameters()}
    separate = nn.ModuleDict({key: nn.Linear(16, 16, bias=False) for key in "qkv"})
    separate_gradients = {}
    for i, layer in enumerate(separate):
        columns = slice(16 * i, 16 * i + 16)
        separate[layer].weight = nn.Parameter(attention.c_attn.weight[:, columns].T.clone())
        separate_gradients[f"{layer}.weight"] = gradients["attn.c_attn.weight"][:, columns].T
    step_with(fused, gradients, head=None)
    step_with(separate, separate_gradients, head=None)
    joined = torch.cat([layer.weight for layer in separate.values()]).T
    torch.testing.assert_close(attention.c_attn.weight, joined)


@pytest.mark.parametrize(("name", "transposed"), [("mixtral", False), ("gpt_oss", True)])
def test_a_stack_of_experts_is_stepped_as_separate_experts(name, transposed) -> None:
    experts = build(name).model.layers[0].mlp.experts
    stack = nn.ModuleDict({"experts": experts})
    gradients = {f"experts.{key}": torch.randn_like(p) for key, p in experts.named_parameters()}
    layers, layer_gradients = {}, {}
    for projection in ("gate_up_proj", "down_proj"):
        halves = 2 if projection == "gate_up_proj" and not transposed else 1
        for i, (W, G) in enumerate(
            zip(getattr(experts, projection), gradients[f"experts.{projection}"], strict=True)
        ):
            parts = zip(*((X.T if transposed else X).chunk(halves) for X in (W, G)), strict=True)
            for j, (part, gradient) in enumerate(parts):
                key = f"{projection}{i}{j}"
                layers[key] = nn.Linear(*part.shape[::-1], bias=False)
                layers[key].weight = nn.Parameter(part.detach().clone())
                layer_gradients[f"{key}.weight"] = gradient
    separate = nn.ModuleDict(layers)
    step_with(stack, gradients, head=None)
    step_with(separate, layer_gradients, head=None)
    for projection in ("gate_up_proj", "down_proj"):
        for i, W in enumerate(getattr(experts, projection)):
            parts = [layers[key].weight for key in layers if key.startswith(f"{projection}{i}")]
            torch.testing.assert_close(W.T if transposed else W, torch.cat(parts))


def test_cross_attention_of_gpt2_fuses_two_projections() -> None:
    assigned = assignments(build("gpt2", add_cross_attention=True))
    assert assigned["transformer.h.0.crossattention.c_attn.weight"][1] == "transposed, 2 x rows"
    assert assigned["transformer.h.0.crossattention.q_attn.weight"][1] == "transposed"


def test_a_conv1d_outside_gpt2_is_transposed_and_not_split() -> None:
    model = nn.ModuleDict({"c_attn": Conv1D(48, 16), "head": nn.Linear(16, 2)})
    assert assignments(model)["c_attn.weight"] == TRANSPOSED


def test_every_convolution_of_a_stem_is_an_input_convolution() -> None:
    """A deep stem is a Sequential named conv1; a conv1 inside a block is an ordinary layer."""
    deep = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3))
    block = nn.ModuleDict({"conv1": nn.Conv2d(8, 8, 3)})
    model = nn.ModuleDict({"conv1": deep, "layer1": block, "fc": nn.Linear(8, 2)})
    assigned = assignments(model)
    stem = ("adamw", "", "input convolution")
    assert (assigned["conv1.0.weight"], assigned["conv1.2.weight"]) == (stem, stem)
    assert assigned["layer1.conv1.weight"] == CONV
    named = nn.ModuleDict({"stem": deep, "fc": nn.Linear(8, 2)})
    assert [assignments(named)[f"stem.{i}.weight"] for i in (0, 2)] == [stem, stem]


def test_declaring_a_stack_keeps_the_blocks_known_from_its_module() -> None:
    model = build("mixtral")
    groups = plan(model, stacks=["*.gate_up_proj"])
    values = next(g for g in groups for name, _ in g["params"] if name.endswith("gate_up_proj"))
    assert (values["view"], values["blocks"]) == ("stack", 2)


class Unknown(nn.Module):
    """Experts in an unknown layout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 32))
        self.lm_head = nn.Linear(16, 3)


def test_errors_for_unknown_layouts_and_missing_heads_name_the_argument_to_pass() -> None:
    with pytest.raises(ValueError, match=r"'gate_up_proj' \(4, 16, 32\) in Unknown.*stacks=\["):
        plan(Unknown())
    assert plan(Unknown(), stacks="gate_up_proj", transposed="gate_up_proj")
    text = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, **ENCODER}
    vision = {"image_size": 32, "patch_size": 8, **ENCODER}
    two_towers = CLIPModel(CLIPConfig(text_config=text, vision_config=vision))
    for model in (LlamaModel(LlamaConfig(**DECODER)), two_towers):
        with pytest.raises(ValueError, match=r"no output head in .*head=None"):
            plan(model)
        assert plan(model, head=None)
