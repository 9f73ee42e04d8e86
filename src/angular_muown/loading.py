"""Loading a state dict without the base class's casts, and with its surprises said aloud."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

StateDict = dict[str, Any]
KAPPA_KEYS = ("warmup_steps", "decay_scale", "decay_degree")


def load_keeping_dtypes(
    optimizer: Optimizer, load: Callable[[StateDict], None], state_dict: StateDict
) -> None:
    """Run `load`, then give every state tensor the dtype it was saved in.

    torch casts float state to the parameter's dtype, which would make bf16 of a float32 momentum.
    """
    final: dict[str, Any] = {}

    def check(_: Optimizer, state_dict: StateDict) -> None:
        _check_family(optimizer, state_dict)
        _check_shapes(optimizer, state_dict)
        _warn_of_kappa(optimizer, state_dict)
        final.update(state_dict)

    def restore(_: Optimizer) -> None:
        saved_groups = final["param_groups"]
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in final["state"].get(key, {}).items():
                    if isinstance(value, torch.Tensor) and name != "step":
                        optimizer.state[p][name] = value.detach().to(p.device, copy=True)

    # Last before and first after loading: the user's own hooks see and may change all of it.
    before = optimizer.register_load_state_dict_pre_hook(check)
    after = optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    try:
        load(state_dict)
    finally:
        before.remove()
        after.remove()


def _check_family(optimizer: Optimizer, state_dict: StateDict) -> None:
    own = type(optimizer).__name__
    for group in state_dict["param_groups"]:
        found = group.get("family", "an optimizer outside this package")
        if found != own:
            raise ValueError(
                f"this state dict was saved by {found}, not by {own}: their states mean different "
                "things; make the same optimizer, or start with fresh state"
            )


def _check_shapes(optimizer: Optimizer, state_dict: StateDict) -> None:
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for i, (p, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
            for name in ("momentum_buffer", "master"):
                value = state_dict["state"].get(key, {}).get(name)
                if value is not None and value.shape != p.shape:
                    label = group.get("param_names", {i: f"number {i}"})[i]
                    raise ValueError(
                        f"{name} of parameter {label} has shape {tuple(value.shape)} in the state "
                        f"dict, but the parameter has {tuple(p.shape)}"
                    )


def _warn_of_kappa(optimizer: Optimizer, state_dict: StateDict) -> None:
    for i, (group, saved) in enumerate(
        zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    ):
        for key in KAPPA_KEYS:
            if key in group and key in saved and group[key] != saved[key]:
                warnings.warn(
                    f"group {i}: {key}={saved[key]} from the state dict replaces {key}={group[key]}"
                    f"; to keep yours, set optimizer.param_groups[{i}]['{key}'] = {group[key]} "
                    "after loading",
                    stacklevel=6,
                )
