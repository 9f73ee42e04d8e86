"""Mean cross-entropy that stores only the logits, in their dtype, for the backward pass."""

from typing import Any

import torch
from torch import Tensor


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that recomputes probabilities in the backward pass.

    torch's version stores float32 log-probabilities, for bfloat16 logits twice their size. This one
    stores the logits and one float32 number per row.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        x = _at_least_float32(logits)
        normalizer = torch.logsumexp(x, dim=-1)
        ctx.save_for_backward(logits, targets, normalizer)
        target_logits = x.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (normalizer - target_logits).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        p = (_at_least_float32(logits) - normalizer.unsqueeze(-1)).exp()
        # A comparison instead of an index: it fuses into a single pass over the logits.
        is_target = torch.arange(p.shape[-1], device=p.device) == targets.unsqueeze(-1)
        grad = (p - is_target.to(p.dtype)) * (grads[0] / len(targets))
        return grad.to(logits.dtype), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over rows of -log softmax(logits)[target], in at least float32."""
    loss: Tensor = _CrossEntropy.apply(logits, targets)
    return loss
