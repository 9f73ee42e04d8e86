"""From words to an experiment: methods, seeds, names, and mistakes."""

from pathlib import Path
from typing import Any

import pytest

from angular_lab.config.named_runs import named_run
from angular_lab.config.overrides import override
from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.experiments.definition import Experiment
from angular_lab.experiments.grid import make_grid
from angular_lab.sweeps.trials import make_trial

LR = "optim.lr=0.005:0.04:x2"


def grid(*words: str, **options: Any) -> Experiment:
    return make_grid("nano", words, **options)


def grids(plan: Experiment) -> dict[str, tuple[float, ...]]:
    return {arm.label: arm.values for arm in plan.arms}


def test_the_example_of_the_help_text() -> None:
    plan = grid("optim.name=muon,normuon", LR, "seed=0..2", horizons=(100, 200), pick_on="0")
    assert grids(plan) == dict.fromkeys(("muon", "normuon"), (0.005, 0.01, 0.02, 0.04))
    assert [arm.spec.optim.name for arm in plan.arms] == ["muon", "normuon"]
    assert (plan.seeds, plan.horizons, plan.scale) == ((0, 1, 2), (100, 200), "nano")
    assert plan.pairs == (("muon", "normuon"),)


def test_methods_are_the_product_and_labels_show_what_differs() -> None:
    plan = grid("optim.name=muon,normuon", "optim.weight_decay=0,0.1", "batch=4", LR)
    assert [*grids(plan)] == [
        "muon, weight_decay 0",
        "muon, weight_decay 0.1",
        "normuon, weight_decay 0",
        "normuon, weight_decay 0.1",
    ]
    assert {arm.spec.batch for arm in plan.arms} == {4}
    assert len(plan.pairs) == 3
    assert {first for first, _ in plan.pairs} == {"muon, weight_decay 0"}


def test_a_word_with_at_is_for_some_methods() -> None:
    plan = grid(
        "optim.name=muon,normuon,adamw",
        "optim.lr=0.01,0.02",
        "optim.lr@adamw=0.001:0.004:x2",
        "optim.weight_decay@adamw=0.1",
        "optim.momentum@muon=0.9,0.95",
    )
    assert grids(plan) == {
        "muon, momentum 0.9": (0.01, 0.02),
        "muon, momentum 0.95": (0.01, 0.02),
        "normuon": (0.01, 0.02),
        "adamw": (0.001, 0.002, 0.004),
    }
    assert [arm.spec.optim.weight_decay for arm in plan.arms] == [0, 0, 0, 0.1]


def test_at_replaces_the_common_word() -> None:
    plan = grid(
        "optim.name=muon,normuon", "optim.weight_decay=0,0.1", "optim.weight_decay@muon=0.2"
    )
    expected = ["muon, weight_decay 0.2", "normuon, weight_decay 0", "normuon, weight_decay 0.1"]
    assert [arm.label for arm in plan.arms] == expected


def test_two_conditions() -> None:
    words = ("optim.name=muon,normuon", "model.layers=1,2", "optim.lr=0.01")
    plan = grid(*words, "optim.lr@muon@2=0.02,0.04")
    assert {label: len(values) for label, values in grids(plan).items()} == {
        "muon, layers 1": 1,
        "muon, layers 2": 2,
        "normuon, layers 1": 1,
        "normuon, layers 2": 1,
    }


def test_another_setting_is_tuned() -> None:
    plan = grid("optim.lr=0.01,0.02", "optim.aux_lr=0.001,0.002", tune="optim.aux_lr")
    assert grids(plan) == {"lr 0.01": (0.001, 0.002), "lr 0.02": (0.001, 0.002)}
    assert {arm.axis for arm in plan.arms} == {"optim.aux_lr"}


def test_without_a_choice_every_value_is_a_method() -> None:
    plan = grid("optim.lr=0.01,0.02", "seed=0..2", pick_on="none")
    assert grids(plan) == {"lr 0.01": (0.01,), "lr 0.02": (0.02,)}
    assert plan.seeds == (0, 1, 2)


def test_the_seed_that_picks_comes_first() -> None:
    assert grid(LR, "seed=0..2", pick_on="1").seeds == (1, 0, 2)
    assert grid(LR).seeds == (0,)


def test_one_method_has_no_pair() -> None:
    plan = grid(LR, "seed=0..2")
    assert [*grids(plan)] == ["angular_muown"]
    assert plan.pairs == ()


def test_the_name_follows_from_what_is_trained() -> None:
    words = ("optim.name=muon,normuon", LR, "seed=0..2")
    name = grid(*words).name
    assert name.startswith("grid-nano-muon-normuon-lr-")
    assert name == Path(name).name
    same = (
        grid("seed=0,1,2", *words[:2]),
        grid(*words, "save_every=7", "loggers=tensorboard"),
        grid("optim.name=muon,normuon", "optim.lr=0.005,0.01,0.02,0.04", words[2], pick_on="0"),
        grid(*words, horizons=(300,)),
    )
    assert {plan.name for plan in same} == {name}
    others = (
        grid(*words, "batch=4"),
        grid(*words, horizons=(100,)),
        grid(*words, pick_on="1"),
        grid(*words, ours="normuon"),
        grid(*words, "data=elsewhere"),
        grid(words[0], "optim.lr=0.005,0.01", words[2]),
    )
    assert len({name, *(plan.name for plan in others)}) == 1 + len(others)
    assert grid(*words, name="mine").name == "mine"


def test_the_name_does_not_depend_on_settings_at_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A setting that the lab gets later has its default in all grids of today."""
    name, as_stated = grid(LR).name, Spec.as_stated

    def with_later_setting(spec: Spec, data: str) -> dict[str, Any]:
        return {**as_stated(spec, data), "later": 1}

    monkeypatch.setattr(Spec, "as_stated", with_later_setting)
    assert grid(LR).name == name


def test_runs_have_the_folders_of_train(tmp_path: Path) -> None:
    """The store is shared: nothing but the words may make a difference."""
    plan = grid("optim.name=adamw,muon", "optim.lr=0.1:0.3:+0.1", "seed=0..1", "batch=4")
    for arm in plan.arms:
        for value in arm.values:
            for seed in plan.seeds:
                (run,) = make_trial(plan, arm, value, seed, "tokens", tmp_path).runs
                typed = [f"optim.name={arm.label}", f"optim.lr={value:g}", f"seed={seed}"]
                spec = override(named_run("nano"), ["batch=4", *typed])
                assert run.spec == spec
                assert run.folder.name == spec.folder_name("tokens")


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ([LR, "optim.lr=0.1"], {}, "optim.lr=0.1: optim.lr is given twice"),
        ([LR], {"tune": "optim.lr,optim.aux_lr"}, "--tune optim.lr,optim.aux_lr: one setting"),
        ([LR], {"tune": "optim.rl"}, "unknown key 'optim.rl'; did you mean optim.lr"),
        ([LR], {"tune": "optim.name"}, "--tune optim.name: it must be a setting that is a number"),
        ([LR], {"tune": "seed"}, "--tune seed: it must be a setting that is a number"),
        ([LR], {"tune": "pins"}, "--tune pins: it must be a setting that is a number"),
        ([LR], {"tune": "optim.aux_lr"}, "--tune optim.aux_lr: none cannot be compared"),
        (["optim.weight_decay=0,0.1"], {"tune": "optim.weight_decay"}, "0.0 cannot be compared"),
        ([LR, "seed=0..2"], {"pick_on": "3"}, "--pick-on 3: it must be one of the seeds 0, 1, 2"),
        (["optim.name=muon,adamw"], {"pick_on": "0"}, "every method has one optim.lr"),
        (["optim.name=muon,adamw"], {"ours": "moun"}, "--ours 'moun': did you mean 'muon'?"),
        (["optim.name=muon,adamw"], {"ours": "sgd"}, "'sgd': no method has this name. The methods"),
        (["optim.name=muon,adamw", "optim.lr@moun=0.1"], {}, "did you mean muon? They have muon"),
        (["optim.lr@muon=0.1"], {}, "no method has the value muon. No word sets one"),
        (["model.layers=1,2", "model.heads=2,4", "optim.lr@2=0.1"], {}, "both have the value 2"),
        (["optim.name=muon,adamw", "seed@muon=1,2"], {}, "seed must be the same for all methods"),
        (["steps=100"], {"horizons": (100, 200)}, "say the same: give one"),
        (["schedule.kind=cosine"], {"horizons": (100, 200)}, "schedule.kind=cosine with several"),
        (["schedule.decay_steps=9"], {"horizons": (100, 200)}, "schedule.decay_steps=9 with"),
        (["eval_every=none"], {}, "eval_every=none: a grid compares validation losses"),
    ],
)
def test_mistakes(words: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        grid(*words, **options)
    assert message in str(error.value)


def test_an_unknown_run() -> None:
    with pytest.raises(UserError, match="unknown run 'nanoo': did you mean nano"):
        make_grid("nanoo", [LR])
