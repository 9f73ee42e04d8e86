"""Shards on disk: their format, the manifest, and the detection of damage."""

import json
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from angular_lab.data import shards
from angular_lab.data.batches import Tokens
from angular_lab.data.shards import JOURNAL, MAGIC, Manifest, Split, read_header, write_shard


def write_with_struct(path: Path, ids: list[int], version: int = 1, magic: int = MAGIC) -> None:
    """The format without numpy."""
    letter = "H" if version == 1 else "I"
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(ids)}{letter}", *ids))


def random_ids(n: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, n)


def write_folder(folder: Path) -> list[int]:
    """Write two shards with a manifest and a vocabulary of 50; return their tokens."""
    parts = [random_ids(n, 50, n).astype(np.uint16) for n in (100, 37)]
    files = [write_shard(folder / f"train_{i:05d}.bin", part) for i, part in enumerate(parts)]
    splits = {"train": Split(2, 137, 4 * 137, tuple(files)), "val": Split(0, 0, 0, ())}
    Manifest({}, 50, 0, "uint16", splits).save(folder)
    return np.concatenate(parts).tolist()


@pytest.mark.parametrize(("dtype", "version", "top"), [("uint16", 1, 2**16), ("uint32", 2, 2**32)])
def test_another_writer_makes_the_same_bytes(tmp_path, dtype, version, top) -> None:
    ids = np.append(random_ids(1000, top), top - 1)
    info = write_shard(tmp_path / "ours_train.bin", ids.astype(dtype))
    assert (info.name, info.tokens, info.max_id) == ("ours_train.bin", 1001, top - 1)
    write_with_struct(tmp_path / "theirs_val.bin", ids.tolist(), version)
    theirs, ours = tmp_path / "theirs_val.bin", tmp_path / "ours_train.bin"
    assert theirs.read_bytes() == ours.read_bytes()
    tokens = Tokens(tmp_path, "val", 1000, top)
    assert tokens.windows(np.arange(1)).tolist() == [ids.tolist()]


def test_llama_shards_of_llm_c_are_read(tmp_path) -> None:
    write_with_struct(tmp_path / "train.bin", [1, 100_000, 3], version=7, magic=20240801)
    assert Tokens(tmp_path, "train", 2, 128_256).windows(np.arange(1)).tolist() == [[1, 100_000, 3]]


@pytest.mark.parametrize("ids", [np.array([0.5]), np.array([1]), np.zeros((2, 2), np.uint16)])
def test_arrays_of_other_types_and_shapes_are_not_written(tmp_path, ids) -> None:
    with pytest.raises(ValueError, match=f"not {ids.dtype.name} of shape"):
        write_shard(tmp_path / "train.bin", ids)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    path = tmp_path / "train.bin"
    write_shard(path, np.array([1, 2], np.uint16))
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_shard(path, np.array([3], np.uint16))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 1024 + 19])
def test_every_truncation_is_detected(tmp_path, size) -> None:
    path = tmp_path / "train.bin"
    write_with_struct(path, list(range(10)))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{path} is truncated.* {size}\b"):
        read_header(path)


def test_a_wrong_header_is_shown_with_the_right_ones(tmp_path) -> None:
    path = tmp_path / "train.bin"
    write_with_struct(path, [1], magic=12345)
    with pytest.raises(ValueError, match=f"{path}.*magic 12345 version 1, not {MAGIC} version 1"):
        Tokens(tmp_path, "train", 1, 10)
    write_with_struct(path, [1], version=3)
    with pytest.raises(ValueError, match="version 3"):
        read_header(path)
    path.write_bytes(struct.pack("<256i", MAGIC, 1, -1, *[0] * 253))
    with pytest.raises(ValueError, match="-1 tokens"):
        read_header(path)
    write_with_struct(path, [1, 2])
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"damaged: .* 1028 bytes, but the file has 1029"):
        read_header(path)


def test_the_manifest_determines_files_vocabulary_and_bytes_per_token(tmp_path) -> None:
    ids = write_folder(tmp_path)
    write_with_struct(tmp_path / "train_99999.bin", [1, 2, 3])  # not listed
    tokens = Tokens(tmp_path, "train", 36, 50)
    assert tokens.windows(np.arange(len(tokens))).tolist() == [ids[:37], ids[36:73], ids[100:]]
    assert (tokens.token_count, tokens.bytes_per_token) == (137, 4.0)
    with pytest.raises(ValueError, match=f"{tmp_path} has no val tokens"):
        Tokens(tmp_path, "val", 36, 50)
    with pytest.raises(ValueError, match=r"vocabulary=49: set model.vocabulary=50"):
        Tokens(tmp_path, "train", 36, 49)


def test_folders_without_usable_data_are_errors(tmp_path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path} has neither manifest.json nor \*val\*.bin"):
        Tokens(tmp_path, "val", 1, 10)
    with pytest.raises(ValueError, match="split='test' must be one of 'train', 'val'"):
        Tokens(tmp_path, "test", 1, 10)
    with pytest.raises(ValueError, match="sequence=0"):
        Tokens(tmp_path, "train", 0, 10)
    write_with_struct(tmp_path / "retrieval_train.bin", [1, 2])
    with pytest.raises(ValueError, match=r"retrieval_train.bin could be train or val"):
        Tokens(tmp_path, "val", 1, 10)
    (tmp_path / JOURNAL).touch()
    with pytest.raises(ValueError, match="not finished: call prepare"):
        Tokens(tmp_path, "train", 1, 10)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        Tokens(tmp_path, "train", 1, 10)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99; this version reads 1"):
        Tokens(tmp_path, "train", 1, 10)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("position", [900, 1024, -1])
def test_a_flipped_bit_is_detected_before_and_after_verification(tmp_path, position) -> None:
    write_folder(tmp_path)
    path = tmp_path / "train_00001.bin"
    for _ in range(2):
        flip(path, position)
        with pytest.raises(ValueError, match=f"{path} is damaged: its sha256 is"):
            Tokens(tmp_path, "train", 5, 50)
        flip(path, position)
        Tokens(tmp_path, "train", 5, 50)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path} is missing"):
        Tokens(tmp_path, "train", 5, 50)


def test_only_changed_files_are_hashed_again(tmp_path, monkeypatch) -> None:
    write_folder(tmp_path)
    hashed: list[str] = []
    check = shards._check_hash

    def hashes(path: Path, expected: str) -> None:
        hashed.append(path.name)
        check(path, expected)

    def opened() -> list[str]:
        hashed.clear()
        Tokens(tmp_path, "train", 5, 50)
        return hashed

    monkeypatch.setattr(shards, "_check_hash", hashes)
    assert opened() == ["train_00000.bin", "train_00001.bin"]
    assert opened() == []
    path = tmp_path / "train_00000.bin"
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 1))
    assert opened() == ["train_00000.bin"]
    (tmp_path / ".verified.json").write_text("not JSON")
    assert len(opened()) == 2
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text())
    content["splits"]["train"]["files"][0]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"train_00000.bin is damaged"):
        opened()


def test_a_folder_that_cannot_be_written_is_verified_every_time(tmp_path) -> None:
    write_folder(tmp_path)
    (tmp_path / ".verified.json").mkdir()  # cannot be replaced by a file, not even by root
    files = sorted(tmp_path.iterdir())
    Tokens(tmp_path, "train", 5, 50)
    assert sorted(tmp_path.iterdir()) == files
    flip(tmp_path / "train_00000.bin", 1030)
    with pytest.raises(ValueError, match="damaged"):
        Tokens(tmp_path, "train", 5, 50)
