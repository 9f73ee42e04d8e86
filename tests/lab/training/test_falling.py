"""The matrices' rate of an optimizer without kappa, falling as kappa does."""

from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.config.spec import OptimSpec, Spec
from angular_lab.experiments.comparison import experiment
from angular_lab.experiments.definition import SETTLED
from angular_lab.training.start import train
from angular_lab.training.trainer import Trainer
from angular_muown import inverse_polynomial
from tests.lab.runs import lines, tiny


def falling(data: Path, name: str = "normuon", fall: float = 0.5) -> Spec:
    spec = tiny(data, optim=OptimSpec(name=name, lr=0.01, aux_lr=2e-3))
    return replace(spec, schedule=replace(spec.schedule, warmup=2, fall=fall))


def test_it_falls_for_matrices_alone(data: Path, tmp_path: Path, monkeypatch) -> None:
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


def test_without_it_nothing_is_new(data: Path, tmp_path: Path) -> None:
    train(falling(data, fall=0.0), tmp_path / "none")
    train(falling(data), tmp_path / "some")
    losses = [lines(tmp_path / name) for name in ("none", "some")]
    assert losses[0][:3] == losses[1][:3]  # warm-up, and the loss before the first smaller step
    assert losses[0][-1] != losses[1][-1]


def test_adamw_has_no_matrices(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule.fall=0.5 is for the matrices' rate"):
        train(falling(data, "adamw"), tmp_path / "run")


def test_a_rate_cannot_rise(data: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule.fall=-0.1: it must be at least 0"):
        falling(data, fall=-0.1)


def test_the_control_falls_by_the_clock_of_kappa() -> None:
    ours, *others = experiment("control", "s").lines
    assert ours.spec.schedule.fall == 0
    assert {line.spec.schedule.fall for line in others} == {ours.spec.optim.decay_scale}


def test_adamw_apart_differs_from_the_comparisons_in_that_rate_alone() -> None:
    _, apart = experiment("tuned-adamw", "s").lines
    (plain,) = (line for line in experiment("teaser", "s").lines if line.label == "adamw")
    assert apart.axis == "optim.aux_lr"
    assert apart.spec.optim.lr == SETTLED["adamw"]
    same = replace(apart.spec.optim, lr=plain.spec.optim.lr)
    assert replace(apart.spec, optim=same) == plain.spec


def test_schedules_are_exchanged_and_nothing_else_is() -> None:
    ours, still, closest, rival, cooled = experiment("schedules", "s").lines
    plain = {line.label: line.spec for line in experiment("teaser", "s").lines}
    schedule = rival.spec.schedule
    assert rival == experiment("rivals", "s").lines[-1], "what is made there is taken over here"
    assert cooled.spec == replace(rival.spec, schedule=plain["angular_muown"].schedule)
    for line in (ours, closest):
        assert line.spec == replace(plain[line.spec.optim.name], schedule=schedule)
        assert line.values[1] == SETTLED[line.spec.optim.name]
    assert still.spec == replace(ours.spec, optim=replace(ours.spec.optim, decay_degree=0.0))
