"""The plans of the runs that advice rests on."""

from dataclasses import replace

import pytest

from angular_lab.config.spec import Spec, get, keys
from angular_lab.experiments.comparison import experiment
from angular_lab.experiments.definition import SCALES
from angular_lab.experiments.one_pass import AT_A_QUARTER, GRIDS, spec_of
from angular_lab.experiments.tiny_model import (
    BATCHES,
    BOTH,
    METHODS,
    SETTINGS,
    STEPS,
    USUAL,
    WARMUP,
    batch_label,
    label,
)
from angular_lab.training.build import lr_factor


def specs(scale: str, steps: int) -> dict[str, Spec]:
    arms = [arm for arm in experiment("short-runs", scale).arms if arm.horizons == (steps,)]
    return {
        arm.label.removesuffix(f", {steps} steps"): replace(arm.spec, steps=steps) for arm in arms
    }


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("scale", SCALES)
def test_arms_differ_in_what_they_are_named_for(scale: str, steps: int) -> None:
    plans = specs(scale, steps)
    usual = plans["angular_muown, cooldown 50%"]
    changed = {
        name: {key for key in keys(usual) if get(spec, key) != get(usual, key)}
        for name, spec in plans.items()
    }
    assert changed == {
        "angular_muown, cooldown 50%": set(),
        "angular_muown, c = 5 / steps, cooldown 50%": {"optim.decay_scale"},
        "angular_muown, cooldown 20%": {"schedule.decay"},
        "angular_muown, c = 5 / steps, cooldown 20%": {"optim.decay_scale", "schedule.decay"},
        "angular_muown, kappa = 1, cooldown 50%": {"optim.decay_degree"},
        "angular_muown, kappa = 1, linear to zero": {"optim.decay_degree", "schedule.decay"},
        "angular_muown, kappa = 1, cosine": {
            "optim.decay_degree", "schedule.decay", "schedule.kind",
        },
    }  # fmt: skip
    for cooldown in ("20%", "50%"):
        scaled = plans[f"angular_muown, c = 5 / steps, cooldown {cooldown}"].optim
        assert scaled.decay_scale * steps == pytest.approx(5)


@pytest.mark.parametrize("steps", STEPS)
def test_learning_rates_fall_when_their_names_say_so(steps: int) -> None:
    for name, spec in specs("nano", steps).items():
        factors = [lr_factor(spec, step) for step in range(steps)]
        peak = factors.index(max(factors))
        assert peak in (WARMUP - 1, WARMUP)
        cooldown = 0.5 if "50%" in name else 0.2
        start = round(steps * (1 - cooldown)) if "cooldown" in name else peak
        assert factors[peak:start] == [1.0] * (start - peak)
        assert factors[start:] == sorted(factors[start:], reverse=True)
        assert factors[-1] <= 1 / (steps - start)


def test_every_method_is_judged_by_other_seeds_than_chose_its_learning_rate() -> None:
    plan = experiment("short-runs", "nano")
    assert plan.seeds == (0, 1, 2, 3, 4)
    assert plan.tuning_seed is None, "the first seed chooses"
    labels = {label(method, schedule, steps) for method, schedule, _ in METHODS for steps in STEPS}
    assert {arm.label for arm in plan.arms} == labels
    assert all(a.rpartition(", ")[2] == b.rpartition(", ")[2] for a, b in plan.pairs), "one length"
    assert {name for pair in plan.pairs for name in pair} == labels


@pytest.mark.parametrize("scale", SCALES)
def test_arms_of_small_batches_differ_in_batch_length_and_settings(scale: str) -> None:
    """A larger batch is taken in parts of the smallest, so that all runs share a compiled model."""
    plan = experiment("small-batches", scale)
    arms = {arm.label: arm for arm in plan.arms}
    smallest, larger, largest = BATCHES[scale]
    usual = arms[batch_label(smallest, 1000, USUAL)]
    expected = {
        batch_label(batch, steps, name): (batch, steps, changes)
        for batch, steps, names in (
            (smallest, 1000, SETTINGS),
            (smallest, 4000, SETTINGS),
            (larger, 1000, SETTINGS.keys() - {"ramp"}),
            (largest, 1000, {USUAL, BOTH}),
        )
        for name, changes in SETTINGS.items()
        if name in names
    }
    assert arms.keys() == expected.keys()
    for name, (batch, steps, changes) in expected.items():
        spec = arms[name].spec
        optim = replace(usual.spec.optim, **changes)
        assert spec == replace(usual.spec, batch=batch, eval_every=steps, optim=optim)
        assert arms[name].horizons == (steps,)
        assert spec.batch % (spec.micro_batch or spec.batch) == 0


def test_trials_change_one_thing_each() -> None:
    plan = experiment("tiny-trials", "nano")
    usual, *trials = plan.arms
    assert len({arm.label for arm in plan.arms}) == len(plan.arms)
    assert plan.pairs == tuple((arm.label, usual.label) for arm in trials)
    assert usual in experiment("small-batches", "nano").arms, "its runs serve both"
    for arm in trials:
        spec = arm.spec
        changed = {key for key in keys(spec) if get(spec, key) != get(usual.spec, key)}
        assert changed, arm.label
        assert (len(changed) == 1) == (", aux_lr" not in arm.label), arm.label


def test_all_methods_are_those_of_model_s_with_the_settings_for_small_batches() -> None:
    plan = experiment("tiny-comparison", "nano")
    assert plan.pairs == tuple((plan.ours, arm.label) for arm in plan.arms[1:])
    assert {arm.label.partition(",")[0] for arm in plan.arms} == {
        method.partition(",")[0] for method, *_ in GRIDS
    }
    for arm in plan.arms:
        method, _, schedule = arm.label.rpartition(", ")
        usual = spec_of("s", method, schedule).optim
        settings = {"aux_beta2": 0.99, "momentum_start": 0.85}
        if usual.name == "adamw":  # its momentum is beta1
            del settings["momentum_start"]
        assert arm.spec.optim == replace(usual, **settings)
        assert (arm.spec.schedule.decay == 0.5) == (schedule == "cooldown 50%")
        assert arm.values[1] == AT_A_QUARTER[method, schedule]


def test_settings_for_small_batches_are_judged_at_one_batch_and_length() -> None:
    plan = experiment("small-batches", "nano")
    for changed, usual in plan.pairs:
        cell, _, name = changed.partition(" steps, ")
        assert usual == f"{cell} steps, {USUAL}"
        assert name != USUAL
    assert len(plan.pairs) == len(plan.arms) - len({x for _, x in plan.pairs})
