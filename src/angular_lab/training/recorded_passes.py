"""Forward and backward passes; on one GPU recorded once and replayed.

A small model's pass is hundreds of short kernels, which the host starts more slowly than the GPU
runs them. A recorded pass is two launches, one forward and one backward, so that the loss can be on
its way to the host while the backward pass runs. The kernels are the same, and so are the bits.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from angular_lab.config.spec import Spec
from angular_lab.models import LanguageModel
from angular_lab.training.ranks import Ranks

_Key = tuple[torch.Size, float]
WARM_UP = 3  # passes before one is recorded: compilation, and what libraries make at first use


def can_record(spec: Spec, model: LanguageModel, ranks: Ranks) -> bool:
    """Ranks that exchange gradients during the backward pass are left to torch."""
    alone = ranks.world == 1 and ranks.device.type == "cuda"
    return alone and spec.compile and model.recordable


class Passes:
    """Of a model as the loop calls it; `recorded=False` for plain ones."""

    def __init__(
        self, parallel: nn.Module, autocast: AbstractContextManager[Any], recorded: bool
    ) -> None:
        self.parallel, self.autocast, self.recorded = parallel, autocast, recorded
        self.parameters = [p for p in parallel.parameters() if p.requires_grad]
        self._inputs: dict[_Key, tuple[Tensor, Tensor]] = {}
        self._counts: dict[_Key, int] = {}
        self._known: dict[_Key, _Recorded] = {}
        self._last: _Recorded | Tensor | None = None

    def forward(self, tokens: Tensor, targets: Tensor, share: float) -> Tensor:
        """The mean loss times `share`, detached."""
        key = (tokens.shape, share)
        if self.recorded:
            tokens, targets = self._placed(key, tokens, targets)
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] > WARM_UP:
                if key not in self._known:
                    self._known[key] = _Recorded(self, tokens, targets, share)
                self._last = self._known[key]
                return self._known[key].forward()
        loss = self.plain(tokens, targets, share)
        self._last = loss
        return loss.detach()

    def _placed(self, key: _Key, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs at the place where a recorded pass reads them. The passes before it read them
        there too: a view of a batch instead of a tensor of its own could make torch compile anew,
        which must not happen while a pass is recorded."""
        if key not in self._inputs:
            self._inputs[key] = tokens.clone(), targets.clone()
        for place, values in zip(self._inputs[key], (tokens, targets), strict=True):
            place.copy_(values)
        return self._inputs[key]

    def plain(self, tokens: Tensor, targets: Tensor, share: float) -> Tensor:
        with self.autocast:
            loss: Tensor = self.parallel(tokens, targets) * share
        return loss

    def backward(self) -> None:
        """Add the gradients of the last forward pass."""
        assert self._last is not None
        self._last.backward()
        if isinstance(self._last, Tensor):
            self._last = None  # and all that it keeps alive

    def clear(self) -> None:
        """Forget the gradients. Recorded passes add to theirs where they lie, so from the first
        pass on they stay there. What no pass has reached gets none, so that the optimizer leaves
        it alone."""
        if not self.recorded:
            for p in self.parameters:
                p.grad = None
            return
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])


class _Recorded:
    """A forward and a backward pass for inputs at one place."""

    def __init__(self, passes: Passes, tokens: Tensor, targets: Tensor, share: float) -> None:
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(tokens.device)
        # thread_local: the next batch is on its way to the device in another thread
        mode = "thread_local"
        with torch.cuda.graph(self._forward, stream=stream, capture_error_mode=mode):
            loss = passes.plain(tokens, targets, share)
        pool = self._forward.pool()
        with torch.cuda.graph(self._backward, pool, stream, capture_error_mode=mode):
            loss.backward()
        self.loss = loss.detach()

    def forward(self) -> Tensor:
        self._forward.replay()
        return self.loss

    def backward(self) -> None:
        self._backward.replay()
