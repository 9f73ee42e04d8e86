"""Generate tokens with a model, one after the other."""

import torch
from torch import Tensor

from angular_lab.models.base import LanguageModel


def choose(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None
) -> Tensor:
    """Return one id for each row of logits, drawn from the `top_k` likeliest."""
    best = logits.topk(min(top_k, logits.shape[-1]))
    probabilities = torch.softmax(best.values / max(temperature, 1e-6), dim=-1)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return best.indices.gather(-1, drawn).squeeze(-1)


@torch.no_grad()
def continue_all(
    model: LanguageModel, prompts: Tensor, length: int, vocabulary: int, seed: int = 0
) -> Tensor:
    """Return prompts of equal length, each continued by `length` tokens.

    Every rank of a sharded model has to call this, and all take the same passes. The choices are
    made on the CPU by a generator of their own: training draws the same numbers with and without.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    was_training = model.training
    model.eval()
    # Passes of growing length would be compiled again and again.
    with torch.compiler.set_stance("force_eager"):
        for _ in range(length):
            logits = model(prompts[:, -model.spec.sequence :])[:, -1, :vocabulary]
            chosen = choose(logits.float().cpu(), 0.8, 50, generator)
            prompts = torch.cat([prompts, chosen[:, None].to(prompts.device)], dim=1)
    model.train(was_training)
    return prompts
