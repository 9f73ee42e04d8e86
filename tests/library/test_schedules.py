"""Schedules: they set the learning rate and kappa together, and warn if both decay."""

import io
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from angular_muown import (
    AngleMonitor,
    AngularMuown,
    Muon,
    cosine,
    cosine_schedule,
    linear,
    linear_schedule,
    matching_lr,
    wsd,
    wsd_schedule,
)
from tests.library.family import FAMILY, noise, parameter
from tests.library.models import loss_of, tiny_lm

FALLING = {"cosine": cosine_schedule, "linear": linear_schedule}
ALL = {"wsd": wsd_schedule, **FALLING}


def matrix(**options) -> AngularMuown:
    return AngularMuown([parameter(8, 6)], lr=0.02, **options)


def factors(optimizer, scheduler, steps: int) -> list[float]:
    """Return the learning rates that the steps of a run see, relative to the last group's base."""
    values = []
    for t in range(steps):
        values.append(optimizer.param_groups[-1]["lr"] / scheduler.base_lrs[-1])
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = noise(*p.shape, seed=t, dtype=p.dtype)
        optimizer.step()
        scheduler.step()
    return values


def test_wsd_schedule_follows_wsd_and_sets_the_warm_up_of_kappa() -> None:
    optimizer = matrix()
    scheduler = wsd_schedule(optimizer, 50, warmup=0.1, cooldown=10)
    group = optimizer.param_groups[0]
    assert (group["warmup_steps"], group["decay_degree"]) == (5, 1.0)
    assert factors(optimizer, scheduler, 50) == pytest.approx(
        [wsd(t, 50, 5, 10) for t in range(50)]
    )
    assert group["lr"] == 0


@pytest.mark.parametrize(("name", "factor"), [("cosine", cosine), ("linear", linear)])
def test_schedules_that_fall_all_the_way_switch_kappa_off(name, factor) -> None:
    optimizer = matrix()
    scheduler = FALLING[name](optimizer, 40, warmup=4, floor=0.1)
    expected = [factor(t, 40, 4, 0.1) for t in range(40)]
    assert factors(optimizer, scheduler, 40) == pytest.approx(expected)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    assert optimizer.kappa(optimizer.param_groups[0]) == 1.0
    assert expected[4] == 1.0
    assert all(a > b for a, b in pairwise(expected[4:]))


@pytest.mark.parametrize("name", ALL)
def test_schedules_serve_every_torch_optimizer(name) -> None:
    adamw = torch.optim.AdamW([parameter(4, 3)], lr=0.1)
    ours = matrix()
    pairs = [(optimizer, ALL[name](optimizer, 20)) for optimizer in (adamw, ours)]
    assert factors(*pairs[0], 20) == pytest.approx(factors(*pairs[1], 20))


@pytest.mark.parametrize("member", FAMILY)
def test_fractions_and_steps_mean_the_same(member) -> None:
    runs = []
    for warmup, cooldown in ((0.1, 0.25), (4, 10)):
        optimizer = member([parameter(8, 6)], lr=0.02)
        runs.append(factors(optimizer, wsd_schedule(optimizer, 40, warmup=warmup,
                                                    cooldown=cooldown), 40))  # fmt: skip
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_steps": 0}, "total_steps=0 is not valid"),
        ({"total_steps": 10, "warmup": -1}, "warmup=-1 is not valid"),
        ({"total_steps": 10, "cooldown": 2.5}, "cooldown=2.5 is not valid"),
        ({"total_steps": 10, "cooldown": "20%"}, "cooldown='20%' is not valid"),
        ({"total_steps": 10, "warmup": 6, "cooldown": 0.5}, r"warmup=6 \(6 steps\) and cooldown"),
    ],
)
def test_impossible_schedules_are_rejected(arguments, message) -> None:
    optimizer = matrix()
    with pytest.raises(ValueError, match=message):
        wsd_schedule(optimizer, **arguments)
    assert optimizer.param_groups[0]["lr"] == 0.02
    with pytest.raises(ValueError, match="floor=2 is not valid"):
        cosine_schedule(optimizer, 10, floor=2)
    assert optimizer.param_groups[0]["decay_degree"] == 1.0


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_resumes_from_its_state_dict(name) -> None:
    optimizer = matrix()
    scheduler = ALL[name](optimizer, 30)
    first = factors(optimizer, scheduler, 30)
    resumed = matrix()
    again = ALL[name](resumed, 30)
    factors(resumed, again, 10)
    buffer = io.BytesIO()
    torch.save((resumed.state_dict(), again.state_dict()), buffer)
    buffer.seek(0)
    states = torch.load(buffer, weights_only=True)
    fresh = matrix()
    continued = ALL[name](fresh, 30)
    fresh.load_state_dict(states[0])
    continued.load_state_dict(states[1])
    assert factors(fresh, continued, 20) == first[10:]


def test_more_steps_than_the_schedule_has_warn() -> None:
    optimizer = matrix()
    scheduler = wsd_schedule(optimizer, 10)
    assert run(optimizer, scheduler, 10) == []
    messages = run(optimizer, scheduler, 2)
    assert len(messages) == 2
    assert "ended after total_steps=10, but scheduler.step() was called 11 times" in messages[0]


# --- kappa and a falling learning rate ---


def run(optimizer, scheduler, steps: int = 300) -> list[str]:
    """Return the warnings of a run; all of them point to the loop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        factors(optimizer, scheduler, steps)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def falling(optimizer, steps: int = 300):
    return {
        "linear": lr_scheduler.LinearLR(optimizer, 1.0, 0.001, steps),
        "cosine": lr_scheduler.CosineAnnealingLR(optimizer, steps),
    }


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_kappa_under_a_falling_learning_rate_warns_once(name) -> None:
    optimizer = matrix(decay_scale=0.01)
    (message,) = run(optimizer, falling(optimizer)[name])
    assert "decays twice" in message
    assert "decay_degree=0" in message


@pytest.mark.parametrize("cooldown", [0.1, 0.2, 0.5])
def test_wsd_does_not_warn(cooldown) -> None:
    for steps in (16, 24, 300):
        optimizer = matrix(decay_scale=5 / steps)
        scheduler = wsd_schedule(optimizer, steps, warmup=0.1, cooldown=cooldown)
        assert run(optimizer, scheduler, steps) == []


@pytest.mark.parametrize("name", FALLING)
def test_our_falling_schedules_do_not_warn(name) -> None:
    optimizer = matrix(decay_scale=0.01)
    assert run(optimizer, FALLING[name](optimizer, 300)) == []


def test_other_members_and_short_runs_do_not_warn() -> None:
    muon = Muon([parameter(8, 6)], lr=0.02)
    assert run(muon, falling(muon)["linear"]) == []
    short = matrix()  # kappa is still at 0.96 after 40 steps
    assert run(short, lr_scheduler.LinearLR(short, 1.0, 0.001, 40), 40) == []


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.LinearLR(o, 0.01, 1.0, 1000),  # a warm-up longer than kappa's
        lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=1000),  # in its rise
        lambda o: lr_scheduler.StepLR(o, 100, 0.5),  # single drops
        lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.4),  # below the constructor's lr throughout
    ],
    ids=["warm-up", "one cycle", "steps", "constant"],
)
def test_learning_rates_that_do_not_fall_over_the_run_do_not_warn(schedule) -> None:
    optimizer = matrix(decay_scale=0.01)
    assert run(optimizer, schedule(optimizer)) == []


def test_a_group_at_lr_zero_does_not_warn() -> None:
    groups = [{"params": [parameter(8, 6)], "lr": 0.0}, {"params": [parameter(8, 6, seed=1)]}]
    optimizer = AngularMuown(groups, lr=0.02, decay_scale=0.01)
    assert run(optimizer, lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)) == []


def test_groups_that_lost_their_first_learning_rate_still_step() -> None:
    """base_lr is needed for radius_lr only; groups that frameworks rebuild may lack it."""
    optimizer = matrix()
    del optimizer.param_groups[0]["base_lr"]
    assert run(optimizer, lr_scheduler.LambdaLR(optimizer, lambda t: 1.0), 2) == []
    assert optimizer.param_groups[0]["step"] == 2


def test_a_resumed_falling_run_warns() -> None:
    optimizer = matrix(decay_scale=0.01)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 1000)
    factors(optimizer, scheduler, 40)
    resumed = matrix(decay_scale=0.01)
    continued = lr_scheduler.LambdaLR(resumed, lambda t: 1 - t / 1000)
    resumed.load_state_dict(optimizer.state_dict())
    continued.load_state_dict(scheduler.state_dict())
    assert len(run(resumed, continued, 700)) == 1


def test_wsd_after_a_falling_schedule_switches_kappa_on_again() -> None:
    optimizer = matrix(decay_degree=0.5)
    cosine_schedule(optimizer, 100)
    wsd_schedule(optimizer, 100)
    assert optimizer.param_groups[0]["decay_degree"] == 0.5
    flat = matrix(decay_degree=0.0)  # kappa = 1 on purpose
    wsd_schedule(flat, 100)
    assert flat.param_groups[0]["decay_degree"] == 0.0


def test_numbers_of_numpy_are_numbers() -> None:
    one, other = matrix(), matrix()
    ours = wsd_schedule(one, np.int64(40), warmup=np.float32(0.25), cooldown=np.int32(10))
    plain = wsd_schedule(other, 40, warmup=0.25, cooldown=10)
    assert factors(one, ours, 40) == factors(other, plain, 40)


def test_a_resumed_cooldown_does_not_warn() -> None:
    optimizer = matrix(decay_scale=0.01)
    scheduler = wsd_schedule(optimizer, 300)
    factors(optimizer, scheduler, 270)
    resumed = matrix(decay_scale=0.01)
    continued = wsd_schedule(resumed, 300)
    resumed.load_state_dict(optimizer.state_dict())
    continued.load_state_dict(scheduler.state_dict())
    assert run(resumed, continued, 30) == []


# --- the learning rate that matches another run's angle ---


def test_matching_lr_gives_the_angle_back() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 64))
    optimizer = AngularMuown.for_model(model, lr=0.03, head="1.*")
    monitor = AngleMonitor(model, optimizer)
    model(torch.randn(64, 32)).square().mean().backward()
    optimizer.step()
    assert matching_lr(monitor.read()) == pytest.approx(0.03, rel=0.1)


def test_matching_lr_continues_adamw_at_its_angle() -> None:
    model = tiny_lm()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = AngleMonitor(model, adamw)
    for seed in range(20):
        adamw.zero_grad()
        loss_of(model, seed).backward()
        adamw.step()
    reading = monitor.read()
    monitor.close()
    lr = matching_lr(reading)
    ours = AngularMuown.for_model(model, lr=lr, aux_lr=3e-3, blocks={"*.qkv.weight": 3})
    monitor = AngleMonitor(model, ours)
    angles = []
    for seed in range(20, 40):
        ours.zero_grad()
        loss_of(model, seed).backward()
        ours.step()
        angles.append(monitor.read()["angle_mean"])
    assert sum(angles) / 20 == pytest.approx(reading["angle_mean"], rel=0.2)


@pytest.mark.parametrize("reading", [{}, {"angle_mean": 0.0}, {"angle_mean": float("nan")}])
def test_matching_lr_expects_a_measured_step(reading) -> None:
    with pytest.raises(ValueError, match=r"pass what AngleMonitor\.read"):
        matching_lr(reading)
