"""A sweep's longer cooldowns: numbers by hand, and warnings about what is missing."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.report.cooldowns import share_form
from angular_lab.report.figures import sweep_figures
from angular_lab.report.read import collect
from angular_lab.report.report import make_report
from angular_lab.run_folder import RunFolder
from tests.lab.report.made import choosing, edit_json, spec_of, table, visible, write_run

Losses = Mapping[tuple[str, float, int], float]  # by method, value and seed
LONGER: Losses = {
    ("angular_muown", 0.01, 0): 3.0,
    ("angular_muown", 0.02, 0): 2.75,
    ("angular_muown", 0.02, 1): 2.80,
    ("angular_muown", 0.02, 2): 2.76,
    ("angular_muown", 0.04, 0): 2.70,
    ("adamw", 0.001, 0): 3.1,
    ("adamw", 0.002, 0): 2.95,
    ("adamw", 0.002, 1): 2.93,
    ("adamw", 0.002, 2): 2.93,
}
OURS = "angular-muown-lr0.02-seed1-to200-longer"


def add_longer(root: Path, losses: Losses = LONGER, speed: float = 10.0) -> Path:
    """Give every entry a cooldown over 40 of the 200 steps, those with a loss a finished run."""
    content = json.loads((root / "sweep.json").read_text())
    for entry in content["entries"]:
        normal = entry["folders"]["200"]
        entry["longer"] = f"{normal}-longer"
        key = entry["label"], entry["value"], entry["seed"]
        if key in losses:
            spec = RunFolder(root / normal).read_spec()
            schedule = replace(spec.schedule, decay_steps=40)
            spec = replace(spec, parent_step=160, schedule=schedule)
            write_run(root / entry["longer"], spec, losses[key], speed=speed)
    (root / "sweep.json").write_text(json.dumps(content))
    return root


def warnings_of(root: Path) -> list[str]:
    (sweep,), _ = collect([root], [])
    return sweep.warnings


def test_numbers_by_hand(tmp_path: Path) -> None:
    page = make_report([add_longer(choosing(tmp_path / "small"))], tmp_path / "out")
    adamw, ours = table(tmp_path / "out", "small-cool-downs")
    normal, longer = "normal, 10% of the steps", "longer, 20% of the steps"
    assert float(ours["best lr"]) == 0.02
    assert float(ours[normal]) == pytest.approx((2.84 + 2.82) / 2)  # not seed 0
    assert float(ours[longer]) == pytest.approx((2.80 + 2.76) / 2)
    assert float(ours["longer - normal"]) == pytest.approx(-(0.04 + 0.06) / 2)
    assert float(adamw["longer - normal"]) == pytest.approx(0)  # -0.01 and +0.01
    assert ours["seeds of the difference"] == adamw["seeds of the difference"] == "2 seeds (1, 2)"
    assert float(ours["best lr with the longer one"]) == 0.04
    assert float(adamw["best lr with the longer one"]) == 0.002
    markdown = (tmp_path / "out" / "tables" / "small-cool-downs.md").read_text()
    assert "| 0.02 | **2.8300 (n=2)** | **2.7800 (n=2)** |" in markdown  # the lowest are bold
    assert "| 0.002 | 2.9300 (n=2) | 2.9300 (n=2) |" in markdown
    (pair,) = table(tmp_path / "out", "small-pairs-longer")
    assert (pair["claim"], pair["verdict"]) == ("angular_muown is below adamw", "holds")
    assert float(pair["mean difference"]) == pytest.approx(-(0.13 + 0.17) / 2)
    words = visible(page)
    assert "2.7800 (n=2)" in words
    assert "0.04 † (chosen was 0.02)" in words
    assert "The longer one would have chosen another for angular_muown." in words
    assert "0.002 † (" not in words  # the same as was chosen: nothing to say
    assert "at step 100, 200, and a longer one (20% of the steps) to the last." in words
    runs = table(tmp_path / "out", "small-runs")
    found = {
        (row["method"], float(row["lr"]), int(row["seed"])): float(
            row["200k tokens, longer cooldown"]
        )
        for row in runs
    }
    assert found == LONGER
    assert {row["status"] for row in runs} == {"done"}


def test_longer_cooldowns_change_no_other_number_or_curve(tmp_path: Path) -> None:
    plain, out = choosing(tmp_path / "a" / "small"), tmp_path / "out"
    longer = add_longer(choosing(tmp_path / "b" / "small"))
    before, after = (collect([root], [])[0][0] for root in (plain, longer))
    assert sweep_figures(before) == sweep_figures(after)
    assert before.warnings == after.warnings
    make_report([plain], out / "plain")
    make_report([longer], out / "longer")
    tables = [
        {p.stem: p.read_text() for p in (out / x / "tables").glob("*.csv")}
        for x in ("plain", "longer")
    ]
    added = {"small-cool-downs", "small-pairs-longer"}
    assert tables[1].keys() - tables[0].keys() == added
    for name in tables[0].keys() - {"small-runs"}:
        assert tables[0][name] == tables[1][name], name
    assert {row["tokens/s"] for row in table(out / "longer", "small-runs")} == {"1000.0"}


def test_before_the_judging_seeds_are_done(tmp_path: Path) -> None:
    """The first seed stands in, as in the other tables, but is not paired with other seeds."""
    first = {key: value for key, value in LONGER.items() if key[2] == 0 and key[1] != 0.04}
    root = add_longer(choosing(tmp_path / "small"), first)
    page = make_report([root], tmp_path / "out")
    ours = table(tmp_path / "out", "small-cool-downs")[1]
    assert float(ours["longer, 20% of the steps"]) == 2.75
    assert (ours["longer - normal"], ours["seeds of the difference"]) == ("", "no seed")
    assert "0.02 (so far, 1 unfinished)" in visible(page)
    (pair,) = table(tmp_path / "out", "small-pairs-longer")
    assert (pair["verdict"], pair["seeds"]) == ("inconclusive", "no seed")


def test_a_line_without_any(tmp_path: Path) -> None:
    ours = {key: value for key, value in LONGER.items() if key[0] == "angular_muown"}
    make_report([add_longer(choosing(tmp_path / "small"), ours)], tmp_path / "out")
    adamw = table(tmp_path / "out", "small-cool-downs")[0]
    assert float(adamw["normal, 10% of the steps"]) == pytest.approx(2.93)
    assert adamw["longer, 20% of the steps"] == adamw["best lr with the longer one"] == ""


def test_no_longer_run_at_all(tmp_path: Path) -> None:
    page = make_report([add_longer(choosing(tmp_path / "small"), {})], tmp_path / "out")
    assert not list((tmp_path / "out" / "tables").glob("*cool-downs*"))
    assert "200 (the longer cool-down)" in visible(page)


def test_missing_and_unfinished(tmp_path: Path) -> None:
    root = add_longer(choosing(tmp_path / "small"))
    shutil.rmtree(root / OURS)
    (root / "adamw-lr0.002-seed2-to200-longer" / "DONE").unlink()
    (root / "adamw-lr0.002-seed2-to200" / "DONE").unlink()
    found = warnings_of(root)
    assert f"{root / OURS} is named in sweep.json as done, but it is not there" in found
    unfinished = "is unfinished: no final loss at step"
    last = "200 (the longer cool-down)"
    assert f"angular_muown, lr 0.02, seed 1 {unfinished} {last}" in found
    assert f"adamw, lr 0.002, seed 2 {unfinished} 200, {last}" in found
    make_report([root], tmp_path / "out")
    (pair,) = table(tmp_path / "out", "small-pairs-longer")
    assert "only one side has seeds 1, 2" in pair["reason"]
    status = {row["folder"]: row["status"] for row in table(tmp_path / "out", "small-runs")}
    assert status["angular-muown-lr0.02-seed1"] == "unfinished"


def test_other_data_takes_the_whole_member_out(tmp_path: Path) -> None:
    root = add_longer(choosing(tmp_path / "small"))
    edit_json(root / OURS / "spec.json", data="other tokens")
    found = warnings_of(root)
    assert any(text.startswith("angular_muown, lr 0.02, seed 1 is left out of") for text in found)
    assert not any("not in sweep.json" in text for text in found)
    make_report([root], tmp_path / "out")
    assert table(tmp_path / "out", "small-final-loss")[1]["seeds"] == "one seed (2)"


@pytest.mark.parametrize("name", [OURS, OURS.removesuffix("-longer")])
def test_what_cannot_be_read_is_no_leftover(tmp_path: Path, name: str) -> None:
    root = add_longer(choosing(tmp_path / "small"))
    (root / name / "spec.json").write_text("{")
    found = [text for text in warnings_of(root) if name in text]
    assert len(found) == 1
    assert "cannot be read" in found[0]


def test_shares_are_those_of_the_runs(tmp_path: Path) -> None:
    def form(*lengths: tuple[int, int]) -> str:
        runs = []
        for steps, length in lengths:
            schedule = replace(spec_of().schedule, decay_steps=length)
            spec = spec_of(steps=steps, schedule=schedule, parent_step=steps - 10)
            run = read_run(write_run(tmp_path / f"{steps}-{length}", spec, 3.0), [])
            assert run is not None
            runs.append(run)
        return share_form(runs)

    assert form((5493, 549)) == "10%"  # 9.9945
    assert form((200, 25)) == "12.5%"
    assert form((200, 40), (100, 20), (200, 10)) == "5% or 20%"
    assert form() == ""
