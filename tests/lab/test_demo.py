"""The demo: it follows the advice, and its learning rates are those that the grid chose."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from angular_lab.demo import RUNS, demo_spec, run_demo
from angular_lab.errors import UserError
from angular_muown import AngularMuown, wsd_schedule

GRID = Path(__file__).parents[2] / "results" / "demo_grid.json"


def test_the_schedule_and_the_clock_of_kappa_are_the_librarys_defaults() -> None:
    cooldown = inspect.signature(wsd_schedule).parameters["cooldown"].default
    clock = inspect.signature(AngularMuown).parameters["decay_scale"].default
    for run in RUNS:
        spec = demo_spec(*run)
        assert (spec.schedule.kind, spec.schedule.decay) == ("wsd", cooldown)
        assert spec.optim.decay_scale == clock


def test_the_demo_says_how_far_kappa_fell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = run_demo(tmp_path / "demo", steps=2)
    assert (page.parent / "curves.svg").exists()
    out = capsys.readouterr().out
    for text in (out, page.read_text()):
        assert "kappa falls from 1 to 1.00" in text  # two steps are all warm-up
        assert "the last 50% of the steps" in text


def test_a_number_of_steps_below_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps=0: it must be at least 1"):
        run_demo(tmp_path, steps=0)


def _rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of an optimizer with the demo's steps and cooldown."""
    rows = json.loads(GRID.read_text())["results"]
    spec = demo_spec(*next(run for run in RUNS if run[0] == name))
    wanted = {"optimizer": name, "steps": spec.steps, "cooldown": spec.schedule.decay}
    return [row for row in rows if wanted.items() <= row.items()]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[0])
def test_learning_rates_are_the_best_of_a_closed_grid(run: tuple[str, float, float, float]) -> None:
    name, lr, aux_lr, _ = run
    rows = _rows(name)
    devices = {x["device"] for x in rows if (x["lr"], x["aux_lr"]) == (lr, aux_lr)}
    assert devices
    for device in devices:  # losses of two devices are not comparable
        losses = {(x["lr"], x["aux_lr"]): x["val_loss"] for x in rows if x["device"] == device}
        assert losses[lr, aux_lr] == min(losses.values())
    for key, chosen in (("lr", lr), ("aux_lr", aux_lr)):
        values = {x[key] for x in rows}
        assert min(values) < chosen < max(values), f"{key} is at the edge of its grid"
