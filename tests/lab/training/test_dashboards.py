"""What TensorBoard, W&B and trackio receive about runs."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from angular_lab.cli.main import main
from angular_lab.config.spec import DashboardSpec, Spec
from angular_lab.errors import UserError
from angular_lab.run_folder import RunFolder, read_run
from angular_lab.sweeps.sweep_file import TrialRecord
from angular_lab.training import loggers
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.signals import Preempted
from angular_lab.training.start import train
from tests.dashboards import trackio_rows, wandb_rows, wandb_run, wandb_summary
from tests.lab.report.made import write_record
from tests.lab.runs import LIMIT, lines, start, stopped_copy, tiny
from tests.lab.sweeps.small import small, sweep

DASHBOARD = DashboardSpec(project="angles", entity="lab", group="teaser", tags=("first", "long"))


class FakeTracker:
    """Stands in for the modules wandb and trackio, online, and for their runs."""

    offline, url, id, name = False, "https://example.org/run", "id", "run"

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self.summary: dict[str, Any] = {}
        self.starting_step = self._next_step = 0  # as the server says

    def init(self, **values: Any) -> "FakeTracker":
        self.runs.append(values)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.steps.append(step)

    def mark_preempting(self) -> None: ...

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code


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
    expected |= {"entity": "lab", "tags": ["first", "long", "angular_muown"], "name": "run"}
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
    assert tracker.steps == list(range(1, 13)), "also those before the dashboard was added"
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

        def add_text(self, key: str, text: str) -> None:
            assert "| seed | 0 |" in text

        def flush(self) -> None:
            calls.append("flush")

    monkeypatch.setattr(loggers, "_import", lambda *_: SimpleNamespace(SummaryWriter=Writer))
    board = loggers.TensorBoard(Spec(), RunFolder(tmp_path), 4)
    for step in (5, 6):
        board.log(step, {"loss": 2.0, "grad_norm": None})
    assert calls == [("purge", 1), ("loss", 5), "flush", ("loss", 6), "flush"]
    for shown, purged in ((9, 5), (2, 3)):  # steps after the checkpoint are taken again
        monkeypatch.setattr(loggers, "_shown", lambda _, last=shown: (last, 0))
        assert loggers.TensorBoard(Spec(), RunFolder(tmp_path), 4).last == purged - 1
        assert calls[-1] == ("purge", purged)


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


# --- real dashboards, on disk ---


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboards")
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when it is imported
    out = folder / "run"
    train(tiny(data), out, device="cpu")
    return out


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let W&B write to a folder of its own."""
    for key, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{key}", value)
    return tmp_path


def wandb_files(folder: Path) -> set[Path]:
    import wandb

    wandb.teardown()  # wait for the process that writes the files
    return {*folder.rglob("*.wandb")}


def values_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return what a dashboard should show: metrics and times by step."""
    folder = RunFolder(run)
    times = folder.read_timing()
    lines = {line.step: line.to_dict() | times[line.step] for line in folder.read_metrics()}
    return {s: {k: v for k, v in line.items() if k != "step"} for s, line in lines.items()}


def test_an_offline_wandb_file_holds_every_step_once_after_a_resume(
    data: Path, finished: Path, offline: Path
) -> None:
    """W&B replaces an earlier file of a run by a later one, so a later one has to be complete."""
    out = stopped_copy(finished, offline / "run", 8)
    spec = tiny(data, loggers=("wandb",), dashboard=DASHBOARD)
    train(spec, out, resume=True, device="cpu")
    (path,) = wandb_files(offline)
    rows = wandb_rows(path)
    assert [row["_step"] for row in rows] == list(range(1, 13))
    for step, values in values_of(out).items():
        assert {k: rows[step - 1].get(k) for k in values} == pytest.approx(values)
    run = wandb_run(path)
    assert (run.project, run.entity, run.run_group) == ("angles", "lab", "teaser")
    assert [*run.tags] == ["first", "long", "angular_muown"]
    read = read_run(out, [])
    assert read is not None
    losses = [*read.values("val_loss").values()]
    summary = wandb_summary(path)
    expected = {"state": "done", "final_val_loss": losses[-1], "best_val_loss": min(losses)}
    expected |= {"tokens": 12 * 4 * 32, "median_tokens_per_second": read.speed}
    assert {key: summary[key] for key in expected} == expected


def test_log_to_wandb_sends_a_finished_run_under_the_id_of_training(
    finished: Path, offline: Path
) -> None:
    sent = [loggers.send_run("wandb", finished, ["dashboard.group=mine"]) for _ in range(2)]
    run = RunFolder(finished)
    files = wandb_files(offline)
    assert len(files) == 2, "each is complete, and W&B replaces the first by the second"
    for path in files:
        assert [row["_step"] for row in wandb_rows(path)] == list(range(1, 13))
        assert wandb_run(path).run_id == loggers.run_id(run.read_spec(), run)
        assert wandb_run(path).run_group == "mine"
    folders = {Path(text.partition("wandb sync ")[2]).resolve() for text in map(str, sent)}
    assert folders == {path.parent.resolve() for path in files}


def test_log_to_trackio_adds_only_what_is_new(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    project = ["dashboard.project=sent"]
    log = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(log[:5]))
    assert loggers.send_run("trackio", out, project).steps == [1, 2, 3, 4, 5]
    (out / "metrics.jsonl").write_text("".join(log))
    assert loggers.send_run("trackio", out, project).steps == list(range(6, 13))
    again = loggers.send_run("trackio", out, project)
    assert not again.steps
    assert "has all steps up to 12 already" in str(again)
    assert trackio_rows("sent") == values_of(out)


def test_training_again_to_trackio_repeats_no_step(
    data: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The abandoned steps after the checkpoint are the same ones."""
    dashboard = DashboardSpec(project="resumed")
    out = stopped_copy(finished, tmp_path / "run", 8)
    loggers.send_run("trackio", out, ["dashboard.project=resumed"])
    spec = tiny(data, loggers=("trackio",), dashboard=dashboard)
    train(spec, out, resume=True, device="cpu")
    assert [*trackio_rows("resumed")] == list(range(1, 13))
    assert capsys.readouterr().out == "", "stdout is for the folder"


def test_wandb_online_is_sent_what_the_server_lacks(
    finished: Path, tmp_path: Path, tracker: FakeTracker, data: Path
) -> None:
    """It may be ahead of the checkpoint, or behind it."""
    for has, expected in ((10, [11, 12]), (6, list(range(7, 13)))):
        out = stopped_copy(finished, tmp_path / str(has), 8)
        tracker.steps, tracker.starting_step = [], has + 1
        train(tiny(data, loggers=("wandb",)), out, resume=True, device="cpu")
        assert tracker.steps == expected
        assert tracker.exit_code == 0


def test_tensorboard_shows_settings_and_final_values(finished: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    for _ in range(2):
        loggers.send_run("tensorboard", out)
    events = EventAccumulator(os.fspath(out), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 13))
    (final,) = events.Scalars("final/final_val_loss")
    read = read_run(out, [])
    assert read is not None
    assert read.final is not None
    assert final.value == pytest.approx(read.final[1])
    assert "settings/text_summary" in events.Tags()["tensors"]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_log_to_tensorboard_adds_only_what_is_new(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is sent before its end gets its final values later."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / "DONE").rename(tmp_path / "DONE")
    log = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(log[:5]))
    assert loggers.send_run("tensorboard", out).steps == [1, 2, 3, 4, 5]
    (out / "metrics.jsonl").write_text("".join(log))
    assert loggers.send_run("tensorboard", out).steps == list(range(6, 13))
    (tmp_path / "DONE").rename(out / "DONE")
    assert not loggers.send_run("tensorboard", out).steps
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    capsys.readouterr()
    assert main(["log-to", "tensorboard", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("run: tensorboard has all steps up to 12 already: view it with")
    assert printed.err == ""
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    events = EventAccumulator(os.fspath(out), size_guidance={"scalars": 0}).Reload()
    for key in ("loss", "tokens_per_second"):
        assert [event.step for event in events.Scalars(key)] == list(range(1, 13))
    assert [event.step for event in events.Scalars("final/tokens")] == [12]


def test_a_run_that_is_trained_is_not_sent(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    owner = RunFolder(out)
    owner.claim()
    with pytest.raises(UserError, match="is being trained: send it when it has ended"):
        loggers.send_run("tensorboard", out)
    owner.release()
    with pytest.raises(UserError, match=r"seed=3: a run that exists keeps its settings"):
        loggers.send_run("tensorboard", out, ["seed=3"])
    (out / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="has not logged a step yet"):
        loggers.send_run("tensorboard", out)


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [(None, "done", 0), (Preempted(), "stopped", 75), (NotFinite(), "diverged", 3),
     (KeyError(), "failed", 1)],
)  # fmt: skip
def test_a_dashboard_shows_how_a_run_ended(
    error: Exception | None, state: str, code: int, finished: Path, tracker: FakeTracker
) -> None:
    run = RunFolder(finished)
    logger = loggers.Wandb(run.read_spec(), run)
    loggers.close_loggers([logger], run, error)
    assert (tracker.summary["state"], tracker.exit_code) == (state, code)
    assert ("final_val_loss" in tracker.summary) == (state == "done")


def test_log_to_groups_a_run_of_a_sweep_under_its_name(
    finished: Path, tmp_path: Path, tracker: FakeTracker, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished, store / "runs" / "trial")
    trial = TrialRecord("angular_muown", 0.02, 0, {12: "trial"})
    write_record(store, [trial], name="teaser-s")
    words = ["log-to", "wandb", str(store / "runs" / "trial")]
    for more, group in (([], "teaser-s"), (["dashboard.group=mine"], "mine")):
        assert main([*words, *more]) == 0
        assert tracker.runs[-1]["group"] == group
    assert main(["log-to", "wandb", str(finished)]) == 0
    assert tracker.runs[-1]["group"] == "nano", "the named run"
    printed = capsys.readouterr().out
    assert printed.startswith("trial: sent 12 steps, up to 12, to wandb: run id at https://")
    assert main(["log-to", "wandb", "dashboard.group=mine"]) == 2
    assert "give at least one run folder" in capsys.readouterr().err


def test_the_help_of_log_to_says_what_is_sent_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["log-to", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "W&B offline gets all steps" in printed
    assert all(name in printed for name in loggers.LOGGERS)


def test_log_to_takes_a_run_whose_name_looks_like_a_setting(
    finished: Path, tmp_path: Path, tracker: FakeTracker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only dashboard.KEY=VALUE is a setting here, wherever it stands."""
    run = tmp_path / "seed=1"
    shutil.copytree(finished, run)
    words = ["log-to", "wandb", "dashboard.group=mine", "--traceback", str(run)]
    assert main(words) == 0
    assert tracker.runs[-1]["group"] == "mine"
    assert main(["log-to", "wandb", str(tmp_path / "seed=2")]) == 2
    assert f"{tmp_path}/seed=2: neither a folder nor the id of a run" in capsys.readouterr().err


def test_log_to_knows_the_dashboards_of_training(
    finished: Path, tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        main(["log-to", "nope", str(finished)])
    expected = "argument dashboard: nope: it must be one of tensorboard, wandb, trackio"
    assert expected in capsys.readouterr().err
    monkeypatch.delitem(loggers.LOGGERS, "wandb")
    with pytest.raises(SystemExit):
        main(["log-to", "wandb", str(finished)])


def test_runs_of_a_sweep_are_a_group(data: Path, tmp_path: Path, tracker: FakeTracker) -> None:
    arm = small(data).arms[1]
    for given, group in ((None, "small-nano"), ("mine", "mine")):
        spec = replace(arm.spec, loggers=("wandb",), dashboard=DashboardSpec(group=given))
        arms = (replace(arm, spec=spec),)
        sweep(small(data, arms=arms, horizons=(4,), seeds=(0,)), tmp_path / group)
        assert tracker.runs[-1]["group"] == group
