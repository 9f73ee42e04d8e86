"""Averages of recent weights, evaluated in addition to the weights themselves.

The library's optimizers keep one average each. A run keeps several, with any optimizer, so that
they are stored here; the library updates them and swaps them in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from angular_lab.config.spec import Window, average_loss
from angular_muown import Group, average

SPHERE = "sphere"  # the form that has an average of its own, of the rows' lengths


class _Average:
    """The average of named tensors over a window, with the number of steps in it."""

    def __init__(self, tensors: Mapping[str, Tensor], window: float) -> None:
        params = [*tensors.values()]
        self.tensors = tensors
        self.group: Group = {"params": params, "lr": 0.0, "average": window, "averaged": 0}
        self.states = {x: {"average": x.detach().to(torch.float32, copy=True)} for x in params}

    @property
    def count(self) -> int:
        return int(self.group["averaged"])

    @property
    def values(self) -> dict[str, Tensor]:
        return {name: self.states[x]["average"] for name, x in self.tensors.items()}

    def update(self) -> None:
        average.update([self.group], self.states)

    def in_place_of_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        return average.in_place_of_weights([self.group], self.states, model)


class Averages:
    """Averages of a model's parameters, one per window.

    Training does not depend on them: the weights are the same bit for bit with and without.
    Buffers are not averaged: an average is evaluated with the model's current ones.

    Each average can be evaluated in further forms: `sphere`, where the averaged rows of `matrices`
    are rescaled to the average of their lengths, since averaging shortens them; and `half`, the
    midpoint between weights and average.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: Iterable[Window],
        forms: Sequence[str] = (),
        matrices: Sequence[Tensor] = (),
    ) -> None:
        self.model, self.windows, self.forms = model, tuple(windows), forms
        # With FSDP these are the shards: during a pass the model has other parameters instead.
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.averages = {str(w): _Average(self.parameters, w) for w in self.windows}
        self.lengths: dict[str, Tensor] = {}  # of the rows of each matrix
        if SPHERE in forms:
            known = {p: name for name, p in self.parameters.items()}
            self.lengths = {known[p]: _lengths(p) for p in matrices}
            self.averages |= {f"{w}_{SPHERE}": _Average(self.lengths, w) for w in self.windows}

    def count(self, window: float) -> int:
        """Return the number of steps in an average."""
        return self.averages[str(window)].count

    def values(self, window: float) -> dict[str, Tensor]:
        """Return an average by the names of the parameters; not a copy."""
        return self.averages[str(window)].values

    def update(self) -> None:
        """Include the weights after a step of the optimizer."""
        for name, length in self.lengths.items():
            length.copy_(_lengths(self.parameters[name]))
        for own in self.averages.values():
            own.update()

    @contextmanager
    def swapped_in(self, window: float, form: str = "") -> Iterator[None]:
        """Replace the weights by an average inside a `with` block; restore them exactly."""
        named = self.parameters if form == "half" else {}
        weights = {name: p.detach().clone() for name, p in named.items()}
        with self.averages[str(window)].in_place_of_weights(self.model):
            with torch.no_grad():
                for name, before in weights.items():
                    self.parameters[name].lerp_(before, 0.5)
                if form == SPHERE:
                    for name, length in self.averages[f"{window}_{SPHERE}"].values.items():
                        now = _lengths(self.parameters[name])
                        self.parameters[name].mul_(length / now.masked_fill(now == 0, 1.0))
            yield

    def evaluate(self, validate: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return the validation loss of each average, without those that have no step yet."""
        losses = {}
        for window in filter(self.count, self.windows):
            for form in ("", *self.forms):
                if form == SPHERE and not self.averages[f"{window}_{SPHERE}"].count:
                    continue  # a branch added it, and has taken no step
                with self.swapped_in(window, form):
                    losses[average_loss(window, form)] = validate()["val_loss"]
        return losses

    @torch.no_grad()
    def replace_weights(self, window: float) -> None:
        """Replace the weights by an average permanently."""
        for name, value in self.values(window).items():
            self.parameters[name].copy_(value)

    def state(self) -> dict[str, Any]:
        """Return the state by name. Its tensors are the averages: copy them to keep them."""
        return {
            name: {"count": own.count, "weights": own.values} for name, own in self.averages.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. What it lacks begins with the next step."""
        for name in self.averages.keys() & state.keys():
            own, saved = self.averages[name], state[name]
            own.group["averaged"] = saved["count"]
            for key, value in own.values.items():
                value.copy_(saved["weights"][key])


def _lengths(p: Tensor) -> Tensor:
    return torch.linalg.vector_norm(p.detach().float(), dim=-1, keepdim=True)
