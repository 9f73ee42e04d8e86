"""Documents to a folder of token shards that any number of runs can read."""

import os
import platform
import sys
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from angular_lab.data import corpus
from angular_lab.data.journal import Job, read_journal
from angular_lab.data.manifest import JOURNAL, Manifest
from angular_lab.data.progress import Progress
from angular_lab.data.shard_files import LIMIT, dtype_for
from angular_lab.data.tokenizer import Tokenizer, load_tokenizer
from angular_lab.data.workers import encode_all

TOKENIZER = "tokenizer.json"


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

    Every document comes after an end-of-text token. A hash of `seed` and its text decides whether
    it is for validation. It ends with the documents, or with exactly `tokens` train tokens.

    Call it again after a kill, with the same arguments, and it goes on; the result is the same to
    the byte. A finished folder is left alone. `workers` (default: all cores) changes no byte.

    documents:  texts, or a file or folder for `corpus.documents`
    source:     one line for the manifest; by default the file's or folder's path
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
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        if (manifest := Manifest.load(out)) is not None:
            _compare(out, manifest.arguments, arguments)
            (out / JOURNAL).unlink(missing_ok=True)  # killed just before this line
            return manifest
        job = Job(out, arguments, dtype_for(tokenizer.vocabulary))
        texts = _open(job, documents)
        tokenizer.save(out / TOKENIZER)
        _encode(job, texts, tokenizer, workers or cores(), progress)
        return _finish(job, tokenizer)


def _check(tokens: int | None, shard_tokens: int, val_fraction: float, workers: int | None) -> None:
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens={tokens} must be None or at least 1")
    if not 1 <= shard_tokens < LIMIT:
        raise ValueError(f"shard_tokens={shard_tokens} must lie in [1, {LIMIT})")
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction} must lie in [0, 1)")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be None or at least 1")


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _alone(folder: Path) -> Generator[None, None, None]:
    """Wait until no other process prepares this folder, such as another rank.

    The lock is on the folder itself: the system drops it with the process, and no file stays.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting: another process prepares {folder}", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # a network file system without locks on folders
            pass
        yield
    finally:
        os.close(handle)


def _compare(out: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = [
        f"{key} was {found.get(key)!r} and is {value!r}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if differences:
        raise ValueError(
            f"{out} was prepared with other arguments: {'; '.join(differences)}; use those, or "
            "another folder"
        )


def _open(job: Job, documents: Iterable[str]) -> Iterator[str]:
    """Begin or go on: the documents that are still to do."""
    for path in job.folder.glob(".*.tmp"):  # of a killed process
        path.unlink()
    if (job.folder / JOURNAL).exists():
        about, _ = read_journal(job.folder)
        _compare(job.folder, about["arguments"], job.arguments)
        job.restore()
        return job.skip(documents)
    if found := sorted(path.name for path in job.folder.iterdir()):
        raise ValueError(
            f"{job.folder} holds something else ({', '.join(found[:3])}); give an empty folder"
        )
    texts = iter(documents)
    first = next(texts, None)
    if first is None:
        raise ValueError(
            f"the corpus is empty: {job.arguments['source'] or 'the source'} gave no document"
        )
    job.save()  # before anything else, so that a kill leaves a folder that is known as ours
    return chain([first], texts)


def _encode(
    job: Job, texts: Iterator[str], tokenizer: Tokenizer, workers: int, progress: bool
) -> None:
    stream = encode_all(texts, tokenizer, job.folder / TOKENIZER, workers, job.arguments["seed"])
    with closing(stream), Progress(job.goal, job.tokens, progress) as bar:
        while not job.done and (item := next(stream, None)) is not None:
            job.add(item)
            bar.update(job.tokens, job.documents)


def _finish(job: Job, tokenizer: Tokenizer) -> Manifest:
    splits = {name: split.finish() for name, split in job.splits.items()}
    manifest = Manifest(
        job.arguments, tokenizer.vocabulary, tokenizer.end_of_text, job.dtype.name, splits
    )
    manifest.save(job.folder)
    (job.folder / JOURNAL).unlink()
    for name, split in splits.items():
        if not split.documents and (name == "train" or job.arguments["val_fraction"]):
            warnings.warn(
                f"{job.folder}: none of the {job.documents} documents fell into the {name} split; "
                "use more or shorter documents, or another val_fraction",
                stacklevel=3,
            )
    return manifest


def stdlib_place(folder: Path, kind: str = "bytes") -> Path:
    """Where the running Python's standard library lies as shards, once they are made."""
    return folder / f"stdlib-{platform.python_version()}-{kind}"


def prepare_stdlib(folder: Path, tokenizer: str = "bytes") -> Path:
    """The running Python's standard library as shards, made once; the folder that holds them.

    It lies inside `folder` and is named after Python's version and the tokenizer.
    """
    loaded, version = load_tokenizer(tokenizer), platform.python_version()
    out = stdlib_place(folder, "bytes" if tokenizer == "bytes" else loaded.fingerprint[:12])
    prepare(
        corpus.stdlib_documents(),
        loaded,
        out,
        val_fraction=0.03,
        workers=1,
        progress=False,
        source=f"the standard library of Python {version}",
    )
    return out
