"""Preparing data: the tokens are those of a plain loop, for any number of workers and kills."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angular_lab.data import workers
from angular_lab.data.batches import Tokens
from angular_lab.data.prepare import prepare, prepare_stdlib
from angular_lab.data.shards import JOURNAL, Manifest, read_header
from angular_lab.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from angular_lab.errors import UserError
from angular_lab.log import configure_logging
from tests.lab.data.kill_prepare import contents

ROOT = Path(__file__).parents[3]
BYTES = load_tokenizer("bytes")
TEXTS = [f"document {i} " + "abc " * (i % 7) for i in range(60)]


@pytest.fixture(autouse=True)
def _fast(monkeypatch) -> None:
    """Small chunks, so that few documents are several; and no test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(workers, "CHUNK_DOCUMENTS", 5)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


def make(texts, out: Path, tokenizer: Tokenizer = BYTES, **options) -> Manifest:
    defaults = {"shard_tokens": 100, "val_fraction": 0.2, "workers": 1, "progress": False}
    return prepare(texts, tokenizer, out, **{**defaults, **options})


def read(folder: Path, split: str) -> list[list[int]]:
    paths = sorted(folder.glob(f"{split}_*.bin"))
    return [np.fromfile(p, read_header(p)[1], offset=1024).tolist() for p in paths]


def joined(folder: Path, split: str) -> list[int]:
    return [token for shard in read(folder, split) for token in shard]


def is_val(content: bytes, seed: int, fraction: float) -> bool:
    digest = hashlib.blake2b(content, digest_size=16, key=str(seed).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def hold_out(streams, counts, content, fraction, tokens, lone) -> int:
    """Move the end of the last document to the split that has none; return its tokens."""
    if fraction == 0 or (counts["val"] and not lone):
        return 0
    if counts["val"]:  # a single document, drawn for validation
        streams["train"], streams["val"] = streams["val"], []
    total = min(len(streams["train"]), tokens or 10**9)
    held_out = min(max(1, round(fraction * total)), len(content) // 2)
    if not held_out:
        if counts["val"]:
            streams["train"], streams["val"] = [], streams["train"]
        return 0
    streams["train"] = streams["train"][:-held_out]
    streams["val"] = [256, *content[-held_out:]]
    counts.update(train=max(1, counts["train"]), val=1)
    return held_out


@settings(max_examples=30)
@given(
    texts=st.lists(st.text(st.characters(), min_size=1, max_size=30), min_size=1, max_size=12),
    shard=st.integers(1, 70),
    fraction=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 3),
    tokens=st.none() | st.integers(1, 200),
)
def test_shards_are_those_of_a_plain_loop(
    tmp_path_factory, texts, shard, fraction, seed, tokens
) -> None:
    """Also of texts with lone surrogates, which become question marks."""
    out = tmp_path_factory.mktemp("loop")
    manifest = make(texts, out, shard_tokens=shard, val_fraction=fraction, seed=seed, tokens=tokens)
    streams: dict[str, list[int]] = {"train": [], "val": []}
    counts = {"train": 0, "val": 0}
    for i, text in enumerate(texts):
        content = text.encode("utf-8", "replace")
        name = "val" if is_val(content, seed, fraction) else "train"
        streams[name] += [256, *content]
        counts[name] += 1
        reached = tokens is not None and len(streams["train"]) >= tokens
        if (reached or i == len(texts) - 1) and 0 in counts.values() and counts[name] == i + 1:
            held_out = hold_out(streams, counts, content, fraction, tokens, lone=i == 0)
            assert manifest.arguments.get("held_out", 0) == held_out
        if reached:
            streams["train"] = streams["train"][:tokens]
            break
    for name, stream in streams.items():
        shards = [stream[i : i + shard] for i in range(0, len(stream), shard)]
        assert read(out, name) == shards
        split = manifest.splits[name]
        assert (split.documents, split.tokens) == (counts[name], len(stream))
        if tokens is None or name == "val":
            assert split.bytes == len(stream) - counts[name]
        assert [info.max_id for info in split.files] == [max(ids) for ids in shards]
    assert Manifest.load(out) == manifest


@pytest.mark.parametrize("fraction", [0.005, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_a_single_text_is_divided(tmp_path, bpe, fraction, seed) -> None:
    """Whatever its hash says: at 0.2, seed 2 draws it for validation."""
    text = " ".join(TEXTS)
    (tmp_path / "book.txt").write_text(text)
    out = tmp_path / "out"
    manifest = make(str(tmp_path / "book.txt"), out, bpe, val_fraction=fraction, seed=seed)
    train, val = (joined(out, name) for name in ("train", "val"))
    assert bpe.decode(train[1:]) + bpe.decode(val[1:]) == text
    assert train[0] == val[0] == bpe.end_of_text
    count = manifest.arguments["held_out"]
    assert count == len(val) - 1 == round(fraction * (len(train) + len(val) - 1))
    sizes = [manifest.splits[name].bytes for name in ("train", "val")]
    assert sum(sizes) == pytest.approx(len(text), abs=1)
    assert make(str(tmp_path / "book.txt"), out, bpe, val_fraction=fraction, seed=seed) == manifest
    assert len(Tokens(out, "val", 2, 300)) > 0


def test_the_last_of_several_texts_is_divided_if_none_is_for_validation(tmp_path) -> None:
    texts = TEXTS[:5]
    manifest = make(texts, tmp_path / "out", val_fraction=0.01)
    assert not any(is_val(text.encode(), 0, 0.01) for text in texts)
    whole = [x for text in texts for x in (256, *text.encode())]
    assert joined(tmp_path / "out", "train") == whole[:-1]
    assert joined(tmp_path / "out", "val") == [256, whole[-1]]
    assert manifest.arguments["held_out"] == 1
    assert "held_out" not in make(texts, tmp_path / "none", val_fraction=0.0).arguments


def test_the_result_opens_as_tokens(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    manifest = make(str(tmp_path / "a.txt"), tmp_path / "out")
    assert manifest.splits == make(TEXTS, tmp_path / "list").splits
    for name, split in manifest.splits.items():
        tokens = Tokens(tmp_path / "out", name, 10, 257)
        assert tokens.token_count == split.tokens
        assert tokens.bytes_per_token == split.bytes / split.tokens
    tokenizer = load_tokenizer(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.fingerprint == manifest.arguments["tokenizer"] == BYTES.fingerprint
    assert manifest.arguments["source"] == str(tmp_path / "a.txt")
    assert (manifest.vocabulary, manifest.end_of_text, manifest.dtype) == (257, 256, "uint16")


def test_the_fingerprint_depends_on_the_tokens_and_not_on_their_source(tmp_path) -> None:
    first = make(TEXTS, tmp_path / "first", source="here")
    moved = make(TEXTS, tmp_path / "moved", source="there")
    assert first != moved
    assert first.fingerprint == moved.fingerprint
    others = [
        make(TEXTS[1:], tmp_path / "corpus"),
        make(TEXTS, tmp_path / "split", seed=1),
        make(TEXTS, tmp_path / "shards", shard_tokens=200),  # windows do not cross shards
        replace(first, arguments={**first.arguments, "tokenizer": "another"}),
        replace(first, vocabulary=300),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_the_number_of_workers_changes_no_byte(tmp_path, bpe) -> None:
    for count in (1, 2):
        make(TEXTS, tmp_path / str(count), bpe, workers=count, tokens=500)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.parametrize(("count", "most"), [(1, 10), (2, 25)])
def test_documents_are_read_only_a_little_ahead(count, most) -> None:
    """A corpus may be larger than the memory."""
    numbers = iter(range(10**9))
    stream = workers.encode_all((f"text {i}" for i in numbers), BYTES, Path("bytes"), count, 0)
    assert next(stream).ids.tolist() == [256, *b"text 0"]
    stream.close()
    assert next(numbers) <= most


def test_a_dead_worker_is_an_error(tmp_path) -> None:
    """It dies here because the tokenizer's file does not exist."""
    stream = workers.encode_all(TEXTS, BYTES, tmp_path / "nowhere.json", 2, 0)
    with pytest.raises(UserError, match=r"a worker process died.*workers=1"):
        next(stream)


def test_long_documents_are_encoded_in_pieces(bpe, monkeypatch) -> None:
    text = "".join(f"line {i}\n" for i in range(50)) + "x" * 100
    monkeypatch.setattr(workers, "PIECE_CHARACTERS", 40)
    pieces = list(workers.pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 40
    assert all(piece.endswith("\n") for piece in pieces[:-4])
    (document,) = workers.encode(bpe, [text], 0)
    assert bpe.decode(document.ids.tolist()[1:]) == text
    assert (int(document.ids[0]), document.size) == (0, len(text))


class CodePoints(Tokenizer):
    def encode_batch(self, texts) -> list[list[int]]:
        return [[ord(c) for c in text] for text in texts]

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_vocabulary_determines_the_type(tmp_path, vocabulary, dtype) -> None:
    tokenizer = CodePoints("{}", vocabulary, 0)
    manifest = make([f"a{chr(vocabulary - 1)}"], tmp_path, tokenizer, val_fraction=0)
    assert manifest.dtype == dtype
    assert read(tmp_path, "train") == [[0, 97, vocabulary - 1]]


# kills


def test_a_kill_at_any_moment_changes_no_byte(tmp_path) -> None:
    command = [sys.executable, "-m", "tests.lab.data.kill_prepare", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert all(int(operations) > 10 for operations in run.stdout.split())


SLOW = """
import sys, time
from pathlib import Path
from angular_lab.data import workers
from tests.lab.data.test_prepare import TEXTS, make

workers.CHUNK_DOCUMENTS = 2
make((time.sleep(0.02) or text for text in TEXTS), Path(sys.argv[1]), workers=2)
"""


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.005)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes as on Linux")
def test_a_killed_pool_leaves_no_process_and_resumes(tmp_path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(out)], cwd=ROOT)
    wait_for(lambda: len(list(out.glob("*.bin"))) >= 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(children) >= 2
    assert not (out / "manifest.json").exists()
    wait_for(lambda: not any(map(is_running, children)))
    make(TEXTS, out)
    make(TEXTS, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


# calling it again


def interrupt(out: Path) -> None:
    """Start a preparation and stop in the middle."""

    def documents() -> Iterator[str]:
        yield from TEXTS[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(documents(), out)
    assert (out / JOURNAL).exists()


def unread() -> Iterator[str]:
    raise AssertionError("a finished folder needs no documents")
    yield ""


def test_a_finished_folder_is_left_alone(tmp_path) -> None:
    first = make(TEXTS, tmp_path)
    before = contents(tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()  # cannot be locked, as if the folder were read-only
    assert make(unread(), tmp_path) == first
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", 77), ("shard_tokens", 99), ("val_fraction", 0.3), ("seed", 5), ("source", "else"),
     ("tokenizer", CodePoints("{}", 300, 0))],
)  # fmt: skip
def test_other_arguments_are_errors_that_show_the_difference(tmp_path, key, value) -> None:
    make(TEXTS, tmp_path / "finished")
    interrupt(tmp_path / "interrupted")
    shown = getattr(value, "fingerprint", value)
    for name in ("finished", "interrupted"):
        before = contents(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name} was prepared with .*{key} was .* {shown!r}"):
            make(TEXTS, tmp_path / name, **{key: value})
        assert contents(tmp_path / name) == before


@pytest.mark.parametrize("changed", [["other", *TEXTS[1:]], TEXTS[1:], TEXTS[:3], []])
def test_other_documents_are_errors(tmp_path, changed) -> None:
    interrupt(tmp_path)
    with pytest.raises(ValueError, match=r"started with other documents: the first \d+ differ"):
        make(changed, tmp_path)
    make(TEXTS, tmp_path)


def test_resuming_encodes_only_the_rest_and_removes_unlisted_shards(tmp_path, monkeypatch) -> None:
    interrupt(tmp_path / "resumed")
    (tmp_path / "resumed" / "train_00099.bin").touch()
    encoded: list[str] = []
    encode = workers.encode

    def record(tokenizer: Tokenizer, texts: list[str], seed: int) -> list[workers.Encoded]:
        encoded.extend(texts)
        return encode(tokenizer, texts, seed)

    monkeypatch.setattr(workers, "encode", record)
    make(TEXTS, tmp_path / "resumed")
    assert encoded == TEXTS[-len(encoded) :]
    assert 20 < len(encoded) < 40
    make(TEXTS, tmp_path / "whole")
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")


def test_concurrent_calls_do_the_work_once(tmp_path, capfd) -> None:
    configure_logging()
    started, released = threading.Event(), threading.Event()

    def slow() -> Iterator[str]:
        started.set()
        assert released.wait(10)
        yield from TEXTS

    manifests: list[Manifest] = []
    calls = [
        threading.Thread(target=lambda t=texts: manifests.append(make(t, tmp_path)))
        for texts in (slow(), unread())
    ]
    calls[0].start()
    assert started.wait(10)
    calls[1].start()
    wait_for(lambda: "waiting: another process is preparing" in capfd.readouterr().err)
    released.set()
    for call in calls:
        call.join()
    assert len(manifests) == 2
    assert manifests[0] == manifests[1]


# errors


def test_an_empty_corpus_leaves_an_empty_folder(tmp_path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"the corpus is empty: .*empty.txt has no documents"):
        make(tmp_path / "empty.txt", tmp_path / "out")
    assert contents(tmp_path / "out") == {}
    make(TEXTS, tmp_path / "out")


def test_a_folder_with_other_files_is_left_alone(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex\)"):
        make(TEXTS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="is a file"):
        make(TEXTS, tmp_path / "thesis.tex")


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", 0), ("shard_tokens", 0), ("shard_tokens", 2**31), ("val_fraction", 1.0),
     ("val_fraction", float("nan")), ("workers", 0)],
)  # fmt: skip
def test_invalid_arguments_are_shown(tmp_path, key, value) -> None:
    with pytest.raises(ValueError, match=f"{key}={value} must"):
        make(TEXTS, tmp_path / "out", **{key: value})
    assert not (tmp_path / "out").exists()


def test_progress_is_shown_on_request(tmp_path, capsys) -> None:
    make(TEXTS, tmp_path / "a", progress=True, tokens=800)
    bar = capsys.readouterr().err
    assert "prepare: 100%" in bar
    assert "800/800" in bar
    assert "documents" in bar
    make(TEXTS, tmp_path / "b", progress=False)
    assert capsys.readouterr().err == ""


def test_the_standard_library_is_prepared_once(data) -> None:
    before = {path: path.stat().st_mtime_ns for path in data.iterdir()}
    assert prepare_stdlib(data.parent) == data
    assert {path: path.stat().st_mtime_ns for path in data.iterdir()} == before
    manifest = Manifest.load(data)
    assert manifest is not None
    documents = {name: split.documents for name, split in manifest.splits.items()}
    assert 0.01 < documents["val"] / sum(documents.values()) < 0.06
    assert all(len(Tokens(data, name, 256, 257)) > 100 for name in ("train", "val"))
