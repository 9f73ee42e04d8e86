"""Data for the examples that needs no download: sentences of a small grammar, images of bars."""

import random

import torch
from torch import Tensor

WORDS = (
    ("the", "a", "every", "no"),
    ("small", "old", "green", "quiet", "round"),
    ("cat", "teacher", "river", "lamp", "garden"),
    ("sees", "follows", "forgets", "paints"),
    ("the", "a", "every", "no"),
    ("fish", "letter", "mountain", "song"),
)


def sentences(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choice(words) for words in WORDS) + "." for _ in range(count)]


class Windows(torch.utils.data.Dataset):
    """Byte tokens in windows, as a causal language model of transformers takes them."""

    def __init__(self, length: int, count: int = 512) -> None:
        text = " ".join(sentences(count)).encode()
        self.tokens = torch.tensor(list(text)).unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class Bars(torch.utils.data.Dataset):
    """Noisy images of one bright bar, upright or lying: two classes."""

    def __init__(self, size: int, count: int = 256) -> None:
        noise = torch.Generator().manual_seed(0)
        self.labels = torch.arange(count) % 2
        self.images = 0.5 * torch.randn(count, 3, size, size, generator=noise)
        at = torch.randint(size, (count,), generator=noise)
        for image, label, i in zip(self.images, self.labels, at, strict=True):
            (image if label else image.mT)[:, i] += 2.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[i], "labels": self.labels[i]}
