"""The lab's cross-entropy against torch's, and its gradient against finite differences."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from angular_lab.models import cross_entropy as module
from angular_lab.models.cross_entropy import cross_entropy


def example(dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(17, 41, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 41, (17,), generator=generator)
    return logits.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)]
)
def test_loss_and_gradient_match_torch(dtype: torch.dtype, error: float, scale: float) -> None:
    """For bfloat16 logits the loss is float32, and only the gradient is rounded."""
    logits, targets = example(dtype, scale)
    wide = logits.detach().to(torch.float64).requires_grad_()
    loss, expected = cross_entropy(logits, targets), F.cross_entropy(wide, targets)
    assert abs(loss - expected) <= 1e-6 * scale
    (grad,) = torch.autograd.grad(3 * loss, logits)
    (expected_grad,) = torch.autograd.grad(3 * expected, wide)
    assert grad.dtype == dtype
    # float32 resolves a logit of 300 to 2e-5 only
    assert (grad - expected_grad).norm() <= error * max(1.0, scale / 10) * expected_grad.norm()


def test_gradient_matches_finite_differences() -> None:
    logits, targets = example(torch.float64)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets), (logits,))


class Sizes(TorchDispatchMode):
    """Record the number of entries of every tensor that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.entries += [result.numel()] if isinstance(result, torch.Tensor) else []
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_takes_a_few_rows_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the gradient is as large as the logits, and the result is that of all rows."""
    logits, targets = example(dtype)
    whole = cross_entropy(logits, targets)
    (expected,) = torch.autograd.grad(whole, logits)
    monkeypatch.setattr(module, "CACHE", 3 * 41 * dtype.itemsize)
    with Sizes() as sizes:
        loss = cross_entropy(logits, targets)
        (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.equal(loss, whole)
    assert torch.equal(gradient, expected)
    assert sizes.entries.count(logits.numel()) == 1
    assert sorted(sizes.entries)[-2] == 3 * 41
