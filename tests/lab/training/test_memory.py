"""A run frees its memory when it ends, without a garbage collection: the next one needs it."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_lab.config.spec import Spec
from angular_lab.models import LanguageModel
from angular_lab.training import build
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.ranks import Ranks
from angular_lab.training.recorded_passes import Passes
from angular_lab.training.signals import Preempted
from angular_lab.training.start import train
from angular_lab.training.trainer import Trainer
from tests.lab.runs import tiny


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Weak references to each run's optimizer and model, with the garbage collector off."""
    references: list[Any] = []
    init = Trainer.__init__

    def watched_init(self: Trainer, *arguments: Any) -> None:
        init(self, *arguments)
        references.extend(weakref.ref(part) for part in (self.optimizer, self.model))

    monkeypatch.setattr(Trainer, "__init__", watched_init)
    build.make_deterministic(Spec())  # torch's imports at the first call put our frames in a cycle
    gc.collect()
    gc.disable()
    yield references
    gc.enable()


@pytest.mark.parametrize("name", ["adamw", "angular_muown"])
def test_finished_run_frees_its_optimizer(
    data: Path, tmp_path: Path, references: list[Any], name: str
) -> None:
    spec = tiny(data, steps=4)
    train(replace(spec, optim=replace(spec.optim, name=name)), tmp_path / "run")
    assert references[0]() is None


def test_run_that_ends_early_frees_its_optimizer(
    data: Path, tmp_path: Path, references: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Trainer.update

    for error in (NotFinite, Preempted, OSError):

        def fail(self: Trainer, error: type[BaseException] = error) -> None:
            update(self)
            if self.step == 2:
                raise error("stopped")

        monkeypatch.setattr(Trainer, "update", fail)
        try:
            train(tiny(data, angle_every=1), tmp_path / error.__name__)
        except error:
            pass
        else:
            pytest.fail(f"{error.__name__} did not end the run")
        assert references[-2]() is None, error.__name__


def test_model_is_freed_before_one_of_another_shape_is_built(
    data: Path, tmp_path: Path, references: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model, alive = build.make_model, []

    def watched_make_model(spec: Spec, ranks: Ranks) -> LanguageModel:
        alive.append([part() for part in references])
        return make_model(spec, ranks)

    monkeypatch.setattr(build, "make_model", watched_make_model)
    models, spec = build.Models(), tiny(data, steps=4)
    train(spec, tmp_path / "a", models=models)
    assert references[1]() is not None, "cached for a run of its shape"
    train(replace(spec, model=replace(spec.model, mlp=96)), tmp_path / "b", models=models)
    assert alive == [[], [None, None]]


def test_recorded_passes_are_freed_before_a_cached_model_is_reused(
    data: Path, tmp_path: Path, references: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded passes hold GPU memory, and the first run of a process leaves them in a cycle."""
    init, passes, cycle = Passes.__init__, [], []

    def watched_init(self: Passes, *arguments: Any) -> None:
        init(self, *arguments)
        passes.append(weakref.ref(self))

    def leave_cycle(self: Trainer) -> None:
        cycle.append([self.passes])
        cycle[-1].append(cycle[-1])

    monkeypatch.setattr(Passes, "__init__", watched_init)
    monkeypatch.setattr(Trainer, "finish", leave_cycle)
    models, spec = build.Models(), tiny(data, steps=4)
    train(spec, tmp_path / "a", models=models)
    cycle.clear()
    assert passes[0]() is not None, "the collector is off"
    models.take(spec, Ranks(0, 1, torch.device("cpu")))
    assert passes[0]() is None
