"""The plan of the comparison on a corpus that is read once."""

from dataclasses import replace
from math import isclose

import pytest

from angular_lab.config.spec import Spec, get, keys
from angular_lab.experiments.comparison import experiment
from angular_lab.experiments.definition import SCALES
from angular_lab.experiments.one_pass import GRIDS, SCHEDULES, STEPS, WHOLE
from angular_lab.experiments.trials import BASELINE, FURTHER, LONGER

SPECS = {arm.label: arm.spec for arm in experiment("one-pass", "s").arms}


def test_every_method_has_every_schedule_and_a_grid_in_even_ratios() -> None:
    pairs = [(method, schedule) for method, schedule, _ in GRIDS]
    methods = {method for method, _ in pairs}
    assert len(methods) == 9
    assert sorted(pairs) == sorted((m, s) for m in methods for s in SCHEDULES)
    for _, _, (low, middle, high) in (*GRIDS, *WHOLE):
        assert low < middle < high
        assert isclose(middle / low, high / middle, rel_tol=0.05)


def test_schedules_of_a_method_differ_in_the_cooldown_alone() -> None:
    def without(spec: Spec) -> Spec:
        return replace(spec, schedule=replace(spec.schedule, decay=0.0))

    for method in {method for method, _, _ in GRIDS}:
        specs = [SPECS[f"{method}, {schedule}"] for schedule in SCHEDULES]
        assert [spec.schedule.decay for spec in specs] == [0.2, 0.5, 0.95]
        assert without(specs[0]) == without(specs[1]) == without(specs[2])


def test_what_sets_the_methods_apart() -> None:
    def optim(method: str) -> dict[str, object]:
        spec, usual = SPECS[f"{method}, linear to zero"].optim, Spec().optim
        return {k: v for k, v in vars(spec).items() if v != getattr(usual, k)}

    assert optim("angular_muown") == {}
    assert optim("angular_muown, kappa = 1") == {"decay_degree": 0.0}
    assert optim("normuon") == {"name": "normuon"}
    assert optim("normuon, decay 0.1") == {"name": "normuon", "weight_decay": 0.1}
    assert optim("magnitude_direction") == {"name": "magnitude_direction", "radius_lr": 4e-3}
    assert optim("adamw") == {"name": "adamw", "weight_decay": 0.1, "aux_lr": 1.6e-2}


@pytest.mark.parametrize("scale", SCALES)
def test_horizons_are_quarters_and_each_ends_with_an_evaluation(scale: str) -> None:
    quarter, *longer = STEPS[scale]
    assert all(isclose(steps / quarter, k, rel_tol=0.01) for k, steps in enumerate(longer, 2))
    plan = experiment("one-pass", scale)
    assert plan.horizons == (quarter,)
    assert {arm.spec.eval_every for arm in plan.arms} == {quarter}


def test_the_whole_corpus_differs_from_a_quarter_in_its_length_and_rates_alone() -> None:
    plan = experiment("one-pass-long", "s")
    assert plan.horizons == STEPS["s"][-1:]
    assert len(plan.seeds) == 4
    assert all(arm.spec == SPECS[arm.label] for arm in plan.arms)
    assert {method for method, _, _ in WHOLE} == {method for method, _, _ in GRIDS}


def test_a_quarter_is_judged_on_seeds_that_chose_nothing() -> None:
    plan = experiment("one-pass-quarter", "s")
    assert plan.horizons == experiment("one-pass", "s").horizons
    assert plan.tuning_seed == 0
    assert plan.seeds == (1, 2, 3, 4)
    assert all(arm.spec == SPECS[arm.label] for arm in plan.arms)
    methods = {arm.label.rpartition(", ")[0] for arm in plan.arms}
    assert methods == {method for method, _, _ in GRIDS}
    assert {other for _, other in plan.pairs} == {arm.label for arm in plan.arms[1:]}


def test_schedules_differ_from_the_method_in_what_they_are_named_for() -> None:
    plan = experiment("one-pass-kappa", "s")
    clock, longer, cosine, flat = plan.arms
    assert clock.horizons == (STEPS["s"][0], STEPS["s"][-1])
    usual = SPECS["angular_muown, cooldown 50%"]
    assert clock.spec == replace(usual, optim=replace(usual.optim, lr=2.5e-2))
    assert (clock.axis, clock.values[1]) == ("optim.decay_scale", usual.optim.decay_scale)
    assert (longer.spec.schedule.decay, cosine.spec.schedule.kind) == (0.7, "cosine")
    assert flat.spec.optim == SPECS["angular_muown, kappa = 1, linear to zero"].optim
    assert plan.horizons == experiment("one-pass", "s").horizons


def test_earlier_horizons_continue_the_whole_run() -> None:
    """At the learning rates of the whole corpus, with one trunk for both."""
    plan, whole = experiment("one-pass-horizons", "s"), {(m, s): r for m, s, r in WHOLE}
    assert plan.horizons == STEPS["s"][1:3]
    for arm in plan.arms:
        method, schedule = arm.label.rsplit(", ", 1)
        assert arm.values[0] in whole[method, schedule]
        assert arm.spec == SPECS[arm.label]


def test_the_larger_model_reads_as_much_as_a_quarter() -> None:
    plan = experiment("one-pass-larger", "s")
    for arm in plan.arms:
        usual = SPECS[arm.label]
        assert arm.spec.model.width == 768
        assert arm.spec.optim == usual.optim
        tokens = plan.horizons[0] * arm.spec.tokens_per_step
        assert tokens == STEPS["s"][0] * usual.tokens_per_step


NAMED = {  # what a label says, and the setting that it stands for
    "extrapolation": "extrapolate.strength",
    "aux_beta2": "optim.aux_beta2",
    "all beta2": "optim.beta2",
    "momentum from": "optim.momentum_start",
    "momentum 0": "optim.momentum",
    "angles of": "optim.angles",
    "equal rows": "optim.equal_rows",
    "slow_share": "optim.slow_share",
    "split_heads": "optim.split_heads",
    "nesterov off": "optim.nesterov",
    "aux_lr": "optim.aux_lr",
    "soap": "optim.soap",
    "averages on": "average_forms",
}


def test_trials_differ_from_their_method_in_what_they_are_named_for() -> None:
    plan = experiment("trials", "s")
    for arm in plan.arms:
        base = next((label for label in SPECS if arm.label.startswith(label)), BASELINE)
        if arm.label == base:
            assert arm.spec == SPECS[base]
            continue
        usual = SPECS[base]
        changed = {key for key in keys(usual) if get(arm.spec, key) != get(usual, key)}
        named = {key for name, key in NAMED.items() if name in arm.label.removeprefix(base)}
        assert changed == {"average", *named}
        values = [get(arm.spec, key) for key in named]
        assert all(f"{x:g}" in arm.label for x in values if isinstance(x, float))
        patterns = [x for value in values if isinstance(value, tuple) for x in value]
        assert all(x.rpartition("=")[2].strip("*.") in arm.label for x in patterns)
    assert BASELINE == plan.ours == plan.arms[0].label


def test_whole_runs_of_trials_differ_from_quarter_runs_in_length_and_rates_alone() -> None:
    quarter, whole = experiment("trials", "s"), experiment("one-pass-closest", "s")
    specs = {arm.label: arm.spec for arm in quarter.arms}
    assert all(arm.spec == specs[arm.label] for arm in whole.arms)
    left = specs.keys() - {arm.label for arm in whole.arms}
    assert left == {f"{LONGER}, {name}" for name in FURTHER}, "not before a quarter shows them best"
    assert (quarter.horizons, whole.horizons) == (STEPS["s"][:1], STEPS["s"][-1:])
    assert whole.seeds == (1, 2, 3, 4)
    assert whole.tuning_seed == 0


def test_competitors_have_learning_rates_of_their_grids() -> None:
    for name, grids in (("trials", GRIDS), ("one-pass-closest", WHOLE)):
        rates = {f"{method}, {schedule}": values for method, schedule, values in grids}
        for arm in experiment(name, "s").arms:
            base = next((label for label in rates if arm.label.startswith(label)), BASELINE)
            assert set(arm.values) <= set(rates[base])
