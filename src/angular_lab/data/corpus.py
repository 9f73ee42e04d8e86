"""Documents from files, folders, Hugging Face datasets and Python's standard library.

A document is a string; empty ones and those of white space alone are left out.
"""

import bz2
import gzip
import importlib
import io
import json
import lzma
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from angular_lab.data import hub
from angular_lab.errors import UserError

END_OF_TEXT = "<|endoftext|>"
SEPARATORS = tuple(END_OF_TEXT + ending for ending in ("", "\n", "\r\n"))
JSON_LINES = (".jsonl", ".ndjson", ".json")
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def optional(module: str) -> Any:
    """Import a module of the `lab` extra where it is needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs the package {module}: pip install -e '.[lab]'") from error


def documents(source: str | Path, key: str = "text") -> Iterator[str]:
    """Iterate over the documents of a file, or of all files of a folder in sorted order.

    The suffix gives the format: JSON lines (.jsonl, .ndjson, .json) and parquet, whose field or
    column `key` holds the document; everything else is plain text in UTF-8. All but parquet may
    end in .xz, .gz, .bz2 or .zst. Hidden files in a folder are left out.

    In plain text, a line that holds only <|endoftext|> separates documents, together with the line
    break before it. A file without such a line is one document.
    """
    path = Path(source)
    if not path.exists():
        raise UserError(f"{path} does not exist; give a file or a folder of documents")
    return _visible(_folder(path, key) if path.is_dir() else _file(path, key))


def _visible(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text and not text.isspace())


def _folder(folder: Path, key: str) -> Iterator[str]:
    names = sorted((path.relative_to(folder) for path in folder.rglob("*")), key=Path.as_posix)
    for name in names:
        path = folder / name
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield from _file(path, key)


def _open_zstd(path: Path) -> BinaryIO:
    # pyarrow rather than zstandard, whose reader accepts a truncated file without an error
    return cast(BinaryIO, optional("pyarrow").input_stream(str(path), compression="zstd"))


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _open_zstd,
}
READ_ERRORS = (EOFError, OSError, lzma.LZMAError, zlib.error, UnicodeDecodeError)


def _file(path: Path, key: str) -> Iterator[str]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet(path, key)
        return
    opener = OPENERS.get(suffix)
    kind = path.with_suffix("").suffix.lower() if opener else suffix
    # Only "\n" ends a line, and line breaks are not translated: a document keeps its bytes.
    with (
        opener(path) if opener else path.open("rb") as binary,
        io.TextIOWrapper(binary, encoding="utf-8-sig", newline="\n") as text,
    ):
        lines = _lines(path, text)
        yield from _json_lines(path, lines, key) if kind in JSON_LINES else _plain(lines)


def _lines(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    try:
        yield from text
    except READ_ERRORS as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it is truncated, damaged or "
            "not UTF-8 text: replace or remove it"
        ) from error


def _plain(lines: Iterator[str]) -> Iterator[str]:
    parts: list[str] = []
    for line in lines:
        if line in SEPARATORS:
            ending = "\r\n" if line.endswith("\r\n") else "\n"
            yield "".join(parts).removesuffix(ending)
            parts = []
        else:
            parts.append(line)
    yield "".join(parts)


def _json_lines(path: Path, lines: Iterator[str], key: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            content = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{path}, line {number} has no text under {key!r}; it has {content}")
        yield record[key]


def _parquet(path: Path, column: str) -> Iterator[str]:
    arrow, parquet = optional("pyarrow"), optional("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise UserError(f"{path} has no column {column!r}; it has {names}")
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for value in batch[0].to_pylist():
                    yield _text(value, f"{path}, column {column!r}")
    except (arrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _text(value: Any, location: str) -> str:
    """Return the value of a cell; a missing one is an empty document."""
    if value is None or isinstance(value, str):
        return value or ""
    raise UserError(f"{location} holds {type(value).__name__}, not text")


def hf_documents(
    path: str, name: str | None = None, split: str = "train", column: str = "text", **options: Any
) -> Iterator[str]:
    """Stream a Hugging Face dataset; `options` are passed to datasets.load_dataset."""
    datasets = optional("datasets")
    label = f"the dataset {path}" if name is None else f"the dataset {path} ({name})"
    try:
        with hub.look_up():
            rows = datasets.load_dataset(path, name, split=split, streaming=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{label}, split {split!r}, cannot be opened ({type(error).__name__}: {error}); check "
            "the name and that the hub can be reached, or download it and give the folder"
        ) from error
    for row in rows:
        if column not in row:
            raise UserError(f"{label} has no column {column!r}; it has {sorted(row)}")
        yield from _visible([_text(row[column], f"{label}, column {column!r}")])


def stdlib_documents() -> Iterator[str]:
    """Iterate over the source files of the running Python's standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted((path.relative_to(root) for path in root.rglob("*.py")), key=Path.as_posix)
    return _visible(_source(root / name) for name in names if EXCLUDED.isdisjoint(name.parts))


def _source(path: Path) -> str:
    """Return a Python file's text, or nothing for one that is invalid on purpose."""
    try:
        with tokenize.open(path) as file:  # understands coding cookies
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
