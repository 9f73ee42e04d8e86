"""Changes of a training step that are on trial: extrapolation, a slower momentum, SOAP, a momentum
that rises and falls, and tangent gradients without row lengths. The library has none of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from angular_lab.config.spec import Spec
from angular_lab.models.tensor_parallel import local_part
from angular_lab.training.build import (
    chosen_matrices,
    lr_factor,
    matrices,
    moves_row_lengths,
)
from angular_muown import ramp

# Names in checkpoints, next to the windows of averages.
DISPLACEMENT, SLOW_GRADIENT, SOAP = "displacement", "slow_gradient", "soap"
SOAP_DECAY, SOAP_EVERY = 0.95, 10  # of arXiv 2409.11321: both averages, and steps between bases


class Extrapolation:
    """Evaluate gradients at, and step from, a point ahead of the weights.

    EMA-Nesterov (arXiv 2605.25395), around any optimizer A:

        W <- A(W + b E),  E <- d E + (1 - d) (W - its value before)

    E is the average displacement of a step, and b E a move along it: where steps agree over
    1 / (1 - d) steps, each becomes 1 / (1 - b) times as long. b follows the learning rate and is 0
    outside a part of the run. Logged angles are those of the optimizer's steps, without the moves.
    With strength=0 it does nothing.
    """

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
        return {DISPLACEMENT: {"weights": named}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. Where it has no displacement, the average begins with the next step."""
        if DISPLACEMENT in state:
            for name, value in zip(self.parameters, self.averages, strict=True):
                value.copy_(state[DISPLACEMENT]["weights"][name])


class SlowMomentum:
    """A second, slower momentum of the matrices, mixed into the first.

        S <- d S + (1 - d) G,  G <- (1 - a) G + a S        S starts as the first G

    The optimizer's own momentum follows, so its step contains the usual average of gradients by
    1 - a and a slower one by a. S stays in the space of the weights: the optimizer projects it at
    the current point. Row lengths, where Adam moves them, follow the gradient itself. a follows the
    learning rate: the average remembers long while steps are long, and ends as usual. With
    slow_share=0 it does nothing.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, spec: Spec) -> None:
        self.spec, self.keeps_lengths = spec, moves_row_lengths(spec.optim.name)
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        params = matrices(optimizer) if spec.optim.slow_share else []
        self.parameters = {names[p]: p for p in params}
        self.averages = [torch.zeros_like(p, dtype=torch.float32) for p in params]
        self.has_begun = False

    @torch.no_grad()
    def mix(self, step: int) -> None:
        """Replace the gradients; before the optimizer's step."""
        share = self.spec.optim.slow_share * lr_factor(self.spec, step)
        newest = 1 - self.spec.optim.slow_decay if self.has_begun else 1.0
        self.has_begun = True
        for p, average in zip(self.parameters.values(), self.averages, strict=True):
            if p.grad is None:
                continue
            average.lerp_(p.grad.to(average.dtype), newest)
            _change(p, share * (average - p.grad), self.keeps_lengths)

    def state(self) -> dict[str, Any]:
        named = dict(zip(self.parameters, self.averages, strict=True))
        return {SLOW_GRADIENT: {"weights": named}} if named else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. Where it has none, the average begins with the next step."""
        self.has_begun = SLOW_GRADIENT in state
        if self.has_begun:
            for name, value in zip(self.parameters, self.averages, strict=True):
                value.copy_(state[SLOW_GRADIENT]["weights"][name])


def _change(p: Tensor, change: Tensor, keeps_lengths: bool) -> None:
    """Add to a gradient; to its part across the rows alone if row lengths follow it themselves."""
    assert p.grad is not None, "the caller skips parameters without a gradient"
    if keeps_lengths:
        squares = p.square().sum(dim=-1, keepdim=True)
        along = (change * p).sum(dim=-1, keepdim=True)
        change -= along / squares.masked_fill(squares == 0, 1.0) * p
    p.grad.add_(change)


class Soap:
    """SOAP in front of the polar factor: entries of equal size, in the eigenbasis of the gradients.

        C <- d C + (1 - d) G^T G        Q: its eigenvectors, by one QR iteration every few steps
        V <- d V + (1 - d) (G Q)^2      G <- (G Q / sqrt(V)) Q^T

    C is the covariance of the shorter side alone: of columns as above, or of rows. A fused weight
    is one matrix. Both averages start as their first value. The optimizer's momentum follows, while
    SOAP itself divides the momentum by sqrt(V). Row lengths, where Adam moves them, follow the
    gradient itself.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, spec: Spec) -> None:
        self.keeps_lengths = moves_row_lengths(spec.optim.name)
        self.parameters = chosen_matrices(model, optimizer, spec.optim.soap)
        self.states = {name: _soap_state(p) for name, p in self.parameters.items()}
        self.begun: set[str] = set()

    @torch.no_grad()
    def equalize(self, step: int) -> None:
        """Replace the gradients; before the optimizer's step."""
        for name, p in self.parameters.items():
            if p.grad is None:
                continue
            wide = p.shape[-2] < p.shape[-1]
            G = p.grad.float().mT if wide else p.grad.float()
            rotated, Q, V = self._rotate(name, G, step)
            equalized = rotated.div_(V.sqrt().masked_fill(V == 0, 1.0)) @ Q.mT
            _change(p, (equalized.mT if wide else equalized) - p.grad, self.keeps_lengths)

    def _rotate(self, name: str, G: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return G Q, Q and V with this step's gradient G."""
        C, Q, V = (self.states[name][key] for key in ("covariance", "basis", "second_moment"))
        newest = 1 - SOAP_DECAY if name in self.begun else 1.0
        C.lerp_(G.mT @ G, newest)
        if name not in self.begun:  # in descending order, which the iteration keeps
            Q.copy_(torch.linalg.eigh(C).eigenvectors.flip(-1))
        elif step % SOAP_EVERY == 0:
            Q.copy_(torch.linalg.qr(C @ Q).Q)
        rotated = G @ Q
        V.lerp_(rotated.square(), newest)
        self.begun.add(name)
        return rotated, Q, V

    def state(self) -> dict[str, Any]:
        return {f"{SOAP}.{name}": {"weights": own} for name, own in self.states.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. A matrix that it lacks begins with its next gradient."""
        for name, own in self.states.items():
            saved = state.get(f"{SOAP}.{name}", {"weights": {}})["weights"]
            for key, value in saved.items():
                own[key].copy_(value)
            if saved and saved["basis"].any():
                self.begun.add(name)


def _soap_state(p: Tensor) -> dict[str, Tensor]:
    *stacked, long, short = *p.shape[:-2], max(p.shape[-2:]), min(p.shape[-2:])
    rows = {"covariance": short, "basis": short, "second_moment": long}
    return {k: torch.zeros(*stacked, m, short, device=p.device) for k, m in rows.items()}


def momentum_at(spec: Spec, step: int) -> float:
    """Return the decay of the momentum at a step, counted from 0."""
    o = spec.optim
    if o.momentum_start is None:
        return o.momentum
    return ramp(step, spec.steps, o.momentum_ramp, o.momentum_start, o.momentum)


@torch.no_grad()
def equalize_rows(optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients of matrices by the lengths of their rows: the tangent gradient is then
    G - r U, without the factor g, and Adam, which moves the lengths, does not see the difference.
    """
    for p in matrices(optimizer):
        if p.grad is not None:
            length = torch.linalg.vector_norm(p, dim=-1, keepdim=True)
            p.grad.div_(length.masked_fill(length == 0, 1.0))
