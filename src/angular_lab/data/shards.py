"""Token shards as windows, and batches as arithmetic.

Nothing here has state that a checkpoint would have to hold: a batch is a function of the step. The
only import outside the standard library is numpy, because this is on the path of training.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from angular_lab.data.manifest import JOURNAL, SPLITS, Manifest, verify
from angular_lab.data.prefetch import Prefetcher
from angular_lab.data.shard_files import (
    HEADER_BYTES,
    MAGIC,
    Header,
    ShardInfo,
    read_header,
    write_shard,
)
from angular_lab.data.shuffle import permute

__all__ = [
    "MAGIC",
    "Batches",
    "Header",
    "Prefetcher",
    "ShardInfo",
    "Tokens",
    "permute",
    "read_header",
    "write_shard",
]

OPEN_SHARDS = 256  # a mapping keeps a file open, and 1,024 is a common limit


def _map(path: Path, header: Header) -> NDArray[np.unsignedinteger]:
    return np.memmap(path, header.dtype, "r", offset=HEADER_BYTES, shape=(header.tokens,))


class Tokens:
    """The shards of one split as windows of sequence + 1 tokens.

    Inside a shard, window i starts at token i * sequence: inputs and targets cover it, and what
    does not fill a window at its end is left out. With a manifest the files are those it lists, and
    their hashes are checked; otherwise every *train*.bin or *val*.bin, in sorted order.
    """

    def __init__(self, folder: Path, split: str, sequence: int, vocabulary: int) -> None:
        if split not in SPLITS:
            raise ValueError(f"split={split!r} must be one of {', '.join(map(repr, SPLITS))}")
        if sequence < 1 or vocabulary < 1:
            raise ValueError(f"{sequence=} and {vocabulary=} must be at least 1")
        self.folder, self.split = Path(folder), split
        self.sequence, self.vocabulary = sequence, vocabulary
        self.bytes_per_token: float | None = None  # for bits per byte; known with a manifest
        self.paths = self._listed() or self._found()
        self._headers = [read_header(path) for path in self.paths]
        counts = [max(0, header.tokens - 1) // sequence for header in self._headers]
        self._ends = np.cumsum(counts)
        self._map = lru_cache(maxsize=OPEN_SHARDS)(_map)

    def _listed(self) -> list[Path]:
        """The manifest's files; none without a manifest."""
        manifest = Manifest.load(self.folder)
        if manifest is None:
            if (self.folder / JOURNAL).exists():
                raise ValueError(
                    f"{self.folder} is not finished: call prepare with the same arguments again"
                )
            return []
        split = manifest.splits[self.split]
        for info in split.files:
            if info.max_id >= self.vocabulary:
                raise ValueError(
                    f"{self.folder / info.name} holds id {info.max_id}, but "
                    f"vocabulary={self.vocabulary}: set model.vocabulary={manifest.vocabulary}"
                )
        if manifest.vocabulary > self.vocabulary:
            raise ValueError(
                f"the tokenizer of {self.folder} has {manifest.vocabulary} entries, but "
                f"vocabulary={self.vocabulary}: set model.vocabulary={manifest.vocabulary}"
            )
        if not split.files:
            raise ValueError(
                f"{self.folder} has no {self.split} tokens: none of its "
                f"{sum(s.documents for s in manifest.splits.values())} documents fell there; "
                "prepare more or shorter documents (validation takes whole ones), or a larger "
                "--val-fraction, into another folder"
            )
        verify(self.folder, split.files)
        self.bytes_per_token = split.bytes / split.tokens
        return [self.folder / info.name for info in split.files]

    def _found(self) -> list[Path]:
        paths = sorted(self.folder.glob(f"*{self.split}*.bin"))
        if not paths:
            raise ValueError(
                f"{self.folder} has neither manifest.json nor *{self.split}*.bin files; make them "
                "with prepare"
            )
        for path in paths:
            if all(split in path.name for split in SPLITS):
                raise ValueError(f"{path} could be train or val; its name must hold only one")
        return paths

    @property
    def token_count(self) -> int:
        return sum(header.tokens for header in self._headers)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def windows(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """(k, sequence + 1): inputs are all but the last column, targets all but the first."""
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise ValueError(
                f"windows from {indices.min()} to {indices.max()} must lie in [0, {len(self)})"
            )
        out = np.empty((indices.size, self.sequence + 1), np.int64)
        shards = np.searchsorted(self._ends, indices, side="right")
        for row, shard, index in zip(out, shards, indices, strict=True):
            start = self._start(int(shard), int(index))
            mapped = self._map(self.paths[shard], self._headers[shard])
            row[:] = mapped[start : start + self.sequence + 1]
        if out.size and out.max() >= self.vocabulary:
            self._refuse(out, shards, indices)
        return out

    def _start(self, shard: int, index: int) -> int:
        before = int(self._ends[shard - 1]) if shard else 0
        return (index - before) * self.sequence

    def _refuse(
        self, out: NDArray[np.int64], shards: NDArray[np.integer], indices: NDArray[np.integer]
    ) -> None:
        row, column = (int(x[0]) for x in np.nonzero(out >= self.vocabulary))
        shard = int(shards[row])
        position = self._start(shard, int(indices[row])) + column
        raise ValueError(
            f"{self.paths[shard]} holds id {out[row, column]} at position {position}, but "
            f"vocabulary={self.vocabulary}; use the vocabulary of the tokenizer that made it"
        )


class Batches:
    """The batch of every step, for every rank.

    Sample k = step * batch + j is window permutation(k mod N) of epoch k div N, with N windows and
    a new permutation in every epoch. The order does not depend on the number of ranks.
    """

    def __init__(self, tokens: Tokens, batch: int, seed: int) -> None:
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1")
        if len(tokens) < batch:
            raise ValueError(
                f"{tokens.folder} has {len(tokens)} {tokens.split} windows of "
                f"{tokens.sequence} tokens, fewer than one batch of {batch}; use a smaller batch "
                "or sequence, or prepare more data"
            )
        self.tokens, self.size, self.seed = tokens, batch, seed

    def batch(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """The contiguous share of one rank: (batch / world, sequence + 1)."""
        return self.tokens.windows(self.indices(step, rank, world))

    def indices(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """Which windows these are."""
        if world < 1 or self.size % world:
            raise ValueError(f"batch={self.size} must be divisible by world={world}")
        if not 0 <= rank < world or step < 0:
            raise ValueError(f"{rank=} must lie in [0, {world}) and {step=} must be at least 0")
        share, n = self.size // world, len(self.tokens)
        samples = step * self.size + rank * share + np.arange(share, dtype=np.int64)
        epochs, places = np.divmod(samples, n)
        out = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = permute(places[here], n, self.seed, int(epoch))
        return out
