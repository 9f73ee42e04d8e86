"""Problems with runs are reported, on the page and on stderr; the rest of the report is written."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.report.report import make_report
from tests.lab.report.made import (
    OURS,
    choosing,
    edit_json,
    spec_of,
    table,
    visible,
    write_run,
    write_sweep,
)

BEST = "angular-muown-lr0.02-seed1"


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


class Report:
    """Of a source; `has` is true for a warning that is both on the page and on stderr."""

    def __init__(self, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = source.parent / "out"
        self.page = make_report([source], self.out)
        self.words, self.errors = visible(self.page), capsys.readouterr().err

    def has(self, warning: str) -> bool:
        return warning in self.words and warning in self.errors and "warning: " in self.errors

    def table(self, name: str) -> list[dict[str, str]]:
        return table(self.out, name)


@pytest.mark.parametrize("exists", [True, False])
def test_no_runs(tmp_path: Path, exists: bool) -> None:
    source = tmp_path / "empty"
    if exists:
        source.mkdir()
    with pytest.raises(ValueError, match=r"no runs to report on: .*empty (has no runs|does not)"):
        make_report([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_next_to_a_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    make_report([tmp_path / "empty", choosing(tmp_path / "small")], tmp_path / "out")
    assert "empty has no runs" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["data", "vocabulary"])
def test_runs_on_other_data_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    root = choosing(tmp_path / "small")
    for folder in root.glob(f"{BEST}*"):
        content = json.loads((folder / "spec.json").read_text())
        if what == "data":
            content["data"] = "other tokens"
        else:
            content["spec"]["model"]["vocabulary"] = 999
        (folder / "spec.json").write_text(json.dumps(content))
    report = Report(root, capsys)
    assert report.has("angular_muown, lr 0.02, seed 1 is left out of the comparison: data ")
    assert report.has("other tokens" if what == "data" else "vocabulary 999")
    assert report.has("angular_muown at 0.02: seed 1 is missing")
    assert "not in sweep.json" not in report.errors
    ours = report.table("small-final-loss")[1]
    assert ours["seeds"] == "one seed (2)"
    assert float(ours["ours at 200k"]) == 2.82
    (speed,) = report.table("small-speed-up")
    assert speed["seeds without one"] == "seed 1: we have no curve"
    pairs = report.table("small-pairs")
    assert {row["verdict"] for row in pairs} == {"inconclusive"}
    assert "only one side has seeds 1" in pairs[0]["reason"]


def test_a_missing_seed_and_a_missing_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = choosing(tmp_path / "small")
    edit_json(
        root / "sweep.json",
        entries=lambda entries: [e for e in entries if (e["label"], e["seed"]) != ("adamw", 2)],
    )
    shutil.rmtree(root / f"{BEST}-to200")
    report = Report(root, capsys)
    assert report.has("adamw at 0.002: seed 2 is missing")
    left = "adamw-lr0.002-seed2-to200 is in the folder, but not in sweep.json: left out"
    assert report.has(left)
    assert report.has(f"{BEST}-to200 is named in sweep.json as done, but it is not there")
    assert report.has("angular_muown, lr 0.02, seed 1 is unfinished: no final loss at step 200")


def test_an_unfinished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "small")
    (root / f"{BEST}-to200" / "DONE").unlink()
    report = Report(root, capsys)
    assert report.has("angular_muown, lr 0.02, seed 1 is unfinished: no final loss at step 200")
    ours = report.table("small-final-loss")[1]
    assert (ours["ours at 100k"], ours["ours at 200k"]) == ("3.0300000000000002", "2.82")
    (speed,) = report.table("small-speed-up")
    assert "a curve of 1 points" in speed["seeds without one"]


@pytest.mark.usefixtures("drawn")
def test_a_method_without_a_finished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = choosing(tmp_path / "small")
    for done in root.glob("angular*/DONE"):
        done.unlink()
    report = Report(root, capsys)
    assert report.has("angular_muown: no finished run, so no best value yet")
    (speed,) = report.table("small-speed-up")
    assert speed["in tokens"].startswith("cannot be computed: seed 1: we have no curve")


@pytest.mark.usefixtures("drawn")
def test_diverged_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {0.01: {0: {400: 3.0}}, 0.02: {0: {400: 2.9}}, 0.04: {0: None}}
    methods = {OURS: (OURS, grid), "muon": ("muon", {0.01: {0: None}})}
    report = Report(write_sweep(tmp_path / "small", methods, experiment="qwen2"), capsys)
    assert report.has("angular_muown, lr 0.04, seed 0 diverged")
    assert report.has("muon: no finished run, so no best value yet")
    row = report.table("small-loss-by-value")[0]
    assert (row["0.02"], row["0.04"]) == ("2.9", "diverged")
    assert "at the edge" not in report.errors  # a value that diverged bounds the grid


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ('{"step": 201, "tok', 'is half-written (\'{"step": 201, "tok\'): left out'),
        ("no json\n", "is no JSON ('no json\\n', Expecting value"),
        ('{"loss": 3}\n', "lacks step and tokens"),
        ("[1, 2]\n", "lacks step and tokens"),
    ],
)
def test_broken_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], added: str, message: str
) -> None:
    root = choosing(tmp_path / "small")
    edit(root / f"{BEST}-to200" / "metrics.jsonl", lambda text: text + added)
    report = Report(root, capsys)
    assert report.has(f"{BEST}-to200/metrics.jsonl, line 3 {message}")
    assert report.table("small-final-loss")[1]["seeds"] == "2 seeds (1, 2)"


def test_without_its_last_line_a_run_has_no_final_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation before it is not after the cooldown, and must not replace it."""
    root = choosing(tmp_path / "small")
    edit(root / f"{BEST}-to200" / "metrics.jsonl", lambda text: text[:-30])
    report = Report(root, capsys)
    assert report.has("is done, but it has no evaluation, not at 200,000: its final loss is not")
    assert report.table("small-final-loss")[1]["ours at 200k"] == "2.82"


@pytest.mark.usefixtures("drawn")
def test_values_that_are_not_numbers_and_no_timing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = choosing(tmp_path / "small")
    line = '{"step": 5, "tokens": 5000, "loss": NaN, "angle_mean": "x", "row_norm_mean": null}\n'
    for path in root.glob("*/metrics.jsonl"):
        edit(path, lambda text: line + text)
    for path in root.glob("angular*/timing.jsonl"):
        edit(path, lambda text: '{"step": 1, "tokens_per_second": 0}\n' + text)
    for path in root.glob("adamw*/timing.jsonl"):
        path.unlink()
    report = Report(root, capsys)
    assert report.table("small-final-loss")[1]["seeds"] == "2 seeds (1, 2)"
    speeds = {row["method"]: row["tokens/s"] for row in report.table("small-runs")}
    assert speeds == {"adamw": "", OURS: "1000.0"}


def test_broken_manifest_and_specs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "runs" / "small")
    edit(root / "sweep.json", lambda text: text[:100])
    edit(root / BEST / "spec.json", lambda text: text[:50])
    report = Report(tmp_path / "runs", capsys)
    assert report.has("small/sweep.json cannot be read")
    assert report.has(f"{BEST}/spec.json cannot be read")
    assert "Single runs" in report.words


@pytest.mark.usefixtures("drawn")
def test_a_sweep_without_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "small")
    for folder in root.glob("*-seed*"):
        shutil.rmtree(folder)
    assert Report(root, capsys).has("is named in sweep.json as done, but it is not there")
    edit_json(root / "sweep.json", entries=[])
    assert Report(root, capsys).has("adamw: planned, but it has no usable run")


def test_two_sweeps_of_one_name(tmp_path: Path) -> None:
    roots = [choosing(tmp_path / name / "small").parent for name in ("a", "b")]
    make_report(roots, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "tables").glob("*-pairs.csv")}
    assert names == {"a-small-pairs.csv", "b-small-pairs.csv"}


def test_single_runs_on_different_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", spec_of("muon"), 3.0)
    write_run(tmp_path / "runs" / "b", spec_of("muown"), 2.0, data="others")
    model = replace(spec_of().model, vocabulary=50)
    write_run(tmp_path / "runs" / "c", spec_of(model=model), 1.0)
    (tmp_path / "runs" / "c" / "DONE").unlink()
    report = Report(tmp_path / "runs", capsys)
    assert report.has("The single runs differ in data or vocabulary")
    assert "Single runs, group 3 of 3" in report.words
    assert report.has("runs/c is unfinished: its last logged step is 400 of 400")
