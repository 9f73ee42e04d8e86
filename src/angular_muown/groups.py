"""Param groups: the engine's defaults, and the numbers of a step that follow from a group."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]

ENGINE_DEFAULTS: Group = {
    "algorithm": "matrix",
    "view": "matrix",
    "transposed": False,
    "blocks": None,
    "column_blocks": None,
    "step": 0,  # the group's steps so far: kappa's clock
    "capturable": False,
    "workspace": 0.25,
    "average": None,
    "averaged": 0,  # steps that the averages have seen
    "wire_dtype": None,
}


HOMES = tuple(f"angular_muown.{name}" for name in ("optimizers", "muons", "rivals"))  # of members


def plainly(group: Group, defaults: Group, kind: type) -> Group:
    """A copy, so that one plan can serve several optimizers, with names and numbers only. The
    member's name goes along, so that another's state is recognised; a subclass of the user's counts
    as its parent."""
    members = (parent.__name__ for parent in kind.__mro__ if parent.__module__ in HOMES)
    group = {**plain_values(group), "family": next(members, kind.__name__)}
    dtype = group.get("state_dtype", defaults["state_dtype"])
    if isinstance(dtype, torch.dtype):
        group["state_dtype"] = str(dtype).removeprefix("torch.")
    return group


def plain_values(group: Group) -> Group:
    """The same values with Python's own numbers: `torch.load(weights_only=True)` reads no others,
    such as NumPy's."""
    return {k: v if k in ("params", "param_names") else plain_value(v) for k, v in group.items()}


def plain_value(value: Any) -> Any:
    """A number of any library's as Python's own, also inside of lists; other things as they are."""
    if type(value) in (list, tuple):
        return type(value)(plain_value(x) for x in value)
    if isinstance(value, bool | str | Tensor):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # its bool, which is not a number, and arrays of one
    return value


def arguments(local_names: Group) -> Group:
    """A member's keyword arguments, from `locals()`: the group's defaults one to one."""
    return {k: v for k, v in local_names.items() if k not in ("self", "params", "__class__")}


def rates(group: Group, dtype: torch.dtype) -> tuple[float | Tensor, float | Tensor]:
    """The learning rates of directions and radii now: `radius_lr` is given for the lr that the
    group started with and follows every schedule of lr."""
    lr = group["lr"]
    if isinstance(lr, Tensor):  # a scalar whose dtype does not spread
        lr = lr.to(dtype).reshape(())
    if group.get("radius_lr") is None:
        return lr, lr
    return lr, group["radius_lr"] / group["base_lr"] * lr


def seed(group: Group) -> int | Tensor | None:
    """Of the step's stochastic rounding; None rounds to nearest."""
    return group["step"] if group["write_back"] == "stochastic" else None


OWN_TO_EACH = ("params", "param_names")
EVERY_STEP = ("lr", "step", "averaged")  # change from step to step


def alike(groups: Sequence[Group]) -> list[tuple[Any, list[int]]]:
    """Find groups that differ in nothing but their parameters: one step can move all of them, so
    that a group for each parameter costs no time.

    Return a key for the settings that rarely change, and the indices of the groups, for each set of
    equal ones in the order of their first."""
    found: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        settings = frozenset(
            (name, _key(x))
            for name, x in group.items()
            if name not in OWN_TO_EACH and name not in EVERY_STEP
        )
        changing = tuple(_key(group.get(name)) for name in EVERY_STEP)
        found.setdefault((settings, changing), []).append(index)
    return [(settings, indices) for (settings, _), indices in found.items()]


def _key(value: Any) -> Any:
    """Equal where values are. A value that cannot be compared is equal to itself alone, as a tensor
    is, whose hash is its identity."""
    key = tuple(value) if isinstance(value, list) else value
    try:
        hash(key)
    except TypeError:
        return id(value)
    return key
