"""Text to evaluate a run on: the validation split of a prepared folder, or documents that are
tokenized on the fly."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from angular_lab.data import corpus
from angular_lab.data.batches import Tokens
from angular_lab.data.prepare import TOKENIZER
from angular_lab.data.shards import HEADER_BYTES, JOURNAL, MANIFEST, Manifest, read_header
from angular_lab.data.tokenizer import Tokenizer, load_tokenizer
from angular_lab.errors import UserError


@dataclass(frozen=True)
class EvaluatedText:
    """Tokens, of which all but the first are predicted, and the bytes that those stand for."""

    path: Path
    ids: NDArray[np.int64]
    bytes: int
    fingerprint: str

    @property
    def tokens(self) -> int:
        return self.ids.size - 1


def read_text(path: Path, data: Path, vocabulary: int, limit: int) -> EvaluatedText:
    """Return at most `limit` predicted tokens of a prepared folder, or of a file or folder of
    documents (see `corpus.documents`). `data` is the run's own prepared folder, whose tokenizer
    counts. Raises UserError if the other folder has another one."""
    tokenizer = tokenizer_of(data)
    if path.is_dir() and _is_prepared(path):
        _check_tokenizer(path, tokenizer, data)
        text = _from_folder(path, tokenizer, vocabulary, limit)
    elif not path.exists():
        raise UserError(
            f"--on {path}: it does not exist; give a folder that angular-lab prepare made, or a "
            "file or folder of text"
        )
    else:
        text = _from_documents(path, tokenizer, limit)
    if not text.tokens or not text.bytes:
        raise UserError(f"--on {path}: it has no text to evaluate")
    return text


def tokenizer_of(data: Path) -> Tokenizer:
    """Return the tokenizer of a prepared folder."""
    path = data / TOKENIZER
    if not path.exists():
        raise UserError(f"{data} has no {TOKENIZER}: its tokens cannot be decoded to text")
    return load_tokenizer(str(path))


def _is_prepared(path: Path) -> bool:
    marks = (MANIFEST, JOURNAL, "*val*.bin")
    return any(next(path.glob(mark), None) is not None for mark in marks)


def _check_tokenizer(folder: Path, tokenizer: Tokenizer, data: Path) -> None:
    manifest = Manifest.load(folder)
    if manifest and manifest.arguments["tokenizer"] != tokenizer.fingerprint:
        raise UserError(
            f"--on {folder}: it has another tokenizer than {data}, which the run was trained on, "
            "so its tokens mean something else to the model. Give the text itself, or prepare it "
            f"with the run's tokenizer: angular-lab prepare TEXT --tokenizer {data / TOKENIZER} "
            "--out FOLDER"
        )


def _from_folder(folder: Path, tokenizer: Tokenizer, vocabulary: int, limit: int) -> EvaluatedText:
    manifest = Manifest.load(folder)
    split = Tokens(folder, "val", 1, vocabulary)  # verifies the files
    ids = _first_ids(split.paths, limit + 1)
    if ids.max(initial=0) >= vocabulary:
        raise UserError(f"--on {folder}: it holds id {ids.max()}, and the model has {vocabulary}")
    size = sum(tokenizer.count_bytes(part) for part in _documents(ids[1:], tokenizer))
    return EvaluatedText(folder, ids, size, manifest.fingerprint if manifest else _hash(ids))


def _first_ids(paths: list[Path], count: int) -> NDArray[np.int64]:
    parts: list[NDArray[np.int64]] = []
    for path in paths:
        size, dtype = read_header(path)
        taken = min(size, count - sum(part.size for part in parts))
        if taken > 0:
            mapped = np.memmap(path, dtype, "r", offset=HEADER_BYTES, shape=(size,))
            parts.append(mapped[:taken].astype(np.int64))
    return np.concatenate([np.empty(0, np.int64), *parts])


def _documents(ids: NDArray[np.int64], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Divide tokens at the end-of-text tokens, which stand for no bytes."""
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    for part in np.split(ids, ends):
        rest = part[1:] if part.size and part[0] == tokenizer.end_of_text else part
        if rest.size:
            yield rest.tolist()


def _from_documents(path: Path, tokenizer: Tokenizer, limit: int) -> EvaluatedText:
    """Tokenize documents as `prepare` does: an end-of-text token comes before each of them."""
    ids, size = [tokenizer.end_of_text], 0
    for number, document in enumerate(corpus.documents(path)):
        tokens = [tokenizer.end_of_text] * (number > 0) + tokenizer.encode(document)
        room = limit + 1 - len(ids)
        if len(tokens) > room:
            tokens = tokens[:room]
            inner = [i for i in tokens if i != tokenizer.end_of_text]
            size += tokenizer.count_bytes(inner)
        else:
            size += len(document.encode())
        ids += tokens
        if len(ids) > limit:
            break
    return EvaluatedText(path, np.array(ids, np.int64), size, _fingerprint(path))


def _fingerprint(path: Path) -> str:
    """Return a hash of a file's bytes, or of all documents of a folder."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for document in corpus.documents(path):
        digest.update(hashlib.sha256(document.encode()).digest())
    return digest.hexdigest()


def _hash(ids: NDArray[np.int64]) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()
