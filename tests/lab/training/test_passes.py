"""Recorded passes, as far as a CPU can show: tests/test_gpu.py has the rest."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_lab.training import recorded_passes as passes
from angular_lab.training.recorded_passes import Passes


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return ((tokens @ self.weight - targets) ** 2).mean()


class Replayed:
    """What would be recorded, taken anew at each call."""

    def __init__(self, owner: Passes, tokens: Tensor, targets: Tensor, share: float) -> None:
        self.owner, self.inputs = owner, (tokens, targets, share)

    def forward(self) -> Tensor:
        self.loss = self.owner.plain(*self.inputs)
        return self.loss.detach()

    def backward(self) -> None:
        self.loss.backward()


def take(owner: Passes, width: int, steps: int, batch: int = 3) -> list[Tensor]:
    losses = []
    for step in range(steps):
        tokens = torch.full((batch + 1, width), float(step))
        part, targets = tokens.split(batch)[0], -tokens[1:]  # views, as parts of a batch are
        losses.append(owner.forward(part, targets, 1.0).clone())
        owner.backward()
        owner.clear()
    return losses


def test_gradients_stay_where_they_lie_from_the_first_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "_Recorded", Replayed)
    model = Model(4)
    owner = Passes(model, nullcontext(), recorded=True)
    losses = take(owner, 4, 1)
    first = model.weight.grad
    assert first is not None
    assert not first.any()
    losses += take(owner, 4, 6)[1:]
    assert model.weight.grad is first
    assert model.unused.grad is None  # and the optimizer leaves it alone
    plain = Passes(model, nullcontext(), recorded=False)
    assert take(plain, 4, 6) == losses
    assert model.weight.grad is None


def test_nothing_is_compiled_while_a_pass_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second batch size of a process on, torch asks for the size of a view's base; a
    tensor of its own has none, and all is compiled anew."""
    monkeypatch.setattr(passes, "_Recorded", Replayed)
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    torch.compiler.reset()
    for batch in (2, 3):
        model = Model(4)
        model.compile(backend=backend)
        owner = Passes(model, nullcontext(), recorded=True)
        take(owner, 4, passes.WARM_UP, batch)
        before = len(compiled)
        take(owner, 4, 2, batch)
        assert len(compiled) == before
    torch.compiler.reset()
