"""What TensorBoard, W&B and trackio are told about runs."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from angular_lab.cli.main import main
from angular_lab.config.spec import DashboardSpec, Spec
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps.trials import COMPARED, decisive
from angular_lab.training import loggers
from angular_lab.training.start import train
from tests.lab.cli.test_cli import SMALL
from tests.lab.runs import LIMIT, lines, start, tiny
from tests.lab.training.test_train import _progress, _wait_for

SHOWN = DashboardSpec(project="angles", entity="lab", group="teaser", tags="first,long")


class Tracker:
    """Stands in for the modules wandb and trackio."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.steps: list[int] = []

    def init(self, **values: Any) -> None:
        self.runs.append(values)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.steps.append(step)

    def finish(self) -> None: ...


@pytest.fixture
def tracker(monkeypatch) -> Tracker:
    fake = Tracker()
    monkeypatch.setattr(loggers, "_import", lambda *_: fake)
    monkeypatch.setattr(loggers, "_has_key", lambda _: True)
    return fake


def _identity(tracker: Tracker, module: str, spec: Spec, folder: Path) -> str:
    """What the module tells runs apart by."""
    train(replace(spec, loggers=module), folder, resume=True, device="cpu")
    return tracker.runs[-1]["id" if module == "wandb" else "name"]


@pytest.mark.parametrize("module", ["wandb", "trackio"])
def test_runs_of_equal_folder_names_stay_apart(module, data, tmp_path, tracker) -> None:
    spec = tiny(data, steps=2)
    here = _identity(tracker, module, spec, tmp_path / "a" / "run")
    there = _identity(tracker, module, spec, tmp_path / "b" / "run")
    (tmp_path / "a" / "run").rename(tmp_path / "a" / "old")
    other = _identity(tracker, module, replace(spec, seed=1), tmp_path / "a" / "run")
    assert len({here, there, other}) == 3


@pytest.mark.parametrize("module", ["wandb", "trackio"])
def test_a_resumed_run_is_the_same_run(module, data, tmp_path, tracker, monkeypatch) -> None:
    """Also if it is shown elsewhere, or named by a relative path."""
    spec = tiny(data, steps=4, save_every=2)
    first = _identity(tracker, module, spec, tmp_path / "run")
    (tmp_path / "run" / "DONE").unlink()
    monkeypatch.chdir(tmp_path)
    group = DashboardSpec(group="other")
    assert _identity(tracker, module, replace(spec, dashboard=group), Path("run")) == first
    assert tracker.runs[-1]["resume"] == "allow"
    assert tracker.runs[-1]["group"] == "other"


def test_wandb_gets_project_entity_group_and_tags(data, tmp_path, tracker) -> None:
    train(tiny(data, steps=2, loggers="wandb", dashboard=SHOWN), tmp_path / "run", device="cpu")
    (told,) = tracker.runs
    named = {key: told[key] for key in ("project", "entity", "group", "tags", "name")}
    assert named == {
        "project": "angles", "entity": "lab", "group": "teaser", "tags": ["first", "long"],
        "name": "run",
    }  # fmt: skip
    assert tracker.steps == [1, 2]


def test_trackio_has_no_entity_and_no_tags(data, tmp_path, tracker, capsys) -> None:
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(tmp_path / "run")]
    command += ["loggers=trackio", "dashboard.project=angles"]
    for setting in ("dashboard.entity=lab", "dashboard.tags=long"):
        assert main([*command, setting]) == 2
        assert f"error: {setting}: only wandb has " in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    assert main([*command, "dashboard.group=teaser"]) == 0
    (told,) = tracker.runs
    assert (told["project"], told["group"]) == ("angles", "teaser")
    assert not {"entity", "tags"} & told.keys()


def test_a_resumed_run_may_be_shown_elsewhere(data, tmp_path, tracker) -> None:
    out, spec = tmp_path / "run", tiny(data, save_every=4)
    train(spec, tmp_path / "whole", device="cpu")
    train(spec, out, device="cpu")
    before = json.loads((out / "spec.json").read_text())
    shown = replace(spec, loggers="wandb", dashboard=SHOWN)
    train(shown, out, resume=True, resume_step=8, device="cpu")
    assert lines(out) == lines(tmp_path / "whole")
    assert tracker.steps == list(range(9, 13))
    assert RunFolder(out).read_spec() == shown
    after = json.loads((out / "spec.json").read_text())
    assert {**after, "spec": 0} == {**before, "spec": 0}, "nothing else changes"
    with pytest.raises(ValueError, match=r"seed=0 \(now 1\)"):
        train(replace(shown, seed=1), out, resume=True, device="cpu")


def test_no_run_of_a_sweep_is_named_by_where_it_is_shown(data) -> None:
    spec = tiny(data)
    shown = replace(spec, loggers="wandb", dashboard=SHOWN)
    assert decisive(shown) == decisive(spec)
    assert all(get(shown) == get(spec) for get in COMPARED.values())


def test_a_spec_without_dashboards_is_read(data, tmp_path) -> None:
    """Earlier versions wrote none."""
    spec = tiny(data, steps=2)
    train(spec, tmp_path / "run", device="cpu")
    content = json.loads((tmp_path / "run" / "spec.json").read_text())
    del content["spec"]["dashboard"]
    (tmp_path / "run" / "spec.json").write_text(json.dumps(content))
    assert RunFolder(tmp_path / "run").read_spec() == spec
    train(spec, tmp_path / "run", resume=True, device="cpu")


def _shown(run: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(os.fspath(run), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in shown.Scalars("loss")]


def test_tensorboard_writes_every_step_before_the_next_one(tmp_path, monkeypatch) -> None:
    """It writes from a queue, which a kill loses, and a resumed run does not log that again."""
    calls: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            calls.append(("purge", purge_step))

        def add_scalar(self, key: str, value: float, step: int) -> None:
            calls.append((key, step))

        def flush(self) -> None:
            calls.append("flush")

    monkeypatch.setattr(loggers, "_import", lambda *_: SimpleNamespace(SummaryWriter=Writer))
    board = loggers.TensorBoard(Spec(), RunFolder(tmp_path), 4)
    for step in (5, 6):
        board.log(step, {"loss": 2.0})
    assert calls == [("purge", 5), ("loss", 5), "flush", ("loss", 6), "flush"]


def test_tensorboard_shows_every_step_once_after_a_kill(data, tmp_path) -> None:
    out, spec = tmp_path / "run", tiny(data, steps=60, save_every=5, loggers="tensorboard")
    process = start(spec, out)
    _wait_for(lambda: _progress(out) > 12, process)
    process.kill()
    process.join(LIMIT)
    assert _progress(out) < 60
    train(spec, out, resume=True, device="cpu")
    assert _shown(out) == list(range(1, 61))
