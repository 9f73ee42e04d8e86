"""Averages of the last weights, evaluated beside the weights themselves.

Training does not know of them: the weights are the same to the bit with and without.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from angular_muown import averaging


class Averages:
    """Of a model's parameters, one for each window; `names` says what their losses are called.

    a <- a + (w - a) averaging(window)(k) after the k-th step that they have seen, so a window is a
    number of steps or a share of them. The first step's share is 1, so nothing is left of the
    values before it: neither zeros, for which a fixed decay needs a correction, nor the random
    initial weights, which it would forget only after some windows.

    Buffers are not averaged: the average is evaluated with those that the model has now.
    """

    def __init__(self, model: nn.Module, names: Mapping[float, str]) -> None:
        self.model, self.names = model, names
        # With FSDP these are the shards. During a pass the model has others in their place.
        self.weights: dict[str, Tensor] = dict(model.named_parameters())
        self.counts = dict.fromkeys(names, 0)
        self.copies = {
            window: {
                name: weight.detach().to(torch.float32, copy=True)
                for name, weight in self.weights.items()
            }
            for window in names
        }

    def update(self) -> None:
        """After a step of the optimizer. One launch for a window; nothing waits for the device."""
        weights = [weight.float() for weight in _local(self.weights)] if self.copies else []
        for window, copies in self.copies.items():
            self.counts[window] += 1
            share = averaging(window)(self.counts[window])
            torch._foreach_lerp_(_local(copies), weights, share)

    def evaluate(self, validate: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """The validation loss of each average; those without a step yet are left out."""
        losses = {}
        for window, name in self.names.items():
            if self.counts[window]:
                with self.swapped(window):
                    losses[name] = validate()["val_loss"]
        return losses

    @contextmanager
    def swapped(self, window: float) -> Iterator[None]:
        """The model with an average in the place of its weights, which then come back, to the bit.
        Values are copied and addresses stay, because compiled and recorded passes rely on them."""
        self._reshard()
        weights = _local(self.weights)
        kept = [weight.clone() for weight in weights]
        try:
            torch._foreach_copy_(weights, _local(self.copies[window]))
            yield
        finally:
            self._reshard()
            torch._foreach_copy_(weights, kept)

    def put(self, window: float) -> None:
        """An average in the place of the weights, for good."""
        torch._foreach_copy_(_local(self.weights), _local(self.copies[window]))

    def _reshard(self) -> None:
        """After a forward pass FSDP keeps the outermost weights gathered for the backward pass. The
        next forward pass would take these for the shards' values, which are other ones by then."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state(self) -> dict[str, Any]:
        """By window. The tensors are the averages themselves: whoever keeps them copies them."""
        return {
            str(window): {"count": self.counts[window], "weights": copies}
            for window, copies in self.copies.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """A window that the state has not begins with the next step."""
        for window, copies in self.copies.items():
            known = state.get(str(window))
            if known is not None:
                self.counts[window] = known["count"]
                for name, copy in copies.items():
                    copy.copy_(known["weights"][name])


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """What this rank holds of each, at the same address."""
    plain = (tensor.detach() for tensor in tensors.values())
    return [t.to_local() if hasattr(t, "to_local") else t for t in plain]
