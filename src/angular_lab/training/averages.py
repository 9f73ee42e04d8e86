"""Averages of recent weights, evaluated in addition to the weights themselves.

The library's optimizers keep one average each. A run keeps several, with any optimizer, so that
they are stored here; the library updates them and swaps them in.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from angular_muown import Group, average


class Averages:
    """Averages of a model's parameters, one per window; `names` has the names of their losses.

    Training does not depend on them: the weights are the same bit for bit with and without.
    Buffers are not averaged: an average is evaluated with the model's current ones.
    """

    def __init__(self, model: nn.Module, names: Mapping[float, str]) -> None:
        self.model, self.names = model, names
        # With FSDP these are the shards: during a pass the model has other parameters instead.
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        params = list(self.parameters.values())
        self.groups: dict[float, Group] = {
            window: {"params": params, "lr": 0.0, "average": window, "averaged": 0}
            for window in names
        }
        self.states = {
            window: {p: {"average": p.detach().to(torch.float32, copy=True)} for p in params}
            for window in names
        }

    def count(self, window: float) -> int:
        """Return the number of steps in an average."""
        return int(self.groups[window]["averaged"])

    def values(self, window: float) -> dict[str, Tensor]:
        """Return an average by the names of the parameters; not a copy."""
        states = self.states[window]
        return {name: states[p]["average"] for name, p in self.parameters.items()}

    def update(self) -> None:
        """Include the weights after a step of the optimizer."""
        for window, group in self.groups.items():
            average.update([group], self.states[window])

    def swapped_in(self, window: float) -> AbstractContextManager[None]:
        """Replace the weights by an average inside a `with` block; restore them exactly."""
        return average.in_place_of_weights([self.groups[window]], self.states[window], self.model)

    def evaluate(self, validate: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return the validation loss of each average, without those that have no step yet."""
        losses = {}
        for window, name in self.names.items():
            if self.count(window):
                with self.swapped_in(window):
                    losses[name] = validate()["val_loss"]
        return losses

    @torch.no_grad()
    def replace_weights(self, window: float) -> None:
        """Replace the weights by an average permanently."""
        for p, state in self.states[window].items():
            p.copy_(state["average"])

    def state(self) -> dict[str, Any]:
        """Return the state by window. Its tensors are the averages: copy them to keep them."""
        return {
            str(window): {"count": self.count(window), "weights": self.values(window)}
            for window in self.names
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. A window that it lacks begins with the next step."""
        for window, group in self.groups.items():
            if str(window) in state:
                group["averaged"] = state[str(window)]["count"]
                for name, value in self.values(window).items():
                    value.copy_(state[str(window)]["weights"][name])
