"""Problems with runs are shown on the page and logged; the rest of the report is written."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.errors import UserError
from angular_lab.report.report import make_report
from angular_lab.run_folder import RUNS
from tests.lab.report.made import (
    OURS,
    choosing,
    edit_sweep,
    spec_of,
    sweep_file,
    table,
    visible,
    write_run,
    write_sweep,
)

BEST = "angular-muown-lr0.02-seed1"


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


class Report:
    """Of a source; `has` is true for a warning that is both on the page and logged."""

    def __init__(self, source: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.out = source.parent / "out"
        self.page = make_report([source], self.out)
        self.words, self.warnings = visible(self.page), caplog.text

    def has(self, warning: str) -> bool:
        return warning in self.words and warning in self.warnings

    def table(self, name: str) -> list[dict[str, str]]:
        return table(self.out, name)


@pytest.mark.parametrize("exists", [True, False])
def test_no_runs(tmp_path: Path, exists: bool) -> None:
    source = tmp_path / "empty"
    if exists:
        source.mkdir()
    with pytest.raises(
        UserError, match=r"no runs to report on: .*empty (holds no run and no sweep|does not)"
    ):
        make_report([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_next_to_a_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    make_report([tmp_path / "empty", choosing(tmp_path / "small")], tmp_path / "out")
    assert "empty holds no run and no sweep" in caplog.text


@pytest.mark.parametrize("what", ["data", "vocabulary"])
def test_runs_on_other_data_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    root = choosing(tmp_path / "small")
    for folder in (root / RUNS).glob(f"{BEST}*"):
        content = json.loads((folder / "spec.json").read_text())
        if what == "data":
            content["data"] = "other tokens"
        else:
            content["spec"]["model"]["vocabulary"] = 999
        (folder / "spec.json").write_text(json.dumps(content))
    report = Report(root, caplog)
    assert report.has("angular_muown, lr 0.02, seed 1 is left out of the comparison: data ")
    assert report.has("other tokens" if what == "data" else "vocabulary 999")
    assert report.has("angular_muown at 0.02: seed 1 is missing")
    ours = report.table("small-final-loss")[1]
    assert ours["seeds"] == "one seed (2)"
    assert float(ours["at 200k"]) == 2.82
    (speed,) = report.table("small-speed-up")
    assert speed["seeds without one"] == "seed 1: we have no curve"
    pairs = report.table("small-pairs")
    assert {row["verdict"] for row in pairs} == {"inconclusive: one seed"}
    assert "only one side has seeds 1" in pairs[0]["reason"]


def test_a_missing_seed_and_a_missing_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = choosing(tmp_path / "small")
    edit_sweep(
        root,
        trials=lambda trials: tuple(t for t in trials if (t.arm, t.seed) != ("adamw", 2)),
    )
    shutil.rmtree(root / RUNS / f"{BEST}-to200")
    report = Report(root, caplog)
    assert report.has("adamw at 0.002: seed 2 is missing")
    assert report.has("angular_muown, lr 0.02, seed 1 is unfinished: no final loss at step 200")


def test_a_run_that_no_sweep_refers_to_is_a_single_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = choosing(tmp_path / "small")
    write_run(root / RUNS / "alone", spec_of("muon"), 3.1)
    report = Report(root, caplog)
    (row,) = report.table("single-runs-1-summary")
    assert row["folder"].endswith("runs/alone")
    assert "1 sweep with 9 trials, and 1 single run." in report.words


def test_an_unfinished_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = choosing(tmp_path / "small")
    (root / RUNS / f"{BEST}-to200" / "DONE").unlink()
    report = Report(root, caplog)
    assert report.has("angular_muown, lr 0.02, seed 1 is unfinished: no final loss at step 200")
    ours = report.table("small-final-loss")[1]
    assert (ours["at 100k"], ours["at 200k"]) == ("3.0300000000000002", "2.82")
    (speed,) = report.table("small-speed-up")
    assert "a curve of 1 points" in speed["seeds without one"]


@pytest.mark.usefixtures("drawn")
def test_a_method_without_a_finished_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = choosing(tmp_path / "small")
    for done in (root / RUNS).glob("angular*/DONE"):
        done.unlink()
    report = Report(root, caplog)
    assert report.has("angular_muown: no finished run, so no best value yet")
    (speed,) = report.table("small-speed-up")
    assert speed["in tokens"].startswith("cannot be computed: seed 1: we have no curve")


@pytest.mark.usefixtures("drawn")
def test_diverged_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = {0.01: {0: {400: 3.0}}, 0.02: {0: {400: 2.9}}, 0.04: {0: None}}
    methods = {OURS: (OURS, grid), "muon": ("muon", {0.01: {0: None}})}
    report = Report(write_sweep(tmp_path / "small", methods, experiment="qwen2"), caplog)
    assert report.has("angular_muown, lr 0.04, seed 0 diverged")
    assert report.has("muon: no finished run, so no best value yet")
    row = report.table("small-loss-by-value")[0]
    assert (row["0.02"], row["0.04"]) == ("2.9", "diverged")
    assert "at the edge" not in report.warnings  # a value that diverged bounds the grid


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ('{"step": 201, "tok', ', line 3 is half-written (\'{"step": 201, "tok\'): left out'),
        ("no json\n", ", line 3 is not JSON ('no json\\n', Expecting value"),
        ("[1, 2]\n", ", line 3 is not JSON ('[1, 2]\\n', not an object"),
        ('{"loss": 3}\n', ": a line lacks step or tokens ('{\"loss\": 3}\\n'): left out"),
    ],
    ids=["half-written", "not JSON", "not an object", "without a step"],
)
def test_damaged_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, added: str, message: str
) -> None:
    root = choosing(tmp_path / "small")
    edit(root / RUNS / f"{BEST}-to200" / "metrics.jsonl", lambda text: text + added)
    report = Report(root, caplog)
    assert report.has(f"{BEST}-to200/metrics.jsonl{message}")
    assert report.table("small-final-loss")[1]["seeds"] == "2 seeds (1, 2)"


def test_without_its_last_line_a_run_has_no_final_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The evaluation before it is not after the cooldown, and must not replace it."""
    root = choosing(tmp_path / "small")
    edit(root / RUNS / f"{BEST}-to200" / "metrics.jsonl", lambda text: text[:-30])
    report = Report(root, caplog)
    assert report.has("is done, but it has no evaluation: its final loss is not used")
    assert report.table("small-final-loss")[1]["at 200k"] == "2.82"


@pytest.mark.usefixtures("drawn")
def test_values_that_are_not_numbers_and_no_timing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = choosing(tmp_path / "small")
    line = '{"step": 5, "tokens": 5000, "loss": NaN, "angle_mean": "x", "row_norm_mean": null}\n'
    for path in (root / RUNS).glob("*/metrics.jsonl"):
        edit(path, lambda text: line + text)
    for path in (root / RUNS).glob("angular*/timing.jsonl"):
        edit(path, lambda text: '{"step": 1, "tokens_per_second": 0}\n' + text)
    for path in (root / RUNS).glob("adamw*/timing.jsonl"):
        path.unlink()
    report = Report(root, caplog)
    assert report.table("small-final-loss")[1]["seeds"] == "2 seeds (1, 2)"
    speeds = {row["method"]: row["tokens/s"] for row in report.table("small-runs")}
    assert speeds == {"adamw": "", OURS: "1000.0"}


def test_a_damaged_sweep_file_and_a_damaged_spec(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = choosing(tmp_path / "small")
    edit(sweep_file(root), lambda text: text[:100])
    edit(root / RUNS / BEST / "spec.json", lambda text: text[:50])
    report = Report(root, caplog)
    assert report.has("sweeps/small.json cannot be read")
    assert report.has("its runs are shown one by one")
    assert report.has(f"{BEST}/spec.json cannot be read")
    rows = report.table("single-runs-1-summary")
    assert len(rows) == 9 * 3 - 1  # two cooldowns off each trunk
    assert BEST not in {Path(row["folder"]).name for row in rows}


@pytest.mark.usefixtures("drawn")
def test_a_sweep_without_its_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = choosing(tmp_path / "small")
    shutil.rmtree(root / RUNS)
    report = Report(root, caplog)
    assert report.has(
        f"angular_muown, 0.02, seed 1: {sweep_file(root)} refers to {BEST}, which is not in "
        f"{root / RUNS}"
    )
    edit_sweep(root, trials=())
    assert Report(root, caplog).has("adamw: planned, but it has no usable run")


def test_the_first_editions_layout_names_the_command_that_converts_it(tmp_path: Path) -> None:
    root = tmp_path / "teaser-s"
    write_run(root / "a", spec_of(), 3.0)
    (root / "sweep.json").write_text('{"entries": []}')
    command = f"convert it and its runs with angular-lab convert-runs {root} --out STORE"
    for source in (tmp_path, root, root / "sweep.json"):
        with pytest.raises(UserError, match=command):
            make_report([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_of_the_first_edition_names_the_command_that_converts_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = write_run(tmp_path / "store" / RUNS / "old", spec_of(), 3.0)
    write_run(tmp_path / "store" / RUNS / "new", spec_of(), 3.0)
    content = json.loads((old / "spec.json").read_text())
    del content["format"]
    (old / "spec.json").write_text(json.dumps(content))
    report = Report(tmp_path / "store", caplog)
    assert report.has(f"convert it with angular-lab convert-runs {old} --out STORE")
    assert len(report.table("single-runs-1-summary")) == 1


@pytest.mark.parametrize("source", ["small.json", "."])
def test_a_sweep_may_be_given_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(sweep_file(choosing(tmp_path / "small")).parent)
    make_report([Path(source)], tmp_path / "out")
    assert table(tmp_path / "out", "small-final-loss")[1]["seeds"] == "2 seeds (1, 2)"


def test_two_sweeps_of_one_name(tmp_path: Path) -> None:
    roots = [choosing(tmp_path / name, name="small") for name in ("a", "b")]
    make_report(roots, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "tables").glob("*-pairs.csv")}
    assert names == {"a-small-pairs.csv", "b-small-pairs.csv"}


def test_two_sweeps_of_one_name_in_stores_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [choosing(tmp_path / name / "store", name="small") for name in ("a", "b")]
    monkeypatch.chdir(roots[0])
    make_report([Path(), roots[1]], tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "tables").glob("*-pairs.csv")}
    assert names == {"a-store-small-pairs.csv", "b-store-small-pairs.csv"}


def test_single_runs_on_different_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path / "runs" / "a", spec_of("muon"), 3.0)
    write_run(tmp_path / "runs" / "b", spec_of("muown"), 2.0, data="others")
    model = replace(spec_of().model, vocabulary=50)
    write_run(tmp_path / "runs" / "c", spec_of(model=model), 1.0)
    (tmp_path / "runs" / "c" / "DONE").unlink()
    report = Report(tmp_path / "runs", caplog)
    assert report.has("The single runs differ in data or vocabulary")
    assert "Single runs, group 3 of 3" in report.words
    assert report.has("runs/c is unfinished: its last logged step is 400 of 400")
