"""Documents to ids, in this process or in several, in the order of the documents."""

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

from angular_lab.data.shard_files import dtype_for
from angular_lab.data.tokenizer import Tokenizer, load_tokenizer

CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 256, 1 << 20
# A tokenizer needs some hundred bytes per token, so a book goes through it in pieces.
PIECE_CHARACTERS = 1 << 22


class Encoded(NamedTuple):
    """One document: the end-of-text token and its ids, and what the split is decided by."""

    ids: NDArray[np.unsignedinteger]
    size: int  # bytes of utf-8
    digest: bytes


def digest(text: str, seed: int) -> bytes:
    """A hash of seed and text; stray surrogates, which are no text, count as question marks."""
    content = text.encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=16, key=str(seed).encode()).digest()


def pieces(text: str) -> Iterator[str]:
    """The text in parts of bounded length, cut after line breaks where there are some."""
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
    found = iter(tokenizer.encode_batch([piece for part in parts for piece in part]))
    dtype = dtype_for(tokenizer.vocabulary)
    out = []
    for text, part in zip(clean, parts, strict=True):
        rows = [[tokenizer.end_of_text], *(next(found) for _ in part)]
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


def _begin(file: str) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = load_tokenizer(file)


def _end_with_parent() -> None:
    """A pool's workers outlive a parent that is killed: they hold both ends of their pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_here(texts: list[str], seed: int) -> list[Encoded]:
    assert _tokenizer is not None
    return encode(_tokenizer, texts, seed)


def encode_all(
    documents: Iterable[str], tokenizer: Tokenizer, file: Path, workers: int, seed: int
) -> Generator[Encoded, None, None]:
    """Every document in order; `file` is the saved tokenizer, from which workers build theirs."""
    if workers == 1:
        for chunk in chunks(documents):
            yield from encode(tokenizer, chunk, seed)
        return
    # spawn: a fork would copy threads' locks, torch's among them
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(str(file),))
    waiting: deque[Future[list[Encoded]]] = deque()
    try:
        # Few chunks under way: the documents may be more than the memory holds.
        for chunk in chunks(documents):
            waiting.append(pool.submit(_encode_here, chunk, seed))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process ended early: the memory may be too small, or the script that calls "
            "prepare does so outside of `if __name__ == '__main__':`; workers=1 needs neither"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
