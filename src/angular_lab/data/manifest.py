"""manifest.json: what a prepared folder holds, and whether the files are still those."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from angular_lab.data.shard_files import ShardInfo, atomic_file

MANIFEST = "manifest.json"
JOURNAL = ".journal.npz"  # there while a folder is being prepared
VERIFIED = ".verified.json"
FORMAT = 1
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Split:
    """One split: its shards in order, and what went into them."""

    documents: int
    tokens: int
    bytes: int  # of the documents in utf-8, without the end-of-text tokens
    files: tuple[ShardInfo, ...]


@dataclass(frozen=True)
class Manifest:
    """A prepared folder. `arguments` are those that decide its bytes."""

    arguments: dict[str, Any]
    vocabulary: int
    end_of_text: int
    dtype: str
    splits: dict[str, Split]

    @property
    def fingerprint(self) -> str:
        """sha256 of what a run can see: tokens, vocabulary, tokenizer. The path that the text was
        read from is not among it."""
        seen = {**asdict(self), "tokenizer": self.arguments["tokenizer"]}
        del seen["arguments"]
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST, {"format": FORMAT, **asdict(self)})

    @staticmethod
    def load(folder: Path) -> "Manifest | None":
        """None where there is no manifest."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text("utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(
                    f"{path} has format {found['format']!r}; this version reads {FORMAT}: prepare "
                    "the data again, or use the version of the package that made it"
                )
            splits = {name: _split(found["splits"][name]) for name in SPLITS}
            keys = ("arguments", "vocabulary", "end_of_text", "dtype")
            return Manifest(*(found[key] for key in keys), splits=splits)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}); prepare the data again"
            ) from error


def _split(found: Mapping[str, Any]) -> Split:
    files = tuple(ShardInfo(**entry) for entry in found["files"])
    return Split(found["documents"], found["tokens"], found["bytes"], files)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def verify(folder: Path, files: Sequence[ShardInfo]) -> None:
    """Compare every file with its sha256, once: the answer is kept for files that did not change.

    Ranks may do so at the same time; then one answer may get lost, and is found again later.
    """
    known = _read_verified(folder)
    fresh = {}
    for info in files:
        try:
            status = (folder / info.name).stat()
        except FileNotFoundError:
            raise ValueError(
                f"{folder / info.name} is missing, but {MANIFEST} lists it; copy it or prepare the "
                "data again"
            ) from None
        seal = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": info.sha256}
        if known.get(info.name) != seal:
            _check_hash(folder / info.name, info.sha256)
            fresh[info.name] = seal
    if fresh:
        try:
            write_json(folder / VERIFIED, {**_read_verified(folder), **fresh})
        except OSError:  # a read-only folder: verified, but the next opening does it again
            return


def _read_verified(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / VERIFIED).read_text("utf-8"))
    except (OSError, ValueError):  # missing or damaged: nothing is known
        return {}
    return found if isinstance(found, dict) else {}


def _check_hash(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise ValueError(
            f"{path} is damaged: its sha256 is {found}, but {MANIFEST} says {wanted}; copy it or "
            "prepare the data again"
        )
