"""How `plan` assigns the parameters of common model classes, and what that means for a step.

The table lists every parameter with two or more dimensions: its rule, its cut and the reason. AdamW
takes all vectors and scalars. test_fused_classes checks the cuts against the forward passes.
"""

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, Conv1D, LlamaConfig, LlamaModel

from angular_muown import AngularMuown, plan
from tests.integrations.tiny_models import DECODER, ENCODER, MODELS, build, loss_of
from tests.library.row_uses import block_of_rows

Assignment = tuple[str, dict[str, Any], str]
LAYOUT_KEYS = ("view", "transposed", "blocks", "interleaved", "column_blocks")


def matrix(why: str, **cut: Any) -> Assignment:
    return "matrix", cut, why


def adamw(why: str) -> Assignment:
    return "adamw", {}, why


HIDDEN, EMBEDDING = matrix("hidden"), adamw("embedding")
HEAD, TIED = adamw("head"), adamw("tied head")
ROUTER, DEPTHWISE, VECTORS = adamw("router"), adamw("depthwise"), adamw("vectors of experts")
STEM, CONV = adamw("input convolution"), matrix("Conv2d", view="conv")
TRANSPOSED = matrix("Conv1D", transposed=True)

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


def experts(kind: str, up: dict[str, Any], **values: Any) -> dict[str, Assignment]:
    return {
        "model.layers.?.mlp.experts.gate_up_proj": matrix(kind, view="stack", **values, **up),
        "model.layers.?.mlp.experts.down_proj": matrix(kind, view="stack", **values),
    }


def fused_and_dense(fused: Assignment) -> dict[str, Assignment]:
    return {
        "transformer.word_embeddings.weight": TIED,
        "transformer.h.?.self_attention.query_key_value.weight": fused,
        "transformer.h.?.*.dense*.weight": HIDDEN,
    }


TABLE = {
    "llama": {**DECODER_TABLE, **MLP},
    "qwen2": {
        "model.embed_tokens.weight": TIED,
        "model.layers.?.self_attn.[qkvo]_proj.weight": HIDDEN,
        **MLP,
    },
    "qwen3": {**DECODER_TABLE, **MLP},
    "qwen3_moe": {
        **DECODER_TABLE,
        "*.mlp.gate.weight": ROUTER,
        **experts("Qwen3MoeExperts", {"blocks": 2}),
    },
    "mixtral": {
        **DECODER_TABLE,
        "*.mlp.gate.weight": ROUTER,
        **experts("MixtralExperts", {"blocks": 2}),
    },
    "gpt_oss": {  # gate and up rows alternate; the sinks of its attention are a vector
        **DECODER_TABLE,
        **experts("GptOssExperts", {"blocks": 2, "interleaved": 32}, transposed=True),
        "model.layers.?.mlp.router.weight": ROUTER,
        "model.layers.?.mlp.experts.*_bias": VECTORS,
    },
    "deepseek_v3": {
        **dict(list(DECODER_TABLE.items())[:2]),
        "model.layers.?.self_attn.q_[ab]_proj.weight": HIDDEN,
        "model.layers.?.self_attn.o_proj.weight": HIDDEN,
        "*.kv_a_proj_with_mqa.weight": matrix("DeepseekV3Attention", blocks=(8, 4)),
        "*.kv_b_proj.weight": matrix("DeepseekV3Attention", blocks=(32, 24), interleaved=4),
        "model.layers.0.mlp.*_proj.weight": HIDDEN,
        "model.layers.1.mlp.shared_experts.*_proj.weight": HIDDEN,
        "model.layers.1.mlp.gate.weight": ROUTER,
        **experts("DeepseekV3Experts", {"blocks": 2}),
    },
    "phi3": {
        **dict(list(DECODER_TABLE.items())[:2]),
        "model.layers.?.self_attn.qkv_proj.weight": matrix("Phi3Attention", blocks=(32, 16, 16)),
        "model.layers.?.self_attn.o_proj.weight": HIDDEN,
        "model.layers.?.mlp.gate_up_proj.weight": matrix("Phi3MLP", blocks=2),
        "model.layers.?.mlp.down_proj.weight": HIDDEN,
    },
    "gpt_neox": {
        "gpt_neox.embed_in.weight": EMBEDDING,
        "*.query_key_value.weight": matrix("GPTNeoXAttention", blocks=3, interleaved=4),
        "*.dense*.weight": HIDDEN,
        "lm_head.weight": HEAD,
    },
    "bloom": fused_and_dense(matrix("BloomAttention", blocks=3, interleaved=4)),
    "falcon": fused_and_dense(matrix("FalconAttention", blocks=(16, 8, 8), interleaved=2)),
    "falcon_multi_query": fused_and_dense(matrix("FalconAttention", blocks=(16, 4, 4))),
    "falcon_per_head": fused_and_dense(matrix("FalconAttention", blocks=3, interleaved=4)),
    "mpt": {
        "transformer.wte.weight": TIED,
        "*.attn.Wqkv.weight": matrix("MptAttention", blocks=3),
        "*.attn.out_proj.weight": HIDDEN,
        "*.ffn.*_proj.weight": HIDDEN,
    },
    "modernbert": {
        "model.embeddings.tok_embeddings.weight": TIED,
        "*.attn.Wqkv.weight": matrix("ModernBertAttention", blocks=3),
        "*.mlp.Wi.weight": matrix("ModernBertMLP", blocks=2),
        "*.Wo.weight": HIDDEN,
        "head.dense.weight": HEAD,
    },
    "opt": {
        "model.decoder.embed_tokens.weight": TIED,
        "model.decoder.embed_positions.weight": EMBEDDING,
        "model.decoder.project_*.weight": HIDDEN,  # between the embedding's width and the model's
        "model.decoder.layers.?.*.weight": HIDDEN,
    },
    "whisper": {
        "model.encoder.conv[12].weight": STEM,
        "model.decoder.embed_tokens.weight": TIED,
        "model.decoder.embed_positions.weight": EMBEDDING,
        "model.*coder.layers.?.*.weight": HIDDEN,
    },
    "gpt2": {
        "transformer.wte.weight": TIED,
        "transformer.wpe.weight": EMBEDDING,
        "transformer.h.?.attn.c_attn.weight": matrix("Conv1D", transposed=True, blocks=3),
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
        "backbone.layers.?.mixer.in_proj.weight": matrix("Mamba2Mixer", blocks=(32, 32, 8, 8, 4)),
        "backbone.layers.?.mixer.out_proj.weight": HIDDEN,
        "lm_head.weight": HEAD,
    },
    "mamba": {
        "backbone.embeddings.weight": TIED,
        "backbone.layers.?.mixer.conv1d.weight": DEPTHWISE,
        "backbone.layers.?.mixer.A_log": adamw("state space"),
        "backbone.layers.?.mixer.in_proj.weight": matrix("MambaMixer", blocks=2),
        "backbone.layers.?.mixer.x_proj.weight": matrix("MambaMixer", blocks=(1, 8, 8)),
        "backbone.layers.?.mixer.dt_proj.weight": HIDDEN,
        "backbone.layers.?.mixer.out_proj.weight": HIDDEN,
    },
    "vit": {
        "vit.embeddings.*": EMBEDDING,
        "vit.layers.?.attention.*.weight": HIDDEN,
        "vit.layers.?.mlp.*.weight": HIDDEN,
        "classifier.weight": HEAD,
    },
    "resnet": {
        "resnet.embedder.*.convolution.weight": STEM,
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


def assignments(model: nn.Module, **options: Any) -> dict[str, Assignment]:
    """Return the rule, cut and reason of every parameter."""
    groups = plan(model, **options)
    return {
        name: (
            group["algorithm"],
            {key: group[key] for key in LAYOUT_KEYS if key in group},
            groups.reasons[name],
        )
        for group in groups
        for name, _ in group["params"]
    }


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_assigned_as_in_the_table(name) -> None:
    model, used = build(name), set()
    assigned = assignments(model)
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
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


# A weight of each kind of cut.
FUSED = {
    "gpt2": "transformer.h.0.attn.c_attn.weight",
    "gpt_neox": "gpt_neox.layers.0.attention.query_key_value.weight",
    "falcon": "transformer.h.0.self_attention.query_key_value.weight",
    "phi3": "model.layers.0.self_attn.qkv_proj.weight",
    "deepseek_v3": "model.layers.0.self_attn.kv_b_proj.weight",
    "mixtral": "model.layers.0.mlp.experts.gate_up_proj",
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj",
}


def matrices(X: torch.Tensor, cut: dict[str, Any]) -> list[torch.Tensor]:
    """Return the out x in matrices of a weight or gradient."""
    X = X.mT if cut.get("transposed") else X
    blocks = torch.tensor(block_of_rows(cut, X.shape[-2]))
    return [Y[blocks == j] for Y in X.reshape(-1, *X.shape[-2:]) for j in blocks.unique()]


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_weight_is_stepped_as_separate_linear_layers(name) -> None:
    model, fused = build(name), FUSED[name]
    weight, cut = model.get_parameter(fused), assignments(model)[fused][1]
    gradients = {key: torch.randn_like(p) for key, p in model.named_parameters()}
    separate = nn.ModuleList(nn.Linear(*W.shape[::-1], bias=False) for W in matrices(weight, cut))
    separate_gradients = {}
    parts = zip(matrices(weight.detach(), cut), matrices(gradients[fused], cut), strict=True)
    for i, (W, G) in enumerate(parts):
        separate[i].weight = nn.Parameter(W)
        separate_gradients[f"{i}.weight"] = G
    step_with(model, gradients)
    step_with(separate, separate_gradients, head=None)
    for layer, W in zip(separate, matrices(weight.detach(), cut), strict=True):
        torch.testing.assert_close(layer.weight, W)


def test_cross_attention_of_gpt2_fuses_two_projections() -> None:
    assigned = assignments(build("gpt2", add_cross_attention=True))
    key_value = assigned["transformer.h.0.crossattention.c_attn.weight"]
    assert key_value == matrix("Conv1D", transposed=True, blocks=2)
    assert assigned["transformer.h.0.crossattention.q_attn.weight"] == TRANSPOSED


def test_a_conv1d_outside_gpt2_is_transposed_and_not_split() -> None:
    model = nn.ModuleDict({"c_attn": Conv1D(48, 16), "head": nn.Linear(16, 2)})
    assert assignments(model, blocks={"c_attn.weight": 1})["c_attn.weight"] == TRANSPOSED


def test_every_convolution_of_a_stem_is_an_input_convolution() -> None:
    """A deep stem is a Sequential named conv1; a conv1 inside a block is an ordinary layer."""
    deep = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3))
    block = nn.ModuleDict({"conv1": nn.Conv2d(8, 8, 3)})
    model = nn.ModuleDict({"conv1": deep, "layer1": block, "fc": nn.Linear(8, 2)})
    assigned = assignments(model)
    assert (assigned["conv1.0.weight"], assigned["conv1.2.weight"]) == (STEM, STEM)
    assert assigned["layer1.conv1.weight"] == CONV
    named = nn.ModuleDict({"stem": deep, "fc": nn.Linear(8, 2)})
    assert [assignments(named)[f"stem.{i}.weight"] for i in (0, 2)] == [STEM, STEM]


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
    declared = {"stacks": "gate_up_proj", "transposed": "gate_up_proj"}
    assert plan(Unknown(), **declared, blocks={"gate_up_proj": 2})
    text = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, **ENCODER}
    vision = {"image_size": 32, "patch_size": 8, **ENCODER}
    two_towers = CLIPModel(CLIPConfig(text_config=text, vision_config=vision))
    for model in (LlamaModel(LlamaConfig(**DECODER)), two_towers):
        with pytest.raises(ValueError, match=r"no output head in .*head=None"):
            plan(model)
        assert plan(model, head=None)
