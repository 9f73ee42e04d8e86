"""Token shards: their file format, the manifest that lists them, and how they are verified.

The file format is that of llm.c and modded-nanogpt, little endian: a header of 256 int32 (magic,
version, number of tokens, zeros), then the tokens.

    magic       version   tokens    written by
    20240520    1         uint16    llm.c, modded-nanogpt, this package
    20240520    2         uint32    this package, for vocabularies above 65,536
    20240801    7         uint32    llm.c for Llama 3; read only
"""

import hashlib
import json
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from angular_lab.errors import UserError

MAGIC = 20240520
HEADER_BYTES = 256 * 4
LIMIT = 2**31  # the header counts tokens in int32
UINT16, UINT32 = np.dtype("<u2"), np.dtype("<u4")
FORMATS: dict[tuple[int, int], np.dtype] = {
    (MAGIC, 1): UINT16,
    (MAGIC, 2): UINT32,
    (20240801, 7): UINT32,
}
VERSIONS: dict[np.dtype, int] = {UINT16: 1, UINT32: 2}

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
JOURNAL = ".journal.npz"  # exists while a folder is being prepared
VERIFIED = ".verified.json"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class ShardInfo:
    """A shard's entry in the manifest."""

    name: str
    tokens: int
    sha256: str
    max_id: int  # -1 without tokens


@dataclass(frozen=True)
class Split:
    """The shards of a split in order, and the totals over its documents."""

    documents: int
    tokens: int
    bytes: int  # of the documents in UTF-8, without the end-of-text tokens
    files: tuple[ShardInfo, ...]

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> "Split":
        files = tuple(ShardInfo(**info) for info in content["files"])
        return Split(content["documents"], content["tokens"], content["bytes"], files)


@dataclass(frozen=True)
class Manifest:
    """A prepared folder. `arguments` are those of `prepare` that determine its bytes."""

    arguments: dict[str, Any]
    vocabulary: int
    end_of_text: int
    dtype: str
    splits: dict[str, Split]

    @property
    def fingerprint(self) -> str:
        """The sha256 of what training depends on: tokens, vocabulary and tokenizer, but not where
        the corpus was read from."""
        content = {**asdict(self), "tokenizer": self.arguments["tokenizer"]}
        del content["arguments"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST, {"format": MANIFEST_FORMAT, **asdict(self)})

    @staticmethod
    def load(folder: Path) -> "Manifest | None":
        """Return the folder's manifest, or None if it has none."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text("utf-8"))
            if content["format"] != MANIFEST_FORMAT:
                raise UserError(
                    f"{path} has format {content['format']!r}; this version reads "
                    f"{MANIFEST_FORMAT}: prepare the data again, or use the version of the package "
                    "that wrote it"
                )
            splits = {name: Split.from_dict(content["splits"][name]) for name in SPLITS}
            keys = ("arguments", "vocabulary", "end_of_text", "dtype")
            return Manifest(*(content[key] for key in keys), splits=splits)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is damaged ({type(error).__name__}: {error}); prepare the data again"
            ) from error


def dtype_for(vocabulary: int) -> np.dtype:
    return UINT16 if vocabulary <= 2**16 else UINT32


@contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO, None, None]:
    """Open a file that takes its name only when it is complete and on disk."""
    # The name holds process and thread: ranks may write the same file concurrently.
    temporary = path.parent / f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if os.name == "posix":  # a rename survives a power cut only if its folder is on disk, too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def write_shard(path: Path, tokens: NDArray[np.unsignedinteger]) -> ShardInfo:
    """Write a shard of uint16 or uint32 tokens atomically."""
    dtype = tokens.dtype.newbyteorder("<")
    if dtype not in VERSIONS or tokens.ndim != 1 or tokens.size >= LIMIT:
        raise UserError(
            f"{path}: tokens must be fewer than {LIMIT} in a one-dimensional array of uint16 or "
            f"uint32, not {tokens.dtype.name} of shape {tokens.shape}"
        )
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSIONS[dtype], tokens.size
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for part in (header.data, np.ascontiguousarray(tokens, dtype).data):
            file.write(part)
            digest.update(part)
    max_id = int(tokens.max()) if tokens.size else -1
    return ShardInfo(path.name, tokens.size, digest.hexdigest(), max_id)


def read_header(path: Path) -> tuple[int, np.dtype]:
    """Return the number and type of a shard's tokens; the file's size must agree with them."""
    try:
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; prepare the data again") from None
    if len(start) < HEADER_BYTES:
        raise UserError(
            f"{path} is truncated: it has {size} bytes, but the header alone takes {HEADER_BYTES}"
        )
    magic, version, tokens = (int(x) for x in np.frombuffer(start, "<i4")[:3])
    if (magic, version) not in FORMATS:
        formats = " or ".join(f"{m} version {v}" for m, v in FORMATS)
        raise UserError(
            f"{path} is not a token shard: it has magic {magic} version {version}, not {formats}"
        )
    dtype = FORMATS[magic, version]
    expected = HEADER_BYTES + tokens * dtype.itemsize
    if tokens < 0 or size != expected:
        problem = "truncated" if size < expected else "damaged"
        raise UserError(
            f"{path} is {problem}: {tokens} tokens of {dtype.name} take {expected} bytes, "
            f"but the file has {size}; copy or prepare it again"
        )
    return tokens, dtype


def verify(folder: Path, files: Sequence[ShardInfo]) -> None:
    """Compare every file with its sha256, and remember the result until the file changes.

    Ranks may do so concurrently. Then a result may be lost, and the next call computes it again.
    """
    verified = _read_verified(folder)
    changes = {}
    for info in files:
        path = folder / info.name
        try:
            status = path.stat()
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing, but {MANIFEST} lists it; copy it or prepare the data again"
            ) from None
        entry = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": info.sha256}
        if verified.get(info.name) != entry:
            _check_hash(path, info.sha256)
            changes[info.name] = entry
    if changes:
        with suppress(OSError):  # a read-only folder: the next call verifies again
            write_json(folder / VERIFIED, {**_read_verified(folder), **changes})


def _read_verified(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / VERIFIED).read_text("utf-8"))
    except (OSError, ValueError):  # missing or damaged: verify everything
        return {}
    return content if isinstance(content, dict) else {}


def _check_hash(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != expected:
        raise UserError(
            f"{path} is damaged: its sha256 is {sha256}, but {MANIFEST} lists {expected}; copy it "
            "or prepare the data again"
        )
