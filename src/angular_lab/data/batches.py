"""Batches of tokens: windows over shards, in a seeded order, prefetched by a thread.

Nothing here has state that a checkpoint would have to hold: a batch is a function of the step.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from math import isqrt
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from angular_lab.data.shards import HEADER_BYTES, JOURNAL, SPLITS, Manifest, read_header, verify
from angular_lab.errors import UserError

T = TypeVar("T")
U64 = NDArray[np.uint64]

OPEN_SHARDS = 256  # a mapping keeps a file open, and 1,024 is a common limit
AHEAD = 2  # batches that are prefetched
ROUNDS = 8
# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Tokens:
    """The shards of one split as windows of sequence + 1 tokens.

    Inside a shard, window i starts at token i * sequence, so that inputs and targets cover the
    shard; a remainder too short for a window is left out. With a manifest the files are those it
    lists, and their hashes are verified; otherwise every *train*.bin or *val*.bin in sorted order.
    """

    def __init__(self, folder: Path, split: str, sequence: int, vocabulary: int) -> None:
        if split not in SPLITS:
            raise UserError(f"split={split!r} must be one of {', '.join(map(repr, SPLITS))}")
        if sequence < 1 or vocabulary < 1:
            raise UserError(f"{sequence=} and {vocabulary=} must be at least 1")
        self.folder, self.split = Path(folder), split
        self.sequence, self.vocabulary = sequence, vocabulary
        self.bytes_per_token: float | None = None  # for bits per byte; needs a manifest
        self.paths = self._paths_in_manifest() or self._paths_by_name()
        self._headers = [read_header(path) for path in self.paths]
        self._ends = np.cumsum([max(0, size - 1) // sequence for size, _ in self._headers])
        self._map = lru_cache(maxsize=OPEN_SHARDS)(_map)

    def _paths_in_manifest(self) -> list[Path]:
        manifest = Manifest.load(self.folder)
        if manifest is None:
            if (self.folder / JOURNAL).exists():
                raise UserError(
                    f"{self.folder} is not finished: call prepare again with the same arguments"
                )
            return []
        if manifest.vocabulary > self.vocabulary:
            raise UserError(
                f"the tokenizer of {self.folder} has {manifest.vocabulary} entries, but "
                f"vocabulary={self.vocabulary}: set model.vocabulary={manifest.vocabulary}"
            )
        split = manifest.splits[self.split]
        if not split.files:
            raise UserError(
                f"{self.folder} has no {self.split} tokens: none of its "
                f"{sum(s.documents for s in manifest.splits.values())} documents is in that split; "
                "prepare again in another folder, with more documents or a larger --val-fraction"
            )
        verify(self.folder, split.files)
        self.bytes_per_token = split.bytes / split.tokens
        return [self.folder / info.name for info in split.files]

    def _paths_by_name(self) -> list[Path]:
        paths = sorted(self.folder.glob(f"*{self.split}*.bin"))
        if not paths:
            raise UserError(
                f"{self.folder} has neither manifest.json nor *{self.split}*.bin files; make them "
                "with prepare"
            )
        for path in paths:
            if all(split in path.name for split in SPLITS):
                raise UserError(f"{path} could be train or val; only one may occur in its name")
        return paths

    @property
    def token_count(self) -> int:
        return sum(size for size, _ in self._headers)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def windows(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return (k, sequence + 1): inputs without the last column, targets without the first."""
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise UserError(
                f"windows from {indices.min()} to {indices.max()} must lie in [0, {len(self)})"
            )
        out = np.empty((indices.size, self.sequence + 1), np.int64)
        shards = np.searchsorted(self._ends, indices, side="right")
        for row, shard, index in zip(out, shards, indices, strict=True):
            start = (index - (self._ends[shard - 1] if shard else 0)) * self.sequence
            mapped = self._map(self.paths[shard], *self._headers[shard])
            row[:] = mapped[start : start + self.sequence + 1]
            if row.max() >= self.vocabulary:
                position = start + int(row.argmax())
                raise UserError(
                    f"{self.paths[shard]} holds id {row.max()} at position {position}, but "
                    f"vocabulary={self.vocabulary}; use the vocabulary of its tokenizer"
                )
        return out


def _map(path: Path, size: int, dtype: np.dtype) -> NDArray[np.unsignedinteger]:
    return np.memmap(path, dtype, "r", offset=HEADER_BYTES, shape=(size,))


class Batches:
    """The batch of every step, for every rank.

    Sample k = step * batch + j is window permutation(k mod N) of epoch k div N, with N windows and
    a new permutation in every epoch. The order does not depend on the number of ranks.
    """

    def __init__(self, tokens: Tokens, batch: int, seed: int) -> None:
        if batch < 1:
            raise UserError(f"batch={batch} must be at least 1")
        if len(tokens) < batch:
            raise UserError(
                f"{tokens.folder} has {len(tokens)} {tokens.split} windows of "
                f"{tokens.sequence} tokens, fewer than one batch of {batch}; use a smaller batch "
                "or sequence, or prepare more data"
            )
        self.tokens, self.size, self.seed = tokens, batch, seed

    def batch(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """Return the contiguous share of one rank: (batch / world, sequence + 1)."""
        return self.tokens.windows(self.indices(step, rank, world))

    def indices(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """Return the numbers of the windows in that share."""
        if world < 1 or self.size % world:
            raise UserError(f"batch={self.size} must be divisible by world={world}")
        if not 0 <= rank < world or step < 0:
            raise UserError(f"{rank=} must lie in [0, {world}) and {step=} must be at least 0")
        share, n = self.size // world, len(self.tokens)
        samples = step * self.size + rank * share + np.arange(share, dtype=np.int64)
        epochs, positions = np.divmod(samples, n)
        out = np.empty_like(samples)
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            out[mask] = permute(positions[mask], n, self.seed, int(epoch))
        return out


def permute(indices: NDArray[np.integer], n: int, seed: int, epoch: int = 0) -> NDArray[np.int64]:
    """Apply the permutation of range(n) that belongs to (seed, epoch), without an array of n.

    A Feistel network on pairs (L, R) with L, R < a, where a^2 >= n:

        (L, R)  ->  (R, (L + F_i(R)) mod a)        i = 1 .. 8

    is a bijection for any F, and therefore permutes range(a^2). An index that is mapped to n or
    above is mapped again until it is below n, which gives a permutation of range(n) (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). Integers only: the same on every
    machine.
    """
    if not 1 <= n < 2**62:
        raise UserError(f"n={n} must be at least 1 and below 2^62")
    x = np.atleast_1d(np.asarray(indices))
    if x.size and not 0 <= x.min() <= x.max() < n:
        raise UserError(f"indices from {x.min()} to {x.max()} must lie in [0, {n})")
    side, keys = isqrt(n - 1) + 1, _keys(seed, epoch)
    out = _feistel(x.astype(np.uint64), side, keys)
    while (outside := out >= np.uint64(n)).any():
        out[outside] = _feistel(out[outside], side, keys)
    return out.astype(np.int64).reshape(np.shape(indices))


def _word(x: int) -> U64:
    """Return x mod 2^64 as an array of one: numpy warns when a scalar wraps around."""
    return np.array([x % 2**64], np.uint64)


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * _word(FIRST)
    x = (x ^ (x >> np.uint64(27))) * _word(SECOND)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int) -> U64:
    rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64)
    base = _mix(_mix(_word(seed) + _word(GOLDEN)) ^ _word(epoch))
    return _mix(base + rounds * _word(GOLDEN))


def _feistel(x: U64, side: int, keys: U64) -> U64:
    a = np.uint64(side)
    left, right = x // a, x % a
    for key in keys:
        left, right = right, (left + _mix(right ^ key) % a) % a
    return left * a + right


def prefetch(make: Callable[[int], T], start: int, stop: int) -> Generator[T, None, None]:
    """Yield make(start), ..., make(stop - 1), computed in this order by one background thread.

    The thread is at most AHEAD results ahead, including the one it is computing. An exception in
    `make` is raised in place of its result. Closing the generator ends the thread; only a running
    call of `make` is waited for.
    """
    steps = iter(range(start, stop))
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        pending = deque(pool.submit(make, step) for step in islice(steps, AHEAD))
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(make, step) for step in islice(steps, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)
