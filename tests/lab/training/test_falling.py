"""The learning rate of matrices falls as kappa does, for an optimizer without kappa."""

from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.config.spec import OptimSpec, Spec
from angular_lab.experiments.comparison import experiment
from angular_lab.experiments.definition import TUNED_AT_S
from angular_lab.training.start import train
from angular_lab.training.trainer import Trainer
from angular_muown import inverse_polynomial
from tests.lab.runs import lines, tiny


def falling(data: Path, name: str = "normuon", fall: float = 0.5) -> Spec:
    spec = tiny(data, optim=OptimSpec(name=name, lr=0.01, aux_lr=2e-3))
    return replace(spec, schedule=replace(spec.schedule, warmup=2, fall=fall))


def test_only_the_learning_rate_of_matrices_falls(data: Path, tmp_path: Path, monkeypatch) -> None:
    seen: list[dict[str, set[float]]] = []
    update = Trainer.update

    def watch(self: Trainer) -> None:
        update(self)
        rates: dict[str, set[float]] = {"matrix": set(), "adamw": set()}
        for group in self.optimizer.param_groups:
            rates[group["algorithm"]].add(group["lr"])
        seen.append(rates)

    monkeypatch.setattr(Trainer, "update", watch)
    train(falling(data), tmp_path / "run")
    assert len(seen) == falling(data).steps
    for step, rates in enumerate(seen):
        (matrices,), (others,) = rates["matrix"], rates["adamw"]
        kappa = inverse_polynomial(step, 2, 0.5, 1.0)
        assert matrices / 0.01 == pytest.approx(kappa * others / 2e-3)
    assert inverse_polynomial(len(seen) - 1, 2, 0.5, 1.0) < 0.3


def test_a_fall_of_zero_changes_nothing(data: Path, tmp_path: Path) -> None:
    train(falling(data, fall=0.0), tmp_path / "none")
    train(falling(data), tmp_path / "some")
    losses = [lines(tmp_path / name) for name in ("none", "some")]
    assert losses[0][:3] == losses[1][:3]  # warmup, and the loss before the first smaller step
    assert losses[0][-1] != losses[1][-1]


def test_adamw_has_no_learning_rate_of_matrices(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule.fall=0.5 is for the learning rate of matrices"):
        train(falling(data, "adamw"), tmp_path / "run")


def test_a_learning_rate_cannot_rise(data: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule.fall=-0.1: it must be at least 0"):
        falling(data, fall=-0.1)


def test_the_control_falls_by_the_clock_of_kappa() -> None:
    ours, *others = experiment("control", "s").arms
    assert ours.spec.schedule.fall == 0
    assert {arm.spec.schedule.fall for arm in others} == {ours.spec.optim.decay_scale}


def test_tuned_adamw_differs_from_the_comparison_in_one_learning_rate_alone() -> None:
    _, tuned = experiment("tuned-adamw", "s").arms
    (plain,) = (arm for arm in experiment("teaser", "s").arms if arm.label == "adamw")
    assert tuned.axis == "optim.aux_lr"
    assert tuned.spec.optim.lr == TUNED_AT_S["adamw"]
    same = replace(tuned.spec.optim, lr=plain.spec.optim.lr)
    assert replace(tuned.spec, optim=same) == plain.spec


def test_schedules_are_exchanged_and_nothing_else_is() -> None:
    ours, constant, closest, concurrent, cooled = experiment("schedules", "s").arms
    plain = {arm.label: arm.spec for arm in experiment("teaser", "s").arms}
    schedule = concurrent.spec.schedule
    assert concurrent == experiment("concurrent", "s").arms[-1], "the two share its runs"
    assert cooled.spec == replace(concurrent.spec, schedule=plain["angular_muown"].schedule)
    for arm in (ours, closest):
        assert arm.spec == replace(plain[arm.spec.optim.name], schedule=schedule)
        assert arm.values[1] == TUNED_AT_S[arm.spec.optim.name]
    assert constant.spec == replace(ours.spec, optim=replace(ours.spec.optim, decay_degree=0.0))
