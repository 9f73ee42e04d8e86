"""Tokenizers: a tokenizer.json, a name on the Hugging Face hub, or plain bytes."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from angular_lab.data import hub
from angular_lab.data.corpus import END_OF_TEXT, optional
from angular_lab.data.shards import atomic_file
from angular_lab.errors import UserError

# What common tokenizers call the token between documents, in order of preference.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
BYTES_JSON = json.dumps({"angular_lab": "bytes", "vocabulary": 257, "end_of_text": 256})


class Tokenizer(ABC):
    """Encodes text verbatim: a special token's name in a document gets no special id.

    `encode` therefore never returns `end_of_text`, and adds nothing at either end.
    """

    # the files that transformers' AutoTokenizer needs, or None if it lacks this tokenizer
    for_transformers: dict[str, str] | None = None

    def __init__(self, content: str, vocabulary: int, end_of_text: int) -> None:
        self._json = content
        self.vocabulary, self.end_of_text = vocabulary, end_of_text

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def count_bytes(self, ids: Sequence[int]) -> int:
        """Return the bytes of the text that the ids of one document stand for."""
        return len(self.decode(ids).encode())

    def save(self, path: Path) -> None:
        """Write a JSON file from which `load_tokenizer` restores this tokenizer."""
        with atomic_file(Path(path)) as file:
            file.write(self._json.encode())

    @property
    def fingerprint(self) -> str:
        """The sha256 of the file that `save` writes."""
        return hashlib.sha256(self._json.encode()).hexdigest()


class BytesTokenizer(Tokenizer):
    """One id per byte, and 256 between documents."""

    def __init__(self) -> None:
        super().__init__(BYTES_JSON, 257, 256)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def count_bytes(self, ids: Sequence[int]) -> int:
        return len(ids)  # also if a character is cut

    def decode(self, ids: Sequence[int]) -> str:
        end = END_OF_TEXT.encode()
        parts = (end if i == 256 else bytes([i]) for i in ids)
        return b"".join(parts).decode(errors="replace")


class LibraryTokenizer(Tokenizer):
    """One of the `tokenizers` library, without truncation, padding and special tokens."""

    def __init__(self, inner: Any, content: str, label: str) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # as text
        self._inner = inner
        ids: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        end = next((name for name in END_NAMES if name in ids), None)
        if end is None:
            names = ", ".join(END_NAMES)
            raise UserError(f"{label} has no end-of-text token; it needs one of {names}")
        # ids may have gaps, so the size follows from the largest id and not from their number
        super().__init__(content, max(ids.values()) + 1, ids[end])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
        self.for_transformers = {
            "tokenizer.json": content,
            "tokenizer_config.json": json.dumps(config),
        }

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # the "fast" variant does not compute offsets, which are not needed here
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes", that of a tokenizer.json's path, or one of the hub by name."""
    if name == "bytes":
        return BytesTokenizer()
    path = Path(name)
    if path.is_file():
        return _from_file(path)
    if path.suffix == ".json" or path.is_dir():
        raise UserError(f"tokenizer {name}: no such file; give the path of a tokenizer.json")
    library = optional("tokenizers").Tokenizer
    try:
        with hub.look_up():
            inner = library.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception in all cases
        raise UserError(
            f"tokenizer {name!r} is neither 'bytes' nor a file, and cannot be loaded from the "
            "Hugging Face hub: the name does not exist there or this machine is offline; download "
            f"its tokenizer.json and give the path ({type(error).__name__}: {error})"
        ) from error
    return LibraryTokenizer(inner, inner.to_str(), name)


def _from_file(path: Path) -> Tokenizer:
    # Keep the file's own content, not the library's rendering: the fingerprint must not depend on
    # the library's version.
    try:
        content = path.read_text("utf-8")
        if json.loads(content) == json.loads(BYTES_JSON):
            return BytesTokenizer()
    except ValueError as error:
        raise UserError(f"{path} is not a tokenizer.json: {error}") from error
    library = optional("tokenizers").Tokenizer
    try:
        inner = library.from_str(content)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path} is not a tokenizer.json: {error}") from error
    return LibraryTokenizer(inner, content, str(path))


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE with <|endoftext|> as id 0; a small corpus may give fewer entries."""
    if vocabulary < 257:
        raise UserError(
            f"vocabulary={vocabulary} must be at least 257: 256 bytes and the end-of-text token"
        )
    library = optional("tokenizers")
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(documents, trainer)
    return LibraryTokenizer(inner, inner.to_str(), "the trained tokenizer")
