"""Load a state dict: check all of it before replacing anything, and skip the base class's casts."""

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
from angular_muown.params.eight_bit import INT8, SCALE
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
from angular_muown.params.state import compute_dtype, momentum_dtype, store_as_asked
from angular_muown.schedules import is_number, restore_momentum
from angular_muown.update import Recipe
from angular_muown.warn import warn

StateDict = dict[str, Any]
SavedGroup = dict[str, Any]
State = dict[str, Any]
SHAPED_LIKE_WEIGHT = ("momentum_buffer", "master", "average")
# These define what the state means: a state dict with other values belongs to other groups.
MEANING_KEYS = ("algorithm", "view", "transposed", "blocks", "column_blocks", "interleaved")
# These select the method or kappa. The state fits either value, so a silent change would go
# unnoticed.
METHOD_KEYS = (
    *("warmup_steps", "decay_scale", "decay_degree"),
    *("orthogonalize", "row_beta", "radius"),
)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CLOCKS = ("step", "averaged")
NONNEGATIVE_SUFFIXES = ("_sq", "second_moment", SCALE)
MAY_BE_NONFINITE = ("master", "average")  # the weight replaces a damaged master
# torch.distributed.checkpoint loads into the tensors of the optimizer, whatever was saved.
PLANNER_ADVICE = (
    "; if it comes from torch.distributed.checkpoint, pass planner=MomentumLoadPlanner() from "
    "angular_muown.integrations.checkpoint to dcp.load"
)
ADVICE = "create the groups as they were saved, or start with fresh state"


class LoadTarget(Protocol):
    """What loading needs from an engine."""

    param_groups: list[Group]
    state: Any

    def group_defaults(self) -> dict[str, Any]: ...
    def recipe(self, group: Group) -> Recipe: ...
    def release(self) -> None: ...


@dataclass
class Contents:
    """The checked contents of a state dict, in the optimizer's order."""

    groups: list[SavedGroup]
    states: dict[Tensor, State]
    others: dict[Any, Any]  # state that does not belong to a parameter
    warnings: list[str]


def load_checked(optimizer: Any, load: Callable[[StateDict], None], state_dict: StateDict) -> None:
    """Load a checked state dict with `load`, or raise and leave the optimizer unchanged.

    State tensors bypass `load`, which would cast them to the parameter's dtype, such as a float32
    momentum to bf16.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"a state dict must be a dict, not {state_dict!r}")
    contents: list[Contents] = []

    def check(_: Optimizer, state_dict: StateDict) -> StateDict:
        checked = read(optimizer, state_dict)
        contents.append(checked)
        optimizer.release()
        return {**state_dict, "state": checked.others, "param_groups": checked.groups}

    def fill(_: Optimizer) -> None:
        optimizer.state.update(contents[-1].states)
        store_as_asked(optimizer.param_groups, optimizer.state)
        for group in optimizer.param_groups:
            cuda_graph.to_device(group)

    # Last before and first after loading, so that the user's hooks can see and change everything.
    before = optimizer.register_load_state_dict_pre_hook(check)
    after = optimizer.register_load_state_dict_post_hook(fill, prepend=True)
    try:
        load(state_dict)
    finally:
        before.remove()
        after.remove()
    for message in contents[-1].warnings:
        warn(message)


def read(optimizer: LoadTarget, state_dict: StateDict) -> Contents:
    """Check a whole state dict, and return it in the form that the optimizer stores."""
    for p in [p for p, state in optimizer.state.items() if not state]:
        del optimizer.state[p]  # torch's flat load leaves empty states, and treats them as state
    _check_structure(optimizer, state_dict)
    _check_family(optimizer, state_dict)
    groups = [_complete(optimizer, i, saved) for i, saved in enumerate(state_dict["param_groups"])]
    _check_meaning(optimizer, groups)
    _check_not_empty(optimizer, groups, state_dict["state"])
    states, parameter_keys = {}, set()
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        reader, names = StateReader(group, saved, optimizer), parameter_names(group, i)
        for p, name, key in zip(group["params"], names, saved["params"], strict=True):
            parameter_keys.add(key)
            if key in state_dict["state"]:
                states[p] = reader.read(p, f"parameter {name!r}", state_dict["state"][key])
    others = {key: x for key, x in state_dict["state"].items() if key not in parameter_keys}
    messages = _changed_values(optimizer, groups) + _dropped_averages(optimizer, state_dict)
    messages += _kept_storage(optimizer, groups, state_dict["state"])
    return Contents(groups, states, others, messages)


# --- groups ---


def _check_structure(optimizer: LoadTarget, state_dict: StateDict) -> None:
    """Check the types of lists and dicts, and that every parameter has a key of its own."""
    for key, kind, word in (("param_groups", list, "list"), ("state", Mapping, "dict")):
        if key not in state_dict:
            raise ValueError(
                f"the state dict has no {key!r}; it has {sorted(map(str, state_dict))}"
            )
        if not isinstance(state_dict[key], kind):
            raise TypeError(f"{key!r} of the state dict is {state_dict[key]!r}, not a {word}")
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"param_groups of the state dict has {len(saved_groups)} group(s), but the optimizer "
            f"has {len(groups)}{_first_difference(groups, saved_groups)}: {ADVICE}"
        )
    owners: dict[Any, Tensor] = {}
    for i, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if not isinstance(saved, dict):
            raise TypeError(f"group {i} of the state dict is {saved!r}, not a dict")
        keys = _list_of(saved, i, "params", len(group["params"]))
        for p, key in zip(group["params"], keys, strict=True):
            if owners.setdefault(key, p) is not p:
                raise ValueError(
                    f"params of group {i} of the state dict has {key!r}, which refers to two "
                    "parameters"
                )
        if "param_names" in saved:
            _list_of(saved, i, "param_names", len(group["params"]))


def _first_difference(groups: list[Group], saved_groups: list[Any]) -> str:
    """Return the first parameter that was saved with another rule or cut, for an error message."""
    saved_by_name = {
        name: saved
        for saved in saved_groups
        if isinstance(saved, dict) and isinstance(saved.get("param_names"), list | tuple)
        for name in saved["param_names"]
        if isinstance(name, str)
    }
    for i, group in enumerate(groups):
        for name in parameter_names(group, i):
            for key in MEANING_KEYS if name in saved_by_name else ():
                current, saved = (_meaning(g.get(key)) for g in (group, saved_by_name[name]))
                if current != saved:
                    return f" ({name!r} was saved with {key}={saved!r} and has {current!r} here)"
    return ""


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
            f"optimizer's group has {count}: {ADVICE}"
        )
    return list(values)


def _check_family(optimizer: LoadTarget, state_dict: StateDict) -> None:
    family = optimizer.param_groups[0]["family"]
    for i, group in enumerate(state_dict["param_groups"]):
        saved_family = group.get("family", "an optimizer outside this package")
        if not isinstance(saved_family, str) or saved_family != family:
            raise ValueError(
                f"group {i} of this state dict was saved by {saved_family}, not by {family} "
                "(family): their states mean different things; create the same optimizer, or start "
                "with fresh state"
            )


def _complete(optimizer: LoadTarget, index: int, saved: Values) -> SavedGroup:
    """Return a checked copy of a saved group, with defaults for keys that it lacks."""
    current = optimizer.param_groups[index]
    start = {key: current[key] for key in ("base_lr",) if key in current}
    group = {
        **optimizer.group_defaults(),
        **start,
        **_copy_group(saved, index, optimizer.group_defaults()),
    }
    if "lr" not in saved:
        raise ValueError(f"group {index} of the state dict has no lr")
    if group["state_dtype"] == "float16":  # from version 0.1; its range is too small for momentum
        group["state_dtype"] = None
    for key in CLOCKS:
        if isinstance(group[key], Tensor):
            group[key] = _integer(group[key], group[key])
    restore_momentum(group)  # a schedule of this optimizer sets its own after loading
    group = cuda_graph.adapt_saved(group, current)
    try:
        check_values(group)
        check_foreach({**group, "params": current["params"]})
    except ValueError as error:
        raise ValueError(f"group {index} of the state dict: {error}") from None
    if group["average"] is None:
        group["averaged"] = 0
    return group


def _copy_group(saved: Values, index: int, defaults: Values) -> SavedGroup:
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


def _integer(value: Any, default: Any) -> Any:
    """Return a counter, tensor or number, as an int; `default` if it is not an integer."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex() or value.is_sparse:
            return default
        value = value.item()
    value = plain_value(value)
    return int(value) if is_number(value) and value == int(value) else default


def _check_meaning(optimizer: LoadTarget, saved_groups: list[SavedGroup]) -> None:
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        for key in MEANING_KEYS:
            current, loaded = (_meaning(g.get(key)) for g in (group, saved))
            if current != loaded:
                raise ValueError(
                    f"group {i} was saved with {key}={loaded!r}, but has {key}={current!r} in this "
                    f"optimizer: {ADVICE}"
                )


def _meaning(value: Any) -> Any:
    """Return a value that is equal for equal cuts: one block leaves a matrix whole."""
    return list(value) if isinstance(value, tuple) else None if value == 1 else value


def _check_not_empty(optimizer: LoadTarget, saved_groups: list[SavedGroup], states: Any) -> None:
    """Raise ValueError if a group has taken steps but all its states are empty.

    torch's flat load asks the optimizer for the names of its state, but cannot make it create any
    while gradients exist. It then passes an empty state for every parameter.
    """
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        group_states = [states[key] for key in saved["params"] if key in states]
        if (
            saved["step"]
            and group_states
            and all(isinstance(state, dict) and not state for state in group_states)
        ):
            name = parameter_names(group, i)[0]
            raise ValueError(
                f"group {i} has taken {saved['step']} steps, but the state dict has an empty state "
                f"for its parameters, such as {name!r}. If torch flattened it "
                "(flatten_optimizer_state_dict=True), call optimizer.zero_grad() before loading; "
                "to start with fresh state, leave out the empty states"
            )


def _changed_values(optimizer: LoadTarget, saved_groups: list[SavedGroup]) -> list[str]:
    """Return a warning for each method setting that the state dict replaces."""
    pairs = zip(optimizer.param_groups, saved_groups, strict=True)
    return [
        f"group {i}: {key}={saved[key]!r} from the state dict replaces {key}={group[key]!r}; to "
        f"keep yours, set optimizer.param_groups[{i}][{key!r}] = {group[key]!r} after loading"
        for i, (group, saved) in enumerate(pairs)
        for key in METHOD_KEYS
        if key in group and key in saved and group[key] != saved[key]
    ]


def _kept_storage(
    optimizer: LoadTarget, saved_groups: list[SavedGroup], states: Mapping[Any, Any]
) -> list[str]:
    """Keep the optimizer's state_dtype; return a warning for each group in which that converts what
    was loaded."""
    warnings = []
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        if group["algorithm"] != "matrix":
            continue
        compute = compute_dtype(group["params"][0])
        old, new = (momentum_dtype(g, compute) for g in (cast(Group, saved), group))
        momenta = [states.get(key, {}).get("momentum_buffer") for key in saved["params"]]
        dtypes = [M.dtype for M in momenta if M is not None]
        # torch.distributed.checkpoint may have cast them on the way, from what the group says.
        old = next((dtype for dtype in dtypes if dtype != new), old)
        same = saved["state_dtype"] == group["state_dtype"] and _is_exact(old, new)
        if dtypes and old != new and not same:
            warnings.append(
                f"group {i}: the momentum, saved with state_dtype={saved['state_dtype']!r}, is "
                f"converted to this optimizer's state_dtype={group['state_dtype']!r}: "
                f"{_what_is_rounded(old, new)}"
            )
        saved["state_dtype"] = group["state_dtype"]
    return warnings


def _is_exact(old: torch.dtype, new: torch.dtype) -> bool:
    """True if a conversion rounds nothing. Entries in 8 bits have the digits of their scales."""
    old = torch.float32 if old == torch.int8 else old
    return new != torch.int8 and torch.promote_types(old, new) == new


def _what_is_rounded(old: torch.dtype, new: torch.dtype) -> str:
    if new == torch.int8:
        return "every entry is rounded to 127 levels up to the largest of its row"
    if _is_exact(old, new):
        return "nothing is rounded"
    return f"every entry is rounded to {str(new).removeprefix('torch.')}"


def _dropped_averages(optimizer: LoadTarget, state_dict: StateDict) -> list[str]:
    """Return a warning for each group whose averages are dropped.

    With average=None a step would not update them, so they would go stale.
    """
    states, saved_groups = state_dict["state"], state_dict["param_groups"]
    pairs = zip(optimizer.param_groups, saved_groups, strict=True)
    return [
        f"group {i}: the weight averages in the state dict are dropped, because the optimizer has "
        f"average=None; to continue them, create it with average={saved.get('average')!r}"
        for i, (group, saved) in enumerate(pairs)
        if group["average"] is None
        and any("average" in states.get(key, ()) for key in saved["params"])
    ]


# --- the state of a parameter ---


class StateReader:
    """Check and convert the saved states of one group's parameters."""

    def __init__(self, current: Values, saved: SavedGroup, optimizer: LoadTarget) -> None:
        self.group, self.layout = saved, Layout.of(saved)
        self.matrices = saved["algorithm"] == "matrix"
        self.required, self.vectors = ("step", *MOMENTS), ()
        if self.matrices:
            # Also those of the group's current method: the user may set it again after loading.
            restored = {**saved, **{key: current[key] for key in METHOD_KEYS if key in current}}
            recipes = [optimizer.recipe(cast(Group, group)) for group in (saved, restored)]
            self.required = ("step", "momentum_buffer")
            self.vectors = tuple(dict.fromkeys(name for r in recipes for name in r.state_names))
            if saved["state_dtype"] == INT8:
                self.required, self.vectors = (*self.required, SCALE), (*self.vectors, SCALE)

    def read(self, p: Tensor, label: str, saved: Any) -> State:
        if not isinstance(saved, Mapping):
            raise TypeError(f"the state of {label} is {saved!r}, not a dict")
        self._check_names(label, saved)
        state = {name: self._read_entry(p, label, name, value) for name, value in saved.items()}
        if self.group["average"] is None:
            state.pop("average", None)
        return state

    def _check_names(self, label: str, saved: Mapping[str, Any]) -> None:
        """Check that required entries are all there or all absent, and moments come in pairs.

        Vectors may be missing if the saved method had none: they start at zero.
        """
        optimizer_entries = ("step", *SHAPED_LIKE_WEIGHT, *MOMENTS, *self.vectors)
        if any(name in saved for name in optimizer_entries):
            for name in self.required:
                if name not in saved:
                    advice = PLANNER_ADVICE if name == SCALE else ""
                    raise ValueError(
                        f"the state of {label} has no {name} in the state dict{advice}"
                    )
        for name in saved:
            squares = f"{name}_sq"
            if squares in self.vectors and squares not in saved:
                raise ValueError(
                    f"the state of {label} has {name}, but no {squares} in the state dict"
                )

    def _read_entry(self, p: Tensor, label: str, name: str, value: Any) -> Any:
        if name == "step":
            return self._counter(p, f"step of {label} in the state dict", value)
        shape = self._shape(p, name)
        if name in (*self._shaped_like_weight, *self.vectors):
            eight_bit = name == "momentum_buffer" and self.group["state_dtype"] == INT8
            _check_tensor(value, name, label, p, shape, (torch.int8,) if eight_bit else FLOATS)
        elif not isinstance(value, Tensor) or value.is_meta or tuple(value.shape) != shape:
            return _copy_user_entry(value, p, f"{name} in the state of {label}")
        return self._place(value.detach().to(p.device).clone(), p, name)

    @property
    def _shaped_like_weight(self) -> tuple[str, ...]:
        return SHAPED_LIKE_WEIGHT if self.matrices else (*MOMENTS, "master", "average")

    def _is_vector(self, name: Any) -> bool:
        return self.matrices and isinstance(name, str) and name not in SHAPED_LIKE_WEIGHT

    def _shape(self, p: Tensor, name: Any) -> tuple[int, ...]:
        return self.layout.vector_shape(p, name) if self._is_vector(name) else tuple(p.shape)

    def _counter(self, p: Tensor, label: str, value: Any) -> Tensor:
        """Return a counter on the device where the step reads it.

        In float32, because a bf16 counter stops at 256.
        """
        count = _integer(value, None)
        if not is_count(count):
            raise ValueError(f"{label} is {value!r}: it must be an integer >= 0")
        fused = not self.matrices and self.group.get("fused")
        device = p.device if self.group["capturable"] or fused else "cpu"
        return torch.tensor(float(count), dtype=torch.float32, device=device)

    def _place(self, value: Tensor, p: Tensor, name: str) -> Tensor:
        """Shard or gather a loaded value to match the parameter.

        AdamW's moments take the parameter's dtype, as in torch.
        """
        is_vector = self._is_vector(name)
        if is_sharded(p) and not is_sharded(value):
            value = shard_like(p, value, self.layout, name if is_vector else "")
        elif is_sharded(value) and not is_sharded(p):
            value = whole(value)
        if not self.matrices and name in MOMENTS:
            value = value.to(p.dtype)
        return value if is_vector else value.contiguous()  # its matrices must be views


def _check_tensor(
    value: Any,
    name: str,
    label: str,
    p: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    label = f"{name} of {label}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{label} is {value!r} in the state dict, not a tensor")
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{label} has shape {tuple(value.shape)} in the state dict, but a parameter of shape "
            f"{tuple(p.shape)} needs {shape}"
        )
    if value.is_meta and not p.is_meta:
        raise TypeError(f"{label} is on the meta device in the state dict: it has no data")
    if value.dtype not in dtypes or value.layout != torch.strided:
        raise TypeError(
            f"{label} is {value.dtype} and {value.layout} in the state dict: it must be a dense "
            f"tensor of {'one of ' * (len(dtypes) > 1)}{', '.join(map(str, dtypes))}; if it was "
            "saved with another state_dtype, create the optimizer with that one"
        )
    if name not in MAY_BE_NONFINITE:
        _check_entries(local(value.detach()), label, not name.endswith(NONNEGATIVE_SUFFIXES))


def _check_entries(value: Tensor, label: str, may_be_negative: bool) -> None:
    """Raise ValueError for entries with which one step would ruin the weights."""
    if value.numel() == 0 or value.is_meta:
        return
    smallest, largest = (x.item() for x in torch.aminmax(value))
    if not (isfinite(smallest) and isfinite(largest)):
        raise ValueError(
            f"{label} has entries in the state dict that are not finite: load an earlier "
            "checkpoint, or start with fresh state"
        )
    if smallest < 0 and not may_be_negative:
        raise ValueError(f"{label} has negative entries in the state dict, such as {smallest}")


def _copy_user_entry(value: Any, p: Tensor, label: str) -> Any:
    """Return a copy of an entry that the user added, with tensors on the parameter's device."""
    if isinstance(value, Tensor):
        return value.detach() if value.is_meta else value.detach().to(p.device).clone()
    if type(value) in (list, tuple):
        return type(value)(_copy_user_entry(x, p, label) for x in value)
    if type(value) is dict:
        return {k: _copy_user_entry(x, p, label) for k, x in value.items()}
    try:
        return deepcopy(value)
    except Exception as error:
        raise TypeError(
            f"{label} is {value!r} in the state dict, which cannot be copied"
        ) from error
