"""Tokenizers: decoding inverts encoding, no text gets the end-of-text id, files are stable."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angular_lab.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

CORPUS = [f"def name_{i}(self, value):\n    return value + {i}\n" for i in range(300)]
TEXTS = st.text() | st.sampled_from(
    ["<|endoftext|>", "a<|endoftext|>b", "\r\n\t ", "\x00", "\u00e9\U0001f600", "self.name_1"]
)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer(CORPUS, 400)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request, bpe) -> Tokenizer:
    return load_tokenizer("bytes") if request.param == "bytes" else bpe


@given(texts=st.lists(TEXTS, max_size=5))
def test_decoding_inverts_encoding_and_no_text_is_an_end(tokenizer, texts) -> None:
    rows = tokenizer.encode_batch(texts)
    assert rows == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(row) for row in rows] == texts
    for row in rows:
        assert all(0 <= i < tokenizer.vocabulary and i != tokenizer.end_of_text for i in row)
    assert tokenizer.decode([tokenizer.end_of_text, *tokenizer.encode("a")]) == "<|endoftext|>a"


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(str(path))
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (loaded.vocabulary, loaded.end_of_text) == (tokenizer.vocabulary, tokenizer.end_of_text)
    assert loaded.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])


def test_bytes_are_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode("h\u00e9") == [0x68, 0xC3, 0xA9]
    assert tokenizer.for_transformers is None


def test_training_reaches_the_vocabulary_and_compresses(bpe) -> None:
    assert (bpe.vocabulary, bpe.end_of_text) == (400, 0)
    assert len(bpe.encode(CORPUS[7])) < len(CORPUS[7]) / 2
    with pytest.raises(ValueError, match="vocabulary=256 must be at least 257"):
        train_tokenizer(CORPUS, 256)


def test_other_processes_train_the_same_tokenizer_and_report_a_missing_hub(bpe) -> None:
    code = (
        "from tests.lab.data.test_tokenizer import CORPUS\n"
        "from angular_lab.data.tokenizer import load_tokenizer, train_tokenizer\n"
        "print(train_tokenizer(iter(CORPUS), 400).fingerprint)\n"
        "load_tokenizer('gpt2')"
    )
    variables = {"PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3],
        env={**os.environ, **variables, "HF_HOME": "/nonexistent"},
    )  # fmt: skip
    assert run.stdout.strip() == bpe.fingerprint, run.stderr
    assert run.returncode == 1
    assert "UserError: tokenizer 'gpt2' is neither" in run.stderr
    assert "this machine is offline; download its tokenizer.json" in run.stderr


def changed(tokenizer: Tokenizer, path: Path, **changes: object) -> str:
    """Save a tokenizer with other settings, and give its last entry the id 5000."""
    tokenizer.save(path)
    content = {**json.loads(path.read_text()), **changes}
    vocab = content["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 5000
    path.write_text(json.dumps(content))
    return str(path)


def test_padding_truncation_and_gaps_in_the_ids_are_handled(bpe, tmp_path) -> None:
    pad = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    name = changed(
        bpe,
        tmp_path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={**pad, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"},
    )
    loaded = load_tokenizer(name)
    assert loaded.vocabulary == 5001
    for text in (CORPUS[0], "a"):
        assert loaded.decode(loaded.encode(text)) == text


def test_files_that_are_not_tokenizers_are_errors(bpe, tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in ("{", "{}", "[1]"):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"{path} is not a tokenizer.json"):
            load_tokenizer(str(path))
    with pytest.raises(ValueError, match=r"nowhere.json: no such file"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
    changed(bpe, path, added_tokens=[])
    path.write_text(path.read_text().replace("<|endoftext|>", "nothing"))
    with pytest.raises(ValueError, match="has no end-of-text token; it needs one of"):
        load_tokenizer(str(path))


def test_bytes_work_without_the_library(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer("bytes").encode("a") == [97]
    with pytest.raises(ImportError, match=r"tokenizers: pip install -e '\.\[lab\]'"):
        train_tokenizer(CORPUS, 300)
