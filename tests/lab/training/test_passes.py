"""Recorded passes without a GPU; tests/test_gpu.py records real ones."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_lab.training import recorded_passes
from angular_lab.training.recorded_passes import Passes


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return ((tokens @ self.weight - targets) ** 2).mean()


class FakeRecording:
    """Run the pass that would have been recorded at each call."""

    def __init__(self, passes: Passes, tokens: Tensor, targets: Tensor, share: float) -> None:
        self.passes, self.inputs = passes, (tokens, targets, share)

    def forward(self) -> Tensor:
        self.loss = self.passes.plain(*self.inputs)
        return self.loss.detach()

    def backward(self) -> None:
        self.loss.backward()


def run_steps(passes: Passes, width: int, steps: int, batch: int = 3) -> list[Tensor]:
    losses = []
    for step in range(steps):
        tokens = torch.full((batch + 1, width), float(step))
        part, targets = tokens.split(batch)[0], -tokens[1:]  # views, as parts of a batch are
        losses.append(passes.forward(part, targets, 1.0).clone())
        passes.backward()
        passes.clear()
    return losses


def test_gradients_keep_their_tensors_from_the_first_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded_passes, "_Recorded", FakeRecording)
    model = Model(4)
    passes = Passes(model, nullcontext(), recorded=True)
    losses = run_steps(passes, 4, 1)
    gradient = model.weight.grad
    assert gradient is not None
    assert not gradient.any()
    losses += run_steps(passes, 4, 6)[1:]
    assert model.weight.grad is gradient
    assert model.unused.grad is None  # so that the optimizer skips it
    plain = Passes(model, nullcontext(), recorded=False)
    assert run_steps(plain, 4, 6) == losses
    assert model.weight.grad is None


def test_nothing_is_compiled_while_a_pass_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second batch size of a process on, torch guards the size of a view's base; a tensor
    that is not a view would trigger a recompilation."""
    monkeypatch.setattr(recorded_passes, "_Recorded", FakeRecording)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    for batch in (2, 3):
        model = Model(4)
        model.compile(backend=backend)
        passes = Passes(model, nullcontext(), recorded=True)
        run_steps(passes, 4, recorded_passes.WARM_UP, batch)
        before = len(graphs)
        run_steps(passes, 4, 2, batch)
        assert len(graphs) == before
    torch.compiler.reset()
