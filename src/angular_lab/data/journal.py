"""A preparation under way: what is written, what waits, and how to go on after a kill.

The journal is one file that is replaced as a whole, after the shards it lists are on disk. It holds
the number of documents behind them and the tokens that did not fill a shard. Whatever happened
after the last journal is done again, and comes out the same.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angular_lab.data.manifest import JOURNAL, SPLITS, Split
from angular_lab.data.shard_files import ShardInfo, atomic_file, read_header, write_shard
from angular_lab.data.workers import Encoded, digest


@dataclass
class SplitWriter:
    """Tokens of one split on their way into shards of equal length."""

    folder: Path
    name: str
    dtype: np.dtype
    shard_tokens: int
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    files: list[ShardInfo] = field(default_factory=list)
    waiting: list[NDArray[np.unsignedinteger]] = field(default_factory=list)

    def add(self, ids: NDArray[np.unsignedinteger], size: int) -> None:
        self.documents += 1
        self.tokens += ids.size
        self.bytes += size
        self.waiting.append(ids)

    @property
    def rest(self) -> NDArray[np.unsignedinteger]:
        return np.concatenate([np.empty(0, self.dtype), *self.waiting])

    def write_full(self) -> bool:
        """Write the shards that are full; whether there were any."""
        if self.tokens - self.shard_tokens * len(self.files) < self.shard_tokens:
            return False
        tokens = self.rest
        while tokens.size >= self.shard_tokens:
            self._write(tokens[: self.shard_tokens])
            tokens = tokens[self.shard_tokens :]
        self.waiting = [tokens.copy()]  # not a view that would keep the shard in memory
        return True

    def finish(self) -> Split:
        if (tokens := self.rest).size:
            self._write(tokens)
        return Split(self.documents, self.tokens, self.bytes, tuple(self.files))

    def _write(self, tokens: NDArray[np.unsignedinteger]) -> None:
        path = self.folder / f"{self.name}_{len(self.files):05d}.bin"
        self.files.append(write_shard(path, tokens, self.dtype))


@dataclass
class Job:
    """All of a preparation that a kill must not lose."""

    folder: Path
    arguments: dict[str, Any]
    dtype: np.dtype
    documents: int = 0
    chain: str = ""  # a hash over the hashes of all documents so far
    splits: dict[str, SplitWriter] = field(init=False)

    def __post_init__(self) -> None:
        size = self.arguments["shard_tokens"]
        self.splits = {name: SplitWriter(self.folder, name, self.dtype, size) for name in SPLITS}

    @property
    def goal(self) -> int | None:
        return self.arguments["tokens"]

    @property
    def tokens(self) -> int:
        """Of the train split: what the goal is counted in."""
        return self.splits["train"].tokens

    @property
    def done(self) -> bool:
        return self.goal is not None and self.tokens >= self.goal

    def add(self, item: Encoded) -> None:
        """Take one document; where it fills a shard, write it and the journal."""
        self._count(item.digest)
        # The hash decides, so that neither order nor workers matter.
        share = int.from_bytes(item.digest[:8], "big") / 2**64
        split = self.splits["val" if share < self.arguments["val_fraction"] else "train"]
        ids, size = item.ids, item.size
        if split.name == "train" and self.goal is not None and split.tokens + ids.size > self.goal:
            room = self.goal - split.tokens
            ids, size = ids[:room], size * room // ids.size  # about as many bytes as are kept
        split.add(ids, size)
        if split.write_full():
            self.save()

    def _count(self, found: bytes) -> None:
        self.documents += 1
        self.chain = hashlib.blake2b(self.chain.encode() + found, digest_size=16).hexdigest()

    def save(self) -> None:
        keys = ("documents", "tokens", "bytes")
        about = {
            "arguments": self.arguments,
            "documents": self.documents,
            "chain": self.chain,
            "splits": {
                name: {key: getattr(split, key) for key in keys}
                | {"files": [asdict(info) for info in split.files]}
                for name, split in self.splits.items()
            },
        }
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        rests: dict[str, Any] = {name: split.rest for name, split in self.splits.items()}
        with atomic_file(self.folder / JOURNAL) as file:
            np.savez(file, about=text, **rests)

    def restore(self) -> None:
        """Go back to the journal; shards it does not list are removed."""
        about, rests = read_journal(self.folder)
        self.documents, self.chain = about["documents"], about["chain"]
        for name, split in self.splits.items():
            found = about["splits"][name]
            split.documents, split.tokens = found["documents"], found["tokens"]
            split.bytes, split.waiting = found["bytes"], [rests[name]]
            split.files = [ShardInfo(**entry) for entry in found["files"]]
            for info in split.files:
                read_header(self.folder / info.name)
            listed = {info.name for info in split.files}
            for path in self.folder.glob(f"{name}_*.bin"):
                if path.name not in listed:
                    path.unlink()

    def skip(self, documents: Iterable[str]) -> Iterator[str]:
        """The documents that are still to do, after a check that those before are the same."""
        stream = iter(documents)
        wanted, count = self.chain, self.documents
        self.chain, self.documents = "", 0
        for text in stream if count else ():
            self._count(digest(text, self.arguments["seed"]))
            if self.documents == count:
                break
        if (self.chain, self.documents) != (wanted, count):
            raise ValueError(
                f"{self.folder} was begun with other documents: the first {count} are not those of "
                "now; give the same ones, or prepare into an empty folder"
            )
        return stream


def read_journal(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.unsignedinteger]]]:
    with np.load(folder / JOURNAL, allow_pickle=False) as found:
        about = json.loads(found["about"].tobytes())
        return about, {name: found[name] for name in SPLITS}
