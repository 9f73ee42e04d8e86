"""CUDA graphs: what a recorded step requires.

A recorded step reads nothing from the host. With `capturable=True`, the learning rate, the group's
step (and with it kappa) and Adam's counters are tensors on the device. torch's schedulers write
into such a learning rate, so replays follow them. A group's other values are fixed when recorded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from angular_muown.params.options import Group, Values, parameter_names
from angular_muown.stages.context import State


def to_device(group: Group) -> None:
    """If the group is capturable, make its lr and clocks tensors on the parameters' device.

    Each group gets its own: a scheduler that writes into one must not change another group's.
    """
    if not group["capturable"] or not group["params"]:
        return
    device = group["params"][0].device

    def on_device(value: float | Tensor, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value).detach().to(device, dtype, copy=True).reshape(())

    group["lr"] = on_device(group["lr"], torch.float32)
    group["step"] = on_device(group["step"], torch.int64)
    if group["average"] is not None:
        group["averaged"] = on_device(group["averaged"], torch.int64)


def _clocks(group: Values) -> tuple[str, ...]:
    return ("step",) if group["average"] is None else ("step", "averaged")


# Settings of this process, which loading a state dict does not change.
PROCESS_KEYS = ("capturable", "workspace", "wire_dtype", "average")


def adapt_saved(saved: Values, current: Values) -> dict[str, Any]:
    """Return a saved group with this process's settings, taken from the current group."""
    group = {**saved, **{key: current[key] for key in PROCESS_KEYS}}
    lr = group["lr"]
    if saved["capturable"] is True and not group["capturable"] and isinstance(lr, Tensor):
        group["lr"] = lr.item() if lr.numel() == 1 else lr
    return group


def is_recording() -> bool:
    """True while a CUDA graph is recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def check(groups: Sequence[Values], state: Mapping[Tensor, State]) -> None:
    """Raise if a recorded step would not do at replay what a plain step does."""
    for index, group in enumerate(groups):
        if not group["capturable"]:
            raise RuntimeError(
                f"group {index} has capturable=False, so every replay would use this step's "
                "learning rate and kappa: construct the optimizer with capturable=True"
            )
        for key in ("lr", *_clocks(group)):
            device = group["params"][0].device
            if not isinstance(group[key], Tensor) or group[key].device != device:
                raise RuntimeError(
                    f"group {index} has {key}={group[key]!r} on the host, so every replay would "
                    f"use this value: write into the tensor, group[{key!r}].fill_(value), as "
                    "torch's schedulers do, instead of replacing it"
                )
        for p, name in zip(group["params"], parameter_names(group, index), strict=True):
            if p.grad is None:
                raise RuntimeError(
                    f"parameter {name!r} has no gradient, so no replay would update it: record "
                    "after a backward pass that reaches it, or freeze it and leave it out of the "
                    "optimizer"
                )
            if p not in state:
                raise RuntimeError(
                    f"parameter {name!r} has no state yet: take a step before recording one"
                )
            if group["average"] is not None and "average" not in state[p]:
                raise RuntimeError(
                    f"parameter {name!r} has no average yet, so every replay would start a new "
                    "one: take a step before recording one"
                )
