"""Convert weights to and from Hugging Face transformers: dense as Llama, qwen2 as Qwen2.

The lab fuses q, k, v and gate, up; transformers has separate weights. Nothing else differs, so an
exported checkpoint gives the same logits.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from angular_lab.config.spec import ModelSpec
from angular_lab.data.tokenizer import Tokenizer
from angular_lab.errors import UserError
from angular_lab.models import LanguageModel
from angular_lab.models.layers import head_size, kv_heads, mlp_width, qkv_rows

Exported = tuple[dict[str, Tensor], dict[str, Any]]  # state dict and configuration

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
EMBEDDING, HEAD = "embedding.weight", "lm_head.weight"
OUTER = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", HEAD: HEAD}
# The lab's parameter of a layer -> its parts in transformers, from the first row to the last.
INNER = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "attn.qkv.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "attn.qkv.bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "attn.out.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
}


def to_llama(model: LanguageModel) -> Exported:
    """Return the state and configuration of the LlamaForCausalLM equal to a dense model."""
    config = {"attention_bias": False, "mlp_bias": False, "head_dim": head_size(model.spec)}
    return _to_transformers(model, "dense", "llama", "LlamaForCausalLM", config)


def to_qwen2(model: LanguageModel) -> Exported:
    """Return the state and configuration of the Qwen2ForCausalLM equal to a qwen2 model."""
    config = {"use_sliding_window": False}
    return _to_transformers(model, "qwen2", "qwen2", "Qwen2ForCausalLM", config)


def from_qwen2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state of a Qwen2ForCausalLM for `load_state_dict` of a qwen2 model."""
    taken = set()

    def take(names: tuple[str, ...]) -> Tensor:
        missing = [name for name in names if name not in state]
        if missing:
            raise UserError(f"the Qwen2 state lacks {', '.join(missing)}")
        taken.update(names)
        return torch.cat([state[name] for name in names])

    tied = HEAD not in state  # files of tied models contain the matrix once
    weights = {name: take((OUTER[EMBEDDING if tied and name == HEAD else name],)) for name in OUTER}
    layers = {name.split(".")[2] for name in state if name.startswith("model.layers.")}
    for layer in sorted(layers, key=int):
        for name, parts in INNER.items():
            names = tuple(f"model.layers.{layer}.{part}" for part in parts)
            weights[f"layers.{layer}.{name}"] = take(names)
    if unknown := sorted(set(state) - taken):
        raise UserError(f"these are not weights of Qwen2: {', '.join(unknown)}")
    return weights


EXPORTS: dict[str, Callable[[LanguageModel], Exported]] = {"dense": to_llama, "qwen2": to_qwen2}


def check_target(folder: str | PathLike[str], overwrite: bool) -> None:
    """Raise UserError if an export to a folder would replace files that it may not."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UserError(f"--out {folder} is a file: give a folder")
    exist = [name for name in FILES if (Path(folder) / name).exists()]
    if exist and not overwrite:
        raise UserError(
            f"--out {folder} holds {', '.join(exist)} already: give another folder, or add "
            "--overwrite to replace them"
        )


def export(
    model: LanguageModel,
    spec: ModelSpec,
    folder: str | PathLike[str],
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Write config.json and model.safetensors for `from_pretrained(folder)` of transformers.

    With a tokenizer, write its files too; its end-of-text token begins and ends a document. With
    `overwrite`, an earlier export is removed first, so that no tokenizer of another run stays.
    """
    check_target(folder, overwrite)
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "export needs the package safetensors: pip install -e '.[lab]'"
        ) from error
    if spec.kind not in EXPORTS:
        raise UserError(
            f"model.kind={spec.kind!r} cannot be exported: transformers has an equivalent only for "
            f"{', '.join(map(repr, EXPORTS))}"
        )
    if spec != model.spec:
        raise UserError(f"the model was built from {model.spec}, not from {spec}")
    state, config = EXPORTS[spec.kind](model)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (path / name).unlink(missing_ok=True)
    if tokenizer is not None:
        config |= dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.end_of_text)
        for name, text in (tokenizer.for_transformers or {}).items():
            (path / name).write_text(text, "utf-8")
    # Older releases of transformers reject files without the framework that wrote them.
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # safetensors writes a file that only its owner can read, whatever the umask
    shutil.copymode(path / "config.json", path / "model.safetensors")


def _to_transformers(
    model: LanguageModel, kind: str, model_type: str, architecture: str, config: dict[str, Any]
) -> Exported:
    spec = model.spec
    if spec.kind != kind or spec.soft_cap is not None:
        cap = "none" if spec.soft_cap is None else f"{spec.soft_cap:g}"
        raise UserError(
            f"model.kind={spec.kind!r} with soft_cap={cap} cannot become a {architecture}, which "
            f"needs {kind!r} with soft_cap=none"
        )
    shared = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.sequence,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": kv_heads(spec),
        "intermediate_size": mlp_width(spec),
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_base,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,  # depends on the tokenizer, see export()
        "eos_token_id": None,
    }
    return _split_weights(model), shared | config


def _split_weights(model: LanguageModel) -> dict[str, Tensor]:
    """Return the state under transformers' names, as copies on the CPU."""
    sizes = {3: qkv_rows(model.spec), 2: [mlp_width(model.spec)] * 2}
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name in OUTER:
            if name != HEAD or not model.spec.tied:
                weights[OUTER[name]] = value
            continue
        _, layer, inner = name.split(".", 2)
        parts = INNER[inner]
        rows = value.split(sizes.get(len(parts), [len(value)]))
        weights |= {f"model.layers.{layer}.{p}": r for p, r in zip(parts, rows, strict=True)}
    return {name: value.detach().cpu().clone() for name, value in weights.items()}
