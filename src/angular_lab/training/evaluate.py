"""What is measured of a model without training it: losses on validation windows, the same for any
number of ranks, losses on other text, and samples of what it writes."""

from math import exp, log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from angular_lab.config.spec import Spec
from angular_lab.data.batches import Tokens
from angular_lab.data.evaluated_text import tokenizer_of
from angular_lab.models import LanguageModel
from angular_lab.models.generate import continue_all
from angular_lab.training.ranks import Ranks


def autocast_of(spec: Spec, device: torch.device) -> torch.autocast:
    """Return the context of a run's forward passes, the same in training and in evaluations."""
    return torch.autocast(device.type, torch.bfloat16, enabled=spec.precision != "fp32")


@torch.no_grad()
def evaluate(
    model: nn.Module, tokens: Tokens, count: int, batch: int, ranks: Ranks, autocast: torch.autocast
) -> dict[str, float]:
    """Return the metrics of the first `count` windows.

    Batches are distributed over the ranks; those of a tensor-parallel group share a batch. Every
    window has the same length, so the mean over windows is the mean over tokens. A rank without a
    batch repeats the first one with weight 0: a sharded model's forward pass is a collective, so
    all ranks need the same number of passes.
    """
    count = min(count, len(tokens))
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    model.eval()
    for first in range(0, count, batch * ranks.data_world):
        start = first + batch * ranks.data_rank
        indices = np.arange(start, min(start + batch, count))
        windows = tokens.windows(indices if len(indices) else np.arange(min(batch, count)))
        data = torch.from_numpy(windows).to(ranks.device)
        with autocast:
            loss = model(data[:, :-1], data[:, 1:])
        total += loss.double() * len(indices)
    model.train()
    loss_value = (ranks.sum(total) / ranks.tensor / count).item()
    metrics = {"val_loss": loss_value, "val_perplexity": exp(min(loss_value, 700.0))}
    if tokens.bytes_per_token:  # of the whole split; `eval` counts those of the windows
        metrics["val_bits_per_byte"] = loss_value / log(2) / tokens.bytes_per_token
    return metrics


@torch.no_grad()
def text_loss(
    model: nn.Module, ids: NDArray[np.int64], sequence: int, batch: int, autocast: torch.autocast
) -> float:
    """Return the mean loss of all ids but the first, each predicted from those before it in its
    window. Windows follow each other as in training; the last one may be shorter."""
    device = next(model.parameters()).device
    count = (ids.size - 1) // sequence
    pieces = [
        np.stack([ids[i * sequence : (i + 1) * sequence + 1] for i in range(first, last)])
        for first in range(0, count, batch)
        for last in [min(first + batch, count)]
    ]
    if (ids.size - 1) % sequence:
        pieces.append(ids[None, count * sequence :])
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    for piece in pieces:
        data = torch.from_numpy(piece).to(device)
        with autocast:
            loss = model(data[:, :-1], data[:, 1:])
        total += loss.double() * (piece.shape[1] - 1) * len(piece)
    model.train()
    return (total / (ids.size - 1)).item()


class Samples:
    """Text that a model writes during training: the beginnings of a few validation sequences, and
    how it continues them. The same prompts and the same random numbers every time."""

    COUNT, PROMPT, LENGTH = 3, 32, 64  # prompts; tokens of each, and of its continuation

    def __init__(self, validation: Tokens, device: torch.device) -> None:
        self.tokenizer = tokenizer_of(validation.folder)
        count = min(self.COUNT, len(validation))
        spread = np.arange(count) * len(validation) // count  # over the documents
        size = min(self.PROMPT, validation.sequence // 2 or 1)
        windows = validation.windows(spread)[:, :size]
        self.prompts = torch.from_numpy(windows).to(device)

    def write(self, model: LanguageModel) -> list[dict[str, str]]:
        """Return each prompt and the text that follows it."""
        ids = continue_all(model, self.prompts, self.LENGTH, self.tokenizer.vocabulary)
        size, decode = self.prompts.shape[1], self.tokenizer.decode
        return [{"prompt": decode(x[:size]), "text": decode(x[size:])} for x in ids.tolist()]
