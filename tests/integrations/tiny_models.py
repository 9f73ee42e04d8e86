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
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 8, **ENDS}
NEOX = {"vocab_size": 64, **ENCODER, "num_attention_heads": 4}
FALCON = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, **ENDS
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "head_dim": 4,
}  # fmt: skip
SPECIAL = {
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 1
}  # fmt: skip
SPEECH_LAYERS = {
    f"{part}_{key}": value
    for part in ("encoder", "decoder")
    for key, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def speech() -> dict[str, Tensor]:
    sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    return {"input_features": sound, "labels": tokens()["labels"]}


def classes() -> dict[str, Tensor]:
    return {"input_ids": tokens()["input_ids"], "labels": torch.tensor([0, 1])}


Build = tuple[type[nn.Module], type[Any], dict[str, Any], Callable[[], dict[str, Tensor]]]

MODELS: dict[str, Build] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, DECODER, tokens),
    "qwen2": (
        hf.Qwen2ForCausalLM, hf.Qwen2Config, {**DECODER, "tie_word_embeddings": True}, tokens,
    ),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, DECODER, tokens),
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
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {**NEOX, **ENDS}, tokens),
    "bloom": (
        hf.BloomForCausalLM, hf.BloomConfig,
        {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 4, **ENDS}, tokens,
    ),
    "falcon": (
        hf.FalconForCausalLM, hf.FalconConfig,
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, tokens,
    ),
    "falcon_multi_query": (
        hf.FalconForCausalLM, hf.FalconConfig, {**FALCON, "multi_query": True}, tokens,
    ),
    "falcon_per_head": (
        hf.FalconForCausalLM, hf.FalconConfig, {**FALCON, "multi_query": False}, tokens,
    ),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {**DECODER, **HEADS}, tokens),
    "mpt": (
        hf.MptForCausalLM, hf.MptConfig,
        {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}, tokens,
    ),
    "modernbert": (
        hf.ModernBertForMaskedLM, hf.ModernBertConfig, {**NEOX, **SPECIAL, "pad_token_id": 0},
        tokens,
    ),
    "deepseek_v3": (
        hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config,
        {**DECODER, **MOE, **LATENT, "num_attention_heads": 4, "num_key_value_heads": 4,
         "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        tokens,
    ),
    "opt": (
        hf.OPTForCausalLM, hf.OPTConfig,
        {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "word_embed_proj_dim": 8, "max_position_embeddings": 32,
         **ENDS, "pad_token_id": 1},
        tokens,
    ),
    "whisper": (
        hf.WhisperForConditionalGeneration, hf.WhisperConfig,
        {"vocab_size": 64, "d_model": 16, "num_mel_bins": 8, "max_source_positions": 16,
         "max_target_positions": 16, **SPEECH_LAYERS, "decoder_start_token_id": 0, **SPECIAL},
        speech,
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
