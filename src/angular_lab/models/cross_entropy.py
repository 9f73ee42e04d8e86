"""Mean cross-entropy that keeps the logits as they came, and nothing of their size beside them."""

from typing import Any

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _CrossEntropy(torch.autograd.Function):
    """torch's own keeps float32 log-probabilities: for logits in bfloat16 twice their size, written
    and read again. Here the logits
    themselves are kept, with one float32 number per row; the rest is computed again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        x = _wide(logits)
        normalizer = torch.logsumexp(x, dim=-1)
        ctx.save_for_backward(logits, targets, normalizer)
        chosen = x.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (normalizer - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        p = (_wide(logits) - normalizer.unsqueeze(-1)).exp()
        # A comparison, not an index: it fuses into the one pass over the logits.
        is_target = torch.arange(p.shape[-1], device=p.device) == targets.unsqueeze(-1)
        grad = (p - is_target.to(p.dtype)) * (grads[0] / len(targets))
        return grad.to(logits.dtype), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over rows of -log softmax(logits)[target], in float32 (float64 for float64)."""
    loss: Tensor = _CrossEntropy.apply(logits, targets)
    return loss
