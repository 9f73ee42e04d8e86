"""Tokenizers: text comes back, the end-of-text id is never made by text, files are stable."""

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


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request) -> Tokenizer:
    return load_tokenizer("bytes") if request.param == "bytes" else train_tokenizer(CORPUS, 400)


@given(texts=st.lists(TEXTS, max_size=5))
def test_text_comes_back_and_never_makes_an_end(tokenizer, texts) -> None:
    rows = tokenizer.encode_batch(texts)
    assert rows == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(row) for row in rows] == texts
    for row in rows:
        assert all(0 <= i < tokenizer.vocabulary and i != tokenizer.end_of_text for i in row)


def test_the_end_can_be_read(tokenizer) -> None:
    ids = [tokenizer.end_of_text, *tokenizer.encode("a")]
    assert tokenizer.decode(ids) == "<|endoftext|>a"


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = load_tokenizer(str(path))
    assert again.fingerprint == tokenizer.fingerprint
    assert again.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (again.vocabulary, again.end_of_text) == (tokenizer.vocabulary, tokenizer.end_of_text)
    assert again.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_bytes_are_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode("h\u00e9") == [0x68, 0xC3, 0xA9]


def test_training_reaches_the_vocabulary_and_shortens() -> None:
    tokenizer = train_tokenizer(CORPUS, 400)
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (400, 0)
    assert len(tokenizer.encode(CORPUS[7])) < len(CORPUS[7]) / 2
    with pytest.raises(ValueError, match="vocabulary=256 must be at least 257"):
        train_tokenizer(CORPUS, 256)


def test_training_is_the_same_in_every_process() -> None:
    code = (
        "from tests.lab.data.test_tokenizer import CORPUS\n"
        "from angular_lab.data.tokenizer import train_tokenizer\n"
        "print(train_tokenizer(CORPUS, 400).fingerprint)"
    )
    wanted = train_tokenizer(iter(CORPUS), 400).fingerprint
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root
    )
    assert run.stdout.strip() == wanted, run.stderr


def changed(tmp_path: Path, **changes: object) -> str:
    """A trained tokenizer's file with other settings."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(CORPUS, 400).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(path)


def test_settings_of_a_file_do_not_change_the_text(tmp_path) -> None:
    pad = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    name = changed(
        tmp_path,
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={**pad, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"},
    )
    for text in (CORPUS[0], "a"):
        assert load_tokenizer(name).decode(load_tokenizer(name).encode(text)) == text


def test_ids_may_have_holes(tmp_path) -> None:
    name = changed(tmp_path)
    content = json.loads(Path(name).read_text())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][last] = 5000
    Path(name).write_text(json.dumps(content))
    assert load_tokenizer(name).vocabulary == 5001


def test_files_that_are_no_tokenizer(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in ("{", "{}", "[1]"):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"{path} is no tokenizer.json"):
            load_tokenizer(str(path))
    with pytest.raises(ValueError, match=r"nowhere.json: no such file"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
    name = changed(tmp_path, added_tokens=[])
    content = json.loads(Path(name).read_text())
    content["model"]["vocab"]["nothing"] = content["model"]["vocab"].pop("<|endoftext|>")
    Path(name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no token that ends a text; it needs one of"):
        load_tokenizer(name)


def test_a_hub_name_without_a_network_says_so() -> None:
    code = "from angular_lab.data.tokenizer import load_tokenizer; load_tokenizer('gpt2')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 1
    last = next(line for line in run.stderr.splitlines() if line.startswith("ValueError"))
    assert "'gpt2'" in last
    assert "offline" in last
    assert "tokenizer.json" in last


def test_without_the_library_bytes_still_work(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer("bytes").encode("a") == [97]
    with pytest.raises(ImportError, match=r"tokenizers: pip install -e '\.\[lab\]'"):
        train_tokenizer(CORPUS, 300)
