"""Detect losses and gradients that are not finite before they reach the weights, and trace them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class NotFinite(RuntimeError):  # noqa: N818  (reads as what it is)
    """Training met a loss or a weight that is not finite."""


class OnHost:
    """A number that is copied to the host asynchronously.

    On a GPU, the copy of a loss waits for the forward pass only: when the host asks for the value,
    the device is busy with the backward pass, so it never idles.
    """

    def __init__(self, loss: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if loss.is_cuda:
            self._host = torch.empty((), dtype=loss.dtype, pin_memory=True)
            self._host.copy_(loss.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = loss.detach()

    def value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return self._host.item()


@contextmanager
def _nonfinite_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of layers with an output that is not finite inside a `with` block."""
    names: list[str] = []

    def check(name: str) -> object:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                names.append(name)

        return hook

    hooks = [
        module.register_forward_hook(check(name))  # type: ignore[arg-type]
        for name, module in model.named_modules()
        if name and not list(module.children())
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def culprit(model: nn.Module, tokens: Tensor, targets: Tensor, micro_batch: int) -> str:
    """Name the first weight, layer output on this batch, or gradient that is not finite."""
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            return f"weight {name}"
    with _nonfinite_outputs(model) as names:
        for part in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
            model(*part)
            if names:
                return f"output of {names[0]}"
    for name, p in model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            return f"gradient of {name}"
    return "nothing here, so another rank's batch"


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    return all(bool(p.detach().isfinite().all()) for p in model.parameters())
