"""Text to ids and back: a tokenizer.json, a name on the Hugging Face hub, or plain bytes."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from angular_lab.data.corpus import END_OF_TEXT, optional
from angular_lab.data.shard_files import atomic_file

# What known tokenizers call the token between documents, in the order of trust.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
BYTES_JSON = json.dumps({"angular_lab": "bytes", "vocabulary": 257, "end_of_text": 256})


class _Backend(Protocol):
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer:
    """Encodes text as text: what looks like a special token in it gets no special id.

    So `end_of_text` never comes out of `encode`, and nothing is added at either end.
    """

    def __init__(self, backend: _Backend, text: str, vocabulary: int, end_of_text: int) -> None:
        self._backend, self._json = backend, text
        self.vocabulary, self.end_of_text = vocabulary, end_of_text

    def encode(self, text: str) -> list[int]:
        return self._backend.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._backend.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids)

    def save(self, path: Path) -> None:
        """As json; `load_tokenizer` of that path gives this tokenizer back."""
        with atomic_file(Path(path)) as file:
            file.write(self._json.encode())

    @property
    def for_transformers(self) -> dict[str, str] | None:
        """Files from which its AutoTokenizer makes this tokenizer; None for bytes, which it does
        not have."""
        if self._json == BYTES_JSON:
            return None
        end = self.decode([self.end_of_text])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
        return {"tokenizer.json": self._json, "tokenizer_config.json": json.dumps(config)}

    @property
    def fingerprint(self) -> str:
        """sha256 of what `save` writes."""
        return hashlib.sha256(self._json.encode()).hexdigest()


class _Bytes:
    """An id per byte, and 256 between documents."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        end = END_OF_TEXT.encode()
        parts = (end if i == 256 else bytes([i]) for i in ids)
        return b"".join(parts).decode(errors="replace")


class _Library:
    """The `tokenizers` library, without truncation, padding and special tokens."""

    def __init__(self, inner: Any) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # as text
        self._inner = inner

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # the "fast" form leaves out the offsets, which nobody reads here
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)


def _from_library(inner: Any, text: str, label: str) -> Tokenizer:
    vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
    ends = [vocabulary[name] for name in END_NAMES if name in vocabulary]
    if not ends:
        raise ValueError(
            f"{label} has no token that ends a text; it needs one of {', '.join(END_NAMES)}"
        )
    # ids may have holes, so the largest counts and not how many there are
    return Tokenizer(_Library(inner), text, max(vocabulary.values()) + 1, ends[0])


def load_tokenizer(name: str) -> Tokenizer:
    """ "bytes", the path of a tokenizer.json, or a name on the Hugging Face hub."""
    if name == "bytes":
        return Tokenizer(_Bytes(), BYTES_JSON, 257, 256)
    path = Path(name)
    if path.is_file():
        return _from_file(path)
    if path.suffix == ".json" or path.is_dir():
        raise ValueError(f"tokenizer {name}: no such file; give the path of a tokenizer.json")
    library = optional("tokenizers").Tokenizer
    try:
        inner = library.from_pretrained(name)
    except Exception as error:  # the library raises bare Exception for all of them
        raise ValueError(
            f"tokenizer {name!r} is neither 'bytes' nor a file, and the Hugging Face hub did not "
            f"give it: either there is no such name or this machine is offline; download its "
            f"tokenizer.json and give the path ({type(error).__name__}: {error})"
        ) from error
    return _from_library(inner, inner.to_str(), name)


def _from_file(path: Path) -> Tokenizer:
    # Its own text and not what the library makes of it: the fingerprint outlives library versions.
    try:
        text = path.read_text("utf-8")
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no tokenizer.json: {error}") from error
    if content == json.loads(BYTES_JSON):
        return load_tokenizer("bytes")
    library = optional("tokenizers").Tokenizer
    try:
        inner = library.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is no tokenizer.json: {error}") from error
    return _from_library(inner, text, str(path))


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE with <|endoftext|> as id 0; a small corpus may give fewer entries."""
    if vocabulary < 257:
        raise ValueError(f"vocabulary={vocabulary} must be at least 257: all bytes and the end")
    library = optional("tokenizers")
    pre, decoders = library.pre_tokenizers, library.decoders
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(documents, trainer)
    return _from_library(inner, inner.to_str(), "the new tokenizer")
