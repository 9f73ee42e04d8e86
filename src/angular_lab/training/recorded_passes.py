"""Forward and backward passes; on one GPU recorded once as CUDA graphs and replayed.

A pass of a small model is hundreds of short kernels, which the host launches more slowly than the
GPU runs them. A recorded pass is two launches, forward and backward, so that the loss is copied to
the host during the backward pass. The kernels are the same, and so are the results, bit for bit.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from angular_lab.config.spec import Spec
from angular_lab.models import LanguageModel
from angular_lab.training.ranks import Ranks

_Key = tuple[torch.Size, float]
WARM_UP = 3  # passes before one is recorded: compilation, and what libraries allocate at first use


def can_record(spec: Spec, model: LanguageModel, ranks: Ranks) -> bool:
    """True on a single GPU: with several ranks, the backward pass communicates."""
    single_gpu = ranks.world == 1 and ranks.device.type == "cuda"
    return single_gpu and spec.compile and model.recordable


class Passes:
    """Run the passes of a model; with `recorded=False`, never record them."""

    def __init__(
        self, parallel: nn.Module, autocast: AbstractContextManager[Any], recorded: bool
    ) -> None:
        self.parallel, self.autocast, self.recorded = parallel, autocast, recorded
        self.parameters = [p for p in parallel.parameters() if p.requires_grad]
        self._inputs: dict[_Key, tuple[Tensor, Tensor]] = {}
        self._counts: dict[_Key, int] = {}
        self._recordings: dict[_Key, _Recorded] = {}
        self._last: _Recorded | Tensor | None = None

    def forward(self, tokens: Tensor, targets: Tensor, share: float) -> Tensor:
        """Return the mean loss times `share`, detached."""
        key = (tokens.shape, share)
        if self.recorded:
            tokens, targets = self._copy_inputs(key, tokens, targets)
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] > WARM_UP:
                if key not in self._recordings:
                    self._recordings[key] = _Recorded(self, tokens, targets, share)
                self._last = self._recordings[key]
                return self._recordings[key].forward()
        loss = self.plain(tokens, targets, share)
        self._last = loss
        return loss.detach()

    def _copy_inputs(self, key: _Key, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the inputs to the tensors that recorded passes read.

        The passes before the recording read them too: torch might recompile for a tensor that is
        not a view of a batch, which must not happen during the recording.
        """
        if key not in self._inputs:
            self._inputs[key] = tokens.clone(), targets.clone()
        for target, values in zip(self._inputs[key], (tokens, targets), strict=True):
            target.copy_(values)
        return self._inputs[key]

    def plain(self, tokens: Tensor, targets: Tensor, share: float) -> Tensor:
        with self.autocast:
            loss: Tensor = self.parallel(tokens, targets) * share
        return loss

    def backward(self) -> None:
        """Accumulate the gradients of the last forward pass."""
        assert self._last is not None
        self._last.backward()
        if isinstance(self._last, Tensor):
            self._last = None  # frees the graph

    def clear(self) -> None:
        """Clear the gradients.

        Recorded passes accumulate into fixed tensors, so those are zeroed in place. Parameters that
        no pass has reached keep no gradient, so that the optimizer skips them.
        """
        if not self.recorded:
            for p in self.parameters:
                p.grad = None
            return
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])


class _Recorded:
    """A forward and a backward pass that read fixed input tensors."""

    def __init__(self, passes: Passes, tokens: Tensor, targets: Tensor, share: float) -> None:
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(tokens.device)
        # thread_local: another thread is copying the next batch to the device
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
