"""Model classes of transformers with tiny configurations, and inputs that give a loss."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

DECODER = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ENCODER = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
ENDS = {"bos_token_id": None, "eos_token_id": None}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
MAMBA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 8, **ENDS}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def classes() -> dict[str, Tensor]:
    return {"input_ids": tokens()["input_ids"], "labels": torch.tensor([0, 1])}


Build = tuple[type[nn.Module], type[Any], dict[str, Any], Callable[[], dict[str, Tensor]]]

MODELS: dict[str, Build] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, DECODER, tokens),
    "qwen2": (
        hf.Qwen2ForCausalLM, hf.Qwen2Config, {**DECODER, "tie_word_embeddings": True}, tokens,
    ),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, {**DECODER, **MOE, "num_experts": 4}, tokens,
    ),
    "mixtral": (
        hf.MixtralForCausalLM, hf.MixtralConfig, {**DECODER, "num_local_experts": 4}, tokens,
    ),
    "gpt_oss": (
        hf.GptOssForCausalLM, hf.GptOssConfig, {**DECODER, "num_local_experts": 4}, tokens,
    ),
    "gpt2": (
        hf.GPT2LMHeadModel, hf.GPT2Config,
        {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, **ENDS},
        tokens,
    ),
    "bert_mlm": (hf.BertForMaskedLM, hf.BertConfig, {"vocab_size": 64, **ENCODER}, tokens),
    "bert_classes": (
        hf.BertForSequenceClassification, hf.BertConfig, {"vocab_size": 64, **ENCODER}, classes,
    ),
    "t5": (
        hf.T5ForConditionalGeneration, hf.T5Config,
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
         "decoder_start_token_id": 0},
        tokens,
    ),
    "mamba2": (
        hf.Mamba2ForCausalLM, hf.Mamba2Config,
        {**MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}, tokens,
    ),
    "mamba": (hf.MambaForCausalLM, hf.MambaConfig, MAMBA, tokens),
    "vit": (
        hf.ViTForImageClassification, hf.ViTConfig,
        {**ENCODER, "image_size": 32, "patch_size": 8}, images,
    ),
    "resnet": (
        hf.ResNetForImageClassification, hf.ResNetConfig, {**STAGES, "embedding_size": 8}, images,
    ),
    "convnext": (
        hf.ConvNextForImageClassification, hf.ConvNextConfig, {**STAGES, "num_stages": 2}, images,
    ),
}  # fmt: skip


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    kind, config, values, _ = MODELS[name]
    return kind(config(**values, **options))


def loss_of(model: nn.Module, name: str) -> Tensor:
    return model(**MODELS[name][-1]()).loss
