"""Several experiments in one command: all are made, one after the other, and nobody idles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.cli.main import main
from angular_lab.experiments.definition import Experiment
from angular_lab.run_folder import RunDir
from angular_lab.sweeps import trials as sweep_entries
from angular_lab.sweeps.sweep import Sweep, run_together
from angular_lab.training.build import Models
from angular_lab.training.signals import Preempted
from tests.lab.sweeps.sweeps import small


@pytest.fixture
def plans(data: Path) -> tuple[Experiment, Experiment]:
    """Of different runs."""
    plan = small(data, horizons=(4,), seeds=(0,))
    first, second = (replace(plan, name=name) for name in ("first", "second"))
    return replace(first, lines=plan.lines[:1]), replace(second, lines=plan.lines[1:])


def test_all_are_made_by_one_model(
    plans: tuple[Experiment, Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Models] = []
    take = Models.take
    monkeypatch.setattr(Models, "take", lambda self, *a: made.append(self) or take(self, *a))
    sweeps = [Sweep(plan, tmp_path / plan.name, device="cpu") for plan in plans]
    run_together(sweeps)
    assert [len(sweep.entries) for sweep in sweeps] == [3, 1]
    assert all(entry.done for sweep in sweeps for entry in sweep.entries)
    assert len(made) == 4
    assert len(set(map(id, made))) == 1


def test_nobody_waits_while_there_is_work(
    plans: tuple[Experiment, Experiment], tmp_path: Path
) -> None:
    """Others are at work on all of the first: the second is made, and only then is waited."""
    sweeps = [Sweep(plan, tmp_path / plan.name, device="cpu") for plan in plans]
    locks = [RunDir(entry.folder) for entry in sweeps[0].pending()]
    for lock in locks:
        lock.claim()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            raise Preempted(text)

    sweeps[0].say = sweeps[1].say = say
    with pytest.raises(Preempted):
        run_together(sweeps)
    for lock in locks:
        lock.release()
    assert all(entry.done for entry in sweeps[1].entries)
    (name,) = (entry.folder.name for entry in sweeps[1].entries)
    assert said[2:] == [f"second/{name}", "waiting: other processes make all that can be made now"]


def test_what_failed_in_one_is_tried_in_the_other(
    plans: tuple[Experiment, Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their runs may have the same name."""
    plan = plans[1]
    sweeps = [Sweep(plan, tmp_path / name, device="cpu") for name in ("first", "second")]
    train, failing = sweep_entries.train, True

    def fail(spec: Any, out: Any, *args: Any) -> RunDir:
        if failing:
            raise RuntimeError("of this kind there is no second")
        return train(spec, out, *args)

    monkeypatch.setattr(sweep_entries, "train", fail)
    for sweep in sweeps:
        sweep.marks = tmp_path
    with pytest.raises(RuntimeError, match="no second"):
        run_together(sweeps)
    assert [len(sweep.left()) for sweep in sweeps] == [0, 1]
    failing = False
    run_together(sweeps)
    assert [len(sweep.pending()) for sweep in sweeps] == [1, 0]


def test_one_folder_is_not_for_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "teaser", "aux-lr", "--out", str(tmp_path / "x")]) == 2
    assert "for 2 experiments: each has a folder of its own" in capsys.readouterr().err
