"""One file of tokens, and files that appear whole or not at all.

The format is that of llm.c and modded-nanogpt, all little endian: a header of 256 int32 (magic,
version, number of tokens, zeros), then the tokens.

    magic       version   tokens    from
    20240520    1         uint16    llm.c, modded-nanogpt
    20240520    2         uint32    this package, for vocabularies above 65,536
    20240801    7         uint32    llm.c for Llama 3; read only
"""

import hashlib
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAGIC = 20240520
HEADER_BYTES = 256 * 4
LIMIT = 2**31  # the header counts in int32
UINT16, UINT32 = np.dtype("<u2"), np.dtype("<u4")
FORMATS: dict[tuple[int, int], np.dtype] = {
    (MAGIC, 1): UINT16,
    (MAGIC, 2): UINT32,
    (20240801, 7): UINT32,
}
VERSIONS: dict[np.dtype, int] = {UINT16: 1, UINT32: 2}


class Header(NamedTuple):
    """What the first 1,024 bytes of a shard say."""

    tokens: int
    dtype: np.dtype


@dataclass(frozen=True)
class ShardInfo:
    """A finished shard: its name, and what to check it against."""

    name: str
    tokens: int
    sha256: str
    max_id: int  # -1 without tokens


def dtype_for(vocabulary: int) -> np.dtype:
    return UINT16 if vocabulary <= 2**16 else UINT32


@contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO, None, None]:
    """A file that takes its name when it is complete and on disk."""
    # Process and thread are in the name: ranks may write the same file at the same time.
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
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A rename outlives a power cut only when its folder is on disk too."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_shard(path: Path, tokens: NDArray[np.integer], dtype: DTypeLike) -> ShardInfo:
    """Write tokens as uint16 or uint32, all at once: a killed process leaves no half a shard."""
    little = np.dtype(dtype).newbyteorder("<")
    _check_tokens(path, tokens, little)
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSIONS[little], tokens.size
    body = np.ascontiguousarray(tokens, little)
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for part in (header.data, body.data):
            file.write(part)
            digest.update(part)
    max_id = int(tokens.max()) if tokens.size else -1
    return ShardInfo(path.name, tokens.size, digest.hexdigest(), max_id)


def _check_tokens(path: Path, tokens: NDArray[np.integer], dtype: np.dtype) -> None:
    if dtype not in VERSIONS:
        raise ValueError(f"{path}: dtype={dtype.name} must be uint16 or uint32")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: tokens must be one row of integers, not {tokens.ndim} dimensions of "
            f"{tokens.dtype.name}"
        )
    if tokens.size >= LIMIT:
        raise ValueError(
            f"{path}: {tokens.size} tokens do not fit in one shard, whose header counts to "
            f"{LIMIT - 1}; use a smaller shard_tokens"
        )
    if tokens.size and not 0 <= tokens.min() <= tokens.max() <= np.iinfo(dtype).max:
        raise ValueError(
            f"{path}: ids from {tokens.min()} to {tokens.max()} do not fit in {dtype.name}, "
            f"which holds 0 to {np.iinfo(dtype).max}"
        )


def read_header(path: Path) -> Header:
    """The number and kind of tokens, after a check that the file holds all of them."""
    try:
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; prepare the data again") from None
    if len(start) < HEADER_BYTES:
        raise ValueError(
            f"{path} is truncated: it has {size} bytes, and the header alone takes {HEADER_BYTES}"
        )
    magic, version, tokens = (int(x) for x in np.frombuffer(start, "<i4")[:3])
    if (magic, version) not in FORMATS:
        known = " or ".join(f"{m} version {v}" for m, v in FORMATS)
        raise ValueError(
            f"{path} is no token shard: found magic {magic} version {version}, wanted {known}"
        )
    dtype = FORMATS[magic, version]
    wanted = HEADER_BYTES + tokens * dtype.itemsize
    if tokens < 0 or size != wanted:
        state = "truncated" if size < wanted else "not what its header says"
        raise ValueError(
            f"{path} is {state}: {tokens} tokens of {dtype.name} take {wanted} bytes, "
            f"but the file has {size}; copy or prepare it again"
        )
    return Header(tokens, dtype)
