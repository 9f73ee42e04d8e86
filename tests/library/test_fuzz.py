"""Random input: constructors, groups and state dicts work, or are rejected by name.

The suite draws a few of each; `pytest -m fuzz` draws many.
"""

import copy
import inspect
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from angular_muown.engine import Engine
from tests.library.family import FAMILY, MEMBERS, parameter, run
from tests.library.params.test_loading import assert_equal, snapshot
from tests.library.params.test_state import save_and_load

NAN, INF = math.nan, math.inf

JUNK: list[Callable[[], Any]] = [
    *(lambda x=x: x for x in (None, NAN, INF, -INF, -1, -1.5, 1.5, 0, 1, 7, 10**400, True, False)),
    *(lambda x=x: x for x in ("junk", "", b"x", (), (0.9,), (0.9, 0.99, 0.999), int, print)),
    *(lambda x=x: x for x in (0.5, 1e-9, 2**70, 3 + 4j, np.float32(NAN), np.int64(-2))),
    lambda: [],
    lambda: {},
    lambda: [None],
    lambda: {"a": {"b": [NAN, {}]}},
    lambda: {1, 2},
    lambda: object(),
    lambda: (x for x in ()),
    lambda: np.array([1.0, NAN]),
    lambda: np.array("x"),
    lambda: torch.tensor(NAN),
    lambda: torch.tensor(-1),
    lambda: torch.tensor(True),
    lambda: torch.ones(2, 3),
    lambda: torch.ones(3, dtype=torch.complex64),
    lambda: torch.ones((), device="meta"),
    lambda: torch.eye(3).to_sparse(),
]

VALID: dict[str, list[Any]] = {
    "lr": [0.0, 0.01, 1, torch.tensor(0.01), torch.tensor([0.02]), np.float32(0.03)],
    "momentum": [0.0, 0.9, np.float64(0.8)],
    "nesterov": [True, False, np.bool_(True)],
    "betas": [(0.9, 0.95), [0.0, 0.5], (np.float32(0.9), 0.99)],
    "eps": [1e-8, 1e-3, 1],
    "warmup_steps": [0, 3, np.int64(5)],
    "decay_scale": [0.0, 1e-3, 2],
    "decay_degree": [0, 0.5, 1.0],
    "row_beta": [0.9, 0.0],
    "tangent_steps": [0, 1, 2],
    "radius_lr": [None, 0.0, 0.01],
    "weight_decay": [0.0, 0.1, 1],
    "maximize": [True, False],
    "capturable": [True, False],
    "workspace": [0.25, 1, 100.0],
    "average": [None, 0.1, 5],
    "scale": ["fan_ratio", "adam_rms", "rms", "aspect", "none"],
    "orthogonalize": ["polar_express", "newton_schulz", "gram", "svd", "tangent"],
    "radius": ["adam", "log_adam", "fixed"],
    "write_back": ["stochastic", "master"],
    "state_dtype": [None, "float32", torch.bfloat16, "float64", "int8"],
    "wire_dtype": [None, "float32", "bfloat16"],
    "process_group": [None, False],
}
GROUP_ONLY: dict[str, list[Any]] = {
    "algorithm": ["matrix", "adamw"],
    "view": ["matrix", "stack", "conv"],
    "transposed": [True, False],
    "blocks": [None, 1, 2, [2, 4], (3, 3), np.int64(3)],
    "column_blocks": [None, 2, [1, 3]],
    "fused": [None, True, False],
    "foreach": [None, True, False],
    "name": ["mine"],
    "initial_lr": [0.5],
    "base_lr": [0.01],
    "step": [0, 12],
}

FRAMEWORK_KEYS = ("name", "initial_lr")  # a group accepts any value for them


def draws(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize a test by ranges of seeds: a few in the suite, many with the marker."""
    marked = [pytest.param(range(i, i + 50), marks=pytest.mark.fuzz) for i in range(few, many, 50)]
    return pytest.mark.parametrize("seeds", [range(few), *marked], ids=lambda r: f"{r.start}")


@contextmanager
def noted(seed: int, drawn: Any) -> Iterator[None]:
    """Add what was drawn to the message of a failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        error.add_note(f"seed {seed}: {drawn!r}")
        raise


def pick(rng: random.Random, table: dict[str, list[Any]], key: str, junk: float) -> Any:
    return rng.choice(JUNK)() if rng.random() < junk else rng.choice(table[key])


def assert_works(optimizer: Engine, params: list[nn.Parameter]) -> None:
    """Assert that steps leave finite weights, and that the state can be saved and loaded."""
    run(optimizer, params, 2)
    assert all(p.isfinite().all() for p in params)
    keys = [sorted(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(save_and_load(optimizer.state_dict()))
    assert [sorted(group) for group in optimizer.param_groups] == keys
    run(optimizer, params, 1, start=2)
    assert all(p.isfinite().all() for p in params)


def assert_named(error: Exception, names: Any) -> None:
    assert any(str(name) in str(error) for name in names), f"{error!r} names none of {names}"


# --- constructors ---


def arguments(rng: random.Random, optimizer: type[Engine]) -> dict[str, Any]:
    accepted = [key for key in inspect.signature(optimizer).parameters if key in VALID]
    junk = rng.choice([0.0, 0.1, 0.5])
    return {key: pick(rng, VALID, key, junk) for key in rng.sample(accepted, rng.randint(1, 6))}


@draws(150, 2150)
def test_constructor_arguments_work_or_are_rejected(seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(f"constructor {seed}")
        optimizer = rng.choice(MEMBERS)
        options = arguments(rng, optimizer)
        with noted(seed, (optimizer, options)):
            outcomes[_construct(optimizer, options)] += 1
    assert min(outcomes["works"], outcomes["rejected"]) > 0.04 * len(seeds), outcomes


def _construct(optimizer: type[Engine], options: dict[str, Any]) -> str:
    w, b = parameter(6, 4), parameter(4)
    try:
        opt = optimizer([{"params": [w]}, {"params": [b], "algorithm": "adamw"}], **options)
    except (ValueError, TypeError) as error:
        assert_named(error, options)
        return "rejected"
    assert_works(opt, [w, b])
    return "works"


# --- groups ---


PARAMS: dict[str, Callable[[], Any]] = {
    "a matrix": lambda: parameter(6, 4, seed=3),
    "matrices": lambda: [parameter(6, 4, seed=3), parameter(4, 6, seed=4)],
    "named": lambda: [("new", parameter(6, 4, seed=3))],
    "a stack": lambda: [parameter(2, 6, 4, seed=3)],
    "a convolution": lambda: [parameter(6, 2, 2, 2, seed=3)],
    "a vector": lambda: [parameter(6, seed=3)],
    "a generator": lambda: (parameter(6, 4, seed=i) for i in (3, 4)),
    "nothing": lambda: [],
    "empty": lambda: [parameter(0, 4)],
    "not a leaf": lambda: [parameter(6, 4) * 2],
    "a set": lambda: {parameter(6, 4)},
    "complex": lambda: [nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))],
    "integers": lambda: [nn.Parameter(torch.ones(3, 3).int(), requires_grad=False)],
    "strings": lambda: ["w"],
    "None": lambda: None,
    "a number": lambda: 3,
}
GOOD = ("a matrix", "matrices", "a stack", "a convolution", "a vector", "a generator")


def random_group(rng: random.Random, optimizer: type[Engine]) -> Any:
    if rng.random() < 0.03:
        return rng.choice([None, 3, [], "group", {}, {"lr": 0.1}])
    options = {key: VALID[key] for key in inspect.signature(optimizer).parameters if key in VALID}
    table, junk = {**options, **GROUP_ONLY}, rng.choice([0.0, 0.0, 0.2])
    keys = rng.sample(sorted(table), rng.randint(0, 4))
    group = {key: pick(rng, table, key, 0 if key in FRAMEWORK_KEYS else junk) for key in keys}
    if rng.random() < 0.05:
        group[rng.choice(["momentun", "process_group", 5, None, "row_beta"])] = 1
    kind = rng.choice(GOOD if rng.random() < 0.7 else sorted(PARAMS))
    if kind in ("a vector", "a stack", "a convolution") and rng.random() < 0.8:
        required = {"a vector": ("algorithm", "adamw"), "a stack": ("view", "stack")}
        key, value = required.get(kind, ("view", "conv"))
        group[key] = value
    return {**group, "params": PARAMS[kind]()}


@draws(150, 2150)
def test_groups_work_or_are_rejected(seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(f"group {seed}")
        optimizer = rng.choice(MEMBERS)
        group = random_group(rng, optimizer)
        with noted(seed, (optimizer, group)):
            outcomes[_add_group(optimizer, group)] += 1
    assert min(outcomes["works"], outcomes["rejected"]) > 0.04 * len(seeds), outcomes


def _add_group(optimizer: type[Engine], group: Any) -> str:
    w = parameter(6, 4)
    opt = optimizer([w], lr=0.01)
    run(opt, [w], 1)
    before = snapshot(opt)
    try:
        opt.add_param_group(group)
    except (ValueError, TypeError) as error:
        assert_named(error, ["param", "group", *(group if isinstance(group, dict) else ())])
        assert_equal(snapshot(opt), before)
        run(opt, [w], 1, start=1)
        return "rejected"
    assert_works(opt, [p for g in opt.param_groups for p in g["params"]])
    return "works"


# --- state dicts ---


Path = tuple[Any, ...]


def paths(tree: Any, prefix: Path = ()) -> Iterator[Path]:
    """Yield the path of keys to everything in a state dict."""
    if prefix:
        yield prefix
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from paths(tree[key], (*prefix, key))


def replace(rng: random.Random, parent: Any, key: Any) -> None:
    parent[key] = rng.choice(JUNK)()


def delete(rng: random.Random, parent: Any, key: Any) -> None:
    del parent[key]


def add(rng: random.Random, parent: Any, key: Any) -> None:
    """Add junk to a container, or to the parent of anything else."""
    container = parent[key] if isinstance(parent[key], dict | list) else parent
    if isinstance(container, list):
        index = rng.randint(0, len(container))
        container.insert(index, rng.choice([*container, rng.choice(JUNK)()]))
    else:
        junk = rng.choice(JUNK)()
        container[rng.choice(["note", "exp_avg", "master", "average", "foreach", 99])] = junk


def swap(rng: random.Random, parent: Any, key: Any) -> None:
    """Swap two entries of the parent."""
    other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


def damage(rng: random.Random, parent: Any, key: Any) -> None:
    """Change a tensor's entries, shape or dtype, or replace anything else."""
    value = parent[key]
    if not isinstance(value, torch.Tensor):
        return replace(rng, parent, key)
    damaged: list[Callable[[], Any]] = [
        lambda: torch.full_like(value, NAN),
        lambda: torch.full_like(value, -INF),
        lambda: -value - 1,
        lambda: value.unsqueeze(0),
        lambda: value.flatten()[:1],
        lambda: value.mT if value.ndim > 1 else value,
        lambda: value.to(rng.choice([torch.bfloat16, torch.int64, torch.complex64, torch.bool])),
        lambda: value.to("meta"),
        lambda: value.tolist(),
        lambda: value.expand(2, *value.shape),
    ]
    parent[key] = rng.choice(damaged)()
    return None


BREAKS = (replace, replace, delete, add, swap, damage, damage)


def corrupt(rng: random.Random, saved: dict[str, Any]) -> list[tuple[str, Path]]:
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        candidates = [p for p in paths(saved) if len(p) > 1 or rng.random() < 0.3]
        if not candidates:
            break
        path = rng.choice(candidates)
        parent = saved
        for key in path[:-1]:
            parent = parent[key]
        break_ = rng.choice(BREAKS)
        break_(rng, parent, path[-1])
        done.append((break_.__name__, path))
    return done


@draws(150, 2150)
def test_state_dicts_load_or_are_rejected(seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(f"state dict {seed}")
        optimizer = rng.choice(FAMILY)
        values = rng.choice([{}, {}, {"average": 0.3}, {"write_back": "master"}])
        dtype = rng.choice([torch.float64, torch.bfloat16])
        params, opt = _trained(optimizer, values, dtype)
        saved = copy.deepcopy(opt.state_dict())
        run(opt, params, 1, start=3)
        done = corrupt(rng, saved)
        with noted(seed, (optimizer, values, dtype, done)):
            outcomes[_load(opt, params, saved, done)] += 1
    assert min(outcomes["works"], outcomes["rejected"]) > 0.04 * len(seeds), outcomes


def _trained(
    optimizer: type[Engine], values: dict[str, Any], dtype: torch.dtype
) -> tuple[list[nn.Parameter], Engine]:
    w, v, b = (parameter(*shape, dtype=dtype) for shape in ((6, 4), (4, 6), (4,)))
    groups = [
        {"params": [("w", w), ("v", v)], "blocks": 2},
        {"params": [("b", b)], "algorithm": "adamw"},
    ]
    radii = (
        {} if "radius_lr" not in inspect.signature(optimizer).parameters else {"radius_lr": 0.02}
    )
    opt = optimizer(groups, lr=0.01, **radii, **values)
    run(opt, [w, v, b], 3)
    return [w, v, b], opt


def _load(opt: Engine, params: list[nn.Parameter], saved: Any, done: list[Any]) -> str:
    before = snapshot(opt)
    try:
        opt.load_state_dict(saved)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        keys = {key for _, path in done for key in path}
        names = {*keys, "param_groups", "'state'"} - {"state", 0, 1, 2}
        places = {f"group {i}" for i in range(3)} | {f"parameter '{name}'" for name in "wvb"}
        assert_named(error, names | places)
        assert_equal(snapshot(opt), before)
        run(opt, params, 1, start=4)
        return "rejected"
    run(opt, params, 1, start=4)
    assert all(p.isfinite().all() for p in params)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    return "works"
