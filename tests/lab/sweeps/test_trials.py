"""Trials: the names and the specs of their runs, and what counts as finished."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.experiments.comparison import EXPERIMENTS, experiment
from angular_lab.experiments.cost import cost, listing
from angular_lab.experiments.definition import SCALES, cooldown_variant
from angular_lab.sweeps.trials import Trial, make_trial
from tests.lab.sweeps.small import small, sweep

Change = Callable[[Callable[[dict[str, Any]], Any]], None]


@pytest.fixture(scope="module", params=[(4,), (4, 8)], ids=["one horizon", "two horizons"])
def trial(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trial:
    """A finished trial."""
    plan = small(data, arms=small(data).arms[1:], horizons=request.param, seeds=(0,))
    finished = sweep(plan, tmp_path_factory.mktemp("store"))
    return finished.trial(plan.arms[0], 0.02, 0)


@pytest.fixture
def change(trial: Trial) -> Iterator[Change]:
    """Edit the settings in the spec.json of the last run, for the time of the test."""
    path = trial.runs[-1].folder / "spec.json"
    before = path.read_text()

    def edit(how: Callable[[dict[str, Any]], Any]) -> None:
        content = json.loads(before)
        how(content["spec"])
        path.write_text(json.dumps(content))

    yield edit
    path.write_text(before)


def test_the_digest_covers_what_a_loss_depends_on() -> None:
    base = Spec()
    same = [
        base,
        replace(base, eval_every=7, log_every=3, angle_every=None, compile=False, keep=9),
        replace(base, data="elsewhere", loggers=("tensorboard",), micro_batch=3),
        replace(base, optim=replace(base.optim, aux_lr=base.optim.lr)),
        replace(base, schedule=replace(base.schedule, decay_steps=100)),
        replace(base, parent="a-trunk", parent_step=900),
    ]
    names = {spec.folder_name("data") for spec in same}
    assert len(names) == 1
    others = [
        replace(base, batch=8),
        replace(base, seed=1),
        replace(base, steps=999),
        replace(base, average=(3,)),
        replace(base, clip=0.5),
        replace(base, optim=replace(base.optim, lr=0.0)),
        replace(base, optim=replace(base.optim, aux_lr=0.0)),
        replace(base, model=replace(base.model, mlp=32)),
        replace(base, schedule=replace(base.schedule, kind="cosine")),
        replace(base, schedule=replace(base.schedule, kind="constant")),
        replace(base, schedule=replace(base.schedule, decay_steps=99)),
    ]
    names |= {spec.folder_name("data") for spec in others} | {base.folder_name("other data")}
    assert len(names) == 1 + len(others) + 1


def test_a_cooldown_is_the_straight_run_of_its_length(data: Path, tmp_path: Path) -> None:
    plan = small(data)
    trial = make_trial(plan, plan.arms[0], 1e-3, 0, "data", tmp_path)
    assert trial.trunk is not None
    assert trial.trunk.spec.pins == (3, 6)
    assert "-trunk-" in trial.trunk.folder.name
    for horizon, run in trial.ends.items():
        assert (run.spec.parent, run.spec.steps) == (trial.trunk.folder.name, horizon)
        (straight,) = make_trial(
            replace(plan, horizons=(horizon,)), plan.arms[0], 1e-3, 0, "data", tmp_path
        ).runs
        assert straight.folder == run.folder
        assert straight.spec.parent is None


def test_a_variant_shares_the_trunk_of_its_arm(data: Path, tmp_path: Path) -> None:
    plan = small(data, horizons=(8, 16))
    arm = plan.arms[0]
    variant = cooldown_variant(arm, 0.5, 16)
    plan = replace(plan, arms=(*plan.arms, variant))
    first, second = (make_trial(plan, a, 1e-3, 0, "data", tmp_path) for a in (arm, variant))
    assert first.trunk is not None
    assert first.trunk == replace(second.trunk, spec=first.trunk.spec)
    assert first.trunk.folder == second.trunk.folder
    assert first.trunk.spec.pins == (6, 8, 12)
    (end,) = second.ends.values()
    assert (end.spec.parent_step, end.spec.steps, end.spec.decay_steps) == (8, 16, 8)
    assert end.folder not in [run.folder for run in first.runs]


def test_cooldowns_of_a_numbered_trunk_start_from_it(data: Path, tmp_path: Path) -> None:
    plan = small(data)
    trial = make_trial(plan, plan.arms[0], 1e-3, 0, "data", tmp_path)
    trunk = f"{trial.record.trunk}-2"
    recorded = trial.as_recorded(replace(trial.record, trunk=trunk))
    assert recorded.record.trunk == trunk
    assert {run.spec.parent for run in recorded.ends.values()} == {trunk}
    assert recorded.record.runs == trial.record.runs


def test_a_run_made_under_another_default_is_not_finished(trial: Trial, change: Change) -> None:
    """The digest leaves defaults out, so it does not show that one has changed."""
    assert trial.done
    change(lambda spec: spec["optim"].update(beta2=0.5))
    expected = r"optim.beta2=0.5, .*needs 0.95: .*another --out, or remove"
    with pytest.raises(UserError, match=expected):
        _ = trial.done


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("model", "init_std", 0.5), ("schedule", "warmup", 7), ("", "clip", 9.0), ("", "seed", 5)],
)
def test_every_kind_of_setting_counts(
    trial: Trial, change: Change, part: str, key: str, value: float
) -> None:
    change(lambda spec: (spec[part] if part else spec).update({key: value}))
    with pytest.raises(UserError, match=f"{key}={value}"):
        _ = trial.done


def test_settings_that_only_observe_a_run_do_not_count(trial: Trial, change: Change) -> None:
    change(lambda spec: spec.update(log_every=77, keep=9, loggers=["tensorboard"]))
    assert trial.done


def test_a_setting_that_an_older_run_lacks_is_at_its_default(trial: Trial, change: Change) -> None:
    change(lambda spec: spec["optim"].pop("row_beta"))
    assert trial.done


def test_a_finished_run_without_an_evaluation(data: Path, tmp_path: Path) -> None:
    plan = small(data, arms=small(data).arms[1:], horizons=(4,), seeds=(0,))
    trial = sweep(plan, tmp_path).trial(plan.arms[0], 0.02, 0)
    assert trial.loss > 0
    (run,) = trial.runs
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 2, "loss": 2.0}\n')
    (run.folder / "DONE").touch()
    with pytest.raises(UserError, match=rf"{run.folder} .*no val_loss"):
        _ = trial.loss


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_consists_of_valid_specs(name: str, scale: str, tmp_path: Path) -> None:
    plan = experiment(name, scale)
    labels = [arm.label for arm in plan.arms]
    assert plan.name == name
    assert len({*labels}) == len(labels)
    assert plan.ours is None or plan.ours in labels
    assert all({*pair} <= {*labels} for pair in plan.pairs)
    for arm in plan.arms:
        for value in arm.values:
            for run in make_trial(plan, arm, value, plan.seeds[0], "", tmp_path).runs:
                run.spec.check()
    trials, tokens, operations = cost(plan)
    assert trials >= len(plan.arms)
    assert operations > tokens > 0


def test_the_teaser_has_the_papers_tokens() -> None:
    """Four arms of five values: nine tenths of 10B tokens and four cooldowns of a tenth each."""
    trials, tokens, _ = cost(experiment("teaser", "paper"))
    assert trials == 20
    assert tokens == pytest.approx(20 * (9e9 + 0.1 * 25e9), rel=1e-3)


def test_the_listing_has_every_experiment_at_every_scale() -> None:
    rows, _ = listing()
    assert [(row["experiment"], row["scale"]) for row in rows] == [
        (name, scale) for name in EXPERIMENTS for scale in SCALES
    ]


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("tease", "s", r"unknown experiment 'tease': did you mean teaser\? There are teaser, "),
        ("nope", "s", r"unknown experiment 'nope'\. There are teaser, "),
        ("teaser", "xl", "--scale xl: it must be paper, s or nano"),
    ],
)
def test_unknown_experiments_and_scales(name: str, scale: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiment(name, scale)
