"""Ranks that disagree get an error that names the difference; no rank hangs."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
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
from tests.library.sharded import PLACEMENTS, make_groups, place, stepped, whole
from tests.ranks import DIED, RankError, on_ranks, results


def poll_often() -> None:
    """Let this rank poll for errors more often than once a second; the sleeps below are longer."""
    collectives.POLL_INTERVAL = timedelta(seconds=0.2)


def optimizer_of(name: str | None, count: int = 3) -> tuple[AngularMuown, list[nn.Parameter]]:
    placement = None if name is None else PLACEMENTS[name]
    groups, params = make_groups([{"shapes": [(6, 5)] * count}], placement, torch.float64)
    optimizer = AngularMuown(groups, lr=0.1)
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
def test_a_parameter_without_a_gradient_keeps_its_values(name: str | None) -> None:
    assert results(2, without_gradient, name, (0, 1)) == [[False, True, False]] * 2


@pytest.mark.parametrize("name", ["rows", "hsdp", None])
def test_a_gradient_missing_on_one_rank_is_an_error_on_all(name: str | None) -> None:
    began = time.monotonic()
    for outcome in on_ranks(2, without_gradient, name, (1,)):
        assert isinstance(outcome, RankError)
        assert "parameter 'w1' has a gradient on ranks [0] and none on ranks [1]" in str(outcome)
    assert time.monotonic() - began < 30, "no rank waited for a timeout"


def disagree(how: str) -> None:
    rank = dist.get_rank()
    if how == "count":
        optimizer, _ = optimizer_of(None, count=2 + rank)
    elif how == "method":
        optimizer, _ = optimizer_of("rows")
        optimizer.param_groups[0]["orthogonalize"] = ("svd", "gram")[rank]
    elif how == "inner stage":
        optimizer, _ = optimizer_of("rows")
        optimizer.param_groups[0]["radius"] = ("adam", "fixed")[rank]
    elif how == "workspace":
        optimizer, _ = optimizer_of("rows")
        optimizer.param_groups[0]["workspace"] = (0.25, 1e-6)[rank]
    elif how == "monitor":
        optimizer, params = optimizer_of("rows")
        if rank == 0:
            AngleMonitor(nn.ParameterList(params), optimizer)
    elif how == "later":  # one rank makes a new plan
        optimizer, _ = optimizer_of("rows")
        optimizer.step()
        if rank == 0:
            optimizer.param_groups[0]["workspace"] = 0.5
    else:
        optimizer, params = optimizer_of(None)
        params[2].grad = noise(6, 5, seed=rank)
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "count",
            "entry 2 of the plan is not observed on rank 0 and w2 (6, 5) torch.float64, plain",
        ),
        (
            "method",
            "entry 0 of the plan is w0 (6, 5) torch.float64, (Shard(dim=0),) on (2,), svd Oblique",
        ),
        ("inner stage", "polar_express Oblique AsIs Adam Free"),
        ("workspace", "workspace 0.25 on rank 0 and w0"),
        (
            "monitor",
            "entry 3 of the plan is observed by a monitor on rank 0 and not observed on rank 1",
        ),
        ("later", "workspace 0.5 on rank 0 and w0"),
        ("gradients", "the gradient of parameter 'w2' differs between ranks"),
    ],
)
def test_the_error_names_what_ranks_disagree_about(how: str, message: str) -> None:
    began = time.monotonic()
    for outcome in on_ranks(2, disagree, how):
        assert isinstance(outcome, RankError)
        assert message in str(outcome)
        assert "process_group=False" in str(outcome)
    assert time.monotonic() - began < 30


def stepped_conv(member: type[Engine], values: dict[str, Any]) -> None:
    group = {"shapes": [(12, 6, 3, 1)], "view": "conv", **values}
    stepped(member, {"lr": 0.02}, PLACEMENTS["columns"], [group], steps=1)


@pytest.mark.parametrize(
    ("member", "values", "reason"),
    [
        (MagnitudeDirection, {}, "column_gain has an entry for every column"),
        (AngularMuown, {"transposed": True}, "exp_avg has an entry for every row"),
    ],
)
def test_channels_must_divide_evenly_among_ranks(member: Any, values: Any, reason: str) -> None:
    """An even split of a state vector would fall inside a kernel."""
    for outcome in on_ranks(4, stepped_conv, member, values):
        assert isinstance(outcome, RankError)
        assert "a convolution of shape (12, 6, 3, 1) is sharded along dimension 1" in str(outcome)
        assert f"6 channels across 4 ranks, but {reason}" in str(outcome)
        assert "shard dimension 0" in str(outcome)


def unchanged_after_an_error() -> list[bool]:
    """Return True for AdamW's parameter and for step counters if an error leaves them unchanged."""
    optimizer, params = optimizer_of("rows")
    other = parameter(4, 3)
    optimizer.add_param_group({"params": [("other", other)], "algorithm": "adamw"})
    other.grad = noise(4, 3, seed=9)
    optimizer.step()
    before, steps = other.detach().clone(), [g["step"] for g in optimizer.param_groups]
    if dist.get_rank() == 1:
        params[0].grad = None
    try:
        optimizer.step()
    except RuntimeError:
        after = [g["step"] for g in optimizer.param_groups]
        return [torch.equal(before, other.detach()), steps == after]
    return []


def test_a_step_that_raises_changes_nothing() -> None:
    assert results(2, unchanged_after_an_error) == [[True, True]] * 2


def warmed_up() -> list[int]:
    """Take two steps of a warmup; rank 3 of 4 has no rows, and therefore no nonzero gradient."""
    groups, params = make_groups([{"shapes": [(6, 5)]}], PLACEMENTS["rows"], torch.float64)
    optimizer = AngularMuown(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    for step in range(2):
        for p, _ in params:
            p.grad = place(noise(6, 5, seed=step), PLACEMENTS["rows"])
        optimizer.step()
        schedule.step()
    return [group["step"] for group in optimizer.param_groups]


def test_a_first_step_with_lr_zero_counts_on_all_ranks() -> None:
    assert results(4, warmed_up) == [[2]] * 4


def killed() -> str:
    optimizer, _ = optimizer_of("rows")
    optimizer.step()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    return "continued"


def test_other_ranks_fail_soon_after_a_rank_is_killed() -> None:
    began = time.monotonic()
    outcomes = on_ranks(3, killed, timeout=8)
    assert str(outcomes[1]) == DIED
    assert isinstance(outcomes[0], RankError)
    assert isinstance(outcomes[2], RankError)
    assert time.monotonic() - began < 40


def stepped_alone() -> torch.Tensor:
    p = parameter(6, 5)
    optimizer = AngularMuown([p], lr=0.1, process_group=False)
    p.grad = noise(6, 5, seed=dist.get_rank())
    optimizer.step()
    return p.detach()


def test_process_group_false_lets_ranks_step_alone() -> None:
    first, second = results(2, stepped_alone)
    assert not torch.equal(first, second)


def in_pairs() -> list[torch.Tensor]:
    """Step in two groups of two ranks, each with its own gradients."""
    rank_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    p = parameter(6, 5)
    optimizer = AngularMuown([p], lr=0.1, process_group=rank_groups[dist.get_rank() // 2])
    p.grad = noise(6, 5, seed=dist.get_rank() // 2)
    optimizer.step()
    return [p.detach(), torch.tensor(len(optimizer.exchange_plan().assignments))]


def test_only_the_ranks_of_a_process_group_share_work() -> None:
    ranks = results(4, in_pairs)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert torch.equal(ranks[2][0], ranks[3][0])
    assert not torch.equal(ranks[0][0], ranks[2][0])
    assert all(plans == 1 for _, plans in ranks)


def sharded_inside_the_kernel() -> None:
    groups, params = make_groups(
        [{"shapes": [(6, 5, 4, 4)], "view": "conv", "first": 2}], PLACEMENTS["rows"], torch.float64
    )
    [(p, _)] = params
    p.grad = place(noise(6, 5, 4, 4, seed=1), PLACEMENTS["rows"], 2)
    AngularMuown(groups).step()


def test_sharding_inside_a_kernel_is_rejected() -> None:
    [outcome, _] = on_ranks(2, sharded_inside_the_kernel)
    assert isinstance(outcome, RankError)
    assert "parameter 'w0' is sharded along dimension 2" in str(outcome)
    assert "shard dimension 0 or 1" in str(outcome)


class OwnerError(Exception):
    pass


def failing_owner(name: str, deep: bool) -> list[bool]:
    """Fail on rank 1: in a polar factor if `deep`, otherwise before the first collective."""
    poll_often()
    optimizer, params = optimizer_of(name)
    optimizer.step()
    before = [p.detach().clone() for p in params]

    def fail(*args: Any) -> Any:
        raise OwnerError("injected")

    if dist.get_rank() == 1:
        module = orthogonalize if deep else engine.options
        setattr(module, "unit" if deep else "with_gradient", fail)
    try:
        optimizer.step()
    except OwnerError:
        time.sleep(2)  # still alive, as in a debugger or an error handler
        raise
    return [torch.equal(p, b) for p, b in zip(params, before, strict=True)]


@pytest.mark.parametrize(
    ("name", "deep"), [("rows", True), ("rows", False), ("columns", True), ("hsdp", True)]
)
def test_an_error_on_one_rank_ends_the_step_on_all(name: str, deep: bool) -> None:
    began = time.monotonic()
    for rank, outcome in enumerate(on_ranks(4, failing_owner, name, deep, timeout=60)):
        assert isinstance(outcome, RankError), rank
        assert "injected" in str(outcome)
        if rank != 1:
            assert "rank 1 failed in its step: OwnerError: injected" in str(outcome)
            assert ("in the polar factor of w" in str(outcome)) == deep
    assert time.monotonic() - began < 30


def failed_once() -> list[int]:
    """Return the steps that raised, and the step counter.

    Step 1 raises. In step 2, rank 1 waits long enough to poll for errors.
    """
    poll_often()
    optimizer, params = optimizer_of("rows")
    failed = []
    for t in range(3):
        grad = params[0].grad
        if t == 1 and dist.get_rank() == 0:
            params[0].grad = None
        if t == 2 and dist.get_rank() == 0:
            time.sleep(1)
        try:
            optimizer.step()
        except RuntimeError:
            failed.append(t)
        params[0].grad = grad
    return [*failed, optimizer.param_groups[0]["step"]]


def test_an_error_that_was_handled_does_not_end_a_later_step() -> None:
    assert results(2, failed_once) == [[1, 2]] * 2


SETTINGS: dict[str, tuple[Any, Any]] = {
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


def different_setting(name: str | None, key: str, tensors: bool) -> None:
    optimizer, params = optimizer_of(name)
    before = [p.detach().clone() for p in params]
    value = SETTINGS[key][dist.get_rank()]
    optimizer.param_groups[0][key] = torch.tensor(value) if tensors else value
    try:
        optimizer.step()
    finally:
        unmoved = all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        assert unmoved, "weights moved"


@pytest.mark.parametrize(("key", "name"), [*((key, "rows") for key in SETTINGS), ("lr", None)])
def test_the_error_names_the_setting_that_differs(key: str, name: str | None) -> None:
    for outcome in on_ranks(2, different_setting, name, key, False):
        assert isinstance(outcome, RankError)
        first, second = SETTINGS[key]
        message = f"group 0 has {key}={first!r} on rank 0 and {key}={second!r} on rank 1"
        assert message in str(outcome)
        assert "weights moved" not in str(outcome)


def test_settings_that_are_tensors_are_compared() -> None:
    for outcome in on_ranks(2, different_setting, "rows", "lr", True):
        assert isinstance(outcome, RankError)
        assert "group 0 has lr=0.10000000149011612 on rank 0 and lr=0.20000000298023224" in str(
            outcome
        )


def one_group_of_four(name: str) -> None:
    """Change one of three matrix groups, two of them equal; the fourth is AdamW's."""
    placement = PLACEMENTS[name]
    groups, params = make_groups([{"shapes": [(6, 5)]}] * 3, placement, torch.float64)
    groups.append({"params": [("v", parameter(4, 3))], "algorithm": "adamw"})
    for group, lr in zip(groups, (0.1, 0.2, 0.1, 0.1), strict=True):
        group["lr"] = lr
    optimizer = AngularMuown(groups)
    for i, (p, _) in enumerate(params):
        p.grad = place(noise(6, 5, seed=i), placement)
    optimizer.step()
    if dist.get_rank() == 1:
        optimizer.param_groups[2]["lr"] = 0.3
    optimizer.step()


def test_the_error_names_the_group_that_differs() -> None:
    for outcome in on_ranks(2, one_group_of_four, "rows"):
        assert "group 2 has lr=0.1 on rank 0 and lr=0.3 on rank 1" in str(outcome)


def different_adamw() -> None:
    optimizer, _ = optimizer_of("rows")
    v = parameter(4, 3)
    optimizer.add_param_group(
        {"params": [("v", v)], "algorithm": "adamw", "lr": 0.1 + dist.get_rank()}
    )
    optimizer.step()


def test_adamw_groups_are_compared() -> None:
    for outcome in on_ranks(2, different_adamw):
        assert "group 1 has lr=0.1 on rank 0 and lr=1.1 on rank 1" in str(outcome)


def solo(fails: bool) -> None:
    """Step an optimizer that only this rank has."""
    p = parameter(6, 5)
    p.grad = noise(6, 5, seed=1)
    optimizer = AngularMuown([p], process_group=False)
    if fails:
        optimizer.param_groups[0]["lr"] = float("nan")
    with suppress(ValueError):
        optimizer.step()


def next_to_another(fails: bool) -> int:
    """Step a shared optimizer; rank 0 also steps one of its own. One of the two fails on rank 0."""
    poll_often()
    optimizer, _ = optimizer_of("rows")
    if dist.get_rank() == 0:
        solo(not fails)
    optimizer.step()
    if dist.get_rank() == 0:
        time.sleep(1)  # rank 1 polls for errors
        if fails:
            optimizer.param_groups[0]["lr"] = float("nan")
    try:
        optimizer.step()
    except ValueError:
        time.sleep(2)
        raise
    return optimizer.param_groups[0]["step"]


def test_an_error_in_a_step_that_is_not_shared_does_not_reach_other_ranks() -> None:
    assert results(2, next_to_another, False) == [2, 2]


def test_an_error_reaches_other_ranks_even_after_steps_they_did_not_share() -> None:
    began = time.monotonic()
    for rank, outcome in enumerate(on_ranks(2, next_to_another, True, timeout=60)):
        assert isinstance(outcome, RankError)
        assert "group 0 has lr=nan" in str(outcome)
        assert ("rank 0 failed in its step" in str(outcome)) == (rank == 1)
    assert time.monotonic() - began < 30


def slow_poll() -> int:
    """Let the collective end while rank 1 polls for errors."""
    poll_often()
    optimizer, _ = optimizer_of("rows")
    optimizer.step()
    poll = collectives._raise_peer_error

    def slowly() -> None:
        poll()
        time.sleep(0.5)

    collectives._raise_peer_error = slowly
    if dist.get_rank() == 0:
        time.sleep(0.5)
    optimizer.step()
    return optimizer.param_groups[0]["step"]


def test_a_collective_may_end_while_a_rank_polls_for_errors() -> None:
    assert results(2, slow_poll) == [2, 2]


def without_a_store() -> None:
    optimizer, _ = optimizer_of("rows")
    optimizer.step()

    def lost() -> Any:
        raise OSError("the store is lost")

    collectives._store = lost
    optimizer.param_groups[0]["lr"] = float("nan")
    optimizer.step()


def test_a_lost_store_does_not_hide_the_error() -> None:
    for outcome in on_ranks(2, without_a_store):
        assert "group 0 has lr=nan" in str(outcome)
        assert "During handling" not in str(outcome)


def experts_with_lr_zero() -> list[int]:
    """Take the first step of a warmup, in which rank 1's experts receive no tokens."""
    p = nn.Parameter(place(parameter(4, 6, 5).detach(), PLACEMENTS["rows"]))
    optimizer = AngularMuown([{"params": [("experts", p)], "view": "stack"}], lr=0.0)
    grad = place(noise(4, 6, 5, seed=1), PLACEMENTS["rows"])
    p.grad = grad if dist.get_rank() == 0 else None
    optimizer.step()
    return [group["step"] for group in optimizer.param_groups]


def test_a_first_step_with_lr_zero_counts_for_experts_without_tokens() -> None:
    assert results(2, experts_with_lr_zero) == [[1], [1]]
