"""Shards on disk, windows over them, and batches that are a function of the step."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from angular_lab.data import manifest
from angular_lab.data.manifest import Manifest, Split
from angular_lab.data.shards import Batches, ShardInfo, Tokens, read_header, write_shard

MAGIC = 20240520


def write_with_struct(path: Path, ids: list[int], version: int = 1, magic: int = MAGIC) -> None:
    """The format again, without numpy."""
    letter = "H" if version == 1 else "I"
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(ids)}{letter}", *ids))


def read_with_struct(path: Path) -> tuple[int, list[int]]:
    content = path.read_bytes()
    magic, version, count, *rest = struct.unpack("<256i", content[:1024])
    assert magic == MAGIC
    assert not any(rest)
    letter = {1: "H", 2: "I"}[version]
    return version, list(struct.unpack(f"<{count}{letter}", content[1024:]))


def ids_of(n: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, n)


def sealed(folder: Path, sizes: tuple[int, ...] = (100, 37), vocabulary: int = 50) -> list[int]:
    """A folder with a manifest, made without `prepare`; its tokens."""
    parts = [ids_of(n, vocabulary, seed) for seed, n in enumerate(sizes)]
    files = [
        write_shard(folder / f"train_{i:05d}.bin", part, np.uint16) for i, part in enumerate(parts)
    ]
    train = Split(len(sizes), sum(sizes), 4 * sum(sizes), tuple(files))
    splits = {"train": train, "val": Split(0, 0, 0, ())}
    Manifest({}, vocabulary, 0, "uint16", splits).save(folder)
    return np.concatenate(parts).tolist()


# one file


@pytest.mark.parametrize(("dtype", "version", "top"), [("uint16", 1, 2**16), ("uint32", 2, 2**32)])
def test_the_format_is_what_another_reader_and_writer_say(tmp_path, dtype, version, top) -> None:
    ids = np.append(ids_of(1000, top), top - 1)
    info = write_shard(tmp_path / "ours_train.bin", ids, dtype)
    assert read_with_struct(tmp_path / "ours_train.bin") == (version, ids.tolist())
    assert (info.name, info.tokens, info.max_id) == ("ours_train.bin", 1001, top - 1)
    write_with_struct(tmp_path / "theirs_val.bin", ids.tolist(), version)
    theirs, ours = tmp_path / "theirs_val.bin", tmp_path / "ours_train.bin"
    assert theirs.read_bytes() == ours.read_bytes()
    found = Tokens(tmp_path, "val", 1000, top)
    assert found.windows(np.arange(len(found))).tolist() == [ids.tolist()]


def test_llama_shards_of_llm_c_are_read(tmp_path) -> None:
    write_with_struct(tmp_path / "train.bin", [1, 100_000, 3], version=7, magic=20240801)
    assert Tokens(tmp_path, "train", 2, 128_256).windows(np.arange(1)).tolist() == [[1, 100_000, 3]]


@pytest.mark.parametrize(
    ("ids", "dtype", "message"),
    [
        (np.array([2**16]), "uint16", "65536"),
        (np.array([-1]), "uint32", "-1"),
        (np.array([0.5]), "uint16", "float64"),
        (np.zeros((2, 2), int), "uint16", "2 dimensions"),
        (np.array([1]), "int64", "int64"),
    ],
)
def test_what_does_not_fit_is_not_written(tmp_path, ids, dtype, message) -> None:
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path / "train.bin", ids, dtype)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    path = tmp_path / "train.bin"
    write_shard(path, np.array([1, 2]), "uint16")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_shard(path, np.array([3]), "uint16")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("keep", [0, 1, 1023, 1024, 1025, 1024 + 19])
def test_every_truncation_is_noticed(tmp_path, keep) -> None:
    path = tmp_path / "train.bin"
    write_with_struct(path, list(range(10)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"{path} is truncated.* {keep}\b"):
        read_header(path)


def test_wrong_headers_show_what_was_found_and_what_was_wanted(tmp_path) -> None:
    path = tmp_path / "train.bin"
    write_with_struct(path, [1], magic=12345)
    with pytest.raises(ValueError, match=f"{path}.*found magic 12345 version 1.*{MAGIC}"):
        Tokens(tmp_path, "train", 1, 10)
    write_with_struct(path, [1], version=3)
    with pytest.raises(ValueError, match="version 3"):
        read_header(path)
    path.write_bytes(struct.pack("<256i", MAGIC, 1, -1, *[0] * 253))
    with pytest.raises(ValueError, match="-1 tokens"):
        read_header(path)
    write_with_struct(path, [1, 2])
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match="1028 bytes, but the file has 1029"):
        read_header(path)


# a folder


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    sequence=st.integers(1, 20),
    data=st.data(),
)
def test_windows_are_slices_of_their_shard(tmp_path_factory, sizes, sequence, data) -> None:
    folder = tmp_path_factory.mktemp("windows")
    wanted = []
    for i, size in enumerate(sizes):
        ids = ids_of(size, 1000, i).tolist()
        write_with_struct(folder / f"x_train_{i}.bin", ids)
        starts = range(0, size - sequence, sequence)
        wanted += [ids[s : s + sequence + 1] for s in starts]
    tokens = Tokens(folder, "train", sequence, 1000)
    assert len(tokens) == len(wanted)
    assert tokens.token_count == sum(sizes)
    assert tokens.bytes_per_token is None
    some = data.draw(st.lists(st.integers(0, len(wanted) - 1), max_size=9)) if wanted else []
    out = tokens.windows(np.array(some, np.int64))
    assert out.dtype == np.int64
    assert out.shape == (len(some), sequence + 1)
    assert out.tolist() == [wanted[i] for i in some]


def test_windows_outside_are_refused(tmp_path) -> None:
    write_with_struct(tmp_path / "train.bin", list(range(10)))
    tokens = Tokens(tmp_path, "train", 3, 10)
    for index in (-1, 3):
        with pytest.raises(ValueError, match=rf"{index}.*\[0, 3\)"):
            tokens.windows(np.array([index]))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
def test_more_shards_than_may_be_open(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("angular_lab.data.shards.OPEN_SHARDS", 2)
    for i in range(6):
        write_with_struct(tmp_path / f"train_{i}.bin", [i, i])
    tokens = Tokens(tmp_path, "train", 1, 10)
    for _ in range(2):
        assert tokens.windows(np.arange(6))[:, 0].tolist() == list(range(6))
    assert open_files(tmp_path) <= 2
    del tokens
    assert open_files(tmp_path) == 0


def open_files(folder: Path) -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.islink(link))


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path) -> None:
    write_with_struct(tmp_path / "train_0.bin", [1] * 10)
    write_with_struct(tmp_path / "train_1.bin", [1] * 7 + [50] + [1] * 5)
    tokens = Tokens(tmp_path, "train", 3, 50)
    assert tokens.windows(np.arange(5)).max() == 1
    with pytest.raises(ValueError, match=r"train_1.bin holds id 50 at position 7,.*vocabulary=50"):
        tokens.windows(np.arange(len(tokens)))
    Tokens(tmp_path, "train", 3, 51).windows(np.arange(len(tokens)))


def test_with_a_manifest_a_small_vocabulary_is_refused_at_once(tmp_path) -> None:
    top = max(sealed(tmp_path))
    with pytest.raises(ValueError, match=rf"train_0000\d.bin holds id {top}, but vocabulary={top}"):
        Tokens(tmp_path, "train", 5, top)


def test_the_manifest_says_which_files_and_how_many_bytes(tmp_path) -> None:
    ids = sealed(tmp_path)
    write_with_struct(tmp_path / "train_99999.bin", [1, 2, 3])  # not listed
    tokens = Tokens(tmp_path, "train", 36, 50)
    assert tokens.windows(np.arange(len(tokens))).tolist() == [ids[:37], ids[36:73], ids[100:]]
    assert tokens.token_count == 137
    assert tokens.bytes_per_token == 4.0
    with pytest.raises(ValueError, match=f"{tmp_path} has no val tokens"):
        Tokens(tmp_path, "val", 36, 50)


def test_folders_that_are_no_data(tmp_path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path} has neither manifest.json nor \*val\*.bin"):
        Tokens(tmp_path, "val", 1, 10)
    with pytest.raises(ValueError, match="split='test' must be one of 'train', 'val'"):
        Tokens(tmp_path, "test", 1, 10)
    with pytest.raises(ValueError, match="sequence=0"):
        Tokens(tmp_path, "train", 0, 10)
    write_with_struct(tmp_path / "retrieval_train.bin", [1, 2])
    with pytest.raises(ValueError, match=r"retrieval_train.bin could be train or val"):
        Tokens(tmp_path, "val", 1, 10)
    (tmp_path / manifest.JOURNAL).touch()
    with pytest.raises(ValueError, match="not finished: call prepare"):
        Tokens(tmp_path, "train", 1, 10)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        Tokens(tmp_path, "train", 1, 10)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99; this version reads 1"):
        Tokens(tmp_path, "train", 1, 10)


# corruption


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("at", [900, 1024, -1])
def test_a_flipped_bit_is_noticed_before_and_after_a_good_opening(tmp_path, at) -> None:
    sealed(tmp_path)
    path = tmp_path / "train_00001.bin"
    for _ in range(2):
        flip(path, at)
        with pytest.raises(ValueError, match=f"{path} is damaged: its sha256 is"):
            Tokens(tmp_path, "train", 5, 50)
        flip(path, at)
        Tokens(tmp_path, "train", 5, 50)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path} is missing"):
        Tokens(tmp_path, "train", 5, 50)


def test_the_second_opening_hashes_nothing(tmp_path, monkeypatch) -> None:
    sealed(tmp_path)
    hashed: list[str] = []
    real = manifest._check_hash

    def counting(path: Path, wanted: str) -> None:
        hashed.append(path.name)
        real(path, wanted)

    monkeypatch.setattr(manifest, "_check_hash", counting)
    Tokens(tmp_path, "train", 5, 50)
    assert hashed == ["train_00000.bin", "train_00001.bin"]
    Tokens(tmp_path, "train", 5, 50)
    assert len(hashed) == 2
    path = tmp_path / "train_00000.bin"  # another time: it might have been changed
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 1))
    Tokens(tmp_path, "train", 5, 50)
    assert hashed[2:] == ["train_00000.bin"]
    (tmp_path / ".verified.json").write_text("no json")
    Tokens(tmp_path, "train", 5, 50)
    assert len(hashed) == 5


def test_a_changed_manifest_is_not_believed_from_the_cache(tmp_path) -> None:
    sealed(tmp_path)
    Tokens(tmp_path, "train", 5, 50)
    path = tmp_path / "manifest.json"
    content = json.loads(path.read_text())
    content["splits"]["train"]["files"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"train_00000.bin is damaged"):
        Tokens(tmp_path, "train", 5, 50)


def test_where_nothing_can_be_written_it_verifies_without_a_cache(tmp_path) -> None:
    sealed(tmp_path)
    (tmp_path / ".verified.json").mkdir()  # root may write everywhere, but not over a folder
    files = sorted(tmp_path.iterdir())
    Tokens(tmp_path, "train", 5, 50)
    assert sorted(tmp_path.iterdir()) == files
    flip(tmp_path / "train_00000.bin", 1030)
    with pytest.raises(ValueError, match="damaged"):
        Tokens(tmp_path, "train", 5, 50)


# batches


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    """Windows that say who they are: the first token is the window's number."""
    folder = tmp_path_factory.mktemp("tokens")
    for i, (start, stop) in enumerate([(0, 40), (40, 83)]):
        write_with_struct(folder / f"train_{i}.bin", [w for w in range(start, stop) for _ in "ab"])
    return Tokens(folder, "train", 2, 100)


def test_one_epoch_is_every_window_once(tokens) -> None:
    n = len(tokens)
    assert n == 39 + 42
    numbers = sorted(tokens.windows(np.arange(n))[:, 0].tolist())
    batches = Batches(tokens, 9, seed=3)  # 9 epochs of 9 batches
    rows = np.concatenate([batches.batch(step)[:, 0] for step in range(81)])
    epochs = rows.reshape(9, 81)
    assert all(sorted(epoch) == numbers for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 9


def test_a_batch_may_lie_in_two_epochs(tokens) -> None:
    n = len(tokens)
    rows = np.concatenate([Batches(tokens, 32, 3).indices(step) for step in range(n)])
    for epoch in rows.reshape(32, n):
        assert sorted(epoch.tolist()) == list(range(n))


@given(step=st.integers(0, 10**9), seed=st.integers(-(2**70), 2**70))
def test_the_number_of_ranks_does_not_change_the_order(tokens, step, seed) -> None:
    batches = Batches(tokens, 16, seed)
    whole = batches.batch(step, 0, 1)
    assert whole.shape == (16, 3)
    for world in (2, 4, 16):
        parts = [batches.batch(step, rank, world) for rank in range(world)]
        assert {part.shape for part in parts} == {(16 // world, 3)}
        assert np.array_equal(np.concatenate(parts), whole)


def test_the_batch_size_does_not_change_the_order(tokens) -> None:
    rows = [
        np.concatenate([Batches(tokens, batch, 5).indices(step) for step in range(240 // batch)])
        for batch in (8, 16, 60)
    ]
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_seeds_give_different_orders(tokens) -> None:
    orders = {tuple(Batches(tokens, 32, seed).indices(0).tolist()) for seed in range(50)}
    assert len(orders) == 50


def test_impossible_batches_are_refused(tokens) -> None:
    with pytest.raises(ValueError, match="81 train windows of 2 tokens, fewer than one batch of 8"):
        Batches(tokens, 82, 0)
    Batches(tokens, 81, 0)
    batches = Batches(tokens, 6, 0)
    with pytest.raises(ValueError, match="batch=6 must be divisible by world=4"):
        batches.batch(0, 0, 4)
    for step, rank, world in [(0, 2, 2), (0, -1, 2), (-1, 0, 1)]:
        with pytest.raises(ValueError, match=f"rank={rank} .* step={step} "):
            batches.batch(step, rank, world)
    with pytest.raises(ValueError, match="batch=0"):
        Batches(tokens, 0, 0)


def test_data_without_a_window_is_shorter_than_a_batch(tmp_path) -> None:
    write_with_struct(tmp_path / "train.bin", [1, 2, 3])
    with pytest.raises(ValueError, match="has 0 train windows of 3 tokens"):
        Batches(Tokens(tmp_path, "train", 3, 10), 1, 0)


def test_training_needs_numpy_alone() -> None:
    code = (
        "import sys, numpy; before = set(sys.modules); import angular_lab.data.shards; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(new - {'angular_lab', 'numpy'} - set(sys.stdlib_module_names))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_shard_info_is_exported() -> None:
    assert ShardInfo("a", 1, "0", 0).name == "a"
