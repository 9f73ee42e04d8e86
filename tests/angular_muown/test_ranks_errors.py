"""Ranks that do not do the same get an error that says so; none of them waits for ever."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from angular_muown import AngularMuown
from tests.angular_muown.family import noise, parameter
from tests.angular_muown.sharded import PLACEMENTS, made, place, whole
from tests.ranks import DIED, RankError, on_ranks, results

pytestmark = pytest.mark.xdist_group("ranks")


def optimizer_of(name: str | None, count: int = 3) -> tuple[AngularMuown, list[nn.Parameter]]:
    placement = None if name is None else PLACEMENTS[name]
    own, params = made([{"shapes": [(6, 5)] * count}], placement, torch.float64)
    optimizer = AngularMuown(own, lr=0.1)
    for i, (p, _) in enumerate(params):
        p.grad = place(noise(6, 5, seed=i), placement)
    return optimizer, [p for p, _ in params]


def without_gradient(name: str | None, on: tuple[int, ...]) -> list[Any]:
    optimizer, params = optimizer_of(name)
    optimizer.step()
    before = [whole(p) for p in params]
    if dist.get_rank() in on:
        params[1].grad = None
    optimizer.step()
    return [torch.equal(whole(p), b) for p, b in zip(params, before, strict=True)]


@pytest.mark.parametrize("name", ["rows", "columns", "copies", None])
def test_a_parameter_without_gradient_stays(name: str | None) -> None:
    assert results(2, without_gradient, name, (0, 1)) == [[False, True, False]] * 2


@pytest.mark.parametrize("name", ["rows", "hsdp", None])
def test_a_gradient_that_one_rank_lacks(name: str | None) -> None:
    began = time.monotonic()
    found = on_ranks(2, without_gradient, name, (1,))
    for outcome in found:
        assert isinstance(outcome, RankError)
        assert "parameter 'w1' has a gradient on ranks [0] and none on ranks [1]" in str(outcome)
    assert time.monotonic() - began < 30, "nobody waited for a time-out"


def disagree(how: str) -> None:
    rank = dist.get_rank()
    if how == "count":
        optimizer, _ = optimizer_of(None, count=2 + rank)
    elif how == "method":
        optimizer, _ = optimizer_of("rows")
        optimizer.param_groups[0]["orthogonalize"] = ("svd", "gram")[rank]
    else:
        optimizer, params = optimizer_of(None)
        params[2].grad = noise(6, 5, seed=rank)
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("count", "parameter 2 is nothing on rank 0 and w2 (6, 5) torch.float64"),
        ("method", "parameter 0 is w0 (6, 5) torch.float64"),
        ("gradients", "the gradient of parameter 'w2' is not the same on ranks"),
    ],
)
def test_ranks_that_disagree_are_told_what_about(how: str, said: str) -> None:
    began = time.monotonic()
    for outcome in on_ranks(2, disagree, how):
        assert isinstance(outcome, RankError)
        assert said in str(outcome)
        assert "process_group=False" in str(outcome)
    assert time.monotonic() - began < 30


def killed() -> str:
    optimizer, _ = optimizer_of("rows")
    optimizer.step()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    return "went on"


def test_a_killed_rank_ends_the_others_in_time() -> None:
    began = time.monotonic()
    found = on_ranks(3, killed, patience=8)
    assert str(found[1]) == DIED
    assert isinstance(found[0], RankError)
    assert isinstance(found[2], RankError)
    assert time.monotonic() - began < 40


def each_by_itself() -> torch.Tensor:
    p = parameter(6, 5)
    optimizer = AngularMuown([p], lr=0.1, process_group=False)
    p.grad = noise(6, 5, seed=dist.get_rank())
    optimizer.step()
    return p.detach()


def test_ranks_may_step_alone() -> None:
    first, second = results(2, each_by_itself)
    assert not torch.equal(first, second)


def in_pairs() -> list[torch.Tensor]:
    """Two teams of two, each with gradients of its own."""
    teams = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    p = parameter(6, 5)
    optimizer = AngularMuown([p], lr=0.1, process_group=teams[dist.get_rank() // 2])
    p.grad = noise(6, 5, seed=dist.get_rank() // 2)
    optimizer.step()
    return [p.detach(), torch.tensor(len(optimizer.exchange_plan().assignments))]


def test_a_process_group_says_who_shares() -> None:
    found = results(4, in_pairs)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[2][0], found[3][0])
    assert not torch.equal(found[0][0], found[2][0])
    assert all(plans == 1 for _, plans in found)


def spread_in_the_kernel() -> None:
    own, params = made(
        [{"shapes": [(6, 5, 4, 4)], "view": "conv", "first": 2}], PLACEMENTS["rows"], torch.float64
    )
    [(p, _)] = params
    p.grad = place(noise(6, 5, 4, 4, seed=1), PLACEMENTS["rows"], 2)
    AngularMuown(own).step()


def test_a_placement_that_cuts_kernels_is_refused() -> None:
    [outcome, _] = on_ranks(2, spread_in_the_kernel)
    assert isinstance(outcome, RankError)
    assert "parameter 'w0' is spread over ranks along dimension 2" in str(outcome)
    assert "shard dimension 0 or 1" in str(outcome)
