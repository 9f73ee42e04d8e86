"""What a sweep says: on which text it trains, how far it is, which seed a loss is of."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.experiments.comparison import EXPERIMENTS
from angular_lab.experiments.definition import Experiment
from angular_lab.sweeps import trials as sweep_entries
from angular_lab.sweeps.sweep import Sweep
from tests.lab.sweeps.sweeps import small


@pytest.fixture
def plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Six runs: three values, the best one on another seed, and a single value on both."""
    made = small(data, horizons=(4,))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: made)
    return made


def _started(said: str) -> str:
    return next(line for line in said.splitlines() if line.startswith("small, scale nano: "))


def test_how_far_it_is_and_on_which_text(
    plan: Experiment, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"  # no other test's sweeps beside it
    words = ["sweep", "small", "--out", str(root), "--device", "cpu"]
    assert main([*words, "--budget", "0.001s"]) == 75
    said = capsys.readouterr().err
    assert said.splitlines() == [
        f"small, scale nano: 0 of 6 runs done; data: {data}",
        f"stopped: the budget is spent; {root}: 0 of 6 runs done, 6 left; the same command goes on",
    ]
    assert main(words) == 0
    assert _started(capsys.readouterr().err).startswith("small, scale nano: 0 of 6 runs done")
    for gone in root.glob("adamw-lr0.001-*"):
        shutil.rmtree(gone)
    assert main([*words, "--budget", "0.001s"]) == 75
    said = capsys.readouterr().err
    assert "5 of 6 runs done, 1 left" in said, "the other seed has one, whatever is chosen"


def test_the_text_where_none_is_given(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "speedrun", "--out", str(tmp_path), "--budget", "0.001s"]
    assert main(words) == 75
    told = "data: stdlib (the Python standard library, as bytes)\n"
    assert told in capsys.readouterr().err


def test_what_diverged_counts_and_is_not_judged(data: Path, tmp_path: Path) -> None:
    """No value is left to try on the other seed."""
    plan = small(data, lines=small(data).lines[:1], horizons=(4,))
    sweep = Sweep(plan, tmp_path)
    assert sweep.counts() == (0, 4)
    for entry in sweep.pending():
        entry.folder.mkdir(parents=True)
        (entry.folder / "DIVERGED").touch()
    assert sweep.counts() == (3, 3)
    sweep.extend = 1
    assert sweep.counts() == (3, 5), "a smaller value, and then another seed"


def test_a_run_that_is_stopped(
    plan: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, train = tmp_path / "runs", sweep_entries.train  # no other test's sweeps beside it
    monkeypatch.setattr(sweep_entries, "train", lambda s, o, r, d, _, m: train(s, o, r, d, 0.0, m))
    assert main(["sweep", "small", "--out", str(root), "--device", "cpu"]) == 75
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("stopped: adamw-lr0.001-seed0-")
    assert last.endswith(f" is saved; {root}: 0 of 6 runs done, 6 left; the same command goes on")


def test_the_closing_table(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = small(data).lines
    first = replace(first, label="adamw, with a name that is longer than others")
    plan = small(data, lines=(first, second), horizons=(4,), seeds=(3, 4))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: plan)
    assert main(["sweep", "small", "--out", str(tmp_path), "--device", "cpu"]) == 0
    best, single, folder, hint = capsys.readouterr().out.splitlines()
    assert best.startswith(f"{first.label}  best 0.004, loss ")
    assert best.endswith(" on seed 3, which chose it, at the grid's edge: above")
    assert single.startswith(f"{second.label:{len(first.label)}}  best 0.02, loss ")
    assert single.endswith(" on seed 3"), "a single value is no choice"
    assert folder == str(tmp_path)
    assert hint == f"a page about it: angular-lab report {tmp_path}"


@pytest.mark.parametrize("command", ["sweep", "submit"])
def test_data_that_is_not_there(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """It is said before a run is named or a folder made."""
    words = [command, "small", "--out", str(tmp_path / "runs"), "--data", str(tmp_path / "none")]
    assert main(words) == 2
    told = capsys.readouterr()
    wanted = f"data={tmp_path / 'none'}: no such folder; make one with angular-lab prepare"
    assert told.err == f"error: {wanted}\n"
    assert not told.out
    assert not (tmp_path / "runs").exists()


def test_what_is_finished_is_told_without_its_data(
    plan: Experiment, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that has the runs alone."""
    moved = tmp_path / "data"
    shutil.copytree(data, moved)
    words = ["sweep", "small", "--out", str(tmp_path / "runs"), "--data", str(moved)]
    assert main([*words, "--device", "cpu"]) == 0
    shutil.rmtree(moved)
    capsys.readouterr()
    assert main(words) == 0
    assert "best 0.02" in capsys.readouterr().out
