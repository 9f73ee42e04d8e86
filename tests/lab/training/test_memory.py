"""What a run held is free when it ends, not when Python's collector comes by: the next run of a
process needs the memory."""

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
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the runs hold, with the collector off."""
    found: list[Any] = []
    begin = Trainer.__init__

    def watched(self: Trainer, *arguments: Any) -> None:
        begin(self, *arguments)
        found.extend(weakref.ref(part) for part in (self.optimizer, self.model))

    monkeypatch.setattr(Trainer, "__init__", watched)
    build.make_deterministic(Spec())  # torch's imports at its first call keep our frames in a cycle
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("name", ["adamw", "angular_muown"])
def test_a_finished_run_holds_nothing(
    data: Path, tmp_path: Path, held: list[Any], name: str
) -> None:
    spec = tiny(data, steps=4)
    train(replace(spec, optim=replace(spec.optim, name=name)), tmp_path / "run")
    assert held[0]() is None, "the optimizer, with its state and buffers"


def test_a_model_of_another_shape_finds_the_memory_free(
    data: Path, tmp_path: Path, held: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, alive = build.make_model, []

    def look(spec: Spec, ranks: Ranks) -> LanguageModel:
        alive.append([part() for part in held])
        return make(spec, ranks)

    monkeypatch.setattr(build, "make_model", look)
    models, spec = build.Models(), tiny(data, steps=4)
    train(spec, tmp_path / "a", models=models)
    assert held[1]() is not None, "kept for a run of its shape"
    train(replace(spec, model=replace(spec.model, mlp=96)), tmp_path / "b", models=models)
    assert alive == [[], [None, None]]


def test_a_model_that_is_taken_again_finds_the_last_passes_gone(
    data: Path, tmp_path: Path, held: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded ones hold a GPU's memory. The first run of a process leaves them in a cycle."""
    begin, made = Passes.__init__, []

    def watched(self: Passes, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Passes, "__init__", watched)
    models, spec = build.Models(), tiny(data, steps=4)
    cycle: list[Any] = []

    def leave(self: Trainer) -> None:
        cycle.append([self.passes])
        cycle[-1].append(cycle[-1])

    monkeypatch.setattr(Trainer, "finish", leave)
    train(spec, tmp_path / "a", models=models)
    cycle.clear()
    assert made[0]() is not None, "the collector is off"
    models.take(spec, Ranks(0, 1, torch.device("cpu")))
    assert made[0]() is None


@pytest.mark.parametrize("error", [NotFinite, Preempted, OSError])
def test_a_run_that_ends_early_holds_nothing(
    data: Path, tmp_path: Path, held: list[Any], monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    update = Trainer.update

    def fail(self: Trainer) -> None:
        update(self)
        if self.step == 2:
            raise error("enough")

    monkeypatch.setattr(Trainer, "update", fail)
    try:
        train(tiny(data, angle_every=1), tmp_path / "run")
    except error:
        pass
    else:
        pytest.fail("it went on")
    assert held[0]() is None
