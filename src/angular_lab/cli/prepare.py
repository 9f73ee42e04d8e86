"""The command prepare: from its arguments to shards."""

import argparse
import logging
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angular_lab.config.overrides import count
from angular_lab.errors import UserError

if TYPE_CHECKING:
    from angular_lab.data.shards import Manifest
    from angular_lab.data.tokenizer import Tokenizer

TRAINING_DOCUMENTS = 20_000  # enough for a vocabulary of tens of thousands
FEW_DOCUMENTS = 20
log = logging.getLogger(__name__)


def prepare(arguments: argparse.Namespace) -> None:
    from angular_lab.data.prepare import prepare as write

    if bool(arguments.hf) == bool(arguments.sources):
        raise UserError("give either files and folders, or a dataset with --hf")
    source = arguments.hf or ", ".join(arguments.sources)
    manifest = write(
        _documents(arguments),
        _tokenizer(arguments),
        arguments.out,
        **given_of(arguments, "tokens", "shard_tokens", "val_fraction", "workers"),
        source=f"{source} [{arguments.column}] {arguments.name or ''}".strip(),
    )
    for name, split in manifest.splits.items():
        log.info("%s: %s tokens, %s documents", name, f"{split.tokens:,}", f"{split.documents:,}")
    _note_validation(manifest)
    print(arguments.out)


def _note_validation(manifest: "Manifest") -> None:
    """Report how the validation split came about where that is not as usual."""
    val, fraction = manifest.splits["val"], manifest.arguments["val_fraction"]
    if held_out := manifest.arguments.get("held_out"):
        log.warning(
            "validation has the last %s tokens of the last document, because no document was "
            "drawn for it as a whole; --val-fraction, in another folder, changes how many",
            f"{held_out:,}",
        )
    elif not val.documents:
        log.warning(
            "no validation split (--val-fraction %g), and training needs one: prepare again with "
            "--val-fraction above 0, in another folder",
            fraction,
        )
    elif val.documents < FEW_DOCUMENTS:
        log.warning(
            "fewer than %d documents for validation, whose loss will be noisy: prepare a larger "
            "corpus, or use a larger --val-fraction",
            FEW_DOCUMENTS,
        )


def given_of(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that the user gave; the functions define the defaults."""
    return {name: x for name in names if (x := getattr(arguments, name)) is not None}


def _documents(arguments: argparse.Namespace) -> Iterator[str]:
    from angular_lab.data.corpus import documents, hf_documents

    if arguments.hf:
        return hf_documents(arguments.hf, arguments.name, "train", arguments.column)
    return chain.from_iterable(documents(source, arguments.column) for source in arguments.sources)


def _tokenizer(arguments: argparse.Namespace) -> "Tokenizer":
    """Load a tokenizer, or train one for `train:N`; a resumed command uses the one it trained."""
    from angular_lab.data.prepare import TOKENIZER
    from angular_lab.data.tokenizer import load_tokenizer, train_tokenizer

    kind, _, size = arguments.tokenizer.partition(":")
    if kind != "train":
        return load_tokenizer(arguments.tokenizer)
    if not size.isdigit():
        raise UserError(
            f"--tokenizer {arguments.tokenizer}: give the size of the vocabulary, as in train:16384"
        )
    vocabulary, saved = int(size), arguments.out / TOKENIZER
    if saved.exists():
        trained = load_tokenizer(str(saved))
        if trained.vocabulary == vocabulary:
            return trained
    return train_tokenizer(islice(_documents(arguments), TRAINING_DOCUMENTS), vocabulary)


def add_prepare(add: Callable[..., argparse.ArgumentParser]) -> None:
    sub = add("prepare", prepare, "convert a corpus to token shards")
    sub.add_argument(
        "sources", nargs="*", metavar="FILE_OR_FOLDER",
        help="plain text, .jsonl or .parquet; all but parquet also as .xz, .gz, .bz2 or .zst",
    )  # fmt: skip
    sub.add_argument("--hf", metavar="DATASET", help="a Hugging Face dataset instead of files")
    sub.add_argument("--name", help="the dataset's configuration, such as sample-10BT")
    sub.add_argument("--column", default="text", help="holds the documents; default: text")
    sub.add_argument(
        "--tokenizer", required=True,
        help="a tokenizer.json, a name on the Hugging Face hub, bytes, or train:N for a new one "
        "with N entries",
    )  # fmt: skip
    sub.add_argument("--out", type=Path, required=True, help="the folder for the shards")
    sub.add_argument("--tokens", type=count, help="stop after this many train tokens, such as 3B")
    sub.add_argument("--shard-tokens", type=count, help="tokens per shard; default: 100M")
    sub.add_argument(
        "--val-fraction", type=float,
        help="the fraction of the documents for validation or, if that is none of them, of the "
        "tokens, from the end of the last document; default: 0.005",
    )  # fmt: skip
    sub.add_argument("--workers", type=int, help="processes that encode; default: all cores")
