"""Schedules: they set the learning rate and kappa together, and warn if both decay."""

import copy
import gc
import io
import pickle
import warnings
import weakref
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
    ramp,
    wsd,
    wsd_schedule,
)
from tests.library.family import FAMILY, MEMBERS, noise, parameter
from tests.library.models import BLOCKS, loss_of, tiny_lm

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


# --- a momentum that rises and falls ---

RISING = {"momentum_start": 0.8, "momentum_ramp": 4}


def momenta(optimizer, scheduler, steps: int) -> list[float]:
    """Return the momentum of the first group in the steps of a run."""
    values = []
    for t in range(steps):
        values.append(optimizer.param_groups[0]["momentum"])
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = noise(*p.shape, seed=t, dtype=p.dtype)
        optimizer.step()
        scheduler.step()
    return values


def ramped(steps: int, start: float = 0.8, length: int = 4, own: float = 0.95) -> list[float]:
    return [ramp(t, steps, length, start, own) for t in range(steps)]


def sgd(**options) -> torch.optim.SGD:
    return torch.optim.SGD([parameter(8, 6)], lr=0.02, **{"momentum": 0.95, **options})


@pytest.mark.parametrize(("steps", "length"), [(1, 1), (2, 1), (9, 4), (10, 5), (700, 300)])
def test_a_ramp_rises_falls_and_is_symmetric(steps: int, length: int) -> None:
    shares = [ramp(t, steps, length, 0.0, 1.0) for t in range(steps)]
    assert shares == shares[::-1]
    assert shares[0] == 0.0
    rise = shares[: min(length, (steps + 1) // 2)]
    assert rise == [t / length for t in range(len(rise))]
    assert set(shares[length : steps - length]) <= {1.0}
    assert ramp(steps + 5, steps, length, 0.0, 1.0) == 0.0
    values = [ramp(t, steps, length, 0.8, 0.95) for t in range(steps)]
    assert values == [0.8 + share * (0.95 - 0.8) for share in shares]


@pytest.mark.parametrize("length", [0, -3])
def test_a_ramp_has_at_least_one_step(length: int) -> None:
    with pytest.raises(ValueError, match=rf"ramp_steps={length} is not valid: .* at least 1"):
        ramp(0, 10, length, 0.8, 0.95)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("make", [matrix, sgd, *MEMBERS])
def test_the_momentum_rises_to_its_own_value_and_falls_back(name, make) -> None:
    optimizer = make([parameter(8, 6)]) if make in MEMBERS else make()
    scheduler = ALL[name](optimizer, 12, **RISING)
    assert isinstance(scheduler, lr_scheduler.LambdaLR)
    assert momenta(optimizer, scheduler, 12) == ramped(12)
    assert ramped(12)[4] == pytest.approx(0.95)
    assert type(optimizer.param_groups[0]["momentum"]) is float


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_a_scheduled_momentum_steps_like_one_set_by_hand(member) -> None:
    a, b = tiny_lm(), tiny_lm()
    one, other = (member.for_model(model, 0.01, blocks=BLOCKS) for model in (a, b))
    usual = [group["momentum"] for group in other.param_groups if group["algorithm"] == "adamw"]
    ours, plain = wsd_schedule(one, 10, **RISING), wsd_schedule(other, 10)
    for t in range(10):
        for group in other.param_groups:
            if group["algorithm"] == "matrix":
                group["momentum"] = ramped(10)[t]
        for model, optimizer, scheduler in ((a, one, ours), (b, other, plain)):
            optimizer.zero_grad()
            loss_of(model, t).backward()
            optimizer.step()
            scheduler.step()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert ours.get_last_lr() == plain.get_last_lr()
    assert usual == [g["momentum"] for g in one.param_groups if g["algorithm"] == "adamw"]


def test_each_group_has_its_own_momentum_and_some_have_none() -> None:
    values = [0.95, 0.9, 0.0]
    groups = [{"params": [parameter(8, 6, seed=i)], "momentum": x} for i, x in enumerate(values)]
    optimizer = Muon(groups)
    scheduler = wsd_schedule(optimizer, 12, **RISING)
    seen = []
    for _ in range(12):
        seen.append([group["momentum"] for group in optimizer.param_groups])
        momenta(optimizer, scheduler, 1)
    for column, own in zip(zip(*seen, strict=True), values, strict=True):
        assert list(column) == (ramped(12, own=own) if own else [0.0] * 12)


@pytest.mark.parametrize("name", ALL)
def test_without_momentum_start_the_scheduler_and_the_momentum_are_as_before(name) -> None:
    optimizer = matrix()
    scheduler = ALL[name](optimizer, 20)
    assert isinstance(scheduler, lr_scheduler.LambdaLR)
    usual = lr_scheduler.LambdaLR(matrix(), lambda t: 1.0)
    assert scheduler.state_dict().keys() == usual.state_dict().keys()
    assert set(momenta(optimizer, scheduler, 20)) == {0.95}
    assert optimizer.param_groups[0].keys() - matrix().param_groups[0].keys() == {"initial_lr"}


def test_fractions_of_a_run_are_lengths_of_a_ramp_too() -> None:
    runs = []
    for steps, start, length in ((40, 0.8, 10), (np.int64(40), np.float32(0.8), np.float64(0.25))):
        optimizer = matrix()
        scheduler = wsd_schedule(optimizer, steps, momentum_start=start, momentum_ramp=length)
        runs.append(momenta(optimizer, scheduler, 40))
        assert {type(x) for x in runs[-1]} == {float}
    assert runs[1] == pytest.approx(runs[0])


def test_a_run_that_outlasts_its_schedule_keeps_the_first_momentum() -> None:
    optimizer = sgd()
    scheduler = wsd_schedule(optimizer, 10, momentum_start=0.0, momentum_ramp=2)
    with pytest.warns(UserWarning, match="the schedule ended"):
        assert momenta(optimizer, scheduler, 13)[9:] == [0.0] * 4


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum_start": 1.0}, r"momentum_start=1.0 is not valid: .* in \[0, 1\)"),
        ({"momentum_start": "0.8"}, "momentum_start='0.8' is not valid"),
        ({"momentum_start": -0.1}, "momentum_start=-0.1 is not valid"),
        ({"momentum_start": 0.99}, "momentum_start=0.99 is above a group's momentum=0.95"),
        ({}, r"momentum_ramp=300 \(300 steps\).*total_steps=20 twice, .* at most 10 steps"),
        (
            {"momentum_ramp": 0.6},
            r"momentum_ramp=0.6 \(12 steps\) does not fit .* at most 10 steps",
        ),
        ({"momentum_ramp": 0}, "momentum_ramp=0 is not valid: .* at least one step"),
        ({"momentum_ramp": 0.001}, "momentum_ramp=0.001 is not valid"),
        ({"momentum_ramp": 2.5}, "momentum_ramp=2.5 is not valid: it must be a fraction"),
    ],
)
def test_impossible_ramps_are_rejected(name, arguments, message) -> None:
    optimizer = matrix()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        ALL[name](optimizer, 20, **{"momentum_start": 0.8, **arguments})
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("length", ["300", -1, 2.5, 0, None])
def test_the_length_of_a_ramp_is_checked_even_if_it_is_not_used(name, length) -> None:
    with pytest.raises(ValueError, match=r"momentum_ramp=.* is not valid"):
        ALL[name](matrix(), 20, momentum_ramp=length)


def test_a_run_of_one_step_has_no_ramp() -> None:
    with pytest.raises(ValueError, match=r"momentum_ramp=1 .* leave out momentum_start") as error:
        wsd_schedule(matrix(), 1, warmup=0, cooldown=0, momentum_start=0.8, momentum_ramp=1)
    assert "0 steps" not in str(error.value)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.optim.AdamW([parameter(8, 6)]), "no group of AdamW has a momentum"),
        (lambda: sgd(momentum=0.0), "no group of SGD has a momentum: give it one, or leave out"),
        (
            lambda: Muon([{"params": [parameter(8, 6)], "algorithm": "adamw"}]),
            "no group of Muon has a momentum",
        ),
        (lambda: matrix(capturable=True), "momentum_start=0.8 with capturable=True"),
    ],
)
def test_optimizers_whose_momentum_cannot_follow_are_rejected(name, make, message) -> None:
    with pytest.raises(ValueError, match=message):
        ALL[name](make(), 20, **RISING)


ORDERS = {
    "optimizer first": ["construct", "optimizer", "scheduler"],
    "scheduler first": ["construct", "scheduler", "optimizer"],
    "constructed last": ["optimizer", "construct", "scheduler"],
    "scheduler alone": ["construct", "scheduler"],
}


def load(saved, optimizer, order: str, settings: dict[str, float]):
    """Load an optimizer's and a schedule's state in this order; return the new schedule."""
    schedule = None
    for part in ORDERS[order]:
        if part == "optimizer":
            optimizer.load_state_dict(saved[0])
        elif part == "construct":
            schedule = wsd_schedule(optimizer, 12, **settings)
        else:
            schedule.load_state_dict(saved[1])
    return schedule


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stop", [0, 2, 6, 10])
@pytest.mark.parametrize("make", [matrix, sgd])
def test_a_ramped_momentum_resumes_in_any_order(make, stop: int, order: str) -> None:
    """Also where the scheduler is constructed for an optimizer whose momentum is on its way."""
    stopped = make()
    scheduler = wsd_schedule(stopped, 12, **RISING)
    momenta(stopped, scheduler, stop)
    resumed = make()
    continued = load(saved_and_loaded(stopped, scheduler), resumed, order, RISING)
    assert momenta(resumed, continued, 12 - stop) == ramped(12)[stop:]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("before", "after"), [(RISING, RISING), (RISING, {}), ({}, RISING), ({}, {})]
)
@pytest.mark.parametrize("make", [matrix, sgd])
def test_the_new_schedule_sets_the_momentum_in_any_order(make, before, after, order: str) -> None:
    """Whatever the run was saved with, and whatever the new optimizer was constructed with."""
    stopped = make()
    scheduler = wsd_schedule(stopped, 12, **before)
    momenta(stopped, scheduler, 2)
    saved = saved_and_loaded(stopped, scheduler)
    resumed = make(momentum=0.95 if order == "scheduler alone" else 0.9)
    continued = load(saved, resumed, order, after)
    expected = ramped(12)[2:] if after else [0.95] * 10
    assert momenta(resumed, continued, 10) == expected
    assert ("initial_momentum" in resumed.param_groups[0]) == bool(after)
    own = continued.state_dict().get("base_momenta")
    assert own == ([0.95] if after else None)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_a_loaded_optimizer_without_a_schedule_has_its_usual_momentum(member) -> None:
    stopped = member([parameter(8, 6)], lr=0.02)
    momenta(stopped, wsd_schedule(stopped, 12, **RISING), 2)
    (saved,) = saved_and_loaded(stopped)
    before = copy.deepcopy(saved)
    resumed = member([parameter(8, 6)], lr=0.02)
    resumed.load_state_dict(saved)
    (group,) = resumed.param_groups
    assert group["momentum"] == 0.95
    assert "initial_momentum" not in group
    assert saved["param_groups"] == before["param_groups"], "loading leaves its argument alone"
    assert stopped.param_groups[0]["momentum"] == ramped(12)[2]


@pytest.mark.parametrize("make", [matrix, sgd])
def test_the_newest_of_several_schedules_sets_the_momentum_after_loading(make) -> None:
    stopped = make()
    momenta(stopped, wsd_schedule(stopped, 12, **RISING), 2)
    (saved,) = saved_and_loaded(stopped)
    low, none, high = {**RISING, "momentum_start": 0.5}, {}, {**RISING, "momentum_start": 0.7}
    for settings in ([low, high], [low, none], [none, high], [low, none, high]):
        optimizer = make()
        schedules = [wsd_schedule(optimizer, 12, **each) for each in settings]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["momentum"] == settings[-1].get("momentum_start", 0.95)
        assert len(schedules) == len(settings), "they are alive"


@pytest.mark.parametrize("settings", [RISING, {}])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("make", [matrix, sgd])
def test_copies_of_a_scheduler_set_the_momentum_after_loading(make, copied, settings) -> None:
    saved = []
    for given in (RISING, {}):
        optimizer = make()
        momenta(optimizer, wsd_schedule(optimizer, 12, **given), 2)
        saved += saved_and_loaded(optimizer)
    optimizer = make()
    scheduler = wsd_schedule(optimizer, 12, **settings)
    momenta(optimizer, scheduler, 3)
    other = copied(scheduler)
    expected = ramped(12)[3] if settings else 0.95
    for one in (scheduler, other):
        for state in saved:
            one.optimizer.load_state_dict(state)
            assert one.optimizer.param_groups[0]["momentum"] == expected
    alone = copied(other.optimizer)  # a copy has no hooks, and follows no schedule
    alone.load_state_dict(saved[1])
    assert alone.param_groups[0]["momentum"] == 0.95


@pytest.mark.parametrize("settings", [RISING, {}])
def test_a_schedule_keeps_nothing_in_memory(settings) -> None:
    optimizer = matrix()
    scheduler = wsd_schedule(optimizer, 12, **settings)
    momenta(optimizer, scheduler, 2)
    states = saved_and_loaded(optimizer)
    references = [weakref.ref(scheduler), weakref.ref(optimizer)]
    gc.collect()
    gc.disable()
    try:
        del scheduler
        assert references[0]() is None
        optimizer.load_state_dict(states[0])
        assert optimizer.param_groups[0]["momentum"] == 0.95
        del optimizer
        assert references[1]() is None
    finally:
        gc.enable()


class Wrapper(torch.optim.Optimizer):
    """Like accelerate's: it hands everything on, and has no hooks of its own."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self) -> None:
        self.optimizer.step()

    def load_state_dict(self, state_dict) -> None:
        self.optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("settings", [RISING, {}])
@pytest.mark.parametrize("make", [matrix, sgd])
def test_a_wrapped_optimizer_follows_its_schedule_after_loading(make, settings) -> None:
    for given in (RISING, {}):
        stopped = make()
        momenta(stopped, wsd_schedule(stopped, 12, **given), 2)
        wrapped = Wrapper(make())
        scheduler = wsd_schedule(wrapped, 12, **settings)
        wrapped.load_state_dict(*saved_and_loaded(stopped))
        assert momenta(wrapped, scheduler, 12) == (ramped(12) if settings else [0.95] * 12)


@pytest.mark.parametrize("settings", [RISING, {}])
def test_the_scheduler_remembers_the_momentum_that_an_optimizer_lost(settings) -> None:
    """Distributed checkpoints load only the keys that a group has: initial_momentum is none yet."""
    optimizer = matrix()
    scheduler = wsd_schedule(optimizer, 12, **RISING)
    momenta(optimizer, scheduler, 2)
    states = saved_and_loaded(optimizer, scheduler)
    del states[0]["param_groups"][0]["initial_momentum"]
    resumed = matrix()
    resumed.load_state_dict(states[0])
    continued = wsd_schedule(resumed, 12, **settings)
    continued.load_state_dict(states[1])
    expected = ramped(12)[2:] if settings else [0.95] * 10
    assert momenta(resumed, continued, 10) == expected
    assert resumed.param_groups[0].get("initial_momentum") == (0.95 if settings else None)


def saved_and_loaded(*parts):
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in parts], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("member", [*MEMBERS, None], ids=lambda m: getattr(m, "__name__", "SGD"))
def test_a_run_with_a_ramp_resumes_bit_for_bit(member, name) -> None:
    def start():
        p = parameter(8, 6)
        optimizer = member([p], lr=0.02) if member else torch.optim.SGD([p], 0.02, 0.95)
        return p, optimizer, ALL[name](optimizer, 12, **RISING)

    whole, *parts = start()
    momenta_of(whole, *parts, range(12))
    half, *parts = start()
    momenta_of(half, *parts, range(7))
    states = saved_and_loaded(*parts)
    p, *parts = start()
    p.data.copy_(half.data)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    momenta_of(p, *parts, range(7, 12))
    assert torch.equal(p, whole)


def momenta_of(p, optimizer, scheduler, steps) -> None:
    for t in steps:
        p.grad = noise(*p.shape, seed=t, dtype=p.dtype)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("make", [matrix, sgd])
def test_copies_of_a_scheduler_go_on_where_it_is(make, copied) -> None:
    optimizer = make()
    scheduler = wsd_schedule(optimizer, 12, **RISING)
    momenta(optimizer, scheduler, 2)
    other = copied(scheduler)
    assert other.optimizer is not optimizer
    with warnings.catch_warnings():  # torch's, whose wrapper of step() is not copied
        warnings.simplefilter("ignore")
        assert momenta(other.optimizer, other, 10) == ramped(12)[2:]
    assert momenta(optimizer, scheduler, 10) == ramped(12)[2:]


@pytest.mark.parametrize("name", ALL)
def test_another_schedule_starts_from_the_momentum_before_any_schedule(name) -> None:
    optimizer = matrix()
    wsd_schedule(optimizer, 30, momentum_start=0.5, momentum_ramp=10)
    again = ALL[name](optimizer, 12, **RISING)
    assert momenta(optimizer, again, 12) == ramped(12)
    constant = ALL[name](optimizer, 12)
    assert set(momenta(optimizer, constant, 12)) == {0.95}


def test_a_schedule_may_be_longer_when_it_resumes() -> None:
    """Lengths belong to the call, as those of the learning rate do; only the momentum is saved."""
    optimizer = matrix()
    scheduler = wsd_schedule(optimizer, 12, **RISING)
    momenta(optimizer, scheduler, 6)
    longer = wsd_schedule(optimizer, 20, **RISING)
    longer.load_state_dict(scheduler.state_dict())
    assert momenta(optimizer, longer, 14) == ramped(20)[6:]


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
