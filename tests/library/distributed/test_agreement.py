"""Ranks that do not do the same get an error that says so; none of them waits for ever."""

import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from angular_muown import AngleMonitor, AngularMuown, MagnitudeDirection, engine
from angular_muown.distributed import collectives
from angular_muown.engine import Engine
from angular_muown.stages import orthogonalize
from tests.library.family import noise, parameter
from tests.library.sharded import PLACEMENTS, made, place, stepped, whole
from tests.ranks import DIED, RankError, on_ranks, results


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
    elif how == "inside":  # of a stage
        optimizer, _ = optimizer_of("rows")
        optimizer.param_groups[0]["radius"] = ("adam", "fixed")[rank]
    elif how == "workspace":
        optimizer, _ = optimizer_of("rows")
        optimizer.param_groups[0]["workspace"] = (0.25, 1e-6)[rank]
    elif how == "monitor":
        optimizer, params = optimizer_of("rows")
        if rank == 0:
            AngleMonitor(nn.ParameterList(params), optimizer)
    elif how == "later":  # one of them makes a new plan
        optimizer, _ = optimizer_of("rows")
        optimizer.step()
        if rank == 0:
            optimizer.param_groups[0]["workspace"] = 0.5
    else:
        optimizer, params = optimizer_of(None)
        params[2].grad = noise(6, 5, seed=rank)
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("count", "number 2 is not observed on rank 0 and w2 (6, 5) torch.float64, plain"),
        ("method", "number 0 is w0 (6, 5) torch.float64, (Shard(dim=0),) on (2,), svd Oblique"),
        ("inside", "polar_express Oblique AsIs Adam Free"),
        ("workspace", "workspace 0.25 on rank 0 and w0"),
        ("monitor", "number 3 is observed by a monitor on rank 0 and not observed on rank 1"),
        ("later", "workspace 0.5 on rank 0 and w0"),
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


def stepped_conv(member: type[Engine], values: dict[str, Any]) -> None:
    group = {"shapes": [(12, 6, 3, 1)], "view": "conv", **values}
    stepped(member, {"lr": 0.02}, PLACEMENTS["columns"], [group], steps=1)


@pytest.mark.parametrize(
    ("member", "values", "said"),
    [
        (MagnitudeDirection, {}, "column_gain has an entry for every column"),
        (AngularMuown, {"transposed": True}, "exp_avg has an entry for every row"),
    ],
)
def test_channels_that_ranks_do_not_divide(member: Any, values: Any, said: str) -> None:
    """A state vector with an entry for each place of a kernel would be cut elsewhere."""
    for outcome in on_ranks(4, stepped_conv, member, values):
        assert isinstance(outcome, RankError)
        assert "a convolution of shape (12, 6, 3, 1) is spread along dimension 1" in str(outcome)
        assert f"6 channels over 4 ranks, but {said}" in str(outcome)
        assert "shard dimension 0" in str(outcome)


def after_a_refusal() -> list[bool]:
    """AdamW's parameters and clocks are where they were, too."""
    optimizer, params = optimizer_of("rows")
    other = parameter(4, 3)
    optimizer.add_param_group({"params": [("other", other)], "algorithm": "adamw"})
    other.grad = noise(4, 3, seed=9)
    optimizer.step()
    before, clocks = other.detach().clone(), [g["step"] for g in optimizer.param_groups]
    if dist.get_rank() == 1:
        params[0].grad = None
    try:
        optimizer.step()
    except RuntimeError:
        after = [g["step"] for g in optimizer.param_groups]
        return [torch.equal(before, other.detach()), clocks == after]
    return []


def test_a_refused_step_moves_nothing() -> None:
    assert results(2, after_a_refusal) == [[True, True]] * 2


def warmed_up() -> list[int]:
    """Rank 3 has no row of six, and so no gradient that is not zero."""
    own, params = made([{"shapes": [(6, 5)]}], PLACEMENTS["rows"], torch.float64)
    optimizer = AngularMuown(own, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    for step in range(2):
        for p, _ in params:
            p.grad = place(noise(6, 5, seed=step), PLACEMENTS["rows"])
        optimizer.step()
        schedule.step()
    return [group["step"] for group in optimizer.param_groups]


def test_a_first_step_at_rate_zero_is_one_for_all_ranks() -> None:
    assert results(4, warmed_up) == [[2]] * 4


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
    rank_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    p = parameter(6, 5)
    optimizer = AngularMuown([p], lr=0.1, process_group=rank_groups[dist.get_rank() // 2])
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
    assert "parameter 'w0' is sharded along dimension 2" in str(outcome)
    assert "shard dimension 0 or 1" in str(outcome)


class UnableError(Exception):
    pass


def failing_owner(name: str, deep: bool) -> list[bool]:
    """Rank 1 cannot make a polar factor, or fails even before the ranks first meet."""
    optimizer, params = optimizer_of(name)
    optimizer.step()
    before = [p.detach().clone() for p in params]

    def fail(*args: Any) -> Any:
        raise UnableError("not today")

    if dist.get_rank() == 1:
        module = orthogonalize if deep else engine.options
        setattr(module, "unit" if deep else "with_gradient", fail)
    try:
        optimizer.step()
    except UnableError:
        time.sleep(6)  # alive, as in a debugger or in a handler of the error
        raise
    return [torch.equal(p, b) for p, b in zip(params, before, strict=True)]


@pytest.mark.parametrize(
    ("name", "deep"), [("rows", True), ("rows", False), ("columns", True), ("hsdp", True)]
)
def test_an_error_on_one_rank_ends_the_step_on_all(name: str, deep: bool) -> None:
    began = time.monotonic()
    found = on_ranks(4, failing_owner, name, deep, patience=60)
    for rank, outcome in enumerate(found):
        assert isinstance(outcome, RankError), rank
        assert "not today" in str(outcome)
        if rank != 1:
            assert "rank 1 failed in its step: UnableError: not today" in str(outcome)
            assert ("in the polar factor of w" in str(outcome)) == deep
    assert time.monotonic() - began < 30


def refused_once() -> list[int]:
    """Step 1 is refused; in step 2 rank 1 waits long enough to look for errors."""
    optimizer, params = optimizer_of("rows")
    refused = []
    for t in range(3):
        grad = params[0].grad
        if t == 1 and dist.get_rank() == 0:
            params[0].grad = None
        if t == 2 and dist.get_rank() == 0:
            time.sleep(3)
        try:
            optimizer.step()
        except RuntimeError:
            refused.append(t)
        params[0].grad = grad
    return [*refused, optimizer.param_groups[0]["step"]]


def test_an_error_that_was_handled_does_not_end_a_later_step() -> None:
    assert results(2, refused_once) == [[1, 2]] * 2


NUMBERS: dict[str, tuple[Any, Any]] = {
    "lr": (0.1, 0.2),
    "momentum": (0.95, 0.9),
    "nesterov": (True, False),
    "scale": ("fan_ratio", "adam_rms"),
    "weight_decay": (0.0, 0.1),
    "eps": (1e-8, 1e-6),
    "betas": ((0.9, 0.95), (0.9, 0.99)),
    "maximize": (False, True),
    "decay_scale": (1e-3, 2e-3),
    "step": (0, 5),
    "radius_lr": (None, 0.01),
    "write_back": ("stochastic", "master"),
}


def other_number(name: str | None, key: str, tensors: bool) -> list[bool]:
    optimizer, params = optimizer_of(name)
    before = [p.detach().clone() for p in params]
    value = NUMBERS[key][dist.get_rank()]
    optimizer.param_groups[0][key] = torch.tensor(value) if tensors else value
    try:
        optimizer.step()
    finally:
        unmoved = all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        assert unmoved, "weights moved"
    return []


@pytest.mark.parametrize(("key", "name"), [*((key, "rows") for key in NUMBERS), ("lr", None)])
def test_ranks_with_other_numbers_are_told_which(key: str, name: str | None) -> None:
    for outcome in on_ranks(2, other_number, name, key, False):
        assert isinstance(outcome, RankError)
        first, second = NUMBERS[key]
        said = f"group 0 has {key}={first!r} on rank 0 and {key}={second!r} on rank 1"
        assert said in str(outcome)
        assert "weights moved" not in str(outcome)


def test_tensors_of_numbers_are_compared_too() -> None:
    for outcome in on_ranks(2, other_number, "rows", "lr", True):
        assert isinstance(outcome, RankError)
        assert "group 0 has lr=0.10000000149011612 on rank 0 and lr=0.20000000298023224" in str(
            outcome
        )


def one_group_among_three(name: str) -> None:
    """Groups whose order must not depend on their values, and one of AdamW."""
    placement = PLACEMENTS[name]
    own, params = made([{"shapes": [(6, 5)]}] * 3, placement, torch.float64)
    own.append({"params": [("v", parameter(4, 3))], "algorithm": "adamw"})
    for group, lr in zip(own, (0.1, 0.2, 0.1, 0.1), strict=True):
        group["lr"] = lr
    optimizer = AngularMuown(own)
    for i, (p, _) in enumerate(params):
        p.grad = place(noise(6, 5, seed=i), placement)
    optimizer.step()
    if dist.get_rank() == 1:
        optimizer.param_groups[2]["lr"] = 0.3
    optimizer.step()


def test_the_group_that_differs_is_named_among_others() -> None:
    for outcome in on_ranks(2, one_group_among_three, "rows"):
        assert "group 2 has lr=0.1 on rank 0 and lr=0.3 on rank 1" in str(outcome)


def other_adamw() -> None:
    optimizer, _ = optimizer_of("rows")
    v = parameter(4, 3)
    optimizer.add_param_group(
        {"params": [("v", v)], "algorithm": "adamw", "lr": 0.1 + dist.get_rank()}
    )
    optimizer.step()


def test_groups_of_adamw_are_compared_too() -> None:
    for outcome in on_ranks(2, other_adamw):
        assert "group 1 has lr=0.1 on rank 0 and lr=1.1 on rank 1" in str(outcome)


def solo(fails: bool) -> None:
    """A step of an optimizer that only this rank has."""
    p = parameter(6, 5)
    p.grad = noise(6, 5, seed=1)
    optimizer = AngularMuown([p], process_group=False)
    if fails:
        optimizer.param_groups[0]["lr"] = float("nan")
    with suppress(ValueError):
        optimizer.step()


def beside_another(fails: bool) -> int:
    """Rank 0 has taken a step of its own more than the others: an error in that one is its own, and
    an error in a shared one is found by the others."""
    optimizer, _ = optimizer_of("rows")
    if dist.get_rank() == 0:
        solo(not fails)
    optimizer.step()
    if dist.get_rank() == 0:
        time.sleep(2.5)  # the others look for errors
        if fails:
            optimizer.param_groups[0]["lr"] = float("nan")
    try:
        optimizer.step()
    except ValueError:
        time.sleep(5)
        raise
    return optimizer.param_groups[0]["step"]


def test_a_step_that_is_not_shared_does_not_matter_to_others() -> None:
    assert results(2, beside_another, False) == [2, 2]


def test_an_error_is_found_whatever_else_a_rank_has_stepped() -> None:
    began = time.monotonic()
    for rank, outcome in enumerate(on_ranks(2, beside_another, True, patience=60)):
        assert isinstance(outcome, RankError)
        assert "group 0 has lr=nan" in str(outcome)
        assert ("rank 0 failed in its step" in str(outcome)) == (rank == 1)
    assert time.monotonic() - began < 30


def slow_look() -> int:
    """The collective ends while rank 1 looks for errors: that is no error."""
    optimizer, _ = optimizer_of("rows")
    optimizer.step()
    look = collectives._look

    def slowly() -> None:
        look()
        time.sleep(1)

    collectives._look = slowly
    if dist.get_rank() == 0:
        time.sleep(1.5)
    optimizer.step()
    return optimizer.param_groups[0]["step"]


def test_a_collective_that_ends_during_a_look_has_not_failed() -> None:
    assert results(2, slow_look) == [2, 2]


def without_a_store() -> None:
    optimizer, _ = optimizer_of("rows")
    optimizer.step()

    def gone() -> Any:
        raise OSError("the store is gone")

    collectives._store = gone
    optimizer.param_groups[0]["lr"] = float("nan")
    optimizer.step()


def test_a_store_that_is_gone_does_not_hide_the_error() -> None:
    for outcome in on_ranks(2, without_a_store):
        assert "group 0 has lr=nan" in str(outcome)
        assert "During handling" not in str(outcome)


def first_step_at_rate_zero() -> list[int]:
    """Rank 1's experts got no tokens in the first step of a warm-up."""
    p = nn.Parameter(place(parameter(4, 6, 5).detach(), PLACEMENTS["rows"]))
    optimizer = AngularMuown([{"params": [("experts", p)], "view": "stack"}], lr=0.0)
    grad = place(noise(4, 6, 5, seed=1), PLACEMENTS["rows"])
    p.grad = grad if dist.get_rank() == 0 else None
    optimizer.step()
    return [group["step"] for group in optimizer.param_groups]


def test_experts_without_tokens_in_a_first_step_at_rate_zero() -> None:
    assert results(2, first_step_at_rate_zero) == [[1], [1]]
