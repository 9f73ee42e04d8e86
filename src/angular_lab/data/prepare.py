"""Prepare a corpus: documents become a folder of token shards that any number of runs can read."""

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from filelock import AcquireReturnProxy, FileLock, Timeout
from numpy.typing import NDArray
from tqdm import tqdm

from angular_lab.data import corpus
from angular_lab.data.shards import (
    JOURNAL,
    LIMIT,
    MANIFEST,
    SPLITS,
    Manifest,
    ShardInfo,
    Split,
    atomic_file,
    dtype_for,
    read_header,
    write_shard,
)
from angular_lab.data.tokenizer import BytesTokenizer, Tokenizer
from angular_lab.data.workers import Encoded, digest, encode_all
from angular_lab.errors import UserError

log = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
LOCK = ".lock"


def prepare(
    documents: str | Path | Iterable[str],
    tokenizer: Tokenizer,
    out: Path,
    *,
    tokens: int | None = None,
    shard_tokens: int = 100_000_000,
    val_fraction: float = 0.005,
    workers: int | None = None,
    seed: int = 0,
    progress: bool = True,
    source: str | None = None,
) -> Manifest:
    """Write train_00000.bin, ..., val_00000.bin, ..., tokenizer.json and, last, manifest.json.

    Every document follows an end-of-text token. A hash of `seed` and the document decides whether
    it is for validation. If none is, as in a corpus of one text, the end of the last document is,
    and the manifest has the number of its tokens as `held_out`. Preparation stops at the last
    document, or at exactly `tokens` train tokens.

    Called again after a kill with the same arguments, it resumes, and the result is identical to
    the byte. A finished folder is left alone. `workers` (default: all cores) changes no byte.

    documents:  strings, or a file or folder for `corpus.documents`
    source:     one line for the manifest; the default is the file's or folder's path
    """
    _check(tokens, shard_tokens, val_fraction, workers)
    out = Path(out)
    if isinstance(documents, str | Path):
        source = str(documents) if source is None else source
        documents = corpus.documents(documents)
    arguments = {
        "source": source or "",
        "tokenizer": tokenizer.fingerprint,
        "tokens": tokens,
        "shard_tokens": shard_tokens,
        "val_fraction": val_fraction,
        "seed": seed,
    }
    _make_folder(out)
    if manifest := _finished(out, arguments):  # without a lock: the folder may be read-only
        return manifest
    with _lock(out):
        if manifest := _finished(out, arguments):  # by the process that held the lock
            return manifest
        preparation = Preparation(out, arguments, dtype_for(tokenizer.vocabulary))
        remaining = preparation.open(documents)
        tokenizer.save(out / TOKENIZER)
        preparation.encode(remaining, tokenizer, workers or cores(), progress)
        return preparation.finish(tokenizer)


def _check(tokens: int | None, shard_tokens: int, val_fraction: float, workers: int | None) -> None:
    if tokens is not None and tokens < 1:
        raise UserError(f"tokens={tokens} must be None or at least 1")
    if not 1 <= shard_tokens < LIMIT:
        raise UserError(f"shard_tokens={shard_tokens} must lie in [1, {LIMIT})")
    if not 0 <= val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} must lie in [0, 1)")
    if workers is not None and workers < 1:
        raise UserError(f"workers={workers} must be None or at least 1")


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _make_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    # The order of these calls matters while another process is preparing this folder: it writes
    # the journal before anything visible, and removes it after the manifest is written.
    names = sorted(path.name for path in out.glob("[!.]*"))
    if names and not (out / JOURNAL).exists() and not (out / MANIFEST).exists():
        raise UserError(f"{out} holds other files ({', '.join(names[:3])}); give an empty folder")


def _finished(out: Path, arguments: dict[str, Any]) -> Manifest | None:
    """Return the manifest of a finished folder, after a comparison of the arguments."""
    manifest = Manifest.load(out)
    if manifest:
        _compare(out, manifest.arguments, arguments)
        if (out / JOURNAL).exists():  # of a process that was killed after writing the manifest
            (out / JOURNAL).unlink(missing_ok=True)
    return manifest


def _lock(folder: Path) -> AcquireReturnProxy:
    """Wait until no other process, such as another rank, is preparing this folder."""
    lock = FileLock(folder / LOCK)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        log.info("waiting: another process is preparing %s", folder)
        return lock.acquire()


def _compare(out: Path, previous: dict[str, Any], arguments: dict[str, Any]) -> None:
    differences = [
        f"{key} was {previous.get(key)!r} and is {value!r}"
        for key, value in arguments.items()
        if previous.get(key) != value
    ]
    if differences:
        raise UserError(
            f"{out} was prepared with other arguments: {'; '.join(differences)}; use those, or "
            "another folder"
        )


@dataclass
class SplitWriter:
    """Collects the tokens of one split and writes them as shards of equal length."""

    folder: Path
    name: str
    dtype: np.dtype
    shard_tokens: int
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    files: list[ShardInfo] = field(default_factory=list)
    pending: list[NDArray[np.unsignedinteger]] = field(default_factory=list)

    @property
    def split(self) -> Split:
        return Split(self.documents, self.tokens, self.bytes, tuple(self.files))

    @property
    def remainder(self) -> NDArray[np.unsignedinteger]:
        """The tokens that are not in a shard yet."""
        return np.concatenate([np.empty(0, self.dtype), *self.pending])

    def add(self, ids: NDArray[np.unsignedinteger], size: int) -> bool:
        """Add a document and write the shards that it fills; True if there are any."""
        self.documents += 1
        self.tokens += ids.size
        self.bytes += size
        self.pending.append(ids)
        if self.tokens - self.shard_tokens * len(self.files) < self.shard_tokens:
            return False
        tokens = self.remainder
        while tokens.size >= self.shard_tokens:
            self._write(tokens[: self.shard_tokens])
            tokens = tokens[self.shard_tokens :]
        self.pending = [tokens.copy()]  # a view would keep the shard in memory
        return True

    def finish(self) -> Split:
        if (tokens := self.remainder).size:
            self._write(tokens)
        return self.split

    def restore(self, split: Split, remainder: NDArray[np.unsignedinteger]) -> None:
        """Continue from a journal's entry; shards that it does not list are removed."""
        self.documents, self.tokens, self.bytes = split.documents, split.tokens, split.bytes
        self.files, self.pending = list(split.files), [remainder]
        for info in split.files:
            read_header(self.folder / info.name)
        listed = {info.name for info in split.files}
        for path in self.folder.glob(f"{self.name}_*.bin"):
            if path.name not in listed:
                path.unlink()

    def _write(self, tokens: NDArray[np.unsignedinteger]) -> None:
        path = self.folder / f"{self.name}_{len(self.files):05d}.bin"
        self.files.append(write_shard(path, tokens))


@dataclass
class Preparation:
    """An unfinished preparation, and the journal from which it resumes after a kill.

    The journal is one file that is replaced atomically, after the shards that it lists are on disk.
    It holds the number of their documents and the tokens that did not fill a shard. What happened
    after the last journal is repeated, with the same result.
    """

    folder: Path
    arguments: dict[str, Any]
    dtype: np.dtype
    documents: int = 0
    chain: str = ""  # a hash over the hashes of all documents so far
    held_out: int = 0  # tokens of the last document that are for validation
    splits: dict[str, SplitWriter] = field(init=False)

    def __post_init__(self) -> None:
        size = self.arguments["shard_tokens"]
        self.splits = {name: SplitWriter(self.folder, name, self.dtype, size) for name in SPLITS}

    @property
    def tokens(self) -> int:
        """The number of train tokens, which is what the goal limits."""
        return self.splits["train"].tokens

    @property
    def goal(self) -> float:
        return self.arguments["tokens"] or inf

    def open(self, documents: Iterable[str]) -> Iterator[str]:
        """Start or resume; return the documents that remain to be encoded."""
        for path in self.folder.glob(".*.tmp"):  # of a killed process
            path.unlink()
        if (self.folder / JOURNAL).exists():
            self._restore()
            return self._skip(documents)
        texts = iter(documents)
        first = next(texts, None)
        if first is None:
            source = self.arguments["source"] or "the source"
            raise UserError(f"the corpus is empty: {source} has no documents")
        self.save()  # first, so that a folder left by a kill is recognized
        return chain([first], texts)

    def add(self, document: Encoded, last: bool = False) -> None:
        """Add a document; if it fills a shard, write the shard and the journal."""
        held_out = self._held_out(document, last)
        self._count(document.digest)
        if held_out:
            filled = self._divide(document, held_out)
        else:
            split = self.splits["val" if self._is_val(document) else "train"]
            ids, size = document.ids, document.size
            if split.name == "train" and self.tokens + ids.size > self.goal:
                room = int(self.goal) - self.tokens
                ids, size = ids[:room], size * room // ids.size  # bytes in proportion
            filled = split.add(ids, size)
        if filled:
            self.save()

    def _is_val(self, document: Encoded) -> bool:
        # By the hash, so that neither the order nor the number of workers matters.
        fraction = int.from_bytes(document.digest[:8], "big") / 2**64
        return bool(fraction < self.arguments["val_fraction"])

    def _held_out(self, document: Encoded, last: bool) -> int:
        """Return how many tokens at the end of a document are for validation: none unless it is the
        last one and no other is, and at most half of it."""
        train, val, size = self.splits["train"], self.splits["val"], document.ids.size
        last = last or train.tokens + size >= self.goal
        needs_both = not val.tokens and not (self._is_val(document) and train.tokens)
        share = self.arguments["val_fraction"]
        if not (last and needs_both and share):
            return 0
        total = min(train.tokens + size, self.goal)
        return min(max(1, round(share * total)), (size - 1) // 2)

    def _divide(self, document: Encoded, held_out: int) -> bool:
        """Add a document's end to the validation split, after an end of text, and the rest, as far
        as there is room, to the other; True if a shard was filled."""
        ids, size, words = document.ids, document.size, document.ids.size - 1
        rest = ids[:-held_out][: int(min(ids.size, self.goal - self.tokens))]
        end = np.concatenate([ids[:1], ids[-held_out:]])
        parts = {"train": rest, "val": end}
        self.held_out = held_out
        filled = [
            self.splits[name].add(part, size * (part.size - 1) // words)  # bytes in proportion
            for name, part in parts.items()
        ]
        return any(filled)

    def _count(self, document_digest: bytes) -> None:
        self.documents += 1
        content = self.chain.encode() + document_digest
        self.chain = hashlib.blake2b(content, digest_size=16).hexdigest()

    def save(self) -> None:
        """Write the journal."""
        content = {
            "arguments": self.arguments,
            "documents": self.documents,
            "chain": self.chain,
            "held_out": self.held_out,
            "splits": {name: asdict(writer.split) for name, writer in self.splits.items()},
        }
        about = np.frombuffer(json.dumps(content).encode(), np.uint8)
        remainders: dict[str, Any] = {name: split.remainder for name, split in self.splits.items()}
        with atomic_file(self.folder / JOURNAL) as file:
            np.savez(file, about=about, **remainders)

    def _restore(self) -> None:
        with np.load(self.folder / JOURNAL, allow_pickle=False) as journal:
            content = json.loads(journal["about"].tobytes())
            remainders = {name: journal[name] for name in SPLITS}
        _compare(self.folder, content["arguments"], self.arguments)
        self.documents, self.chain = content["documents"], content["chain"]
        self.held_out = content.get("held_out", 0)  # earlier versions have none
        for name, writer in self.splits.items():
            writer.restore(Split.from_dict(content["splits"][name]), remainders[name])

    def _skip(self, documents: Iterable[str]) -> Iterator[str]:
        """Skip the documents in the journal, after a check that they are the same."""
        texts = iter(documents)
        expected = self.documents, self.chain
        self.documents, self.chain = 0, ""
        while self.documents < expected[0] and (text := next(texts, None)) is not None:
            self._count(digest(text, self.arguments["seed"]))
        if (self.documents, self.chain) != expected:
            raise UserError(
                f"{self.folder} was started with other documents: the first {expected[0]} differ; "
                "give the same ones, or prepare into an empty folder"
            )
        return texts

    def encode(
        self, texts: Iterator[str], tokenizer: Tokenizer, workers: int, progress: bool
    ) -> None:
        file, seed, goal = self.folder / TOKENIZER, self.arguments["seed"], self.arguments["tokens"]
        stream = encode_all(texts, tokenizer, file, workers, seed)
        bar = tqdm(
            desc="prepare", total=goal, initial=self.tokens, unit=" tokens", unit_scale=True,
            mininterval=0.2 if sys.stderr.isatty() else 10, disable=not progress,
        )  # fmt: skip
        with closing(stream), bar:
            document = next(stream, None)
            while self.tokens < self.goal and document is not None:
                following = next(stream, None)
                self.add(document, last=following is None)
                document = following
                bar.set_postfix_str(f"{self.documents:,} documents", refresh=False)
                bar.update(self.tokens - bar.n)

    def finish(self, tokenizer: Tokenizer) -> Manifest:
        """Write the remaining tokens and the manifest."""
        splits = {name: writer.finish() for name, writer in self.splits.items()}
        vocabulary, end_of_text = tokenizer.vocabulary, tokenizer.end_of_text
        arguments = self.arguments | ({"held_out": self.held_out} if self.held_out else {})
        manifest = Manifest(arguments, vocabulary, end_of_text, self.dtype.name, splits)
        manifest.save(self.folder)
        (self.folder / JOURNAL).unlink(missing_ok=True)  # another process may see the manifest
        return manifest


def stdlib_place(folder: Path) -> Path:
    """Return the folder inside `folder` for the shards of the running Python's standard library."""
    return folder / f"stdlib-{platform.python_version()}-bytes"


def prepare_stdlib(folder: Path) -> Path:
    """Prepare the running Python's standard library as bytes; return its `stdlib_place`."""
    out = stdlib_place(folder)
    prepare(
        corpus.stdlib_documents(),
        BytesTokenizer(),
        out,
        val_fraction=0.03,
        workers=1,
        progress=False,
        source=f"the standard library of Python {platform.python_version()}",
    )
    return out
