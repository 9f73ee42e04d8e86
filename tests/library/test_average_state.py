"""The average in state dicts, copies and checkpoints, and over ranks."""

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
from tests.library.distributed.test_state_on_ranks import WIDTH, assert_same, planned, sharding
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


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


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
def test_resumed_is_uninterrupted_bit_for_bit(resumed: Any, dtype: torch.dtype) -> None:
    model, optimizer = make(WINDOW, dtype)
    train(model, optimizer, range(4))
    other, fresh = resumed(model, optimizer)
    assert_equal(averages(fresh), averages(optimizer))
    train(model, optimizer, range(4, 8))
    train(other, fresh, range(4, 8))
    assert_equal(averages(fresh), averages(optimizer))
    assert all(a.dtype == torch.float32 for a in averages(fresh).values())


def test_a_look_at_a_fresh_optimizer_changes_nothing() -> None:
    (model, optimizer), (other, looked_at) = make(WINDOW), make(WINDOW)
    get_optimizer_state_dict(other, looked_at)
    assert_equal(averages(looked_at), dict(other.named_parameters()))
    train(model, optimizer, range(3))
    train(other, looked_at, range(3))
    assert_equal(averages(looked_at), averages(optimizer))


@pytest.mark.parametrize("older", [False, True])
def test_an_average_that_the_state_has_not_begins(older: bool) -> None:
    """As a new one: its first step leaves nothing of what was before, whatever the clock says."""
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
    wanted = {name: torch.zeros_like(p) for name, p in other.named_parameters()}
    for k in (1, 2, 3, 4):
        for name, [weight] in train(other, fresh, range(k + 5, k + 6)).items():
            wanted[name] = weight if k == 1 else wanted[name].lerp(weight, averaging(WINDOW)(k))
        assert_equal(averages(fresh), wanted)


def test_averages_that_nobody_keeps_are_left_out_aloud() -> None:
    """The setting is the constructor's. Kept without it they would stand still, out of date."""
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


def test_another_window_goes_on_from_the_average_that_was() -> None:
    model, optimizer = make(WINDOW)
    train(model, optimizer, range(4))
    _, fresh = make(50)
    fresh.load_state_dict(save_and_load(optimizer.state_dict()))
    assert all(group["average"] == 50 for group in fresh.param_groups)
    found = [state["average"] for state in fresh.state.values()]
    wanted = [state["average"] for state in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_an_average_of_another_shape_is_refused() -> None:
    model, optimizer = make(WINDOW)
    train(model, optimizer, range(1))
    saved = save_and_load(optimizer.state_dict())
    saved["state"][0]["average"] = torch.zeros(3, 2)
    _, fresh = make(WINDOW)
    with pytest.raises(ValueError, match=r"average of parameter .* has shape \(3, 2\)"):
        fresh.load_state_dict(saved)
    assert not fresh.state


def built(way: str) -> tuple[nn.Module, nn.Module, Any]:
    net = SmallNet()
    model = sharding(net, way)
    return net, model, AngularMuown(planned(net), lr=0.05, average=WINDOW)


def loss(model: nn.Module, step: int) -> Tensor:
    """The same batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(8, WIDTH, dtype=torch.float64, generator=generator)).square().mean()


def go_on(net: nn.Module, model: nn.Module, optimizer: Engine, steps: range) -> list[float]:
    """Losses of the averages after each step. A bias has no gradient before step 3, unlike the rest
    of its group; the pass before an average is read is one with the weights, which FSDP keeps."""
    found = []
    for step in steps:
        loss(model, step).backward()
        for name, p in net.named_parameters():
            if name == "head.bias" and step < 2:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        before = loss(model, 50)
        with torch.no_grad(), optimizer.averaged(net):
            found.append(loss(model, 50).item())
        assert loss(model, 50).item() == before.item()
    return found


Outcome = tuple[dict[str, Tensor], list[float]]


def trained(ways: tuple[str, ...]) -> list[Outcome]:
    found = []
    for way in ways:
        net, model, optimizer = built(way)
        losses = go_on(net, model, optimizer, range(5))
        if way.startswith("fsdp"):
            _check_refusals(net, optimizer)
        found.append((averages(optimizer), losses))
    return found


def _check_refusals(net: Any, optimizer: Engine) -> None:
    wordless, partial = optimizer.averaged(), optimizer.averaged(net.up)
    with pytest.raises(ValueError, match=r"6 parameters .*: write averaged\(model\)"), wordless:
        pass
    with pytest.raises(ValueError, match=r"a Linear that lacks \d of the 6 parameters"), partial:
        pass
    assert not average._swapped


@pytest.mark.parametrize(("world", "ways"), [(2, ("ddp", "fsdp")), (4, ("fsdp x tp",))])
def test_ranks_average_as_one_process_does(world: int, ways: tuple[str, ...]) -> None:
    [(wanted, losses)] = trained(("alone",))
    for rank in results(world, trained, ways):
        for found, own in rank:
            assert_same(found, wanted)
            assert own == pytest.approx(losses, rel=1e-9)
    assert len(set(losses)) == 5


def saved(way: str, folder: str) -> Outcome:
    net, model, optimizer = built(way)
    go_on(net, model, optimizer, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    losses = go_on(net, model, optimizer, range(3, 5))
    return averages(optimizer), losses


def loaded(way: str, folder: str) -> Outcome:
    net, model, optimizer = built(way)
    weights, state = get_state_dict(net, optimizer)
    states = {"model": weights, "optimizer": state}
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state)
    losses = go_on(net, model, optimizer, range(3, 5))
    return averages(optimizer), losses


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads alone
def test_a_checkpoint_without_averages(tmp_path: Path) -> None:
    """torch wants every key; and where it is told not to, the averages begin with the next step,
    not with the initial weights that stood there when the keys were made."""
    model, optimizer = make(None)
    train(model, optimizer, range(6))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    for group in states["optimizer"]["param_groups"]:  # as before there were any
        del group["average"], group["averaged"]
    dcp.save(states, checkpoint_id=tmp_path)
    other, fresh = make(WINDOW)
    weights, state = get_state_dict(other, fresh)
    found = {"model": weights, "optimizer": state}
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load(found, checkpoint_id=tmp_path)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, checkpoint_id=tmp_path, planner=planner)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    assert fresh.param_groups[0]["step"] == 6
    with pytest.raises(RuntimeError, match="begin with the next step"), fresh.averaged():
        pass
    history = train(other, fresh, range(6, 7))
    assert_equal(averages(fresh), {name: weight for name, [weight] in history.items()})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads alone
def test_saved_on_two_ranks_and_loaded_by_one(tmp_path: Path) -> None:
    [(wanted, losses), _] = results(2, saved, "fsdp", str(tmp_path))
    found, own = loaded("alone", str(tmp_path))
    assert_same(found, wanted)
    assert own == pytest.approx(losses, rel=1e-9)
