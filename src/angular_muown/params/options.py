"""Param groups: their options, defaults and checks.

An error names the key or the parameter, shows the value and states what is valid.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Literal, Required, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from angular_muown.params.layout import VIEWS, Cut, Layout
from angular_muown.params.roles import FSDP1, flattened_by, is_a, is_embedding_or_head
from angular_muown.schedules import INITIAL_MOMENTUM, WINDOWS, is_number, is_window
from angular_muown.stages.orthogonalize import ORTHOGONALIZERS
from angular_muown.stages.radius import RADII
from angular_muown.stages.scale import SCALES
from angular_muown.stages.tangent import TANGENT
from angular_muown.warn import warn


class CommonOptions(TypedDict, total=False):
    """Keyword arguments that every member of the family takes. `COMMON_DEFAULTS` has the defaults.

    Args:
        momentum: decay beta of the momentum M, in [0, 1).
        nesterov: True orthogonalizes the look-ahead T + beta M, False orthogonalizes M.
        betas: Adam's two decay rates, for row lengths, gains and groups with algorithm="adamw".
        eps: Adam's epsilon, likewise.
        maximize: ascend instead of descending.
        state_dtype: dtype of the momentum, "float32", "float64", "bfloat16" or "int8"; None is
            float32 (float64 for float64 weights). "int8" takes one byte per entry, and one number
            per row.
        write_back: how 16-bit weights are stored, by "stochastic" rounding or next to a float32
            "master" copy.
        capturable: keep lr and counters on the device, so that a CUDA graph can record a step.
        workspace: memory that a step may take in addition to parameters, gradients and state, as a
            fraction of the matrices' size. It bounds the kernels' work buffer (64 MiB are always
            allowed, unless ranks share matrices), the eager step's copies (of at least 2^24
            elements at a time) and matrices in transit between ranks (at least 32 MiB per owner
            with kernels).
        average: keep an average of recent weights for `with optimizer.averaged():`, over a fraction
            of the steps so far (0.1: about the last tenth) or over a number of steps. None keeps
            none. It takes 4 bytes per parameter and does not affect training.
        process_group: ranks that hold copies of plain parameters (DDP) and share the work. None is
            this node's ranks, on a GPU only where a cost model says that sharing is faster; False
            makes every rank work alone. DTensors (FSDP2, tensor parallel) define their own ranks.
        wire_dtype: dtype of matrices in transit between ranks, "float32", "float64" or "bfloat16";
            None is the dtype the polar factor is computed in.
        foreach: for the AdamW groups, as in `torch.optim.AdamW`; the matrices have kernels of their
            own.
        fused: likewise.
    """

    momentum: float
    nesterov: bool
    betas: tuple[float, float]
    eps: float
    maximize: bool
    state_dtype: str | torch.dtype | None
    write_back: str
    capturable: bool
    workspace: float
    average: float | None
    process_group: dist.ProcessGroup | Literal[False] | None
    wire_dtype: str | None
    foreach: bool | None
    fused: bool | None


COMMON_DEFAULTS: CommonOptions = {
    "momentum": 0.95,
    "nesterov": True,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "maximize": False,
    "state_dtype": None,
    "write_back": "stochastic",
    "capturable": False,
    "workspace": 0.25,
    "average": None,
    "process_group": None,
    "wire_dtype": None,
    "foreach": None,
    "fused": None,
}


class Group(CommonOptions, total=False):
    """A param group: plain values only, so that `torch.load(weights_only=True)` reads them."""

    params: Required[list[Tensor]]
    param_names: list[str]
    family: str  # the optimizer that the state belongs to
    algorithm: str
    view: str
    transposed: bool
    blocks: Cut | None
    column_blocks: Cut | None
    lr: Required[float | Tensor]
    base_lr: float  # lr when the group was added: radius_lr is relative to it
    step: int | Tensor  # steps taken: kappa's clock
    averaged: int | Tensor  # steps included in the averages
    weight_decay: float
    scale: str
    orthogonalize: str
    tangent_steps: int
    warmup_steps: int
    decay_scale: float
    decay_degree: float
    row_beta: float | None
    radius: str
    radius_lr: float | None
    interleaved: int  # absent if the rows of the blocks do not alternate


Values = Mapping[str, Any]  # a group that may be incomplete or unchecked

CONSTRUCTOR_KEYS = ("process_group",)  # one value for the whole optimizer, not per group
ADAMW_KEYS = ("foreach", "fused")  # absent unless set, as in state dicts of earlier versions
ENGINE_DEFAULTS: dict[str, Any] = {
    **{
        key: value
        for key, value in COMMON_DEFAULTS.items()
        if key not in (*CONSTRUCTOR_KEYS, *ADAMW_KEYS)
    },
    "weight_decay": 0.0,
    "algorithm": "matrix",
    "view": "matrix",
    "transposed": False,
    "blocks": None,
    "column_blocks": None,
    "step": 0,
    "averaged": 0,
}


def normalize_group(group: Values, defaults: Values, kind: Any) -> dict[str, Any]:
    """Return a copy of a group with plain values only, labelled with the optimizer's family.

    A copy, so that one plan can serve several optimizers. The family identifies the optimizer that
    saved a state; a user's subclass counts as its parent.
    """
    group = {k: v for k, v in plain_values(group).items() if k not in REMOVED or k in defaults}
    group["family"] = kind.family or kind.__name__
    dtype = group.get("state_dtype", defaults["state_dtype"])
    if isinstance(dtype, torch.dtype):
        group["state_dtype"] = str(dtype).removeprefix("torch.")
    return group


def plain_values(group: Values) -> dict[str, Any]:
    """Convert a group's numbers to Python's: `torch.load(weights_only=True)` rejects NumPy's."""
    return {k: v if k in ("params", "param_names") else plain_value(v) for k, v in group.items()}


def plain_value(value: Any) -> Any:
    """Convert a number of any library to Python's, also in lists; return other values unchanged."""
    if type(value) in (list, tuple):
        return type(value)(plain_value(x) for x in value)
    if isinstance(value, bool | str | Tensor):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # NumPy's bool, which is not a Real, and 0-dimensional arrays
    return value


def learning_rates(group: Group, dtype: torch.dtype) -> tuple[float | Tensor, float | Tensor]:
    """Return the current learning rates of directions and radii.

    `radius_lr` is relative to the lr that the group started with, so it follows lr's schedule.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):  # 0-dimensional, so that it does not promote other dtypes
        lr = lr.to(dtype).reshape(())
    if group.get("radius_lr") is None:
        return lr, lr
    return lr, group["radius_lr"] / group["base_lr"] * lr


def seed(group: Group) -> int | Tensor | None:
    """Return the seed of this step's stochastic rounding; None rounds to nearest."""
    return group["step"] if group["write_back"] == "stochastic" else None


PARAMETER_KEYS = ("params", "param_names")
CHANGING_KEYS = ("lr", "step", "averaged")  # these change from step to step


def equal_groups(groups: Sequence[Group]) -> list[tuple[Any, list[int]]]:
    """Find groups that differ only in their parameters.

    One update moves all of them, so a group per parameter costs no extra time. Return for each set
    of equal groups, in order of the first, a key for the settings that rarely change and the
    groups' indices.
    """
    sets: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        settings = frozenset(
            (name, _key(x))
            for name, x in group.items()
            if name not in PARAMETER_KEYS and name not in CHANGING_KEYS
        )
        changing = tuple(_key(group.get(name)) for name in CHANGING_KEYS)
        sets.setdefault((settings, changing), []).append(index)
    return [(settings, indices) for (settings, _), indices in sets.items()]


def _key(value: Any) -> Any:
    """Return a hashable key for a value.

    An unhashable value, like a tensor, equals only itself.
    """
    key = tuple(value) if isinstance(value, list) else value
    try:
        hash(key)
    except TypeError:
        return id(value)
    return key


ALGORITHMS = ("matrix", "adamw")
WRITE_BACKS = ("stochastic", "master")
# Options of version 0.1 that did not help (docs/evidence/what-did-not-help.md), with the values
# that turned them off.
REMOVED = {
    "tangent_momentum": False,
    "exact_angle": False,
    "row_beta": None,  # only AngularMuown's; NorMuon and NorMuown have it
    "column_gains": False,
}
FOREIGN_KEYS = (
    *("params", "param_names", "base_lr", "interleaved", *ADAMW_KEYS),
    *("initial_lr", "max_lr", "min_lr", INITIAL_MOMENTUM),
)
WIRE_DTYPES = (None, "float32", "float64", "bfloat16")  # float16 would lose small entries
# No float16: gradients, and momentum with them, leave its range of 6e-8 to 65,504.
STATE_DTYPES = (None, "float32", "float64", "bfloat16", "int8")


def _is_nonnegative(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1 and not x.is_meta and _is_nonnegative(x.item())
    return is_number(x) and x >= 0


def _is_fraction(x: Any) -> bool:
    return is_number(x) and 0 <= x < 1


def is_count(x: Any) -> bool:
    return is_number(x) and isinstance(x, int) and x >= 0


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool)


def _is_cut(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return all(map(is_count, x)) and len(x) > 0
    return x is None or (is_count(x) and x >= 1)


def _one_of(names: Any) -> tuple[Callable[[Any], bool], str]:
    valid = tuple(names)  # strings and None: comparing other types may raise
    return (lambda x: isinstance(x, str | None) and x in valid), (
        "one of " + ", ".join(map(repr, names))
    )


_NONNEGATIVE = (_is_nonnegative, "a finite number >= 0")
_FRACTION = (_is_fraction, "a number in [0, 1)")
_BOOL = (_is_bool, "True or False")
_COUNT = (is_count, "an integer >= 0")
_OPTIONAL_BOOL = (lambda x: x is None or _is_bool(x), "None, True or False")
_CUT = (_is_cut, "None, a number of equal blocks >= 1, or a list of block sizes")

RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_is_nonnegative, "a finite number >= 0, or a tensor with one such element"),
    "momentum": _FRACTION,
    "nesterov": _BOOL,
    "betas": (
        lambda x: isinstance(x, list | tuple) and len(x) == 2 and all(map(_is_fraction, x)),
        "two numbers in [0, 1)",
    ),
    "eps": _NONNEGATIVE,
    "warmup_steps": _COUNT,
    "decay_scale": _NONNEGATIVE,
    "decay_degree": _NONNEGATIVE,
    "row_beta": (lambda x: x is None or _is_fraction(x), "None or a number in [0, 1)"),
    "tangent_steps": _COUNT,
    "radius_lr": (
        lambda x: x is None or _is_nonnegative(x),
        "None (follow lr) or a finite number >= 0",
    ),
    "weight_decay": _NONNEGATIVE,
    "maximize": _BOOL,
    "capturable": _BOOL,
    "workspace": (lambda x: is_number(x) and x > 0, "a number > 0: 0.25 for a quarter"),
    "average": (lambda x: x is None or is_window(x), f"None, {WINDOWS}"),
    "scale": _one_of(SCALES),
    "orthogonalize": _one_of((*ORTHOGONALIZERS, TANGENT)),
    "radius": _one_of(RADII),
    "algorithm": _one_of(ALGORITHMS),
    "write_back": _one_of(WRITE_BACKS),
    "state_dtype": _one_of(STATE_DTYPES),
    "wire_dtype": _one_of(WIRE_DTYPES),
    "view": _one_of(VIEWS),
    "transposed": _BOOL,
    "blocks": _CUT,
    "column_blocks": _CUT,
    "interleaved": (lambda x: is_count(x) and x >= 1, "an integer >= 1"),
    "step": _COUNT,
    "averaged": _COUNT,
    "base_lr": _NONNEGATIVE,
    "fused": _OPTIONAL_BOOL,
    "foreach": _OPTIONAL_BOOL,
}


# What a plan shows of a group: options of the method, not the clocks and keys of frameworks.
_HIDDEN = ("lr", "algorithm", "step", "averaged", "base_lr")
_ADAMW = ("weight_decay", "betas", "eps", "maximize", "average", *ADAMW_KEYS)
SHOWN_KEYS = {
    "matrix": frozenset(RULES).difference(_HIDDEN, ADAMW_KEYS),
    "adamw": frozenset(_ADAMW),
}


def check_not_model(params: Any, family: str) -> None:
    if isinstance(params, nn.Module):
        raise TypeError(
            f"{family} got a model: use {family}.for_model(model), which sorts its parameters"
        )


def changed_settings(group: Values, defaults: Values) -> dict[str, Any]:
    """Return what a group sets differently from the defaults, and what every reader looks for.

    Learning rate and momentum are those before any schedule. What schedulers keep in a group is
    left out, and so is what AdamW does not use.
    """
    lr = group.get("initial_lr", group.get("lr"))
    if INITIAL_MOMENTUM in group:
        group = {**group, "momentum": group[INITIAL_MOMENTUM]}
    always = {"algorithm": group.get("algorithm"), "lr": lr}
    changed = {
        key: value
        for key, value in group.items()
        if key in SHOWN_KEYS[group.get("algorithm", "matrix")]
        and not (key in defaults and _key(defaults[key]) == _key(value))
    }
    return {key: value for key, value in always.items() if value is not None} | changed


# A vocabulary has several times more rows than columns, and no layer that reads its rows.
VOCABULARY_RATIO = 3.5
LEAST_LAYERS = 3  # a shape that each of them has is not an embedding's
DECLARING_KEYS = ("algorithm", "view", "transposed", "blocks", "column_blocks", "interleaved")


def warn_if_unsorted(group: Values, family: str) -> None:
    """Warn if parameters without declared roles seem to include an embedding or a head.

    `model.parameters()` of a model without biases passes all other checks.
    """
    if any(key in group for key in DECLARING_KEYS) or isinstance(group["params"], Tensor | set):
        return
    named = [x if isinstance(x, tuple) and len(x) == 2 else ("", x) for x in group["params"]]
    pairs = [(name, p) for name, p in named if isinstance(p, Tensor) and p.ndim == 2]
    counts = Counter(p.shape for _, p in pairs)
    for name, p in pairs:
        if is_embedding_or_head(name) or _is_vocabulary(p.shape, counts):
            label = f"{name!r} " if name else ""
            warn(
                f"{family} got a parameter {label}of shape {p.shape[0]} x {p.shape[1]} that looks "
                "like an embedding or an output head, which belong to AdamW: use "
                f"{family}.for_model(model), or declare the group with algorithm='adamw' or "
                "algorithm='matrix'"
            )
            return


def _is_vocabulary(shape: torch.Size, counts: Mapping[torch.Size, int]) -> bool:
    """True for a tall shape that occurs once or twice in a model of several layers."""
    rows, columns = shape
    fed = any(rows == k * other[1] for other in counts for k in (1, 2, 3))  # 2, 3: fused layers
    in_layers = max(counts.values()) >= LEAST_LAYERS > counts[shape]
    return rows >= VOCABULARY_RATIO * columns and in_layers and not fed


def check_keys(group: Values, defaults: Mapping[str, Any], family: str) -> None:
    """Check the keys of a new group.

    Frameworks store keys of their own in groups, so unknown keys are allowed, but likely typos are
    not.
    """
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"a param group must be a dict with the key 'params', not {group!r}")
    for key in group:
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} in a group is not a string")
        if key in CONSTRUCTOR_KEYS:
            raise ValueError(
                f"{key}={group[key]!r} in a group: pass it to the constructor, one value for all "
                "groups"
            )
        if is_removed(key, group[key], defaults):
            continue
        if key in RULES and key not in (*defaults, *FOREIGN_KEYS):
            raise ValueError(f"{key}={group[key]!r}: {family} has no {key}")
        if key not in defaults and key not in FOREIGN_KEYS:
            for near in get_close_matches(key, defaults, n=1, cutoff=0.85):
                raise ValueError(f"{key}={group[key]!r} is not an option: did you mean {near}?")


def is_removed(key: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """True if this option was removed; raise ValueError if it is turned on."""
    if key not in REMOVED or key in defaults:
        return False
    if value is not REMOVED[key]:
        raise ValueError(
            f"{key}={value!r}: this option was removed, because no run was clearly better with it; "
            "leave it out"
        )
    return True


def parameter_list(params: Any) -> Any:
    """Return a group's parameters as a list of leaf tensors. torch checks the rest."""
    if isinstance(params, Tensor | set):
        return params
    if not isinstance(params, Iterable):
        raise TypeError(f"params={params!r} in a group: it must be a list of parameters")
    entries = list(params)
    for i, entry in enumerate(entries):
        name, p = entry if isinstance(entry, tuple) and len(entry) == 2 else (f"params[{i}]", entry)
        if isinstance(p, Tensor) and not (p.is_leaf or p.retains_grad):
            raise ValueError(
                f"parameter {name!r} (shape {tuple(p.shape)}) is the result of a computation, not "
                "a leaf: pass the tensor that it was computed from, or p.detach()"
            )
    return entries


def check_value(name: str, value: Any, key: str) -> None:
    """Check an argument `name` by the rule of the option `key`."""
    is_valid, expected = RULES[key]
    if not is_valid(value):
        raise ValueError(f"{name}={value!r} is not valid: it must be {expected}")


def check_values(group: Values) -> None:
    for key in RULES:
        if key in group:
            check_value(key, group[key], key)
    if group.get("fused") and group.get("foreach"):
        raise ValueError("fused=True with foreach=True: choose one of torch's implementations")
    if group["algorithm"] == "matrix":
        _check_combinations(group)


def check_foreach(group: Values) -> None:
    """Reject what torch's AdamW would reject during the step, after other parameters moved."""
    if group["algorithm"] != "adamw" or not group.get("foreach"):
        return
    takes_tensors = group["capturable"] and all(p.is_cuda for p in group["params"])
    if not takes_tensors and (group["capturable"] or isinstance(group["lr"], Tensor)):
        raise ValueError(
            f"lr={group['lr']!r} with foreach=True and capturable={group['capturable']}: torch's "
            "foreach takes a tensor lr only with capturable=True and on a GPU; use a plain number, "
            "or leave out foreach"
        )


def _check_combinations(group: Values) -> None:
    """Check values of a matrix group that are valid on their own but not together."""
    start = "base_lr" if "base_lr" in group else "lr"  # a schedule may have set lr to 0 since
    if group.get("radius_lr") is not None and float(group[start]) == 0:
        raise ValueError(
            f"radius_lr={group['radius_lr']!r} with {start}={group[start]!r}: radius_lr is "
            "scheduled in proportion to lr, so lr must start above 0"
        )
    if (group.get("interleaved") or 1) > 1 and not group.get("blocks"):
        raise ValueError(
            f"interleaved={group['interleaved']!r} without blocks: declare the blocks whose rows "
            "alternate, such as blocks=3 for q, k, v"
        )
    if group.get("orthogonalize") == TANGENT and "tangent_steps" not in group:
        raise ValueError(
            f"orthogonalize={TANGENT!r} is for AngularMuown only: choose one of "
            + ", ".join(map(repr, ORTHOGONALIZERS))
        )


def check_process_group(group: Any) -> Any:
    """Return `group` if it is None, False or a process group that this rank belongs to."""
    if group is None or group is False:
        return group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"process_group={group!r} is not valid: it must be None (the default group), False "
            "(every rank works alone) or a process group that this rank belongs to"
        )
    return group


def check_copy(process_group: Any) -> None:
    if process_group:
        raise TypeError(
            "an optimizer with a process_group cannot be copied or pickled, because the process "
            "group cannot: create another with the same param groups, and load the state_dict"
        )


def parameter_names(group: Values, index: int) -> list[str]:
    """Return a name for each parameter of a group, for errors and reports."""
    if "param_names" in group:
        return list(group["param_names"])
    return [f"param_groups[{index}]['params'][{i}]" for i in range(len(group["params"]))]


# FSDP1 and ZeRO flatten weights into shared buffers, so the rows of a matrix are lost.
FLATTENING_REMEDIES = {
    "FSDP1": "use FSDP2 (torch.distributed.fsdp.fully_shard), which keeps their shapes",
    "DeepSpeed": 'use ZeRO stage 0 ("zero_optimization": {"stage": 0}), or FSDP2 (fully_shard)',
}


def check_model(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Reject flattened parameters before they are sorted: they would look like vectors."""
    for path, module in model.named_modules():
        if is_a(module, FSDP1):
            raise ValueError(
                f"module '{path or type(module).__name__}' is wrapped by FSDP1, which flattens "
                f"matrices: {FLATTENING_REMEDIES['FSDP1']}"
            )
    for name, p in named:
        _check_not_flat(p, f"parameter {name!r} (shape {tuple(p.shape)})")


def _check_not_flat(p: Tensor, label: str) -> None:
    framework = flattened_by(p)
    if framework is not None:
        remedy = FLATTENING_REMEDIES[framework]
        raise ValueError(f"{label} was flattened by {framework}: {remedy}")


def check_parameter(p: Tensor, name: str, group: Values) -> None:
    """Check that a parameter is real and, in a matrix group, can be read as matrices."""
    label = f"parameter {name!r} (shape {tuple(p.shape)}, {p.dtype}, {p.layout})"
    _check_not_flat(p, label)
    if p.is_complex() or not p.is_floating_point():
        raise ValueError(f"{label} is not real floating point: use another optimizer for it")
    if group["algorithm"] == "adamw":
        return
    if p.layout != torch.strided:
        raise ValueError(f"{label} is not dense: use p.to_dense()")
    if p.ndim < 2:
        raise ValueError(
            f"{label} is not a matrix: use {group['family']}.for_model(model), which sorts all "
            "parameters, or put it in a group with algorithm='adamw'"
        )
    if p.numel() == 0:
        raise ValueError(f"{label} has no elements: leave it out")
    try:
        Layout.of(group).check(p)
    except ValueError as error:
        raise ValueError(f"{label} {error}") from None


def with_gradient(group: Values, index: int) -> list[Tensor]:
    """Return the group's parameters that have a gradient, after checking them.

    The check comes before anything moves: a step moves all parameters or none. It runs for every
    parameter at every step, so it must be cheap.
    """
    params, matrices = [], group["algorithm"] == "matrix"
    for i, p in enumerate(group["params"]):
        if matrices and p.ndim < 2:  # it was a matrix when it was added
            names = parameter_names(group, index)
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise ValueError(
                f"a flat tensor of shape {tuple(p.shape)} has replaced the matrices of group "
                f"{index}, which was created with {names[0]!r}{others}. Under FSDP1: "
                f"{FLATTENING_REMEDIES['FSDP1']}. Under DeepSpeed: "
                f"{FLATTENING_REMEDIES['DeepSpeed']}"
            )
        grad = p.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            raise ValueError(
                f"parameter {parameter_names(group, index)[i]!r} (shape {tuple(p.shape)}) has a "
                f"{grad.layout} gradient: only dense gradients are supported; for an embedding set "
                "sparse=False"
            )
        params.append(p)
    return params


def check_clock(group: Values, index: int) -> None:
    """Check the numbers that every step reads and that users and schedulers write.

    A tensor's value is not read: that would wait for the device.
    """
    for key in ("step", "averaged"):
        value = group.get(key)
        if type(value) is not int or value < 0:
            _check_number(group, index, key, _is_clock, "an integer >= 0")
    if type(group.get("lr")) is not float or not isfinite(group["lr"]):
        expected = "a finite number or a tensor with one element"
        _check_number(group, index, "lr", _is_finite, expected)
    if group.get("radius_lr") is not None and group["algorithm"] == "matrix":
        base = group.get("base_lr")
        if type(base) is not float or not 0 < base < inf:
            expected = "the lr that radius_lr is relative to, a number above 0"
            _check_number(group, index, "base_lr", lambda x: is_number(x) and x > 0, expected)


def _is_clock(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1 and x.dtype in (torch.int64, torch.int32)
    return is_count(plain_value(x))


def _is_finite(x: Any) -> bool:
    return x.numel() == 1 if isinstance(x, Tensor) else is_number(plain_value(x))


def _check_number(
    group: Values, index: int, key: str, is_valid: Callable[[Any], bool], expected: str
) -> None:
    if key not in group:
        raise ValueError(f"group {index} has no {key}: it must be {expected}")
    if not is_valid(group[key]):
        raise ValueError(
            f"group {index} has {key}={group[key]!r}, which is not valid: it must be {expected}"
        )


def check_group(group: Values, index: int) -> None:
    """Check the settings of an optimizer's group, except those that `check_clock` checks."""
    try:
        check_values({key: x for key, x in group.items() if key not in CHANGING_KEYS})
        check_foreach(group)
    except ValueError as error:
        raise ValueError(f"group {index}: {error}") from None


def check_fit(
    groups: Mapping[int, Values],
    params: Iterable[Tensor],
    states: Iterable[Mapping[str, Any]],
) -> None:
    """Check that the state fits the parameters, which may have been cast, moved or resized since.

    This runs for every parameter at every step, so it must be cheap.
    """
    adam = next(iter(groups.values()))["algorithm"] == "adamw"
    names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",)
    for p, state in zip(params, states, strict=True):
        for name in names:
            value = state.get(name)
            if (
                value is None
                or value.shape != p.shape
                or value.device != p.device
                or (adam and value.dtype is not p.dtype)
            ):
                _raise_unfit(groups, p, name, value)
        if not isinstance(state["step"], Tensor):
            _raise_unfit(groups, p, "step", None)


def _raise_unfit(groups: Mapping[int, Values], p: Tensor, name: str, value: Tensor | None) -> None:
    names = (
        parameter_name
        for i, group in groups.items()
        for q, parameter_name in zip(group["params"], parameter_names(group, i), strict=True)
        if q is p
    )
    label = f"parameter {next(names)!r}"
    if value is None:
        raise ValueError(
            f"the state of {label} has no tensor {name}: restore it, or start with fresh state by "
            "optimizer.state.clear()"
        )
    if value.shape != p.shape:
        raise ValueError(
            f"{label} has shape {tuple(p.shape)}, but its {name} has {tuple(value.shape)}: after "
            "resizing a parameter, start with fresh state for it by del optimizer.state[p]"
        )
    raise ValueError(
        f"{label} is {p.dtype} on {p.device}, but its {name} is {value.dtype} on {value.device}: "
        "after casting or moving the model, convert the state by "
        "optimizer.load_state_dict(optimizer.state_dict())"
    )
