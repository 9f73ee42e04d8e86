"""Loading a state dict: one check of all that is in it before anything is replaced, and loading
without the base class's casts."""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from angular_muown import cuda_graph
from angular_muown.adamw import MOMENTS
from angular_muown.distributed.mesh import is_sharded, local, shard_like, whole
from angular_muown.params.layout import Layout
from angular_muown.params.options import (
    Group,
    Values,
    check_foreach,
    check_values,
    is_count,
    is_removed,
    parameter_names,
    plain_value,
    plain_values,
)
from angular_muown.schedules import is_number
from angular_muown.update import Recipe

StateDict = dict[str, Any]
SavedGroup = dict[str, Any]
State = dict[str, Any]
SHAPED_LIKE_WEIGHT = ("momentum_buffer", "master", "average")
# What gives the state its meaning: a state dict with other values belongs to other groups.
MEANING = ("algorithm", "view", "transposed", "blocks", "column_blocks")
# What makes it another method or another kappa: a caller would miss it, and the state fits both.
METHOD = (
    *("warmup_steps", "decay_scale", "decay_degree"),
    *("orthogonalize", "row_beta", "radius"),
)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CLOCKS = ("step", "averaged")
NEVER_NEGATIVE = ("_sq", "second_moment")  # how such entries' names end
NO_PART_OF_A_STEP = ("master", "average")  # a damaged master yields to the weight
FRESH = "make the groups as they were, or start with fresh state"


class Loads(Protocol):
    """What loading needs of an engine."""

    param_groups: list[Group]
    defaults: dict[str, Any]
    state: Any

    def recipe(self, group: Group) -> Recipe: ...
    def release(self) -> None: ...


@dataclass
class Contents:
    """What a state dict holds for an optimizer, checked, in the optimizer's order."""

    groups: list[SavedGroup]
    states: dict[Tensor, State]
    others: dict[Any, Any]  # state that belongs to no parameter
    surprises: list[str]


def load_checked(optimizer: Any, load: Callable[[StateDict], None], state_dict: StateDict) -> None:
    """Run `load` with what a state dict holds, or raise and leave the optimizer as it was.

    State tensors come past `load`, which would cast them to the parameter's dtype: that makes bf16
    of a float32 momentum."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"a state dict must be a dict, not {state_dict!r}")
    contents: list[Contents] = []

    def check(_: Optimizer, state_dict: StateDict) -> StateDict:
        found = read(optimizer, state_dict)
        contents.append(found)
        optimizer.release()
        return {**state_dict, "state": found.others, "param_groups": found.groups}

    def fill(_: Optimizer) -> None:
        optimizer.state.update(contents[-1].states)
        for group in optimizer.param_groups:
            cuda_graph.to_device(group)

    # Last before and first after loading: the user's own hooks see and may change all of it.
    before = optimizer.register_load_state_dict_pre_hook(check)
    after = optimizer.register_load_state_dict_post_hook(fill, prepend=True)
    try:
        load(state_dict)
    finally:
        before.remove()
        after.remove()
    for surprise in contents[-1].surprises:
        warnings.warn(surprise, stacklevel=3)


def read(optimizer: Loads, state_dict: StateDict) -> Contents:
    """Check a state dict as a whole, and return it in the form that the optimizer keeps."""
    for p in [p for p, state in optimizer.state.items() if not state]:
        del optimizer.state[p]  # torch's flat load leaves empty ones, and takes them for state
    _check_kinds(optimizer, state_dict)
    _check_family(optimizer, state_dict)
    groups = [_complete(optimizer, i, saved) for i, saved in enumerate(state_dict["param_groups"])]
    _check_meaning(optimizer, groups)
    _check_not_lost(optimizer, groups, state_dict["state"])
    states, taken = {}, set()
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        entries, names = Entries(group, saved, optimizer), parameter_names(group, i)
        for p, name, key in zip(group["params"], names, saved["params"], strict=True):
            taken.add(key)
            if key in state_dict["state"]:
                states[p] = entries(p, f"parameter {name!r}", state_dict["state"][key])
    others = {key: value for key, value in state_dict["state"].items() if key not in taken}
    surprises = _changed_values(optimizer, groups) + _dropped_averages(optimizer, state_dict)
    return Contents(groups, states, others, surprises)


# --- groups ---


def _check_kinds(optimizer: Loads, state_dict: StateDict) -> None:
    """What has to be a list or a dict is one, and every parameter has its place."""
    for key, kind, word in (("param_groups", list, "list"), ("state", Mapping, "dict")):
        if key not in state_dict:
            raise ValueError(
                f"the state dict has no {key!r}; it has {sorted(map(str, state_dict))}"
            )
        if not isinstance(state_dict[key], kind):
            raise TypeError(f"{key!r} of the state dict is {state_dict[key]!r}, not a {word}")
    own, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if len(saved_groups) != len(own):
        raise ValueError(
            f"param_groups of the state dict has {len(saved_groups)} group(s), but the optimizer "
            f"has {len(own)}: {FRESH}"
        )
    owners: dict[Any, Tensor] = {}
    for i, (group, saved) in enumerate(zip(own, saved_groups, strict=True)):
        if not isinstance(saved, dict):
            raise TypeError(f"group {i} of the state dict is {saved!r}, not a dict")
        keys = _list_of(saved, i, "params", len(group["params"]))
        for p, key in zip(group["params"], keys, strict=True):
            if owners.setdefault(key, p) is not p:
                raise ValueError(
                    f"params of group {i} of the state dict has {key!r}, which stands for two "
                    "parameters"
                )
        if "param_names" in saved:
            _list_of(saved, i, "param_names", len(group["params"]))


def _list_of(saved: Values, index: int, key: str, count: int) -> list[Any]:
    if key not in saved:
        raise ValueError(f"group {index} of the state dict has no {key}")
    values = saved[key]
    if not isinstance(values, list | tuple) or not all(isinstance(x, int | str) for x in values):
        raise TypeError(
            f"group {index} of the state dict has {key}={values!r}: it must be a list of numbers "
            "or names"
        )
    if len(values) != count:
        raise ValueError(
            f"group {index} of the state dict has {key} with {len(values)} entries, but the "
            f"optimizer has {count} there: {FRESH}"
        )
    return list(values)


def _check_family(optimizer: Loads, state_dict: StateDict) -> None:
    own = optimizer.param_groups[0]["family"]
    for i, group in enumerate(state_dict["param_groups"]):
        found = group.get("family", "an optimizer outside this package")
        if not isinstance(found, str) or found != own:
            raise ValueError(
                f"group {i} of this state dict was saved by {found}, not by {own} (family): their "
                "states mean different things; make the same optimizer, or start with fresh state"
            )


def _complete(optimizer: Loads, index: int, saved: Values) -> SavedGroup:
    """A copy of a saved group with the defaults for what it lacks, because it is older; checked."""
    own = optimizer.param_groups[index]
    start = {key: own[key] for key in ("base_lr",) if key in own}
    group = {**optimizer.defaults, **start, **_copy_of(saved, index, optimizer.defaults)}
    if "lr" not in saved:
        raise ValueError(f"group {index} of the state dict has no lr")
    if group["state_dtype"] == "float16":  # of version 0.1; its range is too small for momentum
        group["state_dtype"] = None
    for key in CLOCKS:
        if isinstance(group[key], Tensor):
            group[key] = _integer(group[key], group[key])
    group = cuda_graph.adapt_saved(group, own)
    try:
        check_values(group)
        check_foreach({**group, "params": own["params"]})
    except ValueError as error:
        raise ValueError(f"group {index} of the state dict: {error}") from None
    if group["average"] is None:
        group["averaged"] = 0
    return group


def _copy_of(saved: Values, index: int, defaults: Values) -> SavedGroup:
    group = {}
    for key, value in saved.items():
        try:
            if is_removed(key, value, defaults):
                continue
            group[key] = deepcopy(value)
        except ValueError as error:
            raise ValueError(f"group {index} of the state dict: {error}") from None
        except Exception as error:
            raise TypeError(f"group {index} of the state dict: {key} cannot be copied") from error
    return plain_values(group)


def _integer(value: Any, otherwise: Any) -> Any:
    """A counter, tensor or number, as an int; `otherwise` where it does not hold one."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex() or value.is_sparse:
            return otherwise
        value = value.item()
    value = plain_value(value)
    return int(value) if is_number(value) and value == int(value) else otherwise


def _check_meaning(optimizer: Loads, saved_groups: list[SavedGroup]) -> None:
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        for key in MEANING:
            here, there = (list(v) if isinstance(v := g[key], tuple) else v for g in (group, saved))
            if here != there:
                raise ValueError(
                    f"group {i} was saved with {key}={there!r}, but has {key}={here!r} here: "
                    f"{FRESH}"
                )


def _check_not_lost(optimizer: Loads, saved_groups: list[SavedGroup], states: Any) -> None:
    """torch's flat load asks an optimizer for the names of its state, and does not let it make any
    while gradients exist: it passes on a state of nothing for every parameter."""
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        found = [states[key] for key in saved["params"] if key in states]
        if (
            saved["step"]
            and found
            and all(isinstance(state, dict) and not state for state in found)
        ):
            name = parameter_names(group, i)[0]
            raise ValueError(
                f"group {i} has taken {saved['step']} steps, but the state dict has an empty state "
                f"for its parameters, such as {name!r}. If torch flattened it "
                "(flatten_optimizer_state_dict=True), call optimizer.zero_grad() before loading; "
                "to start with fresh state, leave out the empty ones"
            )


def _changed_values(optimizer: Loads, saved_groups: list[SavedGroup]) -> list[str]:
    pairs = zip(optimizer.param_groups, saved_groups, strict=True)
    return [
        f"group {i}: {key}={saved[key]!r} from the state dict replaces {key}={group[key]!r}; to "
        f"keep yours, set optimizer.param_groups[{i}][{key!r}] = {group[key]!r} after loading"
        for i, (group, saved) in enumerate(pairs)
        for key in METHOD
        if key in group and key in saved and group[key] != saved[key]
    ]


def _dropped_averages(optimizer: Loads, state_dict: StateDict) -> list[str]:
    """A group that keeps no average would not move one either: it would be out of date."""
    states, saved_groups = state_dict["state"], state_dict["param_groups"]
    pairs = zip(optimizer.param_groups, saved_groups, strict=True)
    return [
        f"group {i}: the state dict has averages of the weights, which are left out, because "
        f"average=None here; to continue with them, set average={saved.get('average')!r} when the "
        "optimizer is made"
        for i, (group, saved) in enumerate(pairs)
        if group["average"] is None
        and any("average" in states.get(key, ()) for key in saved["params"])
    ]


# --- the state of a parameter ---


class Entries:
    """Reads the state of parameters of one group."""

    def __init__(self, own: Values, saved: SavedGroup, optimizer: Loads) -> None:
        self.group, self.layout = saved, Layout.of(saved)
        self.matrices = saved["algorithm"] == "matrix"
        self.needed, self.vectors = ("step", *MOMENTS), ()
        if self.matrices:
            # also for the method that the group has now: the user may set it again
            kept = {**saved, **{key: own[key] for key in METHOD if key in own}}
            recipes = [optimizer.recipe(cast(Group, group)) for group in (saved, kept)]
            self.needed = ("step", "momentum_buffer")
            self.vectors = tuple(dict.fromkeys(name for r in recipes for name in r.state_names))

    def __call__(self, p: Tensor, label: str, saved: Any) -> State:
        if not isinstance(saved, Mapping):
            raise TypeError(f"the state of {label} is {saved!r}, not a dict")
        self._check_names(label, saved)
        state = {name: self._read(p, label, name, value) for name, value in saved.items()}
        if self.group["average"] is None:
            state.pop("average", None)
        return state

    def _check_names(self, label: str, saved: Mapping[str, Any]) -> None:
        """State is there as a whole or not at all; vectors that the method did not have before
        begin at zero."""
        own = ("step", *SHAPED_LIKE_WEIGHT, *MOMENTS, *self.vectors)
        if any(name in saved for name in own):
            for name in self.needed:
                if name not in saved:
                    raise ValueError(f"the state of {label} has no {name} in the state dict")
        for name in saved:
            squares = f"{name}_sq"
            if squares in self.vectors and squares not in saved:
                raise ValueError(
                    f"the state of {label} has {name}, but no {squares} in the state dict"
                )

    def _read(self, p: Tensor, label: str, name: str, value: Any) -> Any:
        if name == "step":
            return self._counter(p, f"step of {label} in the state dict", value)
        wanted = self._shape(p, name)
        if name in (*self._shaped, *self.vectors):
            _check_tensor(value, name, label, p, wanted)
        elif not isinstance(value, Tensor) or value.is_meta or tuple(value.shape) != wanted:
            return _copied(value, p, f"{name} in the state of {label}")  # the user's
        return self._placed(value.detach().to(p.device).clone(), p, name)

    @property
    def _shaped(self) -> tuple[str, ...]:
        return SHAPED_LIKE_WEIGHT if self.matrices else (*MOMENTS, "master", "average")

    def _is_vector(self, name: Any) -> bool:
        return self.matrices and isinstance(name, str) and name not in SHAPED_LIKE_WEIGHT

    def _shape(self, p: Tensor, name: Any) -> tuple[int, ...]:
        return self.layout.vector_shape(p, name) if self._is_vector(name) else tuple(p.shape)

    def _counter(self, p: Tensor, what: str, value: Any) -> Tensor:
        """In float32, because one in bf16 stops at 256; where the step wants to have it."""
        count = _integer(value, None)
        if not is_count(count):
            raise ValueError(f"{what} is {value!r}: it must be an integer >= 0")
        fused = not self.matrices and self.group.get("fused")
        device = p.device if self.group["capturable"] or fused else "cpu"
        return torch.tensor(float(count), dtype=torch.float32, device=device)

    def _placed(self, value: Tensor, p: Tensor, name: str) -> Tensor:
        """A loaded value where the parameter's ranks want it: whole ones are cut, parts gathered.
        AdamW's moments have the parameter's dtype, as torch makes them."""
        vector = self._is_vector(name)
        if is_sharded(p) and not is_sharded(value):
            value = shard_like(p, value, self.layout, name if vector else "")
        elif is_sharded(value) and not is_sharded(p):
            value = whole(value)
        if not self.matrices and name in MOMENTS:
            value = value.to(p.dtype)
        elif name == "momentum_buffer" and value.dtype == torch.float16:
            value = value.float()
        return value if vector else value.contiguous()  # matrices of it have to be views


def _check_tensor(value: Any, name: str, label: str, p: Tensor, wanted: tuple[int, ...]) -> None:
    what = f"{name} of {label}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} is {value!r} in the state dict, not a tensor")
    if tuple(value.shape) != wanted:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)} in the state dict, but a parameter of shape "
            f"{tuple(p.shape)} needs {wanted}"
        )
    if value.is_meta and not p.is_meta:
        raise TypeError(f"{what} is on the meta device in the state dict: it has no entries")
    if value.dtype not in FLOATS or value.layout != torch.strided:
        raise TypeError(
            f"{what} is {value.dtype} and {value.layout} in the state dict: it must be a dense "
            f"tensor of one of {', '.join(map(str, FLOATS))}"
        )
    if name not in NO_PART_OF_A_STEP:
        _check_entries(local(value.detach()), what, not name.endswith(NEVER_NEGATIVE))


def _check_entries(value: Tensor, what: str, may_be_negative: bool) -> None:
    """One step with such an entry would ruin the weights."""
    if value.numel() == 0 or value.is_meta:
        return
    least, largest = (x.item() for x in torch.aminmax(value))
    if not (isfinite(least) and isfinite(largest)):
        raise ValueError(
            f"{what} has entries in the state dict that are not finite: load an earlier one, or "
            "start with fresh state"
        )
    if least < 0 and not may_be_negative:
        raise ValueError(f"{what} has negative entries in the state dict, such as {least}")


def _copied(value: Any, p: Tensor, what: str) -> Any:
    """What is not ours, as it is, with tensors on the parameter's device."""
    if isinstance(value, Tensor):
        return value.detach() if value.is_meta else value.detach().to(p.device).clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(x, p, what) for x in value)
    if type(value) is dict:
        return {k: _copied(x, p, what) for k, x in value.items()}
    try:
        return deepcopy(value)
    except Exception as error:
        raise TypeError(f"{what} is {value!r} in the state dict, which cannot be copied") from error
