"""The demo: kappa falls within the run, and its learning rates are those that the grid chose."""

import json
from pathlib import Path
from typing import Any

import pytest

from angular_lab.config.spec import OptimSpec
from angular_lab.demo import OURS, RUNS, demo_spec, run_demo
from angular_lab.errors import UserError
from angular_lab.training.build import make_model, make_optimizer
from angular_lab.training.ranks import start_ranks
from angular_muown import AngularMuown

GRID = Path(__file__).parents[2] / "results" / "demo_grid.json"


@pytest.mark.parametrize("steps", [None, 60, 1000])
def test_kappa_falls_to_a_fifth_whatever_the_number_of_steps(steps: int | None) -> None:
    spec = demo_spec(*RUNS[-1], steps)
    assert spec.optim.name == OURS
    optimizer = make_optimizer(make_model(spec, start_ranks("cpu")), spec)
    assert isinstance(optimizer, AngularMuown)
    group = next(group for group in optimizer.param_groups if group["algorithm"] == "matrix")
    past = spec.steps - group["warmup_steps"]
    kappa = (1 + group["decay_scale"] * past) ** -group["decay_degree"]
    assert 0.16 < kappa < 0.24


def test_only_ours_has_a_clock_of_its_own() -> None:
    for run in RUNS[:-1]:
        assert demo_spec(*run).optim.decay_scale == OptimSpec().decay_scale


def test_the_demo_says_how_far_kappa_fell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = run_demo(tmp_path / "demo", steps=2)
    assert (page.parent / "curves.svg").exists()
    out = capsys.readouterr().out
    assert "kappa falls from 1 to 1.00" in out  # two steps are all warm-up
    assert "5 / 2 steps = 2.5" in out
    assert "5 / 2 steps = 2.5" in page.read_text()


def test_a_number_of_steps_below_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps=0: it must be at least 1"):
        run_demo(tmp_path, steps=0)


def _rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of an optimizer at the demo's number of steps and clock."""
    rows = json.loads(GRID.read_text())["results"]
    optim = demo_spec(*next(run for run in RUNS if run[0] == name)).optim
    scale = optim.decay_scale
    return [x for x in rows if x["optimizer"] == name and x.get("decay_scale", scale) == scale]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[0])
def test_learning_rates_are_the_best_of_a_closed_grid(run: tuple[str, float, float, float]) -> None:
    name, lr, aux_lr, _ = run
    rows = _rows(name)
    devices = {x["device"] for x in rows if (x["lr"], x["aux_lr"]) == (lr, aux_lr)}
    assert devices
    for device in devices:  # losses of two devices are not comparable
        losses = {(x["lr"], x["aux_lr"]): x["val_loss"] for x in rows if x["device"] == device}
        # AdamW at twice this learning rate is as good on one device and diverged on another
        tolerance = 1e-3 if name == "adamw" else 0.0
        assert losses[lr, aux_lr] <= min(losses.values()) + tolerance
    for key, chosen in (("lr", lr), ("aux_lr", aux_lr)):
        values = {x[key] for x in rows}
        assert min(values) < chosen < max(values), f"{key} is at the edge of its grid"
