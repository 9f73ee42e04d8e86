"""Damaged or foreign state dicts: loaded completely, or rejected by name with nothing changed."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from angular_muown import AngularMuown
from angular_muown.engine import Engine
from tests.library.family import FAMILY, noise, parameter, run
from tests.library.params.test_state import make, save_and_load, train

StateDict = dict[str, Any]


def small(
    optimizer: type[Engine] = AngularMuown, dtype: torch.dtype = torch.float64, **values: Any
) -> tuple[list[nn.Parameter], Engine]:
    """Return a matrix and a bias, and an optimizer with a group for each."""
    w, b = parameter(6, 4, dtype=dtype), parameter(4, seed=1, dtype=dtype)
    groups = [
        {"params": [("w", w)]},
        {"params": [("b", b)], "algorithm": "adamw"},
    ]
    return [w, b], optimizer(groups, lr=0.01, **values)


def trained(optimizer: type[Engine] = AngularMuown, **values: Any) -> tuple[Any, Engine]:
    params, opt = small(optimizer, **values)
    run(opt, params, 3)
    return params, opt


def snapshot(opt: Engine) -> Any:
    """Copy everything that a step reads."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    params = [p for g in opt.param_groups for p in g["params"]]
    states = [dict(opt.state[p]) if p in opt.state else None for p in params]
    return copy.deepcopy((groups, [p.detach() for p in params], states))


def assert_equal(a: Any, b: Any) -> None:
    """Assert equality of nested values, including types and every bit of tensors."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b or (a != a and b != b)


# --- weights of another dtype ---


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize(
    ("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_state_loads_into_weights_of_another_dtype(optimizer, before, after) -> None:
    """AdamW's moments take the weights' dtype, as in torch; the matrices' state keeps its own."""
    (_, b), opt = trained(optimizer, dtype=before)
    (w2, b2), other = small(optimizer, dtype=after)
    other.load_state_dict(save_and_load(opt.state_dict()))
    torch_target, torch_source = torch.optim.AdamW([b2]), torch.optim.AdamW([b])
    torch_source.state[b] = opt.state[b]
    torch_target.load_state_dict(torch_source.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert other.state[b2][name].dtype == after
        assert torch.equal(other.state[b2][name], torch_target.state[b2][name])
    saved = opt.state[opt.param_groups[0]["params"][0]]
    for name, value in other.state[w2].items():
        assert value.dtype == saved[name].dtype, name
    run(other, [w2, b2], 1, start=3)
    assert all(p.isfinite().all() for p in (w2, b2))


# --- group keys ---


def reloaded(opt: Engine) -> Engine:
    opt.load_state_dict(save_and_load(opt.state_dict()))
    return opt


COPIES: dict[str, Callable[[Engine], Engine]] = {
    "load_state_dict": reloaded,
    "deepcopy": copy.deepcopy,
    "pickle": lambda opt: pickle.loads(pickle.dumps(opt)),
}


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("method", COPIES)
def test_groups_keep_their_keys(optimizer, method) -> None:
    _, opt = trained(optimizer)
    group_keys, defaults = [list(g) for g in opt.param_groups], list(opt.defaults)
    duplicate = COPIES[method](opt)
    assert [sorted(g) for g in duplicate.param_groups] == [sorted(keys) for keys in group_keys]
    assert list(duplicate.defaults) == defaults


def test_a_key_that_earlier_versions_left_in_groups_is_removed() -> None:
    _, opt = trained()
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group["differentiable"] = False
    opt.load_state_dict(saved)
    assert all("differentiable" not in g for g in opt.param_groups)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_copies_have_the_same_public_attributes(optimizer) -> None:
    _, opt = trained(optimizer)
    public = [{k for k in vars(o) if not k.startswith("_")} for o in (opt, copy.deepcopy(opt))]
    assert public[0] == public[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a single process
def test_a_distributed_checkpoint_of_a_fresh_run_loads_twice(tmp_path: Path) -> None:
    model, opt = make(AngularMuown, torch.float32)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    for _ in range(2):
        weights, state = get_state_dict(model, opt)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
        set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    train(model, opt, 0, 1)


# --- everything is checked before anything is replaced ---


def without(name: str, key: int = 0) -> Callable[[StateDict], None]:
    return lambda saved: saved["state"][key].pop(name)


def entry(name: str, value: Any, key: int = 0) -> Callable[[StateDict], None]:
    return lambda saved: saved["state"][key].update({name: value})


def setting(name: str, value: Any, group: int = 0) -> Callable[[StateDict], None]:
    return lambda saved: saved["param_groups"][group].update({name: value})


def top(name: str, value: Any) -> Callable[[StateDict], None]:
    return lambda saved: saved.update({name: value})


NAN = float("nan")
REJECTED: list[tuple[str, Callable[[StateDict], Any], str]] = [
    ("no momentum", without("momentum_buffer"), "'w' has no momentum_buffer"),
    ("no step", without("step"), "'w' has no step"),
    ("no moment", without("exp_avg_sq", 1), "'b' has no exp_avg_sq"),
    ("half of the moments", without("exp_avg_sq"), "'w' has exp_avg, but no exp_avg_sq"),
    ("step nan", entry("step", torch.tensor(NAN)), "step of parameter 'w'.*nan"),
    ("step negative", entry("step", torch.tensor(-1.0), 1), "step of parameter 'b'.*-1"),
    ("step a string", entry("step", "three"), "step of parameter 'w'.*three"),
    ("step None", entry("step", None), "step of parameter 'w'.*None"),
    ("step a vector", entry("step", torch.ones(2)), "step of parameter 'w'"),
    ("momentum None", entry("momentum_buffer", None), "momentum_buffer of parameter 'w'.*None"),
    ("momentum a list", entry("momentum_buffer", [1.0]), "momentum_buffer of parameter 'w'"),
    ("momentum int", entry("momentum_buffer", torch.ones(6, 4).int()), "momentum_buffer.*int32"),
    ("momentum shape", entry("momentum_buffer", torch.ones(4, 6)), r"'w' has shape \(4, 6\)"),
    ("momentum sparse", entry("momentum_buffer", torch.eye(6)[:, :4].to_sparse()), "'w'.*sparse"),
    ("momentum meta", entry("momentum_buffer", torch.ones(6, 4, device="meta")), "'w'.*meta"),
    ("momentum nan", entry("momentum_buffer", torch.full((6, 4), NAN)), "momentum_buffer.*'w'"),
    ("moment shape", entry("exp_avg", torch.ones(5), 1), r"'b' has shape \(5,\)"),
    ("second moment < 0", entry("exp_avg_sq", -torch.ones(4), 1), "exp_avg_sq.*'b'.*negative"),
    ("state a list", lambda saved: saved["state"].update({0: [1, 2]}), r"'w'.*\[1, 2\]"),
    ("states None", top("state", None), "state.*None"),
    ("groups None", top("param_groups", None), "param_groups.*None"),
    ("no groups", lambda saved: saved.pop("param_groups"), "param_groups"),
    ("no states", lambda saved: saved.pop("state"), "'state'"),
    ("fewer groups", lambda saved: saved["param_groups"].pop(), "1 group.*2"),
    ("more groups", lambda s: s["param_groups"].append(s["param_groups"][0]), "3 group.*2"),
    ("a group None", lambda saved: saved["param_groups"].__setitem__(1, None), "group 1.*None"),
    ("more parameters", setting("params", [0, 5]), "group 0.*params.*2.*1"),
    ("no params", lambda saved: saved["param_groups"][0].pop("params"), "group 0.*params"),
    ("params a number", setting("params", 3), "group 0.*params"),
    ("unhashable", setting("params", [[]]), "group 0.*params"),
    ("a key used twice", setting("params", [0], 1), "params.*0.*two"),
    ("names", setting("param_names", ["a", "b"]), "group 0.*param_names"),
    ("names None", setting("param_names", None), "group 0.*param_names"),
    ("lr", setting("lr", NAN), "group 0.*lr=nan"),
    ("momentum", setting("momentum", "much", 1), "group 1.*momentum='much'"),
    ("betas", setting("betas", None), "group 0.*betas=None"),
    ("clock", setting("step", -3), "group 0.*step=-3"),
    ("clock nan", setting("step", NAN), "group 0.*step=nan"),
    ("clock None", setting("step", None), "group 0.*step=None"),
    ("clock a tensor", setting("step", torch.tensor(-2)), "group 0.*step="),
    ("averaged", setting("averaged", "x"), "group 0.*averaged='x'"),
    ("base_lr", setting("base_lr", None), "group 0.*base_lr=None"),
    ("base_lr 0", setting("base_lr", 0.0), "group 0.*base_lr"),
    ("fused", setting("fused", "yes", 1), "group 1.*fused='yes'"),
    ("fused and foreach", lambda s: s["param_groups"][1].update(fused=True, foreach=True),
     "group 1.*foreach"),
    ("algorithm", setting("algorithm", torch.ones(3)), "group 0.*algorithm"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("break_", "message"), [r[1:] for r in REJECTED], ids=[r[0] for r in REJECTED]
)
def test_a_bad_state_dict_is_rejected_by_name_and_nothing_changes(break_, message) -> None:
    params, opt = trained(radius_lr=0.02)
    saved = copy.deepcopy(opt.state_dict())
    run(opt, params, 1, start=3)
    before = snapshot(opt)
    break_(saved)
    with pytest.raises((ValueError, TypeError, KeyError), match=f"(?s){message}"):
        opt.load_state_dict(saved)
    assert_equal(snapshot(opt), before)
    run(opt, params, 1, start=4)


@pytest.mark.parametrize("junk", [None, 3, [], "state"])
def test_a_value_that_is_not_a_state_dict_is_rejected(junk) -> None:
    _, opt = trained()
    before = snapshot(opt)
    with pytest.raises(TypeError, match=re.escape(repr(junk))):
        opt.load_state_dict(junk)
    assert_equal(snapshot(opt), before)


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize(
    "convert", [int, float, lambda t: t.to(torch.int64), lambda t: t.reshape(1)]
)
def test_saved_counters_may_be_numbers(optimizer, convert) -> None:
    """Older versions of torch saved numbers."""
    (params, opt), (others, other) = trained(optimizer), small(optimizer)
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        state["step"] = convert(state["step"])
    with torch.no_grad():
        for p, q in zip(others, params, strict=True):
            p.copy_(q)
    other.load_state_dict(saved)
    run(opt, params, 2, start=3)
    run(other, others, 2, start=3)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert_equal(snapshot(other), snapshot(opt))


@pytest.mark.parametrize("optimizer", FAMILY)
def test_user_entries_survive_loading(optimizer) -> None:
    params, opt = trained(optimizer)
    entries = {
        "note": "mine",
        "count": 3,
        "table": torch.arange(5),
        "half": torch.ones(3, dtype=torch.float16),
        "nested": {"a": [torch.ones(2), None], "b": (1, "x")},
    }
    for p in params:
        opt.state[p].update(copy.deepcopy(entries))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p in params:
        state = {name: opt.state[p][name] for name in entries}
        assert_equal(state["nested"]["a"][0], entries["nested"]["a"][0])
        assert state["nested"]["b"] == entries["nested"]["b"]
        assert (state["note"], state["count"]) == ("mine", 3)
        for name in ("table", "half"):
            assert torch.equal(state[name], entries[name])
            assert state[name].dtype == entries[name].dtype
    run(opt, params, 1, start=3)


def test_user_entries_are_copied() -> None:
    params, opt = trained()
    entries = {"table": torch.zeros(3), "list": [torch.zeros(2)], "like_rows": torch.zeros(6, 1)}
    opt.state[params[0]].update(entries)
    opt.load_state_dict(opt.state_dict())
    for tensor in (entries["table"], entries["list"][0], entries["like_rows"]):
        tensor.add_(1)
    state = opt.state[params[0]]
    assert not any(t.any() for t in (state["table"], state["list"][0], state["like_rows"]))


def test_an_entry_named_like_one_of_the_methods_must_fit() -> None:
    """Of either method: the saved one, and the current one, which the user may restore."""
    params, opt = trained()
    opt.state[params[0]]["multiplier"] = torch.zeros(3)
    saved = opt.state_dict()
    opt.load_state_dict(saved)  # neither method uses this name
    _, other = small(orthogonalize="tangent")
    with pytest.raises(ValueError, match=r"multiplier of parameter 'w' has shape \(3,\)"):
        other.load_state_dict(saved)


def test_a_state_with_user_entries_only_counts_as_fresh() -> None:
    params, opt = small()
    opt.state[params[0]]["note"] = 1
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(opt, params, 1)
    assert opt.state[params[0]]["note"] == 1
    assert opt.state[params[0]]["step"] == 1


def test_loading_releases_the_work_buffers_unless_it_is_rejected() -> None:
    """A recorded CUDA graph reads from them."""
    _, opt = trained()
    opt._fused = buffers = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="param_groups"):
        opt.load_state_dict({"state": {}, "param_groups": []})
    assert opt._fused is buffers
    opt.load_state_dict(opt.state_dict())
    assert opt._fused is None


def test_numpy_scalars_in_a_state_dict_become_python_numbers() -> None:
    _, opt = trained()
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group.update(lr=np.float64(0.5), betas=(np.float32(0.5), 0.25), step=np.int64(7))
    opt.load_state_dict(saved)
    for group in save_and_load(opt.state_dict())["param_groups"]:
        assert_equal((group["lr"], group["betas"], group["step"]), (0.5, (0.5, 0.25), 7))


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def test_the_error_of_a_flat_load_while_gradients_exist_gives_the_remedy() -> None:
    """torch cannot make the optimizer create state while gradients exist, and passes empty ones."""
    model, opt = make(AngularMuown, torch.float32)
    train(model, opt, 0, 3)
    flat = get_optimizer_state_dict(model, opt, options=FLAT)
    other, fresh = make(AngularMuown, torch.float32)
    other.load_state_dict(model.state_dict())
    for p in other.parameters():
        p.grad = torch.zeros_like(p)
    before = snapshot(fresh)
    with pytest.raises(ValueError, match=r"group 0 .*3 steps.*zero_grad\(\)"):
        set_optimizer_state_dict(other, fresh, copy.deepcopy(flat), options=FLAT)
    assert_equal(snapshot(fresh), before)
    fresh.zero_grad()  # as the error advises
    set_optimizer_state_dict(other, fresh, copy.deepcopy(flat), options=FLAT)
    train(model, opt, 3, 2)
    train(other, fresh, 3, 2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_an_older_state_dict_without_newer_keys_loads() -> None:
    params, opt = trained()
    saved = save_and_load(opt.state_dict())
    old_keys = ("params", "family", "lr", "step", "algorithm")
    saved["param_groups"] = [
        {k: v for k, v in g.items() if k in old_keys} for g in saved["param_groups"]
    ]
    before = snapshot(opt)
    opt.load_state_dict(saved)
    assert_equal(snapshot(opt), before)
    run(opt, params, 1, start=3)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_capturable_run_loads_into_one_that_is_not(foreach) -> None:
    """A capturable run's learning rate and clocks are tensors, which foreach rejects."""
    saved = small(capturable=True)[1].state_dict()
    for group in saved["param_groups"]:
        assert isinstance(group["lr"], Tensor)
        group["foreach"] = foreach
    params, opt = small()
    opt.load_state_dict(saved)
    assert all(type(g["lr"]) is float and type(g["step"]) is int for g in opt.param_groups)
    run(opt, params, 1)


# --- checks before a step ---


def assert_step_raises(opt: Engine, message: str) -> None:
    """Assert that a step raises before it changes anything."""
    before = snapshot(opt)
    with pytest.raises((ValueError, TypeError), match=message):
        opt.step()
    assert_equal(snapshot(opt), before)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_step_raises_if_weights_were_cast(optimizer) -> None:
    model, opt = make(optimizer, torch.float32)
    train(model, opt, 0, 2)
    model.to(torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert_step_raises(opt, r"'embedding.weight'.*bfloat16.*float32.*load_state_dict")
    opt.load_state_dict(opt.state_dict())  # as the error advises
    train(model, opt, 2, 1)


@pytest.mark.parametrize(("which", "name"), [(0, "momentum_buffer"), (1, "exp_avg")])
def test_a_step_raises_if_weights_were_moved(which, name) -> None:
    params, opt = trained()
    for p in params:
        p.grad = torch.ones_like(p)
    state = opt.state[params[which]]
    state[name] = state[name].to("meta")  # move the state instead: there may be only one device
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=f"'{'wb'[which]}'.*cpu.*{name}.*meta.*load_state_dict"):
        opt.step()
    assert [g["step"] for g in opt.param_groups] == [3, 3]
    assert_equal([p.detach() for p in params], before)


def test_a_step_raises_if_state_is_missing() -> None:
    params, opt = trained()
    run(opt, params, 1, start=3)
    del opt.state[params[1]]["exp_avg"]
    assert_step_raises(opt, "'b' has no tensor exp_avg")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "3"), ("step", -1), ("step", 1.5), ("step", None), ("step", True),
        ("step", torch.ones(2)), ("step", torch.tensor(1.5)), ("averaged", "3"), ("averaged", -1),
        ("base_lr", "x"), ("base_lr", 0.0), ("base_lr", NAN), ("base_lr", None),
        ("lr", "fast"), ("lr", NAN), ("lr", None), ("lr", torch.ones(2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("index", [0, 1])
def test_a_step_raises_if_a_group_value_is_bad(key, value, index) -> None:
    params, opt = trained(radius_lr=0.02)
    for p in params:
        p.grad = noise(*p.shape, seed=5)
    opt.param_groups[index][key] = value
    if key == "base_lr" and index == 1 and value == 0.0:
        return opt.step()  # AdamW has no radii
    assert_step_raises(opt, f"(?s)group {index}.*{key}={re.escape(repr(value))}")
    return None


def test_a_step_raises_if_a_group_value_is_missing() -> None:
    params, opt = trained(radius_lr=0.02)
    for p in params:
        p.grad = noise(*p.shape, seed=5)
    for key in ("step", "averaged", "base_lr", "lr"):
        value = opt.param_groups[0].pop(key)
        before = [p.detach().clone() for p in params]
        with pytest.raises(ValueError, match=f"group 0 has no {key}"):
            opt.step()
        assert_equal([p.detach() for p in params], before)
        opt.param_groups[0][key] = value
    opt.step()


def test_a_clock_may_be_a_tensor() -> None:
    (params, opt), (others, other) = trained(), trained()
    other.param_groups[0]["step"] = torch.tensor(3)
    run(opt, params, 2, start=3)
    run(other, others, 2, start=3)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


def test_a_saved_group_without_a_learning_rate_is_rejected() -> None:
    _, opt = trained()
    saved = opt.state_dict()
    del saved["param_groups"][0]["lr"]
    with pytest.raises(ValueError, match="group 0 of the state dict has no lr"):
        opt.load_state_dict(saved)


def test_momentum_saved_in_float16_is_loaded_in_the_dtype_of_new_state() -> None:
    """Version 0.1 allowed state_dtype="float16", whose range is too small."""
    params, opt = trained()
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        group["state_dtype"] = "float16"
    for state in saved["state"].values():
        if "momentum_buffer" in state:
            state["momentum_buffer"] = state["momentum_buffer"].half()
    opt.load_state_dict(saved)
    buffers = [opt.state[p]["momentum_buffer"] for p in params if "momentum_buffer" in opt.state[p]]
    assert {buffer.dtype for buffer in buffers} == {params[0].dtype} == {torch.float64}
    assert {group["state_dtype"] for group in opt.param_groups} == {None}


def test_another_number_of_groups_names_the_parameter_that_changed() -> None:
    def optimizer(cut: dict[str, Any]):
        named = [("a", parameter(12, 4)), ("b", parameter(12, 4, seed=1))]
        if not cut:
            return AngularMuown([{"params": named}])
        return AngularMuown([{"params": named[:1]}, {"params": named[1:], **cut}])

    with pytest.raises(ValueError, match=r"'b' was saved with blocks=3 and has None here"):
        optimizer({}).load_state_dict(optimizer({"blocks": 3}).state_dict())


def test_one_block_is_no_cut_but_another_cut_is_refused() -> None:
    def optimizer(**cut):
        return AngularMuown([{"params": [parameter(12, 4)], **cut}])

    whole = optimizer().state_dict()
    optimizer(blocks=1).load_state_dict(whole)
    optimizer(blocks=1, interleaved=1).load_state_dict(whole)
    with pytest.raises(ValueError, match=r"saved with blocks=None, but has blocks=3"):
        optimizer(blocks=3).load_state_dict(whole)
    cut = optimizer(blocks=3).state_dict()
    with pytest.raises(ValueError, match=r"saved with interleaved=None, but has interleaved=2"):
        optimizer(blocks=3, interleaved=2).load_state_dict(cut)
    both = optimizer(blocks=3, interleaved=2).state_dict()
    optimizer(blocks=3, interleaved=2).load_state_dict(both)


def test_a_momentum_of_float64_weights_is_rounded_with_a_warning() -> None:
    """Both optimizers have state_dtype=None, which follows the weights."""
    p = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
    p.grad = torch.randn_like(p)
    optimizer = AngularMuown([p])
    optimizer.step()
    shorter = AngularMuown([nn.Parameter(p.detach().float())])
    with pytest.warns(UserWarning, match="every entry is rounded to float32"):
        shorter.load_state_dict(optimizer.state_dict())


def test_without_a_momentum_nothing_is_converted() -> None:
    p = nn.Parameter(torch.randn(8, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AngularMuown([p], state_dtype="int8").load_state_dict(AngularMuown([p]).state_dict())
