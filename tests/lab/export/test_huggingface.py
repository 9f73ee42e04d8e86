"""Exchange with transformers: its own classes compute the same logits from our weights, and back.

The classes are the reference for the dense and the qwen2 model altogether.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: nothing is fetched

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
    assert a.abs().max() > 1, "there is something to compare"
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("config", "architecture", "convert", "spec"), CASES, ids=IDS)
def test_the_state_gives_the_same_logits(config, architecture, convert, spec: ModelSpec) -> None:
    model = scrambled(spec)
    state, values = convert(model)
    theirs = architecture(config(**values))
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if spec.tied else [], [])
    theirs.tie_weights()
    assert_same_logits(model, theirs)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("config", "architecture", "convert", "spec"), CASES, ids=IDS)
def test_the_folder_loads(config, architecture, convert, spec: ModelSpec, tmp_path: Path) -> None:
    model = scrambled(spec)
    export(model, spec, tmp_path / "new" / "folder")
    theirs = architecture.from_pretrained(tmp_path / "new" / "folder")
    assert_same_logits(model, theirs)
    written = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    assert written["architectures"] == [architecture.__name__]
    with safe_open(tmp_path / "new" / "folder" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("spec", [spec for *_, kind, spec in CASES if kind is to_qwen2])
def test_their_qwen2_becomes_ours_and_theirs_again(spec: ModelSpec) -> None:
    _, values = to_qwen2(build_model(spec))
    torch.manual_seed(3)
    theirs = Qwen2ForCausalLM(Qwen2Config(**values))
    for p in theirs.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    ours = build_model(spec)
    ours.load_state_dict(from_qwen2(theirs.state_dict()))
    assert_same_logits(ours, theirs)
    state, _ = to_qwen2(ours)
    back = theirs.state_dict()
    assert set(back) - set(state) == ({"lm_head.weight"} if spec.tied else set())
    assert all(torch.equal(state[name], back[name]) for name in state)
    again = from_qwen2(state)  # as a file of a tied model: without the head
    assert all(torch.equal(again[name], value) for name, value in ours.state_dict().items())


def test_the_export_is_a_copy() -> None:
    model = scrambled(SPECS["dense"])
    state, _ = to_llama(model)
    storages = {value.untyped_storage().data_ptr() for value in state.values()}
    assert len(storages) == len(state)
    assert storages.isdisjoint(p.untyped_storage().data_ptr() for p in model.parameters())


def test_a_state_that_is_no_qwen2() -> None:
    state, _ = to_qwen2(scrambled(SPECS["qwen2"]))
    with pytest.raises(ValueError, match=r"no weights of Qwen2: model.layers.0.mlp.router.weight"):
        from_qwen2({**state, "model.layers.0.mlp.router.weight": torch.zeros(1)})
    del state["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ValueError, match=r"has no model.layers.1.self_attn.k_proj.bias"):
        from_qwen2(state)


@pytest.mark.parametrize("kind", ["moe", "gpt_speedrun"])
def test_what_transformers_does_not_have(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no model like '{kind}', only"):
        export(build_model(SPECS[kind]), SPECS[kind], tmp_path)
    with pytest.raises(ValueError, match=f"cannot be a model of kind '{kind}'"):
        to_llama(build_model(SPECS[kind]))


def test_what_the_format_cannot_say(tmp_path: Path) -> None:
    spec = replace(SPECS["dense"], soft_cap=15.0)
    with pytest.raises(ValueError, match="soft_cap=15: it needs 'dense' without a cap"):
        to_llama(build_model(spec))
    with pytest.raises(ValueError, match="the model was built from"):
        export(build_model(spec), SPECS["dense"], tmp_path)


def test_without_safetensors_the_extra_is_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[lab\]'"):
        export(build_model(SPECS["dense"]), SPECS["dense"], tmp_path)


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    """transformers' own reader makes the same ids, and knows what ends a text."""
    texts = [f"document {i} says hello and goodbye" for i in range(50)]
    tokenizer = train_tokenizer(iter(texts), 300)
    spec = replace(SPECS["dense"], vocabulary=300)
    export(build_model(spec), spec, tmp_path, tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for line in (*texts, "something else, 123\n"):
        assert theirs(line)["input_ids"] == tokenizer.encode(line)
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.end_of_text
    config = LlamaConfig.from_pretrained(tmp_path)
    assert config.eos_token_id == config.bos_token_id == tokenizer.end_of_text
    export(build_model(spec), spec, tmp_path / "bytes", load_tokenizer("bytes"))
    assert not list((tmp_path / "bytes").glob("tokenizer*")), "transformers has no such tokenizer"
