"""Preparing data: the tokens are those of a plain loop, whatever the workers and the kills."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from angular_lab.data import progress as prepare_progress
from angular_lab.data import workers as prepare_workers
from angular_lab.data.journal import Job
from angular_lab.data.manifest import JOURNAL, Manifest
from angular_lab.data.prepare import prepare, prepare_stdlib
from angular_lab.data.shards import Tokens, read_header
from angular_lab.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.lab.training.killing import contents

ROOT = Path(__file__).parents[3]
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
BYTES = load_tokenizer("bytes")
SOME = [f"document {i} " + "abc " * (i % 7) for i in range(60)]


@pytest.fixture(autouse=True, scope="module")
def _quick_disk() -> Iterator[None]:
    """Nothing here cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def is_val(text: str, seed: int, fraction: float) -> bool:
    """The rule of the split, once more."""
    found = hashlib.blake2b(text.encode(), digest_size=16, key=str(seed).encode()).digest()
    return int.from_bytes(found[:8], "big") < fraction * 2**64


def read(folder: Path, split: str) -> list[list[int]]:
    paths = sorted(folder.glob(f"{split}_*.bin"))
    return [np.fromfile(p, read_header(p).dtype, offset=1024).tolist() for p in paths]


def texts_of(folder: Path, split: str) -> list[str]:
    stream = [i for shard in read(folder, split) for i in shard]
    return BYTES.decode(stream).split("<|endoftext|>")[1:]


def make(texts, out: Path, **changes) -> Manifest:
    options = {"shard_tokens": 100, "val_fraction": 0.2, "workers": 1, "progress": False, **changes}
    return prepare(texts, BYTES, out, **options)


@pytest.mark.filterwarnings("ignore:.*documents fell into")
@given(
    texts=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=12),
    shard=st.integers(1, 70),
    fraction=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 3),
    tokens=st.none() | st.integers(1, 200),
)
def test_the_shards_are_those_of_a_plain_loop(
    tmp_path_factory, texts, shard, fraction, seed, tokens
) -> None:
    out = tmp_path_factory.mktemp("loop")
    found = make(texts, out, shard_tokens=shard, val_fraction=fraction, seed=seed, tokens=tokens)
    streams: dict[str, list[int]] = {"train": [], "val": []}
    counts = {"train": 0, "val": 0}
    for text in texts:
        name = "val" if is_val(text, seed, fraction) else "train"
        streams[name] += [256, *text.encode()]
        counts[name] += 1
        if tokens is not None and len(streams["train"]) >= tokens:
            streams["train"] = streams["train"][:tokens]
            break
    for name, stream in streams.items():
        assert read(out, name) == [stream[i : i + shard] for i in range(0, len(stream), shard)]
        split = found.splits[name]
        assert (split.documents, split.tokens) == (counts[name], len(stream))
        if tokens is None or name == "val":
            assert split.bytes == len(stream) - counts[name]
        assert [info.max_id for info in split.files] == [max(part) for part in read(out, name)]
    assert Manifest.load(out) == found


def test_the_result_opens_as_tokens(tmp_path) -> None:
    found = make(SOME, tmp_path)
    for name in ("train", "val"):
        tokens = Tokens(tmp_path, name, 10, 257)
        split = found.splits[name]
        assert tokens.token_count == split.tokens
        assert tokens.bytes_per_token == split.bytes / split.tokens
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint == BYTES.fingerprint
    assert found.arguments["tokenizer"] == BYTES.fingerprint
    assert (found.vocabulary, found.end_of_text, found.dtype) == (257, 256, "uint16")


def test_a_fingerprint_is_of_the_tokens_and_not_of_where_the_text_lay(tmp_path) -> None:
    first = make(SOME, tmp_path / "first", source="here")
    moved = make(SOME, tmp_path / "moved", source="there")
    assert first != moved
    assert first.fingerprint == moved.fingerprint
    others = [
        make(SOME[1:], tmp_path / "text"),
        make(SOME, tmp_path / "split", seed=1),
        make(SOME, tmp_path / "shards", shard_tokens=200),  # whose ends windows do not cross
        replace(first, arguments={**first.arguments, "tokenizer": "another"}),
        replace(first, vocabulary=300),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_the_split_does_not_depend_on_order_but_on_the_seed(tmp_path) -> None:
    shuffled = random.Random(0).sample(SOME, len(SOME))
    for i, texts in enumerate((SOME, shuffled)):
        make(texts, tmp_path / str(i))
    make(SOME, tmp_path / "seed", seed=1)
    val = [sorted(texts_of(tmp_path / name, "val")) for name in ("0", "1", "seed")]
    train = sorted(texts_of(tmp_path / "0", "train"))
    assert val[0] == val[1] != val[2]
    assert sorted(train + val[0]) == sorted(SOME)


def test_the_share_of_validation_is_what_was_asked_for(tmp_path) -> None:
    found = make((str(i) for i in range(4000)), tmp_path, val_fraction=0.05, shard_tokens=10**6)
    assert abs(found.splits["val"].documents - 200) < 5 * np.sqrt(4000 * 0.05 * 0.95)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer(SOME, 300)


def test_the_number_of_workers_changes_no_byte(tmp_path, bpe, monkeypatch) -> None:
    monkeypatch.setattr(prepare_workers, "CHUNK_DOCUMENTS", 7)
    for workers in (1, 2):
        prepare(SOME, bpe, tmp_path / str(workers), shard_tokens=50, val_fraction=0.2,
                workers=workers, progress=False, tokens=500)  # fmt: skip
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_documents_are_read_only_a_little_ahead(monkeypatch) -> None:
    """A corpus may be larger than the memory."""
    monkeypatch.setattr(prepare_workers, "CHUNK_DOCUMENTS", 3)
    given: list[int] = []

    def endless() -> Iterator[str]:
        for i in range(10**9):
            given.append(i)
            yield "text"

    stream = prepare_workers.encode_all(endless(), BYTES, Path("bytes"), 1, 0)
    for _ in range(9):
        next(stream)
    stream.close()
    assert len(given) == 9
    stream = prepare_workers.encode_all(endless(), BYTES, Path("bytes"), 2, 0)
    assert next(stream).ids.tolist() == [256, *b"text"]
    stream.close()
    assert len(given) <= 9 + 5 * 3


def test_a_worker_that_dies_is_an_error(tmp_path) -> None:
    """Here because the tokenizer's file is not there."""
    stream = prepare_workers.encode_all(SOME, BYTES, tmp_path / "nowhere.json", 2, 0)
    with pytest.raises(RuntimeError, match=r"a worker process ended early.*workers=1"):
        next(stream)


def test_long_documents_go_in_pieces(tmp_path, bpe, monkeypatch) -> None:
    text = "".join(f"line {i}\n" for i in range(50)) + "x" * 100
    monkeypatch.setattr(prepare_workers, "PIECE_CHARACTERS", 40)
    parts = list(prepare_workers.pieces(text))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 40
    assert all(part.endswith("\n") for part in parts[:-4])
    (found,) = prepare_workers.encode(bpe, [text], 0)
    assert bpe.decode(found.ids.tolist()[1:]) == text
    assert (int(found.ids[0]), found.size) == (0, len(text))


def test_stray_surrogates_do_not_stop_it(tmp_path) -> None:
    make(["a\ud800b"], tmp_path, val_fraction=0)
    assert texts_of(tmp_path, "train") == ["a?b"]


class Wide:
    """A vocabulary beyond uint16."""

    def encode_batch(self, texts) -> list[list[int]]:
        return [[ord(c) for c in text] for text in texts]

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_vocabulary_picks_the_width(tmp_path, vocabulary, dtype) -> None:
    last = chr(vocabulary - 1)
    found = prepare([f"a{last}"], Tokenizer(Wide(), "{}", vocabulary, 0), tmp_path, val_fraction=0,
                    workers=1, progress=False)  # fmt: skip
    assert found.dtype == dtype
    assert read(tmp_path, "train") == [[0, 97, vocabulary - 1]]
    tokens = Tokens(tmp_path, "train", 2, vocabulary)
    assert tokens.windows(np.arange(1)).tolist() == [[0, 97, vocabulary - 1]]


# kills


def test_a_kill_at_any_moment_changes_no_byte(tmp_path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.lab.training.killing", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert all(int(moments) > 30 for moments in run.stdout.split())


SLOW = """
import sys, time
from pathlib import Path
from angular_lab.data import workers as prepare_workers
from tests.lab.data.test_prepare import SOME, make

def slow():
    for text in SOME:
        time.sleep(0.02)
        print("document", file=sys.stderr)
        yield text

if __name__ == "__main__":
    prepare_workers.CHUNK_DOCUMENTS = 2
    make(slow(), Path(sys.argv[1]), workers=2)
"""


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(what, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.005)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux does")
@pytest.mark.parametrize("shards", [0, 4])
def test_a_killed_pool_leaves_no_process_and_can_go_on(tmp_path, shards) -> None:
    script, out = tmp_path / "slow.py", tmp_path / "out"
    script.write_text(SLOW)
    command = [sys.executable, str(script), str(out)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_for(lambda: (out / JOURNAL).exists() and len(list(out.glob("*.bin"))) >= shards)
    if shards:
        wait_for(lambda: len(children(process.pid)) >= 2)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "manifest.json").exists()
    wait_for(lambda: not any(map(lives, workers)))
    make(SOME, out)
    make(SOME, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


# calling it again


def halted(out: Path, **changes) -> None:
    """Begin, and stop in the middle."""

    def some() -> Iterator[str]:
        yield from SOME[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(some(), out, **changes)
    assert (out / JOURNAL).exists()


def untouched() -> Iterator[str]:
    raise AssertionError("a finished folder needs no documents")
    yield ""


def test_a_finished_folder_returns_at_once(tmp_path) -> None:
    first = make(SOME, tmp_path)
    before = contents(tmp_path)
    assert make(untouched(), tmp_path) == first
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", 77), ("shard_tokens", 99), ("val_fraction", 0.3), ("seed", 5), ("source", "else")],
)
def test_other_arguments_are_refused_with_the_difference(tmp_path, key, value, monkeypatch) -> None:
    monkeypatch.setattr(prepare_workers, "CHUNK_DOCUMENTS", 5)
    make(SOME, tmp_path / "finished")
    halted(tmp_path / "halted")
    for name in ("finished", "halted"):
        before = contents(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name} was prepared with .*{key} was .* {value!r}"):
            make(SOME, tmp_path / name, **{key: value})
        assert contents(tmp_path / name) == before


def test_another_tokenizer_is_refused(tmp_path, bpe) -> None:
    make(SOME, tmp_path)
    with pytest.raises(ValueError, match="tokenizer was"):
        prepare(SOME, bpe, tmp_path, shard_tokens=100, val_fraction=0.2)


@pytest.mark.parametrize("changed", [["other", *SOME[1:]], SOME[1:], SOME[:3], []])
def test_other_documents_are_refused(tmp_path, changed, monkeypatch) -> None:
    monkeypatch.setattr(prepare_workers, "CHUNK_DOCUMENTS", 5)
    halted(tmp_path)
    with pytest.raises(ValueError, match=r"begun with other documents: the first \d+ are not"):
        make(changed, tmp_path)
    make(SOME, tmp_path)


def test_going_on_removes_shards_that_the_journal_does_not_know(tmp_path, monkeypatch) -> None:
    """Such as those of documents that are no longer there."""
    monkeypatch.setattr(prepare_workers, "CHUNK_DOCUMENTS", 5)
    halted(tmp_path / "halted")
    (tmp_path / "halted" / "train_00099.bin").touch()
    make(SOME, tmp_path / "halted")
    make(SOME, tmp_path / "whole")
    assert contents(tmp_path / "halted") == contents(tmp_path / "whole")


def test_going_on_encodes_only_what_is_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_workers, "CHUNK_DOCUMENTS", 5)
    halted(tmp_path)
    taken: list[int] = []
    real = Job.add

    def counting(self: Job, item: prepare_workers.Encoded) -> None:
        taken.append(1)
        real(self, item)

    monkeypatch.setattr(Job, "add", counting)
    make(SOME, tmp_path)
    assert len(taken) < 40


def test_two_at_once_do_the_work_once(tmp_path) -> None:
    script, out = tmp_path / "slow.py", tmp_path / "out"
    script.write_text(SLOW.replace("workers=2", "workers=1"))
    command = [sys.executable, str(script), str(out)]
    both = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate()[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(text.count("document") for text in said) == [0, len(SOME)]
    make(SOME, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


# what cannot be prepared


def test_an_empty_corpus_leaves_an_empty_folder(tmp_path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"the corpus is empty: .*empty.txt gave no document"):
        make(tmp_path / "empty.txt", tmp_path / "out")
    assert contents(tmp_path / "out") == {}
    make(SOME, tmp_path / "out")


def test_a_folder_with_something_else_is_left_alone(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds something else \(thesis.tex\)"):
        make(SOME, tmp_path)
    assert list(contents(tmp_path)) == ["thesis.tex"]
    with pytest.raises(ValueError, match="is a file"):
        make(SOME, tmp_path / "thesis.tex")


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", 0), ("shard_tokens", 0), ("shard_tokens", 2**31), ("val_fraction", 1.0),
     ("val_fraction", float("nan")), ("workers", 0)],
)  # fmt: skip
def test_bad_arguments_are_shown(tmp_path, key, value) -> None:
    with pytest.raises(ValueError, match=f"{key}={value} must"):
        make(SOME, tmp_path / "out", **{key: value})
    assert not (tmp_path / "out").exists()


def test_a_split_without_documents_is_said(tmp_path) -> None:
    with pytest.warns(UserWarning, match="none of the 1 documents fell into the val split"):
        make(["one"], tmp_path, val_fraction=1e-9)


def test_a_path_is_read_as_a_corpus(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(SOME))
    found = make(str(tmp_path / "a.txt"), tmp_path / "out")
    assert found.arguments["source"] == str(tmp_path / "a.txt")
    assert found.splits == make(SOME, tmp_path / "list").splits


# progress


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("tqdm", [True, False])
def test_a_terminal_gets_one_line_that_changes(tmp_path, monkeypatch, tqdm) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(prepare_progress, "EVERY", {True: 0.0})
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    make(SOME, tmp_path, progress=True, tokens=800)
    assert screen.text.count("\r") > 5
    assert screen.text.count("\n") == 1
    last = screen.text.rpartition("\r")[2]
    assert "documents" in last
    assert "tokens/s" in last
    assert "100" in last


def test_a_log_gets_lines(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(prepare_progress, "EVERY", {False: 0.0})
    make(SOME, tmp_path / "a", progress=True, tokens=800)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 10
    assert all("tokens/s" in line and "ETA" in line for line in lines)
    assert lines[-1].startswith("prepare: 800 tokens, ")
    make(SOME, tmp_path / "b", progress=False)
    assert capsys.readouterr().err == ""


def test_the_estimate_is_what_is_left_by_the_rate() -> None:
    assert prepare_progress.line(250, 3, 10.0, 1000).endswith("25.0%, ETA 0:01:15")
    assert "ETA" not in prepare_progress.line(250, 3, 10.0, None)


# the default data


def test_the_standard_library_is_ready_in_seconds_and_made_once(tmp_path) -> None:
    start = time.process_time()
    out = prepare_stdlib(tmp_path)
    assert time.process_time() - start < 10
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    start = time.process_time()
    assert prepare_stdlib(tmp_path) == out
    assert time.process_time() - start < 0.2
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    found = Manifest.load(out)
    assert found is not None
    documents = {name: split.documents for name, split in found.splits.items()}
    assert 0.01 < documents["val"] / sum(documents.values()) < 0.06
    assert all(len(Tokens(out, name, 256, 257)) > 100 for name in ("train", "val"))
