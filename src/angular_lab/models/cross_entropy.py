"""Mean cross-entropy that stores only the logits, in their dtype, for the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CACHE = 2**20  # bytes of logits per pass on a CPU: a core's cache, next to float32 copies


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_rows(function: Callable[..., Tensor], logits: Tensor, *others: Tensor) -> Tensor:
    """Return `function` of tensors whose rows it treats independently.

    An eager CPU gets a few rows at a time: intermediate tensors as large as all logits would leave
    the cache, and each would be fresh memory. A compiler fuses them away.
    """
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return function(logits, *others)
    rows = max(1, CACHE // (logits.shape[-1] * logits.element_size()))
    parts = zip(*(x.split(rows) for x in (logits, *others)), strict=True)
    return torch.cat([function(*part) for part in parts])


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that recomputes probabilities in the backward pass.

    torch's version stores float32 log-probabilities, for bfloat16 logits twice their size. This one
    stores the logits and one float32 number per row.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        normalizer = _by_rows(lambda x: torch.logsumexp(_at_least_float32(x), dim=-1), logits)
        ctx.save_for_backward(logits, targets, normalizer)
        target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (normalizer - target_logits).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        factor = grads[0] / len(targets)

        def gradient(x: Tensor, target: Tensor, normalizer: Tensor) -> Tensor:
            p = (_at_least_float32(x) - normalizer.unsqueeze(-1)).exp()
            # A comparison instead of an index: it fuses into a single pass over the logits.
            is_target = torch.arange(p.shape[-1], device=p.device) == target.unsqueeze(-1)
            return ((p - is_target.to(p.dtype)) * factor).to(x.dtype)

        return _by_rows(gradient, logits, targets, normalizer), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over rows of -log softmax(logits)[target], in at least float32."""
    loss: Tensor = _CrossEntropy.apply(logits, targets)
    return loss
