"""Conversion to and from transformers, whose models must compute the same logits.

This makes transformers the reference for the dense and the qwen2 model.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: nothing is downloaded

from safetensors import safe_open
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from angular_lab.config.spec import ModelSpec
from angular_lab.data.tokenizer import load_tokenizer, train_tokenizer
from angular_lab.export.huggingface import export, from_qwen2, to_llama, to_qwen2
from angular_lab.models import build_model
from tests.lab.tiny import SPECS, scrambled, text

LLAMA = (LlamaConfig, LlamaForCausalLM, to_llama)
QWEN2 = (Qwen2Config, Qwen2ForCausalLM, to_qwen2)
CASES = [
    (*LLAMA, SPECS["dense"]),
    (*LLAMA, replace(SPECS["dense"], tied=False, kv_heads=2, rope_base=300.0, norm_eps=1e-2)),
    (*QWEN2, SPECS["qwen2"]),
    (*QWEN2, replace(SPECS["qwen2"], tied=False, kv_heads=1, norm_eps=1e-2)),
]
IDS = ["llama", "llama untied GQA", "qwen2", "qwen2 untied MQA"]


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model.eval()(tokens)
    return out if isinstance(out, Tensor) else out.logits


def assert_same_logits(ours: nn.Module, theirs: nn.Module) -> None:
    tokens, _ = text()
    a, b = logits_of(ours, tokens), logits_of(theirs, tokens)
    assert a.abs().max() > 1
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("config", "architecture", "convert", "spec"), CASES, ids=IDS)
def test_exported_model_has_the_same_logits_in_transformers(
    config, architecture, convert, spec: ModelSpec, tmp_path: Path
) -> None:
    model, folder = scrambled(spec), tmp_path / "new" / "folder"
    state, values = convert(model)
    missing, unexpected = architecture(config(**values)).load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if spec.tied else [], [])
    export(model, spec, folder)
    loaded = architecture.from_pretrained(folder)
    assert_same_logits(model, loaded)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == [architecture.__name__]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("spec", [spec for *_, kind, spec in CASES if kind is to_qwen2])
def test_qwen2_weights_of_transformers_convert_in_both_directions(spec: ModelSpec) -> None:
    _, values = to_qwen2(build_model(spec))
    torch.manual_seed(3)
    original = Qwen2ForCausalLM(Qwen2Config(**values))
    for p in original.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    model = build_model(spec)
    model.load_state_dict(from_qwen2(original.state_dict()))
    assert_same_logits(model, original)
    state, _ = to_qwen2(model)
    expected = original.state_dict()
    assert set(expected) - set(state) == ({"lm_head.weight"} if spec.tied else set())
    assert all(torch.equal(state[name], expected[name]) for name in state)
    again = from_qwen2(state)  # like a file of a tied model: without the head
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_exported_tensors_are_copies() -> None:
    model = scrambled(SPECS["dense"])
    state, _ = to_llama(model)
    storages = {value.untyped_storage().data_ptr() for value in state.values()}
    assert len(storages) == len(state)
    assert storages.isdisjoint(p.untyped_storage().data_ptr() for p in model.parameters())


def test_incomplete_and_foreign_states_are_rejected() -> None:
    state, _ = to_qwen2(scrambled(SPECS["qwen2"]))
    with pytest.raises(ValueError, match=r"not weights of Qwen2: model.layers.0.mlp.router.weight"):
        from_qwen2({**state, "model.layers.0.mlp.router.weight": torch.zeros(1)})
    del state["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ValueError, match=r"lacks model.layers.1.self_attn.k_proj.bias"):
        from_qwen2(state)


def test_models_without_an_equivalent_are_rejected(tmp_path: Path) -> None:
    for kind in ("moe", "gpt_speedrun"):
        with pytest.raises(ValueError, match=f"kind='{kind}' cannot be exported"):
            export(build_model(SPECS[kind]), SPECS[kind], tmp_path)
        with pytest.raises(ValueError, match=f"kind='{kind}' .* cannot become a LlamaForCausalLM"):
            to_llama(build_model(SPECS[kind]))
    spec = replace(SPECS["dense"], soft_cap=15.0)
    with pytest.raises(ValueError, match=r"soft_cap=15 .* which needs 'dense' with soft_cap=none"):
        to_llama(build_model(spec))
    with pytest.raises(ValueError, match="the model was built from"):
        export(build_model(spec), SPECS["dense"], tmp_path)


def test_missing_safetensors_error_names_the_extra(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[lab\]'"):
        export(build_model(SPECS["dense"]), SPECS["dense"], tmp_path)


def test_exported_tokenizer_gives_the_same_ids_in_transformers(tmp_path: Path) -> None:
    texts = [f"document {i} says hello and goodbye" for i in range(50)]
    tokenizer = train_tokenizer(iter(texts), 300)
    spec = replace(SPECS["dense"], vocabulary=300)
    export(build_model(spec), spec, tmp_path, tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for document in (*texts, "something else, 123\n"):
        assert loaded(document)["input_ids"] == tokenizer.encode(document)
    assert loaded.eos_token_id == loaded.bos_token_id == tokenizer.end_of_text
    config = LlamaConfig.from_pretrained(tmp_path)
    assert config.eos_token_id == config.bos_token_id == tokenizer.end_of_text
    export(build_model(spec), spec, tmp_path / "bytes", load_tokenizer("bytes"))
    assert not list((tmp_path / "bytes").glob("tokenizer*")), "transformers has no such tokenizer"
