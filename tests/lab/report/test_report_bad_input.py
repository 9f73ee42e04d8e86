"""What is wrong with the runs is said, on the page and on stderr; the rest is still made."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.report.report import make_report
from angular_lab.run_folder import RunFolder
from tests.lab.report.test_report_sweeps import (
    choosing,
    no_git,  # noqa: F401  (a fixture)
    spec_of,
    table,
    visible,
    write_run,
    write_sweep,
)

BEST = "angular-muown-lr0.02-seed1"


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def report(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The page's words; every warning is on stderr too."""
    page = make_report([source], out)
    words, errors = visible(page), capsys.readouterr().err
    assert page.read_text().count("<svg") >= 3
    return f"{words}\n{errors}"


def both(text: str, message: str) -> bool:
    """On the page, where quotes are escaped, and on stderr."""
    page, errors = text.split("\n", 1)
    plain = page.replace("&#x27;", "'").replace("&quot;", '"')
    return message in plain and f"{message}" in errors and "warning: " in errors


@pytest.mark.parametrize("there", [True, False])
def test_no_runs(tmp_path: Path, there: bool) -> None:
    source = tmp_path / "empty"
    if there:
        source.mkdir()
    with pytest.raises(ValueError, match=r"no runs to report on: .*empty (holds no run|does not)"):
        make_report([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_empty_folder_beside_a_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    make_report([tmp_path / "empty", choosing(tmp_path / "small")], tmp_path / "out")
    assert "empty holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["data", "vocabulary"])
def test_other_data_is_left_out(
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
    text = report(root, tmp_path / "out", capsys)
    assert both(text, "angular_muown, lr 0.02, seed 1 is left out of the comparison: data ")
    assert ("other tokens" if what == "data" else "vocabulary 999") in text
    assert both(text, "angular_muown at 0.02: seed 1 is missing")
    assert "not in sweep.json" not in text
    ours = table(tmp_path / "out", "small-final-loss")[1]
    assert ours["seeds"] == "one seed (2)"
    assert float(ours["ours at 200k"]) == 2.82
    (speed,) = table(tmp_path / "out", "small-speed-up")
    assert speed["seeds without one"] == "seed 1: we have no curve"
    pairs = table(tmp_path / "out", "small-pairs")
    assert {row["verdict"] for row in pairs} == {"inconclusive"}
    assert "only one side has seeds 1" in pairs[0]["reason"]


def test_a_missing_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "small")

    def forget(text: str) -> str:
        content = json.loads(text)
        content["entries"] = [
            e for e in content["entries"] if (e["label"], e["seed"]) != ("adamw", 2)
        ]
        return json.dumps(content)

    edit(root / "sweep.json", forget)
    text = report(root, tmp_path / "out", capsys)
    assert both(text, "adamw at 0.002: seed 2 is missing")
    assert both(text, "adamw-lr0.002-seed2-to200 is in the folder, but not in sweep.json: left out")


def test_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "small")
    shutil.rmtree(root / f"{BEST}-to200")
    text = report(root, tmp_path / "out", capsys)
    assert both(text, f"{BEST}-to200 is named in sweep.json as done, but it is not there")
    assert both(text, "angular_muown, lr 0.02, seed 1 is unfinished: no final loss at step 200")


def test_unfinished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "small")
    (root / f"{BEST}-to200" / "DONE").unlink()
    text = report(root, tmp_path / "out", capsys)
    assert both(text, "angular_muown, lr 0.02, seed 1 is unfinished: no final loss at step 200")
    ours = table(tmp_path / "out", "small-final-loss")[1]
    assert (ours["ours at 100k"], ours["ours at 200k"]) == ("3.0300000000000002", "2.82")
    (speed,) = table(tmp_path / "out", "small-speed-up")
    assert "a curve of 1 points" in speed["seeds without one"]


def test_a_line_that_nothing_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "small")
    for done in root.glob("angular*/DONE"):
        done.unlink()
    text = report(root, tmp_path / "out", capsys)
    assert both(text, "angular_muown: no finished run, so no best value yet")
    (speed,) = table(tmp_path / "out", "small-speed-up")
    assert speed["in tokens"].startswith("cannot be computed: seed 1: we have no curve")
    assert speed["in wall-clock"] == "cannot be computed: there is no speed-up in tokens"


def test_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {0.01: {0: {400: 3.0}}, 0.02: {0: {400: 2.9}}, 0.04: {0: None}}
    lines = {"angular_muown": ("angular_muown", grid), "muon": ("muon", {0.01: {0: None}})}
    write_sweep(tmp_path / "small", lines, "qwen2")
    text = report(tmp_path / "small", tmp_path / "out", capsys)
    assert both(text, "angular_muown, lr 0.04, seed 0 diverged")
    assert both(text, "muon: no finished run, so no best value yet")
    row = table(tmp_path / "out", "small-loss-by-value")[0]
    assert (row["0.02"], row["0.04"]) == ("2.9", "diverged")
    assert "at the edge" not in text.split("\n", 1)[1]  # what diverged bounds the grid


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
    text = report(root, tmp_path / "out", capsys)
    assert both(text, f"{BEST}-to200/metrics.jsonl, line 3 {message}")
    assert table(tmp_path / "out", "small-final-loss")[1]["seeds"] == "2 seeds (1, 2)"


def test_a_last_line_cut_off_takes_the_final_loss_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation before it is no cooled-down loss, and must not stand in for one."""
    root = choosing(tmp_path / "small")
    edit(root / f"{BEST}-to200" / "metrics.jsonl", lambda text: text[:-30])
    text = report(root, tmp_path / "out", capsys)
    assert both(text, "is done, but it has no evaluation, not at 200,000: its final loss is not")
    assert table(tmp_path / "out", "small-final-loss")[1]["ours at 200k"] == "2.82"


def test_no_timing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "small")
    for path in root.glob("adamw*/timing.jsonl"):
        path.unlink()
    report(root, tmp_path / "out", capsys)
    (speed,) = table(tmp_path / "out", "small-speed-up")
    assert speed["in wall-clock"] == "cannot be computed: adamw has no timing.jsonl"


def test_broken_manifest_and_specs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "runs" / "small")
    edit(root / "sweep.json", lambda text: text[:100])
    edit(root / BEST / "spec.json", lambda text: text[:50])
    text = report(tmp_path / "runs", tmp_path / "out", capsys)
    assert both(text, "small/sweep.json cannot be read")
    assert both(text, f"{BEST}/spec.json cannot be read")
    assert "Single runs" in text


def test_a_sweep_of_which_nothing_is_there(tmp_path: Path) -> None:
    root = choosing(tmp_path / "small")
    for folder in root.glob("*-seed*"):
        shutil.rmtree(folder)
    page = make_report([root], tmp_path / "out")
    assert "is named in sweep.json as done, but it is not there" in visible(page)
    edit(root / "sweep.json", lambda text: json.dumps(json.loads(text) | {"entries": []}))
    assert "adamw: planned, but it has no usable run" in visible(make_report([root], tmp_path))


def test_values_that_are_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = choosing(tmp_path / "small")
    line = '{"step": 5, "tokens": 5000, "loss": NaN, "angle_mean": "x", "row_norm_mean": null}\n'
    for path in root.glob("*/metrics.jsonl"):
        edit(path, lambda text: line + text)
    for path in root.glob("*/timing.jsonl"):
        edit(path, lambda text: '{"step": 1, "tokens_per_second": 0}\n' + text)
    report(root, tmp_path / "out", capsys)
    assert table(tmp_path / "out", "small-final-loss")[1]["seeds"] == "2 seeds (1, 2)"


def test_two_sweeps_of_one_name(tmp_path: Path) -> None:
    roots = [choosing(tmp_path / name / "small").parent for name in ("a", "b")]
    make_report(roots, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "tables").glob("*-pairs.csv")}
    assert names == {"a-small-pairs.csv", "b-small-pairs.csv"}


def test_single_runs_of_two_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", spec_of("muon"), 3.0)
    write_run(tmp_path / "runs" / "b", spec_of("muown"), 2.0, data="others")
    model = replace(spec_of().model, vocabulary=50)
    write_run(tmp_path / "runs" / "c", spec_of(model=model), 1.0)
    RunFolder(tmp_path / "runs" / "c").path.joinpath("DONE").unlink()
    text = report(tmp_path / "runs", tmp_path / "out", capsys)
    assert both(text, "The single runs differ in data or vocabulary")
    assert "Single runs, kind 3 of 3" in text
    assert both(text, "runs/c is unfinished: its last line is at step 400 of 400")
