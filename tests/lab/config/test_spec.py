"""Specs: their limits, their phases, JSON, and the trunks and cooldowns made of them."""

import json
from dataclasses import replace

import pytest

from angular_lab.config.branches import (
    branch_point,
    cooldown_spec,
    horizon_from,
    step_at,
    steps_or_share,
    trunk_spec,
)
from angular_lab.config.named_runs import NAMED_RUNS, named_run
from angular_lab.config.overrides import override
from angular_lab.config.spec import ScheduleSpec, Spec
from angular_lab.errors import UserError
from angular_lab.experiments.comparison import EXPERIMENTS, experiment
from angular_lab.experiments.definition import SCALES

TYPED = ["pins=4,6", "average=3,0.5", "loggers=tensorboard", "save_every=none", "clip=none",
         "optim.aux_lr=0", "dashboard.tags=a,b", "parent=trunk"]  # fmt: skip


@pytest.mark.parametrize("name", NAMED_RUNS)
def test_a_spec_survives_json(name: str) -> None:
    for spec in (named_run(name), override(named_run(name), TYPED)):
        assert Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps=-3", "steps=-3: it must be at least 1"),
        ("keep=0", "keep=0: it must be at least 1"),
        ("seed=-1", "seed=-1: it must be at least 0"),
        ("save_every=0", "save_every=0: it must be at least 1, or none"),
        ("eval_every=-1", "eval_every=-1: it must be at least 1, or none"),
        ("micro_batch=0", "micro_batch=0: it must be at least 1, or none"),
        ("precision=fp16", "precision=fp16: it must be one of bf16, bf16_weights, fp32"),
        ("on_nan=foo", "on_nan=foo: it must be one of stop, skip"),
        ("parallel=magic", "parallel=magic: it must be one of ddp, fsdp"),
        ("schedule.kind=up", "schedule.kind=up: it must be one of wsd, cosine, constant"),
        ("schedule.fall=-1", "schedule.fall=-1: it must be at least 0"),
    ],
)
def test_an_impossible_setting_is_rejected_at_once(assignment: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        override(Spec(), [assignment])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("schedule.warmup=301", "schedule.warmup=301: the run has 300 steps"),
        ("schedule.warmup=-1", "schedule.warmup=-1: it must be at least 0"),
        ("schedule.decay=1.5", "schedule.decay=1.5: it must be between 0 and 1"),
        ("schedule.decay=-1", "schedule.decay=-1: it must be between 0 and 1"),
        ("schedule.decay=nan", "schedule.decay=nan: it must be between 0 and 1"),
        ("schedule.decay_steps=301", "schedule.decay_steps=301: the run has 300 steps"),
        ("schedule.decay_steps=-1", "schedule.decay_steps=-1: it must be at least 0"),
        ("clip=-1", "clip=-1: it must be above 0, or none"),
        ("clip=0", "clip=0: it must be above 0, or none"),
        ("clip=nan", "clip=nan: it must be above 0, or none"),
    ],
)
def test_a_run_that_cannot_work_is_rejected_before_it_starts(assignment: str, message: str) -> None:
    """Reading it is possible: a run folder may hold it."""
    spec = override(named_run("nano"), [assignment])
    with pytest.raises(UserError) as error:
        spec.check()
    assert str(error.value).startswith(message)


def test_every_planned_run_can_start() -> None:
    for scale in SCALES:
        for name in EXPERIMENTS:
            plan = experiment(name, scale)
            for arm in plan.arms:
                for horizon in plan.horizons_of(arm):
                    replace(arm.spec, steps=horizon).check()


@pytest.mark.parametrize(
    ("settings", "last", "pinned"),
    [
        (["schedule.decay=0.25"], 75, (75,)),
        (["schedule.decay_steps=10", "pins=20"], 90, (20, 90)),
        (["schedule.decay_steps=0"], 100, ()),
        (["schedule.kind=constant", "pins=20"], 100, (20,)),
        (["schedule.kind=cosine"], 0, ()),
        (["schedule.decay=1"], 0, ()),
        (["schedule.decay=0.25", "parent=trunk", "parent_step=75"], 75, ()),
    ],
)
def test_the_constant_phase_ends_where_the_learning_rate_falls(
    settings: list[str], last: int, pinned: tuple[int, ...]
) -> None:
    """The start of a cooldown is pinned, unless the run itself branched off there."""
    spec = override(Spec(steps=100), ["schedule.warmup=5", *settings])
    assert spec.full_rate_until == last
    assert list(spec.constant_phase) == list(range(6, last + 1))
    assert spec.pinned == pinned


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "cosine"}, "schedule.kind=cosine: every learning rate depends on the length"),
        ({"decay_steps": 7}, "schedule.decay_steps=7: .*set schedule.decay"),
    ],
)
def test_a_schedule_without_a_trunk_is_refused(settings, message) -> None:
    """It used to become a cooldown, and nothing said so."""
    spec = replace(Spec(), schedule=ScheduleSpec(**settings))
    with pytest.raises(UserError, match=message):
        trunk_spec(spec, [10, 20])


def test_a_trunk_ends_at_its_last_branch_point_and_cooldowns_at_their_horizons() -> None:
    base = override(named_run("nano"), ["seed=3", "optim.lr=0.5"])
    starts = [branch_point(horizon, 0.25) for horizon in (16, 8, 16)]
    assert starts == [12, 6, 12]
    trunk = trunk_spec(base, starts)
    assert (trunk.steps, trunk.pins, trunk.schedule.kind) == (12, (6, 12), "constant")
    cooldown = cooldown_spec(trunk, "trunk", 6, 8)
    assert (cooldown.steps, cooldown.pins, cooldown.parent_step) == (8, (), 6)
    assert (cooldown.full_rate_until, cooldown.decay_steps) == (6, 2)
    straight = override(base, ["steps=8", "schedule.decay=0.25"])
    assert cooldown.identity("tokens") == straight.identity("tokens")
    assert cooldown.folder_name("tokens") == straight.folder_name("tokens")
    assert "-trunk-" in trunk.folder_name("tokens")


@pytest.mark.parametrize(
    "spelled_out",
    ["optim.aux_lr=0.02", "optim.radius_lr=0.02", "optim.aux_beta2=0.95",
     "optim.momentum_start=0.95", "optim.momentum_ramp=7", "extrapolate.end=0.5"],
)  # fmt: skip
def test_runs_that_train_alike_are_one_run(spelled_out: str) -> None:
    """Whoever compares runs agrees with the name of the folder."""
    spec = named_run("nano")
    other = override(spec, [spelled_out])
    assert other != spec
    assert other.identity("tokens") == spec.identity("tokens")
    assert other.folder_name("tokens") == spec.folder_name("tokens")


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, -0.1, float("nan")])
def test_a_cooldown_takes_a_part_of_the_steps(share: float) -> None:
    with pytest.raises(UserError, match=r"a cooldown over .* of the steps: it must be between"):
        branch_point(100, share)


def test_a_cooldown_has_at_least_one_step() -> None:
    with pytest.raises(UserError, match=r"a cooldown over 0.2 of 2 steps has 0: it must have"):
        branch_point(2, 0.2)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.9])
def test_a_horizon_from_a_branch_point_has_its_cooldown_there(share: float) -> None:
    for start in range(20, 400):
        assert branch_point(horizon_from(start, share), share) == start
    for horizon in range(20, 400, 20):
        start = branch_point(horizon, 0.25)
        assert horizon_from(start, 0.25) == horizon


def test_a_point_is_a_step_or_a_share_of_the_steps() -> None:
    texts = ["60%", "33.3%", "100%", "100", "2k"]
    assert [step_at(steps_or_share(text), 300) for text in texts] == [180, 100, 300, 100, 2000]
    for wrong in ("0%", "101%", "-5%", "half", "%", "1.5"):
        with pytest.raises(ValueError, match=r"between|not an integer|could not|Invalid literal"):
            steps_or_share(wrong)


def test_names_of_run_folders_never_change() -> None:
    """A sweep finds its finished runs by these names."""
    assert named_run("nano").folder_name("tokens") == "nano-angular_muown-lr0.02-seed0-74e9a684"
    spec = override(Spec(), [*TYPED, "optim.name=adamw", "optim.lr=1e-3", "seed=2"])
    assert spec.folder_name("tokens") == "custom-adamw-lr0.001-seed2-72d7c679"
