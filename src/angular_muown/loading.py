"""Loading a state dict without the base class's casts, and with its surprises said aloud."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from angular_muown import capture
from angular_muown.layout import Layout
from angular_muown.placement import is_sharded, spread_like, whole

StateDict = dict[str, Any]
SHAPED_LIKE_WEIGHT = ("momentum_buffer", "master", "average")
# What gives the state its meaning: a state dict with other values belongs to other groups.
MEANING = ("algorithm", "view", "transposed", "blocks", "column_blocks")
# What makes it another method or another kappa: a caller would miss it, and the state fits both.
METHOD = (
    *("warmup_steps", "decay_scale", "decay_degree"),
    *("exact_angle", "orthogonalize", "tangent_momentum", "row_beta", "column_gains", "radius"),
)


def load_keeping_dtypes(
    optimizer: Optimizer, load: Callable[[StateDict], None], state_dict: StateDict
) -> None:
    """Run `load`, then give every state tensor the dtype it was saved in, and every group the
    settings of this process.

    torch casts float state to the parameter's dtype, which would make bf16 of a float32 momentum.
    """
    own = [{key: group[key] for key in capture.OWN} for group in optimizer.param_groups]
    final: dict[str, Any] = {}
    surprises: list[str] = []

    def check(_: Optimizer, state_dict: StateDict) -> None:
        _check_family(optimizer, state_dict)
        _check_meaning(optimizer, state_dict)
        _check_shapes(optimizer, state_dict)
        surprises.extend(_changed_values(optimizer, state_dict))
        surprises.extend(_dropped_averages(optimizer, state_dict))
        final.update(state_dict)

    def restore(_: Optimizer) -> None:
        saved_groups = final["param_groups"]
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in final["state"].get(key, {}).items():
                    if isinstance(value, torch.Tensor):
                        # the base class puts "step" on the right device, but does not copy it
                        device = optimizer.state[p]["step"].device if name == "step" else p.device
                        copied = value.detach().to(device).clone()
                        optimizer.state[p][name] = _placed(copied, p, name, group)

    # Last before and first after loading: the user's own hooks see and may change all of it.
    before = optimizer.register_load_state_dict_pre_hook(check)
    after = optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    try:
        load(state_dict)
    finally:
        before.remove()
        after.remove()
    for group, values in zip(optimizer.param_groups, own, strict=True):
        capture.adapt(group, values, optimizer.state)
    for surprise in surprises:
        warnings.warn(surprise, stacklevel=3)


def _placed(value: Tensor, p: Tensor, name: str, group: dict[str, Any]) -> Tensor:
    """A loaded value where the parameter's ranks want it: whole ones are cut, parts gathered."""
    if name == "step":
        return value
    vector = group["algorithm"] == "matrix" and name not in SHAPED_LIKE_WEIGHT
    if is_sharded(p) and not is_sharded(value):
        value = spread_like(p, value, Layout.of(group), name if vector else "")
    elif is_sharded(value) and not is_sharded(p):
        value = whole(value)
    return value if vector else value.contiguous()  # matrices of it have to be views


def _check_family(optimizer: Optimizer, state_dict: StateDict) -> None:
    own = optimizer.param_groups[0]["family"]
    for group in state_dict["param_groups"]:
        found = group.get("family", "an optimizer outside this package")
        if found != own:
            raise ValueError(
                f"this state dict was saved by {found}, not by {own}: their states mean different "
                "things; make the same optimizer, or start with fresh state"
            )


def _check_meaning(optimizer: Optimizer, state_dict: StateDict) -> None:
    pairs = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    for i, (group, saved) in enumerate(pairs):
        for key in MEANING:
            here, there = (_plain(g.get(key)) for g in (group, saved))
            if here != there:
                raise ValueError(
                    f"group {i} was saved with {key}={there!r}, but has {key}={here!r} here: make "
                    "the groups as they were, or start with fresh state"
                )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_shapes(optimizer: Optimizer, state_dict: StateDict) -> None:
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        layout = Layout.of(saved)
        for i, (p, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
            for name, value in state_dict["state"].get(key, {}).items():
                vector = saved["algorithm"] == "matrix" and name not in SHAPED_LIKE_WEIGHT
                wanted = layout.vector_shape(p, name) if vector else tuple(p.shape)
                if name != "step" and tuple(value.shape) != wanted:
                    label = group["param_names"][i] if "param_names" in group else f"number {i}"
                    raise ValueError(
                        f"{name} of parameter {label} has shape {tuple(value.shape)} in the state "
                        f"dict, but a parameter of shape {tuple(p.shape)} wants {wanted}"
                    )


def _changed_values(optimizer: Optimizer, state_dict: StateDict) -> list[str]:
    """An older state dict lacks settings; `Engine.__setstate__` then takes the defaults."""
    saved_groups = [{**optimizer.defaults, **group} for group in state_dict["param_groups"]]
    pairs = zip(optimizer.param_groups, saved_groups, strict=False)
    return [
        f"group {i}: {key}={saved[key]!r} from the state dict replaces {key}={group[key]!r}; to "
        f"keep yours, set optimizer.param_groups[{i}][{key!r}] = {group[key]!r} after loading"
        for i, (group, saved) in enumerate(pairs)
        for key in METHOD
        if key in group and key in saved and group[key] != saved[key]
    ]


def _dropped_averages(optimizer: Optimizer, state_dict: StateDict) -> list[str]:
    """A group that keeps no average would not move one either: it would be out of date."""
    pairs = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    return [
        f"group {i}: the state dict has averages of the weights, which are left out, because "
        f"average=None here; to go on with them, set average={saved.get('average')!r} when the "
        "optimizer is made"
        for i, (group, saved) in enumerate(pairs)
        if group["average"] is None
        and any("average" in state_dict["state"].get(key, {}) for key in saved["params"])
    ]
