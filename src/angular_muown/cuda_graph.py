"""CUDA graphs: what a recorded step needs.

A recorded step reads nothing from the host. With `capturable=True` the learning rate, the group's
clock (and with it kappa) and Adam's counters are tensors on the device; torch's schedulers write
into such a learning rate, so a replayed step follows them. Other numbers of a group are recorded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from angular_muown.params.options import Group, Values, parameter_names


def to_device(group: Group) -> None:
    """lr and step as tensors beside the parameters, each group with its own: a scheduler that
    writes into one must not change another's."""
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


# Settings of this process: a state dict from elsewhere does not change them.
OWN = ("capturable", "workspace", "wire_dtype", "average")


def adapted(saved: Values, own: Values) -> dict[str, Any]:
    """A saved group with the settings of the group whose place it takes."""
    group = {**saved, **{key: own[key] for key in OWN}}
    lr = group["lr"]
    if saved["capturable"] is True and not group["capturable"] and isinstance(lr, Tensor):
        group["lr"] = lr.item() if lr.numel() == 1 else lr
    return group


def is_recording() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def check(groups: Sequence[Values], state: dict[Tensor, Any]) -> None:
    """Refuse to record a step that would not be the one to replay."""
    for index, group in enumerate(groups):
        if not group["capturable"]:
            raise RuntimeError(
                f"group {index} has capturable=False, so a recorded step would keep this step's "
                "learning rate and kappa: make the optimizer with capturable=True"
            )
        for key in ("lr", *_clocks(group)):
            device = group["params"][0].device
            if not isinstance(group[key], Tensor) or group[key].device != device:
                raise RuntimeError(
                    f"group {index} has {key}={group[key]!r} on the host, so a recorded step would "
                    f"keep it for ever: write into the tensor, group[{key!r}].fill_(value), as "
                    "torch's schedulers do, instead of replacing it"
                )
        for p, name in zip(group["params"], parameter_names(group, index), strict=True):
            if p.grad is None:
                raise RuntimeError(
                    f"parameter {name!r} has no gradient, so a recorded step would leave it out "
                    "for ever: record after a backward pass that reaches it, or freeze it and "
                    "leave it out of the optimizer"
                )
            if p not in state:
                raise RuntimeError(
                    f"parameter {name!r} has no state yet: take a step before recording one"
                )
            if group["average"] is not None and "average" not in state[p]:
                raise RuntimeError(
                    f"parameter {name!r} has no average yet, which a recorded step would begin "
                    "anew each time: take a step before recording one"
                )
