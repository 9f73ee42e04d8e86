"""State dicts: their contents and dtypes, and that a resumed run equals an uninterrupted one."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from angular_muown import AngularMuown, plan
from angular_muown.engine import Engine
from tests.library.family import FAMILY, parameter, run
from tests.library.models import BLOCKS, loss_of, tiny_lm


def save_and_load(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def make(optimizer: type[Engine], dtype: torch.dtype, **values) -> tuple[nn.Module, Engine]:
    model = tiny_lm(dtype)
    return model, optimizer(plan(model, blocks=BLOCKS), lr=0.01, **values)


def train(model: nn.Module, opt: Engine, start: int, steps: int) -> None:
    for t in range(start, start + steps):
        opt.zero_grad()
        loss_of(model, seed=t).backward()
        opt.step()


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write_back", ["stochastic", "master"])
def test_a_resumed_run_equals_an_uninterrupted_one(optimizer, dtype, write_back) -> None:
    a, opt_a = make(optimizer, dtype, write_back=write_back)
    train(a, opt_a, 0, 4)
    b, opt_b = make(optimizer, dtype, write_back=write_back)
    b.load_state_dict(save_and_load(a.state_dict()))
    opt_b.load_state_dict(state_dict=save_and_load(opt_a.state_dict()))
    train(a, opt_a, 4, 4)
    train(b, opt_b, 4, 4)
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "float32"])
def test_dtypes_survive_loading(optimizer, state_dtype) -> None:
    p = parameter(6, 4, dtype=torch.bfloat16)
    opt = optimizer([p], state_dtype=state_dtype)
    run(opt, [p], 3)
    expected = torch.bfloat16 if state_dtype == torch.bfloat16 else torch.float32
    assert opt.state[p]["momentum_buffer"].dtype == expected
    vectors = [value for key, value in opt.state[p].items() if key != "momentum_buffer"]
    assert {value.dtype for value in vectors} == {torch.float32}, "16 bits would lose small changes"
    fresh = optimizer([p], state_dtype=state_dtype)
    fresh.load_state_dict(save_and_load(opt.state_dict()))
    for key, value in opt.state[p].items():
        assert fresh.state[p][key].dtype == value.dtype, key
        assert torch.equal(fresh.state[p][key], value), key
        assert fresh.state[p][key] is not value


@pytest.mark.parametrize(
    ("before", "after", "stored", "rounded"),
    [
        (None, "bfloat16", torch.bfloat16, "every entry is rounded to bfloat16"),
        ("bfloat16", None, torch.float32, "nothing is rounded"),
        ("float64", "float32", torch.float32, "every entry is rounded to float32"),
        (None, "float64", torch.float64, "nothing is rounded"),
        ("int8", "bfloat16", torch.bfloat16, "every entry is rounded to bfloat16"),
        ("bfloat16", "int8", torch.int8, "every entry is rounded to 127 levels"),
    ],
)
def test_the_optimizers_state_dtype_wins_and_a_warning_says_what_is_rounded(
    before, after, stored, rounded
) -> None:
    p = parameter(6, 4, dtype=torch.float32)
    opt = AngularMuown([p], state_dtype=before)
    run(opt, [p], 2)
    fresh = AngularMuown([p], state_dtype=after)
    message = f"saved with state_dtype={before!r}, is converted .*={after!r}: {rounded}"
    with pytest.warns(UserWarning, match=message) as caught:
        fresh.load_state_dict(save_and_load(opt.state_dict()))
    assert len(caught) == 1
    assert fresh.param_groups[0]["state_dtype"] == after
    assert fresh.state[p]["momentum_buffer"].dtype == stored
    torch.testing.assert_close(fresh.momentum(p), opt.momentum(p), rtol=0.02, atol=0.02)
    run(fresh, [p], 1, start=2)
    assert fresh.state[p]["momentum_buffer"].dtype == stored


def test_two_names_of_one_dtype_are_no_change() -> None:
    p = parameter(6, 4, dtype=torch.float32)
    opt = AngularMuown([p])
    run(opt, [p], 2)
    fresh = AngularMuown([p], state_dtype="float32")
    fresh.load_state_dict(opt.state_dict())  # warnings are errors here
    assert fresh.param_groups[0]["state_dtype"] == "float32"
    assert torch.equal(fresh.state[p]["momentum_buffer"], opt.state[p]["momentum_buffer"])


def test_a_changed_group_converts_float32_and_bfloat16() -> None:
    p = parameter(6, 4, dtype=torch.float32)
    opt = AngularMuown([p])
    run(opt, [p], 2)
    for name, dtype in (("bfloat16", torch.bfloat16), (None, torch.float32)):
        opt.param_groups[0]["state_dtype"] = name
        opt.state_dict()
        assert opt.state[p]["momentum_buffer"].dtype == dtype


@pytest.mark.parametrize("optimizer", FAMILY)
def test_two_optimizers_share_no_state_after_loading(optimizer) -> None:
    """torch does not copy the counter: each optimizer would count the other's steps."""
    (a, opt_a), (_, opt_b) = make(optimizer, torch.float32), make(optimizer, torch.float32)
    train(a, opt_a, 0, 2)
    opt_b.load_state_dict(opt_a.state_dict())
    before = copy.deepcopy(opt_b.state_dict())
    train(a, opt_a, 2, 2)
    after = opt_b.state_dict()
    for i, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(after["state"][i][key], value), key


def test_the_counter_passes_256_with_bf16_weights() -> None:
    p = parameter(3, 4, dtype=torch.bfloat16)
    opt = AngularMuown([p])
    run(opt, [p], 2)
    saved = opt.state_dict()
    saved["state"][0]["step"].fill_(300)
    opt.load_state_dict(saved)
    run(opt, [p], 1)
    assert opt.state[p]["step"].item() == 301


@pytest.mark.parametrize("optimizer", FAMILY)
def test_state_is_one_momentum_buffer_and_vectors(optimizer) -> None:
    p = parameter(6, 40)
    opt = optimizer([p])
    run(opt, [p], 1)
    state = dict(opt.state[p])
    assert state.pop("step").shape == ()
    assert state.pop("momentum_buffer").shape == p.shape
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    assert shapes.pop("matrix_norm", (1, 1)) == (1, 1)
    for name, shape in shapes.items():
        assert shape == ((1, 40) if name.startswith("column_") else (6, 1))
    if optimizer is AngularMuown:
        assert set(state) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("optimizer", FAMILY)
def test_getting_the_state_dict_of_a_fresh_optimizer_only_creates_state(optimizer) -> None:
    """torch creates the state by a step with lr = 0 and zero gradients."""
    (a, opt_a), (b, opt_b) = make(optimizer, torch.float32), make(optimizer, torch.float32)
    get_optimizer_state_dict(a, opt_a)
    assert opt_a.state
    assert all(g["step"] == 0 for g in opt_a.param_groups)
    assert all(s["step"] == 0 for s in opt_a.state.values())
    train(a, opt_a, 0, 3)
    train(b, opt_b, 0, 3)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_run_resumes_from_a_distributed_state_dict(optimizer) -> None:
    a, opt_a = make(optimizer, torch.float32)
    train(a, opt_a, 0, 3)
    b, opt_b = make(optimizer, torch.float32)
    b.load_state_dict(a.state_dict())
    set_optimizer_state_dict(b, opt_b, get_optimizer_state_dict(a, opt_a))
    train(a, opt_a, 3, 3)
    train(b, opt_b, 3, 3)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_first_step_at_lr_zero_with_gradients_counts() -> None:
    """Warmup schedules start at 0. Only a step with zero gradients as well is a state probe."""
    p = parameter(4, 6)
    opt = AngularMuown([p], lr=0.01)
    opt.param_groups[0]["lr"] = 0.0
    before = p.detach().clone()
    run(opt, [p], 1)
    assert opt.param_groups[0]["step"] == 1
    assert opt.state[p]["momentum_buffer"].any()
    torch.testing.assert_close(p.detach(), before)


def test_loading_warns_if_it_changes_kappa() -> None:
    """The loaded value replaces the optimizer's."""
    p = parameter(4, 6)
    saved = AngularMuown([p], decay_scale=2e-3).state_dict()
    opt = AngularMuown([p], decay_scale=5e-3)
    with pytest.warns(UserWarning, match=r"decay_scale=0.002 .*replaces .*0.005") as caught:
        opt.load_state_dict(saved)
    assert caught[0].filename == __file__, "the warning points at the caller"
    group = opt.param_groups[0]
    assert group["decay_scale"] == 2e-3
    group["decay_scale"] = 5e-3  # as the warning advises
    group["step"] = 1000
    assert opt.kappa(group) == pytest.approx(1 / 6)


OTHER_METHODS: dict[str, Any] = {
    "orthogonalize": "tangent",
    "radius": "log_adam",
}


@pytest.mark.parametrize("key", OTHER_METHODS)
@pytest.mark.parametrize("saved_is_plain", [False, True])
def test_loading_warns_if_it_changes_the_method(key, saved_is_plain) -> None:
    p = parameter(4, 6)
    pair = [AngularMuown([p], **{key: OTHER_METHODS[key]}), AngularMuown([p])]
    source, target = reversed(pair) if saved_is_plain else pair
    new, old = (opt.param_groups[0][key] for opt in (source, target))
    with pytest.warns(UserWarning, match=f"{key}={new!r} from .* {key}={old!r}") as caught:
        target.load_state_dict(save_and_load(source.state_dict()))
    assert len(caught) == 1
    assert target.param_groups[0][key] == new


def test_loading_equal_values_is_silent() -> None:
    p = parameter(4, 6)
    for values in ({}, OTHER_METHODS):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AngularMuown([p], **values).load_state_dict(AngularMuown([p], **values).state_dict())


@pytest.mark.parametrize("key", OTHER_METHODS)
def test_a_state_dict_without_a_newer_setting_gets_the_optimizers_default(key) -> None:
    """A value set in a group, not in the constructor, is replaced with a warning."""
    p = parameter(4, 6)
    opt = AngularMuown([p])
    run(opt, [p], 2)
    saved = save_and_load(opt.state_dict())
    del saved["param_groups"][0][key]
    fresh = AngularMuown([p])
    default = fresh.param_groups[0][key]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(copy.deepcopy(saved))
    assert fresh.param_groups[0][key] == default
    run(fresh, [p], 1, start=2)
    by_constructor = AngularMuown([p], **{key: OTHER_METHODS[key]})
    by_constructor.load_state_dict(copy.deepcopy(saved))
    assert by_constructor.param_groups[0][key] == OTHER_METHODS[key]
    by_group = AngularMuown([{"params": [p], key: OTHER_METHODS[key]}])
    with pytest.warns(UserWarning, match=f"{key}={default!r} .*replaces .*{OTHER_METHODS[key]!r}"):
        by_group.load_state_dict(copy.deepcopy(saved))
    assert by_group.param_groups[0][key] == default


@pytest.mark.parametrize("optimizer", FAMILY)
def test_user_hooks_see_and_change_what_is_loaded(optimizer) -> None:
    p = parameter(4, 6, dtype=torch.bfloat16)
    opt = optimizer([p])
    run(opt, [p], 2)
    fresh = optimizer([p])
    doubled = copy.deepcopy(opt.state_dict())
    doubled["state"][0]["momentum_buffer"] = doubled["state"][0]["momentum_buffer"] * 2
    fresh.register_load_state_dict_pre_hook(lambda _, state_dict: doubled)
    dtypes = []
    fresh.register_load_state_dict_post_hook(
        lambda o: dtypes.append(o.state[p]["momentum_buffer"].dtype)
    )
    fresh.load_state_dict(opt.state_dict())
    assert dtypes == [torch.float32]
    assert torch.equal(fresh.state[p]["momentum_buffer"], opt.state[p]["momentum_buffer"] * 2)
    assert len(fresh._optimizer_load_state_dict_pre_hooks) == 1, "only the user's hook remains"
