"""Extrapolation: evaluate gradients at, and step from, a point ahead of the weights.

EMA-Nesterov (arXiv 2605.25395), around any optimizer A:

    W <- A(W + b E),  E <- d E + (1 - d) (W - its value before)

E is the average displacement of a step, and b E a move along it: where steps agree over 1 / (1 - d)
steps, each becomes 1 / (1 - b) times as long. b follows the learning rate and is 0 outside a part
of the run. Logged angles are those of the optimizer's steps, without the moves.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from angular_lab.config.spec import Spec
from angular_lab.models.tensor_parallel import local_part
from angular_lab.training.build import lr_factor

NAME = "displacement"  # in checkpoints, next to the windows of averages


class Extrapolation:
    """The average displacement of a model's parameters; without strength it does nothing."""

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        self.spec = spec
        self.parameters = dict(model.named_parameters()) if spec.extrapolate.strength else {}
        weights = [p.detach() for p in self.parameters.values()]
        # With FSDP this rank's parts are moved, and averages are saved as parts of the whole.
        self.averages = [torch.zeros_like(w) for w in weights]
        self.weights = [*map(local_part, weights)]
        self.displacement = [*map(local_part, self.averages)]
        self.before = [w.clone() for w in self.weights]

    def strength(self, step: int) -> float:
        """Return b at a step, counted from 0."""
        part = self.spec.extrapolate
        inside = part.start * self.spec.steps <= step < part.end * self.spec.steps
        return part.strength * lr_factor(self.spec, step) if inside else 0.0

    def is_over(self, step: int) -> bool:
        """True if no later step moves ahead: then there is nothing to average either."""
        return not self.weights or step >= self.spec.extrapolate.end * self.spec.steps

    def move(self, step: int) -> None:
        """Move the weights ahead; before the forward pass."""
        if self.is_over(step):
            return
        torch._foreach_copy_(self.before, self.weights)
        if strength := self.strength(step):
            torch._foreach_add_(self.weights, self.displacement, alpha=strength)

    def undo(self, step: int) -> None:
        """Move the weights back; after a batch that is skipped."""
        if not self.is_over(step):
            torch._foreach_copy_(self.weights, self.before)

    def update(self, step: int) -> None:
        """Include a step in the average; after it."""
        if not self.is_over(step):
            torch._foreach_sub_(self.before, self.weights)  # W before - W, in place of a third copy
            torch._foreach_mul_(self.before, -1)
            torch._foreach_lerp_(self.displacement, self.before, 1 - self.spec.extrapolate.decay)

    def state(self) -> dict[str, Any]:
        if not self.weights:
            return {}
        named = dict(zip(self.parameters, self.averages, strict=True))
        return {NAME: {"weights": named}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. Where it has no displacement, the average begins with the next step."""
        if NAME in state:
            for name, value in zip(self.parameters, self.averages, strict=True):
                value.copy_(state[NAME]["weights"][name])
