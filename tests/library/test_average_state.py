"""Averages in state dicts, copies and checkpoints, and across ranks."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from angular_muown import AngularMuown, average, averaging
from angular_muown.engine import Engine
from tests.library.distributed.test_state_on_ranks import WIDTH, assert_same, parallelize, planned
from tests.library.distributed.test_state_on_ranks import Net as SmallNet
from tests.library.params.test_state import save_and_load
from tests.library.sharded import whole
from tests.library.test_average import make, train
from tests.ranks import results

WINDOW = 0.4


def averages(optimizer: Engine) -> dict[str, Tensor]:
    groups = optimizer.param_groups
    named = [pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True)]
    return {name: whole(optimizer.state[p]["average"]) for name, p in named}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def by_state_dict(model: nn.Module, optimizer: Engine) -> tuple[nn.Module, Engine]:
    dtype = next(model.parameters()).dtype
    other, fresh = make(WINDOW, dtype)
    other.load_state_dict(save_and_load(model.state_dict()))
    fresh.load_state_dict(save_and_load(optimizer.state_dict()))
    return other, fresh


def by_torch(model: nn.Module, optimizer: Engine) -> tuple[nn.Module, Engine]:
    other, fresh = make(WINDOW, next(model.parameters()).dtype)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(model, optimizer))
    return other, fresh


def by_deepcopy(model: nn.Module, optimizer: Engine) -> tuple[nn.Module, Engine]:
    return copy.deepcopy((model, optimizer))


def by_pickle(model: nn.Module, optimizer: Engine) -> tuple[nn.Module, Engine]:
    return pickle.loads(pickle.dumps((model, optimizer)))


@pytest.mark.parametrize("resumed", [by_state_dict, by_torch, by_deepcopy, by_pickle])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    resumed: Any, dtype: torch.dtype
) -> None:
    model, optimizer = make(WINDOW, dtype)
    train(model, optimizer, range(4))
    other, fresh = resumed(model, optimizer)
    assert_equal(averages(fresh), averages(optimizer))
    train(model, optimizer, range(4, 8))
    train(other, fresh, range(4, 8))
    assert_equal(averages(fresh), averages(optimizer))
    assert all(a.dtype == torch.float32 for a in averages(fresh).values())


def test_creating_a_fresh_optimizers_state_changes_nothing() -> None:
    (model, optimizer), (other, probed) = make(WINDOW), make(WINDOW)
    get_optimizer_state_dict(other, probed)
    assert_equal(averages(probed), dict(other.named_parameters()))
    train(model, optimizer, range(3))
    train(other, probed, range(3))
    assert_equal(averages(probed), averages(optimizer))


@pytest.mark.parametrize("older", [False, True])
def test_averages_missing_from_a_state_dict_start_anew(older: bool) -> None:
    """The first step discards the initial value, whatever the group's step is."""
    model, optimizer = make(None)
    train(model, optimizer, range(6))
    saved = save_and_load(optimizer.state_dict())
    if older:
        for group in saved["param_groups"]:
            del group["average"], group["averaged"]
    other, fresh = make(WINDOW)
    other.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(saved)
    assert all(group["average"] == WINDOW for group in fresh.param_groups)
    expected = {name: torch.zeros_like(p) for name, p in other.named_parameters()}
    for k in (1, 2, 3, 4):
        for name, [weight] in train(other, fresh, range(k + 5, k + 6)).items():
            expected[name] = weight if k == 1 else expected[name].lerp(weight, averaging(WINDOW)(k))
        assert_equal(averages(fresh), expected)


def test_loading_unwanted_averages_drops_them_with_a_warning() -> None:
    """The constructor decides. Without average= they would not be updated."""
    model, optimizer = make(WINDOW)
    train(model, optimizer, range(2))
    _, fresh = make(None)
    with pytest.warns(UserWarning, match=rf"weight averages .* average=None.*{WINDOW}") as caught:
        fresh.load_state_dict(save_and_load(optimizer.state_dict()))
    assert len(caught) == len(fresh.param_groups)
    assert caught[0].filename == __file__, "the warning points at the caller"
    assert all(group["average"] is None for group in fresh.param_groups)
    assert all("average" not in state for state in fresh.state.values())
    assert all(group["averaged"] == 0 for group in fresh.param_groups)
    assert len(fresh.state) == len(optimizer.state)


def test_another_window_continues_from_the_loaded_average() -> None:
    model, optimizer = make(WINDOW)
    train(model, optimizer, range(4))
    _, fresh = make(50)
    fresh.load_state_dict(save_and_load(optimizer.state_dict()))
    assert all(group["average"] == 50 for group in fresh.param_groups)
    loaded = [state["average"] for state in fresh.state.values()]
    expected = [state["average"] for state in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


def test_an_average_of_another_shape_is_rejected() -> None:
    model, optimizer = make(WINDOW)
    train(model, optimizer, range(1))
    saved = save_and_load(optimizer.state_dict())
    saved["state"][0]["average"] = torch.zeros(3, 2)
    _, fresh = make(WINDOW)
    with pytest.raises(ValueError, match=r"average of parameter .* has shape \(3, 2\)"):
        fresh.load_state_dict(saved)
    assert not fresh.state


def build(way: str) -> tuple[nn.Module, nn.Module, Any]:
    net = SmallNet()
    model = parallelize(net, way)
    return net, model, AngularMuown(planned(net), lr=0.05, average=WINDOW)


def loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss on a batch that is the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(8, WIDTH, dtype=torch.float64, generator=generator)).square().mean()


def train_on(net: nn.Module, model: nn.Module, optimizer: Engine, steps: range) -> list[float]:
    """Train; return the loss of the averages after each step.

    A bias has no gradient before the third step, unlike the rest of its group. A forward pass with
    the weights precedes each reading of the averages, because FSDP keeps the weights gathered.
    """
    losses = []
    for step in steps:
        loss(model, step).backward()
        for name, p in net.named_parameters():
            if name == "head.bias" and step < 2:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        before = loss(model, 50)
        with torch.no_grad(), optimizer.averaged(net):
            losses.append(loss(model, 50).item())
        assert loss(model, 50).item() == before.item()
    return losses


Outcome = tuple[dict[str, Tensor], list[float]]


def outcomes(ways: tuple[str, ...]) -> list[Outcome]:
    trained = []
    for way in ways:
        net, model, optimizer = build(way)
        losses = train_on(net, model, optimizer, range(5))
        if way.startswith("fsdp"):
            _check_refusals(net, optimizer)
        trained.append((averages(optimizer), losses))
    return trained


def _check_refusals(net: Any, optimizer: Engine) -> None:
    without_model, partial = optimizer.averaged(), optimizer.averaged(net.up)
    with pytest.raises(ValueError, match=r"6 parameters .*write averaged\(model\)"), without_model:
        pass
    with pytest.raises(ValueError, match=r"a Linear that lacks \d of the 6 parameters"), partial:
        pass
    assert not average._swapped


@pytest.mark.parametrize(("world", "ways"), [(2, ("ddp", "fsdp")), (4, ("fsdp x tp",))])
def test_averages_on_ranks_match_a_single_process(world: int, ways: tuple[str, ...]) -> None:
    [(expected, losses)] = outcomes(("alone",))
    for rank in results(world, outcomes, ways):
        for rank_averages, rank_losses in rank:
            assert_same(rank_averages, expected)
            assert rank_losses == pytest.approx(losses, rel=1e-9)
    assert len(set(losses)) == 5


def train_and_save(way: str, folder: str) -> Outcome:
    net, model, optimizer = build(way)
    train_on(net, model, optimizer, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    losses = train_on(net, model, optimizer, range(3, 5))
    return averages(optimizer), losses


def load_and_train(way: str, folder: str) -> Outcome:
    net, model, optimizer = build(way)
    weights, state = get_state_dict(net, optimizer)
    states = {"model": weights, "optimizer": state}
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state)
    losses = train_on(net, model, optimizer, range(3, 5))
    return averages(optimizer), losses


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads alone
def test_averages_start_anew_from_a_checkpoint_without_them(tmp_path: Path) -> None:
    """torch requires every key. With a partial load, the averages start with the next step, not
    with the initial weights that they held when the keys were created."""
    model, optimizer = make(None)
    train(model, optimizer, range(6))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    for group in states["optimizer"]["param_groups"]:  # as saved by versions without averages
        del group["average"], group["averaged"]
    dcp.save(states, checkpoint_id=tmp_path)
    other, fresh = make(WINDOW)
    weights, state = get_state_dict(other, fresh)
    targets = {"model": weights, "optimizer": state}
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load(targets, checkpoint_id=tmp_path)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(targets, checkpoint_id=tmp_path, planner=planner)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    assert fresh.param_groups[0]["step"] == 6
    with pytest.raises(RuntimeError, match="begin with the next step"), fresh.averaged():
        pass
    history = train(other, fresh, range(6, 7))
    assert_equal(averages(fresh), {name: weight for name, [weight] in history.items()})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads alone
def test_a_checkpoint_of_two_ranks_loads_in_one_process(tmp_path: Path) -> None:
    [(expected, losses), _] = results(2, train_and_save, "fsdp", str(tmp_path))
    loaded, loaded_losses = load_and_train("alone", str(tmp_path))
    assert_same(loaded, expected)
    assert loaded_losses == pytest.approx(losses, rel=1e-9)
