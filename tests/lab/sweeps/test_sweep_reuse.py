"""Runs that a sweep beside this one has made: taken over where they are the same, only there."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.config.spec import Spec
from angular_lab.experiments.definition import Experiment, Line, trained_by
from angular_lab.report.report import make_report
from angular_lab.run_folder import RunDir
from angular_lab.sweeps import trials as sweep_entries
from angular_lab.sweeps.reuse import reuse
from angular_lab.sweeps.sweep import Sweep
from angular_lab.training.start import train
from tests.lab.runs import tiny
from tests.lab.sweeps.sweeps import small


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sweeps with one in it: a trunk with cool-downs to steps 8 and 16, one longer."""
    root = tmp_path_factory.mktemp("runs")
    plan = small(data, horizons=(8, 16), seeds=(0,), longer=0.5)
    Sweep(replace(plan, lines=plan.lines[1:]), root / "first", device="cpu").run()
    return root


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


def _plan(data: Path, steps: int = 16, seed: int = 0, **changes: Any) -> Experiment:
    spec = replace(tiny(data, save_every=0), **changes)
    line = Line("other name", trained_by(spec, "angular_muown"), (0.02,))
    return Experiment("second", "nano", "Another", (line,), (steps,), (seed,))


def _never(spec: Spec, *args: Any) -> RunDir:
    raise AssertionError(f"made again: {spec}")


@pytest.mark.parametrize("steps", [8, 16])
def test_a_cool_down_off_a_trunk_is_the_straight_run(
    runs: Path, data: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sweep_entries, "train", _never)
        Sweep(_plan(data, steps), runs / "second", device="cpu").run()
    (entry,) = Sweep(_plan(data, steps), runs / "second").entries
    assert entry.done
    train(entry.spec, runs / "straight", device="cpu")
    taken, straight = (RunDir(path).read_metrics() for path in (entry.folder, runs / "straight"))
    assert [line["step"] for line in taken] == list(range(1, steps + 1))
    # where a trunk ends it is evaluated, and a straight run is not
    assert [{**line, **other} for line, other in zip(taken, straight, strict=True)] == taken
    assert taken[-1] == straight[-1]
    make_report([runs / "second"], runs / "report")
    assert f"{entry.loss:.4f}" in (runs / "report" / "index.html").read_text()


def test_runs_on_the_standard_library_are_taken_over_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tokens lie in a folder of Python's version."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data, tmp_path / "data" / "stdlib" / data.name)
    plan = _plan(Path("stdlib"), steps=4)
    Sweep(plan, tmp_path / "runs" / "first", device="cpu").run()
    monkeypatch.setattr(sweep_entries, "train", _never)
    Sweep(plan, tmp_path / "runs" / "second", device="cpu").run()
    assert "as first/other-name" in capsys.readouterr().err


def test_the_folder_says_where_it_was_made(
    runs: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Sweep(_plan(data), runs / "second", device="cpu").run()
    (spec,) = (runs / "second").glob("*/spec.json")
    assert '"made_in": "first/angular-muown' in spec.read_text()
    assert "as first/angular-muown" in capsys.readouterr().err
    make_report([runs / "second"], runs / "report")
    (table,) = (runs / "report" / "tables").glob("*-runs.md")
    assert "| as first/angular-muown" in table.read_text()
    assert not list((runs / "report" / "tables").glob("*-pace.md")), "speeds of another sweep"


def _with(key: str, **values: Any) -> Callable[[Spec], Spec]:
    return lambda spec: replace(spec, **{key: replace(getattr(spec, key), **values)})


@pytest.mark.parametrize(
    "change",
    [
        _with("optim", aux_lr=0.02),  # as lr, by its number
        _with("optim", radius_lr=0.02),
        _with("schedule", decay=0.5),  # the longer cool-down
        _with("schedule", decay_steps=4),
        lambda spec: replace(spec, eval_every=8, log_every=0),
        lambda spec: replace(spec, compile=not spec.compile, keep=7),
    ],
)
def test_the_same_by_another_name(runs: Path, data: Path, change: Callable[[Spec], Spec]) -> None:
    assert _reused(runs, data, change)


@pytest.mark.parametrize(
    "change",
    [
        _with("optim", aux_lr=0.01),
        _with("optim", lr=0.01),
        _with("optim", row_beta=0.9),
        _with("model", layers=1),
        _with("schedule", decay=0.3),
        _with("schedule", kind="constant"),
        lambda spec: replace(spec, average="3"),  # which the other did not evaluate
        lambda spec: replace(spec, eval_every=3),  # nor at these steps
        lambda spec: replace(spec, angle_every=1),
        lambda spec: replace(spec, steps=12),
        lambda spec: replace(spec, seed=1),
    ],
)
def test_another_run_is_another_run(runs: Path, data: Path, change: Callable[[Spec], Spec]) -> None:
    assert not _reused(runs, data, change)


def _reused(runs: Path, data: Path, change: Callable[[Spec], Spec]) -> bool:
    plan = _plan(data)
    spec = change(replace(plan.lines[0].spec, steps=16))
    line = replace(plan.lines[0], spec=spec, values=(spec.optim.lr,))
    plan = replace(plan, lines=(line,), horizons=(spec.steps,), seeds=(spec.seed,))
    (entry,) = Sweep(plan, runs / "second").pending()
    entry.folder.mkdir(parents=True)
    found = reuse(entry, "cpu") is not None
    assert entry.done is found
    return found


def test_other_tokens_make_another_run(runs: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "data"
    shutil.copytree(data, other)
    for path in runs.glob("*/*/spec.json"):  # as if made on the copy
        path.write_text(path.read_text().replace(str(data), str(other)))
    assert _reused(runs, other, lambda spec: spec)
    shutil.rmtree(runs / "second")
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0'))
    assert not _reused(runs, other, lambda spec: spec)


def test_tokens_that_cannot_be_told_apart(runs: Path, data: Path, tmp_path: Path) -> None:
    """Shards without a manifest have no fingerprint."""
    bare = tmp_path / "bare"
    for path in runs.glob("*/*/spec.json"):
        content = json.loads(path.read_text().replace(str(data), str(bare)))
        path.write_text(json.dumps({**content, "data": ""}))
    assert not _reused(runs, bare, lambda spec: spec)


@pytest.mark.parametrize("key", ["torch", "device", "ranks", "angular_muown"])
def test_what_would_round_in_another_way(runs: Path, data: Path, key: str) -> None:
    for path in runs.glob("*/*/spec.json"):
        content = json.loads(path.read_text())
        content["versions"][key] = "another"
        path.write_text(json.dumps(content))
    assert not _reused(runs, data, lambda spec: spec)


@pytest.mark.parametrize("gone", ["DONE", "sweep.json", "trunk", "the trunk's DONE"])
def test_only_what_is_whole(runs: Path, data: Path, gone: str) -> None:
    (end,) = (path for path in (runs / "first").iterdir() if path.name.endswith("-to16"))
    trunk = end.with_name(end.name.removesuffix("-to16"))
    if gone == "DONE":
        (end / "DONE").unlink()
    elif gone == "sweep.json":  # no sweep: a folder of somebody's own
        (runs / "first" / gone).unlink()
    elif gone == "trunk":
        shutil.rmtree(trunk)
    else:
        (trunk / "DONE").unlink()
    assert not _reused(runs, data, lambda spec: spec)


@pytest.mark.parametrize("damage", ["{", '{"spec": {}}', "setting"])
def test_a_damaged_neighbour_stops_nobody(
    runs: Path, data: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one of a version with other settings."""
    bad = runs / "a" / "bad"  # looked at before the good one
    shutil.copytree(next((runs / "first").glob("*-to16")), bad)
    shutil.copy(runs / "first" / "sweep.json", bad.parent)
    text = (bad / "spec.json").read_text()
    (bad / "spec.json").write_text(
        text.replace('"seed"', '"saat"') if damage == "setting" else damage
    )
    assert _reused(runs, data, lambda spec: spec)
    assert "a/bad is not looked at: " in capsys.readouterr().err


def test_a_take_over_that_was_broken_off(
    runs: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made anew, or taken over anew, but never resumed as if it had begun here."""
    finish = RunDir.finish
    monkeypatch.setattr(RunDir, "finish", _no_space)
    with pytest.raises(OSError, match="no space"):
        Sweep(_plan(data), runs / "second", device="cpu").run()
    monkeypatch.setattr(RunDir, "finish", finish)
    shutil.rmtree(runs / "first")
    Sweep(_plan(data), runs / "second", device="cpu").run()
    (spec,) = (runs / "second").glob("*/spec.json")
    assert "made_in" not in spec.read_text()


def _no_space(_: RunDir) -> None:
    raise OSError("no space left")


def test_a_trunk_is_made_anew(runs: Path, data: Path) -> None:
    """Its cool-downs start from checkpoints, which are not taken over."""
    plan = replace(_plan(data), horizons=(8, 16))
    (entry,) = Sweep(plan, runs / "second").pending()
    assert reuse(entry, "cpu") is None
