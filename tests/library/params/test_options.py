"""Bad input: an error names the parameter and shows the value, and nothing changes."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from angular_muown import AngularMuown, Muon, plan
from angular_muown.engine import Engine
from tests.library.family import FAMILY, noise, parameter, run
from tests.library.params.test_state import save_and_load

NAN, INF = math.nan, math.inf

BAD_VALUES = [
    ("lr", -0.1), ("lr", NAN), ("lr", INF), ("lr", "fast"), ("lr", torch.tensor([0.1, 0.2])),
    ("lr", torch.tensor(NAN)), ("momentum", 1.0), ("momentum", -0.1), ("momentum", NAN),
    ("nesterov", 1), ("betas", (0.9, 1.0)), ("betas", 0.9), ("betas", (0.9, NAN)), ("eps", -1e-8),
    ("weight_decay", -0.1), ("weight_decay", NAN), ("maximize", "yes"), ("warmup_steps", -1),
    ("warmup_steps", 1.5), ("decay_scale", -1.0), ("decay_scale", NAN), ("decay_degree", -1.0),
    ("radius_lr", -1.0), ("radius_lr", NAN), ("scale", "fan_in"), ("orthogonalize", "qr"),
    ("radius", "sgd"), ("state_dtype", "float8"), ("write_back", "nearest"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
@pytest.mark.parametrize("where", ["argument", "group"])
def test_an_error_shows_the_bad_value(key, value, where) -> None:
    p = parameter(4, 6)
    arguments = {key: value} if where == "argument" else {}
    group = {"params": [p], **({key: value} if where == "group" else {})}
    with pytest.raises(ValueError, match=re.escape(f"{key}={value!r}")):
        AngularMuown([group], **arguments)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("scale", ["fan_ratio", "adam_rms", "rms", "aspect", "none"]),
        ("orthogonalize", ["polar_express", "newton_schulz", "gram", "svd"]),
        ("radius", ["adam", "log_adam", "fixed"]),
        ("algorithm", ["matrix", "adamw"]),
        ("view", ["matrix", "stack", "conv"]),
    ],
)
def test_the_error_for_an_unknown_name_lists_the_valid_ones(key, names) -> None:
    with pytest.raises(ValueError, match="must be one of") as error:
        AngularMuown([{"params": [parameter(4, 6)], key: "nonsense"}])
    assert all(repr(name) in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("key", "near"),
    [("momentun", "momentum"), ("warmup_step", "warmup_steps"), ("block", "blocks")],
)
def test_misspelled_group_keys_are_rejected(key, near) -> None:
    with pytest.raises(ValueError, match=f"{key}=1 is not an option: did you mean {near}"):
        AngularMuown([{"params": [parameter(4, 6)], key: 1}])


def test_framework_keys_are_allowed() -> None:
    keys = ("initial_lr", "max_lr", "fused", "foreach", "lr_scale", "name", "max_momentum")
    AngularMuown([{"params": [parameter(4, 6)], **dict.fromkeys(keys)}])


def test_the_key_of_a_schedule_is_allowed_next_to_an_option_with_a_similar_name() -> None:
    class Member(Engine):
        def __init__(self, params, lr: float = 0.02, final_momentum: float = 0.8) -> None:
            super().__init__(params, {"lr": lr, "final_momentum": final_momentum})

    with pytest.raises(ValueError, match=r"final_momenta=0.8 .*did you mean final_momentum"):
        Member([{"params": [parameter(4, 6)], "final_momenta": 0.8}])
    Member([{"params": [parameter(4, 6)], "initial_momentum": 0.95}])


@pytest.mark.parametrize(("key", "value"), [("process_group", False)])
def test_constructor_arguments_are_rejected_in_groups(key, value) -> None:
    """They would pass as a framework's keys and have no effect."""
    optimizer = AngularMuown([parameter(4, 4)])
    message = re.escape(f"{key}={value!r} in a group: pass it to the constructor")
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(4, 6)], key: value})
    assert len(optimizer.param_groups) == 1, "the rejected group was not added"
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    with pytest.raises(ValueError, match=message):
        AngularMuown(plan(model, overrides={"body.weight": {key: value}}))


def test_an_option_of_another_optimizer_is_rejected() -> None:
    with pytest.raises(ValueError, match="Muon has no radius_lr"):
        Muon([{"params": [parameter(4, 6)], "radius_lr": 0.1}])


def test_radius_lr_does_not_restrict_adamw_groups() -> None:
    groups = [{"params": [parameter(4, 6)]}]
    groups.append({"params": [parameter(4)], "algorithm": "adamw", "lr": 0.0})
    AngularMuown(groups, lr=0.02, radius_lr=0.004)


def test_radius_lr_requires_an_lr_above_zero() -> None:
    with pytest.raises(ValueError, match="lr must start above 0"):
        AngularMuown([parameter(4, 6)], lr=0.0, radius_lr=0.1)


def bad_parameters() -> list[tuple[str, nn.Parameter, str]]:
    flat = parameter(4, 6)
    flat._is_flat_param = True  # type: ignore[attr-defined]  # how FSDP1 marks them
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    return [
        ("vector", parameter(5), "not a matrix"),
        ("scalar", nn.Parameter(torch.tensor(1.0)), "not a matrix"),
        ("complex", nn.Parameter(torch.ones(3, 3, dtype=torch.complex64)), "not real"),
        ("integer", nn.Parameter(torch.ones(3, 3, dtype=torch.int32), requires_grad=False), "real"),
        ("sparse", sparse, "not dense"),
        ("undeclared", parameter(2, 3, 4), "view='stack'"),
        ("undeclared4", parameter(2, 3, 4, 4), "view='conv'"),
        ("empty", parameter(0, 4), "no elements"),
        ("flat", flat, "FSDP2"),
    ]


@pytest.mark.parametrize(("name", "p", "message"), bad_parameters(), ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("optimizer", FAMILY)
def test_bad_parameters_are_named(optimizer: type[Engine], name, p, message) -> None:
    good = parameter(4, 4)
    with pytest.raises(ValueError, match=message) as error:
        optimizer([("good", good), (name, p)])
    assert f"'{name}'" in str(error.value)
    assert str(tuple(p.shape)) in str(error.value)
    opt = optimizer([("good", good)])
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": [(name, p)]})
    assert len(opt.param_groups) == 1, "the rejected group was not added"


def test_errors_name_an_unnamed_parameter_by_its_index() -> None:
    with pytest.raises(ValueError, match=re.escape("param_groups[0]['params'][1]")):
        AngularMuown([parameter(4, 4), parameter(4)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"blocks": 5}, "12, which does not divide into 5 equal blocks"),
        ({"blocks": [4, 4]}, "add up to 8, not 12"),
        ({"blocks": [12, 0]}, "must all be at least 1"),
        ({"column_blocks": 4}, "6, which does not divide into 4"),
        ({"blocks": 0}, "blocks=0"),
        ({"blocks": []}, "blocks="),
        ({"blocks": 1.5}, "blocks=1.5"),
        ({"view": "stack"}, "no leading dimension"),
    ],
)
def test_layouts_that_do_not_fit_the_shape_are_rejected(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        AngularMuown([{"params": [("w", parameter(12, 6))], **values}])


@pytest.mark.parametrize("params", [None, 3])
def test_params_that_are_not_a_list_are_rejected(params) -> None:
    with pytest.raises(TypeError, match=f"params={params}"):
        AngularMuown([{"params": params}])


def test_a_tensor_that_is_not_a_leaf_is_named() -> None:
    good, computed = parameter(4, 4), parameter(4, 4) * 2
    with pytest.raises(ValueError, match=r"'w'.*\(4, 4\).*not a leaf"):
        AngularMuown([("good", good), ("w", computed)])
    with pytest.raises(ValueError, match=r"params\[1\]"):
        AngularMuown([good, computed])
    computed.retain_grad()  # torch accepts it now
    AngularMuown([good, computed])


@pytest.mark.parametrize("group", [None, 3, {}, {"lr": 0.1}, {"params": [], 5: 1}])
def test_a_value_that_is_not_a_group_is_rejected(group) -> None:
    optimizer = AngularMuown([parameter(4, 4)])
    with pytest.raises(TypeError, match="group"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_empty_groups_and_models_are_rejected() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        AngularMuown([{"params": []}])
    with pytest.raises(ValueError, match="empty parameter list"):
        AngularMuown([])
    with pytest.raises(ValueError, match="no trainable parameters"):
        plan(nn.Identity())


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_step_with_a_sparse_gradient_raises_before_anything_moves(optimizer) -> None:
    w = parameter(4, 6)
    table = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)
    opt = optimizer(
        [
            {"params": [("w", w)]},
            {"params": [("table", table.weight)], "algorithm": "adamw"},
        ]
    )
    w.grad = noise(4, 6, seed=1)
    table(torch.tensor([1])).sum().backward()
    before = w.detach().clone()
    with pytest.raises(ValueError, match=r"'table'.*sparse"):
        opt.step()
    assert torch.equal(w, before)
    assert not opt.state
    assert opt.param_groups[0]["step"] == 0


def test_state_of_another_optimizer_is_rejected_and_nothing_changes() -> None:
    p = parameter(4, 6)
    muon, angular = Muon([p]), AngularMuown([p])
    run(muon, [p], 2)
    run(angular, [p], 2)
    before = {k: v.clone() for k, v in angular.state[p].items()}
    for saved, family in ((muon, "Muon"), (torch.optim.AdamW([p]), "outside this package")):
        with pytest.raises(ValueError, match=f"saved by .*{family}"):
            angular.load_state_dict(saved.state_dict())
    assert all(torch.equal(angular.state[p][k], v) for k, v in before.items())


@pytest.mark.parametrize(
    ("key", "saved", "current"),
    [("blocks", 2, 3), ("column_blocks", 2, None), ("algorithm", "matrix", "adamw")],
)
def test_state_of_another_cut_or_algorithm_is_rejected(key, saved, current) -> None:
    p = parameter(6, 6)
    source = AngularMuown([{"params": [p], key: saved}])
    run(source, [p], 1)
    target = AngularMuown([{"params": [p], key: current}])
    with pytest.raises(ValueError, match=f"saved with {key}={saved!r}, but has {key}={current!r}"):
        target.load_state_dict(source.state_dict())


def test_a_list_and_a_tuple_are_the_same_cut() -> None:
    p = parameter(4, 6)
    saved = AngularMuown([{"params": [p], "blocks": (2, 2)}]).state_dict()
    AngularMuown([{"params": [p], "blocks": [2, 2]}]).load_state_dict(saved)


def test_a_subclass_loads_its_parents_state() -> None:
    class Mine(AngularMuown):
        pass

    p = parameter(4, 6)
    Mine([p]).load_state_dict(AngularMuown([p]).state_dict())


def test_a_group_of_another_optimizer_takes_the_new_family() -> None:
    p = parameter(4, 6)
    muon = Muon([p])
    values = {k: v for k, v in muon.param_groups[0].items() if k in ("params", "family", "lr")}
    angular = AngularMuown([values])
    angular.load_state_dict(angular.state_dict())


def test_state_of_another_shape_is_rejected() -> None:
    a, b = parameter(4, 6), parameter(6, 4)
    opt = AngularMuown([("w", a)])
    run(opt, [a], 1)
    with pytest.raises(ValueError, match=r"of parameter 'w' has shape \(4, .*\(6, 4\)"):
        AngularMuown([("w", b)]).load_state_dict(opt.state_dict())


def test_the_base_class_cannot_step() -> None:
    opt = Engine([parameter(3, 3)], {"lr": 0.1, "state_dtype": None, "write_back": "stochastic"})
    opt.param_groups[0]["params"][0].grad = noise(3, 3, seed=1)
    with pytest.raises(TypeError, match="member of the family"):
        opt.step()


NUMPY: dict[str, Any] = {
    "lr": np.float32(0.02),
    "momentum": np.float64(0.9),
    "betas": (np.float32(0.9), np.float64(0.95)),
    "warmup_steps": np.int64(3),
    "decay_scale": np.float16(0.5),
    "nesterov": np.bool_(False),
    "average": np.int32(5),
    "radius_lr": np.array(0.01),
    "blocks": np.int64(2),
}


@pytest.mark.parametrize("where", ["argument", "group"])
def test_numpy_scalars_equal_python_numbers(where) -> None:
    results = []
    for values in (NUMPY, {k: np.asarray(v).tolist() for k, v in NUMPY.items()}):
        p = parameter(4, 6)
        group = values if where == "group" else {"blocks": values["blocks"]}
        arguments = {} if where == "group" else {k: v for k, v in values.items() if k != "blocks"}
        opt = AngularMuown([{"params": [p], **group}], **arguments)
        run(opt, [p], 3)
        saved = save_and_load(opt.state_dict())["param_groups"][0]
        for key in NUMPY:
            numbers = saved[key] if key == "betas" else [saved[key]]
            assert all(type(x) in (int, float, bool) for x in numbers), key
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("key", ["eps", "lr", "warmup_steps", "average", "workspace"])
def test_integers_that_overflow_a_float_are_rejected(key) -> None:
    with pytest.raises(ValueError, match=f"{key}=10"):
        AngularMuown([parameter(4, 6)], **{key: 10**400})


@pytest.mark.parametrize("dtype", ["float16", torch.float16])
def test_momentum_in_float16_is_rejected(dtype: Any) -> None:
    """float16 turns gradients of 1e-9 into zeros, and gradients of 1e5 into infinities."""
    with pytest.raises(ValueError, match=r"state_dtype='float16' is not valid: .*'bfloat16'"):
        AngularMuown([parameter(4, 3)], state_dtype=dtype)


def break_state(opt: Any, v: Any, key: str, value: Any) -> None:
    if value is None:
        del opt.state[v][key]
    else:
        opt.state[v][key] = value


BROKEN: dict[str, Any] = {
    "exp_avg_sq of 'v' is missing": lambda opt, v: break_state(opt, v, "exp_avg_sq", None),
    "exp_avg of 'v' is shorter": lambda opt, v: break_state(opt, v, "exp_avg", torch.zeros(2)),
    "'v' grew": lambda opt, v: setattr(v, "data", torch.zeros(9)),
    "step of 'v' is a number": lambda opt, v: break_state(opt, v, "step", 3),
    "group 1 has one beta": lambda opt, v: opt.param_groups[1].update(betas=(0.9,)),
    "group 1 has eps='x'": lambda opt, v: opt.param_groups[1].update(eps="x"),
    "group 1 has weight_decay=None": lambda opt, v: opt.param_groups[1].update(weight_decay=None),
    "group 1 has foreach and a tensor lr": lambda opt, v: opt.param_groups[1].update(
        foreach=True, lr=torch.tensor(0.1)
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_damaged_adamw_groups_raise_before_anything_moves(damage: str) -> None:
    """The matrix group is stepped first: without a check, AdamW would fail after it moved."""
    w, v = parameter(4, 6), nn.Parameter(torch.zeros(4))
    opt = AngularMuown(
        [{"params": [("w", w)]}, {"params": [("v", v)], "algorithm": "adamw"}], lr=0.1
    )
    for p in (w, v):
        p.grad = torch.ones_like(p)
    opt.step()
    BROKEN[damage](opt, v)
    v.grad = torch.ones_like(v)
    before, clocks = w.detach().clone(), [group["step"] for group in opt.param_groups]
    counter = opt.state[w]["step"].clone()
    with pytest.raises(ValueError, match="'v'" if "'v'" in damage else "group 1"):
        opt.step()
    assert torch.equal(w, before)
    assert [group["step"] for group in opt.param_groups] == clocks
    assert opt.state[w]["step"] == counter
