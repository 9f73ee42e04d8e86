"""Averages of recent weights, evaluated in addition to the weights themselves.

The library's optimizers keep one average each. A run keeps several, with any optimizer, so that
they are stored here; the library updates them and swaps them in.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from angular_muown import Group, average


class Averages:
    """Averages of a model's parameters, one per window; `names` has the names of their losses.

    Training does not depend on them: the weights are the same bit for bit with and without.
    Buffers are not averaged: an average is evaluated with the model's current ones.

    Each average can be evaluated in further forms: `sphere`, where the rows of `matrices` have the
    average of their lengths, since averaging directions shortens them; and `half`, the midpoint
    between weights and average.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[float, str],
        forms: Sequence[str] = (),
        matrices: Sequence[Tensor] = (),
    ) -> None:
        self.model, self.names, self.forms = model, names, forms
        # With FSDP these are the shards: during a pass the model has other parameters instead.
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.lengths: list[tuple[Tensor, Tensor]] = []  # matrices, and what is averaged beside them
        if "sphere" in forms:
            named = {p: name for name, p in self.parameters.items()}
            self.lengths = [(p, _lengths(p)) for p in matrices]
            self.parameters |= {f"{named[p]}.length": length for p, length in self.lengths}
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
        for p, length in self.lengths:
            length.copy_(_lengths(p))
        for window, group in self.groups.items():
            average.update([group], self.states[window])

    @contextmanager
    def swapped_in(self, window: float, form: str = "") -> Iterator[None]:
        """Replace the weights by an average inside a `with` block; restore them exactly."""
        weights = [p.detach().clone() for p in self.parameters.values()] if form == "half" else []
        swap = average.in_place_of_weights([self.groups[window]], self.states[window], self.model)
        with swap:
            with torch.no_grad():
                if form == "half":
                    torch._foreach_lerp_(list(self.parameters.values()), weights, 0.5)
                if form == "sphere":
                    for p, length in self.lengths:
                        now = _lengths(p)
                        p.mul_(length / now.masked_fill(now == 0, 1.0))
            yield

    def evaluate(self, validate: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return the validation loss of each average, without those that have no step yet."""
        losses = {}
        for window in filter(self.count, self.names):
            for form in ("", *self.forms):
                with self.swapped_in(window, form):
                    name = f"{self.names[window]}_{form}" if form else self.names[window]
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


def _lengths(p: Tensor) -> Tensor:
    return torch.linalg.vector_norm(p.detach().float(), dim=-1, keepdim=True)
