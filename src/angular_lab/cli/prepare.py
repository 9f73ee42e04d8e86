"""`angular-lab prepare`: from the command line's words to shards."""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from angular_lab.config.overrides import count
from angular_lab.data.corpus import documents, hf_documents
from angular_lab.data.manifest import Manifest
from angular_lab.data.prepare import TOKENIZER, prepare
from angular_lab.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

TRAINING_DOCUMENTS = 20_000  # enough for a vocabulary of tens of thousands
FEW = 20  # documents


def prepare_from(arguments: argparse.Namespace) -> Path:
    if bool(arguments.hf) == bool(arguments.sources):
        raise ValueError("name either files and folders, or a dataset with --hf, not both or none")
    source = arguments.hf or ", ".join(arguments.sources)
    source += f" [{arguments.column}]"
    prepare(
        _texts(arguments),
        _tokenizer(arguments),
        arguments.out,
        **given_of(arguments, "tokens", "shard_tokens", "val_fraction", "workers"),
        source=f"{source} {arguments.name or ''}".strip(),
    )
    _tell(arguments.out)
    return arguments.out


def _tell(folder: Path) -> None:
    """Few documents make a validation loss that says little, and nobody looks at the manifest."""
    manifest = Manifest.load(folder)
    assert manifest is not None
    for name, split in manifest.splits.items():
        print(f"{name}: {split.tokens:,} tokens, {split.documents:,} documents", file=sys.stderr)
    if manifest.splits["val"].documents < FEW:
        print(
            f"fewer than {FEW} documents to validate on: give more text, or a larger "
            "--val-fraction",
            file=sys.stderr,
        )


def given_of(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What was given on the command line; the functions have the defaults."""
    return {name: x for name in names if (x := getattr(arguments, name)) is not None}


def _texts(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.hf:
        return hf_documents(arguments.hf, arguments.name, "train", arguments.column)
    return chain.from_iterable(documents(source, arguments.column) for source in arguments.sources)


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """A named one, or `train:N`, trained on the first documents; a resumed call reuses it."""
    kind, _, size = arguments.tokenizer.partition(":")
    if kind != "train":
        return load_tokenizer(arguments.tokenizer)
    if not size.isdigit():
        raise ValueError(f"--tokenizer {arguments.tokenizer}: write train:16384")
    vocabulary, saved = int(size), arguments.out / TOKENIZER
    if saved.exists():
        before = load_tokenizer(str(saved))
        if before.vocabulary == vocabulary:
            return before
    return train_tokenizer(islice(_texts(arguments), TRAINING_DOCUMENTS), vocabulary)


def add_prepare(add: Callable[..., argparse.ArgumentParser]) -> None:
    sub = add("prepare", _prepare, "tokenize a corpus into shards")
    sub.add_argument(
        "sources", nargs="*", help="text, .jsonl, .parquet; also .xz .gz .zst; folders"
    )
    sub.add_argument("--hf", help="a Hugging Face dataset instead of files")
    sub.add_argument("--name", help="its configuration, such as sample-10BT")
    sub.add_argument(
        "--tokenizer", required=True, help="tokenizer.json, a hub name, bytes, train:N"
    )
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--tokens", type=count, help="stop after N training tokens, such as 3B")
    sub.add_argument("--column", default="text", help="of a table; default: text")
    sub.add_argument("--shard-tokens", type=count, help="tokens per shard")
    sub.add_argument("--val-fraction", type=float, help="share of the documents for validation")
    sub.add_argument("--workers", type=int, help="processes; default: one per core")


def _prepare(arguments: argparse.Namespace) -> None:
    print(prepare_from(arguments))
