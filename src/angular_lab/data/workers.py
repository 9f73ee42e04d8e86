"""Encode documents, in this process or in a pool of worker processes, in their order."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from angular_lab.data.shards import dtype_for
from angular_lab.data.tokenizer import Tokenizer, load_tokenizer
from angular_lab.errors import UserError

CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 256, 1 << 20
# Tokenizers need some hundred bytes of memory per token, so a book is encoded in pieces.
PIECE_CHARACTERS = 1 << 22


class Encoded(NamedTuple):
    """One document: the end-of-text token and its ids, its size, and the hash that assigns it to a
    split."""

    ids: NDArray[np.unsignedinteger]
    size: int  # bytes of UTF-8
    digest: bytes


def digest(text: str, seed: int) -> bytes:
    """Return a hash of seed and text; lone surrogates count as question marks."""
    content = text.encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=16, key=str(seed).encode()).digest()


def pieces(text: str) -> Iterator[str]:
    """Divide the text into parts of bounded length, after a line break where possible."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        end = (text.rfind("\n", start, end) + 1) or end
        yield text[start:end]
        start = end
    yield text[start:]


def encode(tokenizer: Tokenizer, texts: Iterable[str], seed: int) -> list[Encoded]:
    clean = [text.encode("utf-8", "replace").decode() for text in texts]
    parts = [list(pieces(text)) for text in clean]
    encoded = iter(tokenizer.encode_batch([piece for part in parts for piece in part]))
    dtype = dtype_for(tokenizer.vocabulary)
    out = []
    for text, part in zip(clean, parts, strict=True):
        rows = [[tokenizer.end_of_text], *(next(encoded) for _ in part)]
        ids = np.concatenate([np.array(row, dtype) for row in rows])
        out.append(Encoded(ids, len(text.encode()), digest(text, seed)))
    return out


def chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for text in documents:
        chunk.append(text)
        characters += len(text)
        if len(chunk) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


_tokenizer: Tokenizer | None = None  # of a worker process


def _start_worker(file: str) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool provides the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _tokenizer = load_tokenizer(file)


def _exit_with_parent() -> None:
    """A pool's workers survive a killed parent: they hold both ends of their pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(texts: list[str], seed: int) -> list[Encoded]:
    assert _tokenizer is not None
    return encode(_tokenizer, texts, seed)


def encode_all(
    documents: Iterable[str], tokenizer: Tokenizer, file: Path, workers: int, seed: int
) -> Generator[Encoded, None, None]:
    """Encode every document in order; workers load the tokenizer from `file`."""
    if workers == 1:
        for chunk in chunks(documents):
            yield from encode(tokenizer, chunk, seed)
        return
    # spawn: a fork would copy locks that other threads hold, such as torch's
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (str(file),))
    pending: deque[Future[list[Encoded]]] = deque()
    try:
        # Only a few chunks are pending: the corpus may be larger than the memory.
        for chunk in chunks(documents):
            pending.append(pool.submit(_encode_in_worker, chunk, seed))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died: it may have run out of memory, or the script calls prepare "
            "outside of `if __name__ == '__main__':`; workers=1 avoids both"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
