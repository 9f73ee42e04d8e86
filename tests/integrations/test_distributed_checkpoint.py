"""Momenta cross state dtypes in torch.distributed.checkpoint, in one process.

tests/library/distributed/test_state_on_ranks.py does it on several ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from angular_muown import AngularMuown, plan
from angular_muown.integrations.checkpoint import MomentumLoadPlanner
from tests.library.models import BLOCKS, loss_of, tiny_lm

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*assuming the intent is to (save|load):UserWarning"
)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def make(state_dtype: str | None) -> tuple[nn.Module, AngularMuown]:
    model = tiny_lm(torch.float32)
    return model, AngularMuown(plan(model, blocks=BLOCKS), lr=0.01, state_dtype=state_dtype)


def train(model: nn.Module, optimizer: AngularMuown, steps: range) -> None:
    for step in steps:
        loss_of(model, seed=step).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: Path, state_dtype: str | None, **options: Any) -> tuple[nn.Module, AngularMuown]:
    model, optimizer = make(state_dtype)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer, **options)
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    return model, optimizer


def load(
    folder: Path, model: nn.Module, optimizer: Any, planner: Any = None, **options: Any
) -> None:
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, **options)}
    dcp.load(state, checkpoint_id=folder, planner=planner)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], **options)


@pytest.mark.parametrize(
    ("before", "after", "rounded"),
    [
        (None, "int8", "every entry is rounded to 127 levels"),
        ("bfloat16", "int8", "every entry is rounded to 127 levels"),
        ("int8", None, "nothing is rounded"),
        ("int8", "bfloat16", "every entry is rounded to bfloat16"),
    ],
)
def test_the_planner_loads_what_load_state_dict_loads(
    tmp_path: Path, before: str | None, after: str | None, rounded: str
) -> None:
    source, first = saved(tmp_path, before)
    resumed, optimizer = make(after)
    resumed.load_state_dict(source.state_dict())
    with pytest.warns(UserWarning, match=rounded):
        load(tmp_path, resumed, optimizer, MomentumLoadPlanner())
    expected_model, expected = make(after)
    expected_model.load_state_dict(source.state_dict())
    with pytest.warns(UserWarning, match=rounded):
        expected.load_state_dict(first.state_dict())
    for model, one in ((resumed, optimizer), (expected_model, expected)):
        train(model, one, range(3, 5))
    for (name, p), q in zip(resumed.named_parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert optimizer.state[p].keys() == expected.state[q].keys(), name


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_the_planner_changes_nothing_where_dtypes_agree(
    tmp_path: Path, state_dtype: str | None
) -> None:
    source, first = saved(tmp_path, state_dtype)
    model, optimizer = make(state_dtype)
    load(tmp_path, model, optimizer, MomentumLoadPlanner())  # warnings are errors here
    for p, q in zip(source.parameters(), model.parameters(), strict=True):
        for name, value in first.state[p].items():
            assert torch.equal(value, optimizer.state[q][name]), name


def test_float32_and_bfloat16_need_no_planner(tmp_path: Path) -> None:
    source, first = saved(tmp_path, None)
    model, optimizer = make("bfloat16")
    with pytest.warns(UserWarning, match="every entry is rounded to bfloat16"):
        load(tmp_path, model, optimizer)
    matrices = [i for i, p in enumerate(source.parameters()) if "momentum_buffer" in first.state[p]]
    assert matrices
    for i in matrices:
        p, q = list(source.parameters())[i], list(model.parameters())[i]
        assert torch.equal(first.momentum(p).bfloat16(), optimizer.state[q]["momentum_buffer"])


def test_without_the_planner_an_error_names_it(tmp_path: Path) -> None:
    saved(tmp_path, "int8")
    model, optimizer = make(None)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"no momentum_scale .*planner=MomentumLoadPlanner\(\)"):
        load(tmp_path, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert {group["state_dtype"] for group in optimizer.param_groups} == {None}


def test_without_the_planner_torch_misses_the_scales(tmp_path: Path) -> None:
    saved(tmp_path, None)
    model, optimizer = make("int8")
    with pytest.raises(CheckpointException, match=r"Missing key .*momentum_scale"):
        load(tmp_path, model, optimizer)


def test_a_failed_load_leaves_the_optimizers_own_tensors(tmp_path: Path) -> None:
    """The planner must not write to the dicts of optimizer.state, which torch passes on."""
    saved(tmp_path, "int8")
    model, optimizer = make(None)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "missing": torch.zeros(1)}
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(state, checkpoint_id=tmp_path, planner=MomentumLoadPlanner())
    buffers = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
    assert {M.dtype for M in buffers} == {torch.float32}


def test_flat_state_dicts_are_refused_with_the_way_that_works(tmp_path: Path) -> None:
    source, first = saved(tmp_path, "int8", options=FLAT)
    model, optimizer = make(None)
    with pytest.raises(
        CheckpointException, match=r"flat state dicts .*Create it with the state_dtype"
    ):
        load(tmp_path, model, optimizer, MomentumLoadPlanner(), options=FLAT)
    model, optimizer = make("int8")
    load(tmp_path, model, optimizer, options=FLAT)
    for group in optimizer.param_groups:
        group["state_dtype"] = None
    optimizer.state_dict()
    for p, q in zip(source.parameters(), model.parameters(), strict=True):
        if "momentum_buffer" in first.state[p]:
            assert optimizer.state[q]["momentum_buffer"].dtype == torch.float32
            assert torch.equal(optimizer.momentum(q), first.momentum(p))
