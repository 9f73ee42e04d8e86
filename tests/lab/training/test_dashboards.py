"""What TensorBoard, W&B and trackio receive about runs."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from angular_lab.config.spec import DashboardSpec, Spec
from angular_lab.run_folder import RunFolder
from angular_lab.training import loggers
from angular_lab.training.start import train
from tests.lab.runs import LIMIT, lines, start, tiny

DASHBOARD = DashboardSpec(project="angles", entity="lab", group="teaser", tags=("first", "long"))


class FakeTracker:
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
def tracker(monkeypatch: pytest.MonkeyPatch) -> FakeTracker:
    fake = FakeTracker()
    monkeypatch.setattr(loggers, "_import", lambda *_: fake)
    monkeypatch.setattr(loggers, "_has_key", lambda _: True)
    return fake


@pytest.mark.parametrize(("module", "key"), [("wandb", "id"), ("trackio", "name")])
def test_identity_differs_between_runs_but_not_when_resumed(
    module: str, key: str, tmp_path: Path, tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(spec: Spec, folder: Path) -> str:
        loggers.make_loggers(replace(spec, loggers=(module,)), RunFolder(folder), 0)
        return tracker.runs[-1][key]

    spec, folder = Spec(), tmp_path / "a" / "run"
    first = identity(spec, folder)
    assert identity(spec, tmp_path / "b" / "run") != first, "same name, another folder"
    assert identity(replace(spec, seed=1), folder) != first, "same folder, another run"
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    changed = replace(spec, data="elsewhere", dashboard=DashboardSpec(group="other"))
    assert identity(changed, Path("run")) == first
    assert tracker.runs[-1]["resume"] == "allow"
    assert tracker.runs[-1]["group"] == "other"


def test_only_wandb_receives_entity_and_tags(
    data: Path, tmp_path: Path, tracker: FakeTracker
) -> None:
    spec = tiny(data, steps=2, loggers=("wandb", "trackio"), dashboard=DASHBOARD)
    train(spec, tmp_path / "run", device="cpu")
    wandb, trackio = tracker.runs
    expected = {"project": "angles", "group": "teaser"}
    assert {**trackio, **expected, "config": spec.to_dict()} == trackio
    expected |= {"entity": "lab", "tags": ["first", "long"], "name": "run"}
    assert {**wandb, **expected, "config": spec.to_dict()} == wandb
    assert not {"entity", "tags"} & trackio.keys()
    assert tracker.steps == [1, 1, 2, 2]
    for setting in ({"entity": "lab"}, {"tags": ("long",)}):
        dashboard = DashboardSpec(**setting)
        with pytest.raises(ValueError, match=r"dashboard\.\w+=(lab|long): only wandb has "):
            train(replace(spec, loggers=("trackio",), dashboard=dashboard), tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_resumed_run_may_change_its_dashboard(
    data: Path, tmp_path: Path, tracker: FakeTracker
) -> None:
    """Runs of earlier versions have no dashboard in spec.json; no identity depends on it."""
    out, spec = tmp_path / "run", tiny(data)
    train(spec, out, device="cpu")
    before, metrics = json.loads((out / "spec.json").read_text()), lines(out)
    older = {**before, "spec": {k: v for k, v in before["spec"].items() if k != "dashboard"}}
    (out / "spec.json").write_text(json.dumps(older))
    assert RunFolder(out).read_spec() == spec
    changed = replace(spec, loggers=("wandb",), dashboard=DASHBOARD)
    train(changed, out, resume=True, resume_step=8, device="cpu")
    assert lines(out) == metrics
    assert tracker.steps == list(range(9, 13))
    assert RunFolder(out).read_spec() == changed
    after = json.loads((out / "spec.json").read_text())
    changed_keys = [change["key"] for change in after.pop("changes")]
    assert changed_keys == [
        *("dashboard.entity", "dashboard.group", "dashboard.project", "dashboard.tags", "loggers")
    ]
    assert {**after, "changes": [], "spec": 0} == {**before, "spec": 0}, "nothing else changes"
    with pytest.raises(ValueError, match=r"seed=0 \(now 1\)"):
        train(replace(changed, seed=1), out, resume=True, device="cpu")
    assert changed.identity("") == spec.identity("")


def test_tensorboard_flushes_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes from a queue, which a kill loses, and a resumed run does not log it again."""
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
        board.log(step, {"loss": 2.0, "grad_norm": None})
    assert calls == [("purge", 5), ("loss", 5), "flush", ("loss", 6), "flush"]


def test_tensorboard_shows_every_step_once_after_a_kill(data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, spec = tmp_path / "run", tiny(data, steps=60, save_every=5, loggers=("tensorboard",))
    process = start(spec, out)
    deadline = time.monotonic() + LIMIT
    while not (out / "metrics.jsonl").exists() or len(lines(out)) <= 12:
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join(LIMIT)
    assert len(lines(out)) < 60
    train(spec, out, resume=True, device="cpu")
    events = EventAccumulator(os.fspath(out), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 61))
