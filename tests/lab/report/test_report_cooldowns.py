"""A sweep's longer cool-downs, and its speeds: numbers by hand, and what is missing is said."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.report.cooldowns import share_form
from angular_lab.report.report import collect, make_report
from angular_lab.report.runs import read_run
from angular_lab.run_folder import RunFolder
from tests.lab.report.test_report_sweeps import (
    choosing,
    no_git,  # noqa: F401  (a fixture)
    spec_of,
    table,
    visible,
    write_run,
)

Losses = Mapping[tuple[str, float, int], float]  # by line, value and seed
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
    """Every entry gets a cool-down over 40 of the 200 steps, those with a loss a finished run."""
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


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


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
        (row["line"], float(row["lr"]), int(row["seed"])): float(
            row["200k tokens, longer cool-down"]
        )
        for row in runs
    }
    assert found == LONGER
    assert {row["status"] for row in runs} == {"done"}


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    """Other losses and another speed on the longer cool-downs move no other number or curve."""
    plain, out = choosing(tmp_path / "a" / "small"), tmp_path / "out"
    make_report([plain], out / "plain")
    make_report([add_longer(choosing(tmp_path / "b" / "small"))], out / "longer")
    own = {"small-cool-downs", "small-pairs-longer"}
    for kind in ("tables/*.csv", "figures/*.png"):
        before, after = ({p.stem: p for p in (out / x).glob(kind)} for x in ("plain", "longer"))
        assert after.keys() - before.keys() == (own if "csv" in kind else set())
        for name in before.keys() - {"small-runs"}:
            assert before[name].read_bytes() == after[name].read_bytes(), name
    slow = {row["tokens/s"] for row in table(out / "longer", "small-runs")}
    assert slow == {"1000.0"}
    assert warnings_of(tmp_path / "b" / "small") == warnings_of(plain)


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


def test_speed_of_training(tmp_path: Path) -> None:
    speeds = {"adamw": 2000.0, "angular_muown": 1000.0}
    root = choosing(tmp_path / "small", speeds=speeds)
    slow = root / "adamw-lr0.002-seed1-to100" / "timing.jsonl"
    slow.write_text('{"step": 100, "tokens_per_second": 500.0, "runs_at_once": 1}\n')
    make_report([root], tmp_path / "out")
    adamw, ours = table(tmp_path / "out", "small-pace")
    assert float(adamw["tokens/s"]) == 2000  # one slow run in nine does not move the median
    assert (adamw["slowest run"], adamw["fastest run"]) == ("500.0", "2000.0")
    assert adamw["runs"] == "9"  # three seeds: a trunk and two cool-downs each
    assert float(ours["minutes to 200k tokens"]) == pytest.approx(200_000 / 1000 / 60)
    relative = "time relative to angular_muown"
    assert (float(adamw[relative]), float(ours[relative])) == (0.5, 1.0)
    assert ours["device"] == "cpu"


def test_speeds_of_a_shared_device_are_not_compared(tmp_path: Path) -> None:
    """A run beside others logs the speed of its share."""
    speeds = {"adamw": 2000.0, "angular_muown": 1000.0}
    root = choosing(tmp_path / "small", speeds=speeds)
    beside = '{"step": 100, "tokens_per_second": 500.0, "runs_at_once": 4}\n'
    for path in root.glob("adamw-lr0.002-seed1*/timing.jsonl"):
        path.write_text(beside)
    make_report([root], tmp_path / "out")
    adamw, ours = table(tmp_path / "out", "small-pace")
    relative = "time relative to angular_muown"
    assert (adamw["at once"], ours["at once"]) == ("1 to 4", "1")
    assert float(adamw[relative]) == 0.5  # by what the other seeds logged alone
    for unknown in (beside, '{"step": 100, "tokens_per_second": 500.0}\n'):
        for path in root.glob("adamw*/timing.jsonl"):
            path.write_text(unknown)
        make_report([root], tmp_path / "out")
        adamw, _ = table(tmp_path / "out", "small-pace")
        why = "cannot be computed: adamw has no speed logged with the device to itself"
        assert (adamw["tokens/s"], adamw["minutes to 200k tokens"]) == ("", "")
        assert adamw[relative] == why
        (speed,) = table(tmp_path / "out", "small-speed-up")
        assert speed["in wall-clock"] == why
    assert adamw["at once"] == ""  # the log does not say


def test_speeds_that_cannot_be_compared(tmp_path: Path) -> None:
    root = choosing(tmp_path / "small")
    for path in root.glob("adamw*/spec.json"):
        edit_json(path, versions={"device": "gpu"})
    relative = "time relative to angular_muown"
    make_report([root], tmp_path / "out")
    adamw, ours = table(tmp_path / "out", "small-pace")
    assert adamw[relative] == "cannot be computed: they ran on cpu, gpu"
    assert float(ours[relative]) == 1
    for path in root.glob("adamw*/spec.json"):
        edit_json(path, made_in="another/run")
    make_report([root], tmp_path / "out")
    adamw, _ = table(tmp_path / "out", "small-pace")
    assert adamw[relative] == "cannot be computed: adamw has no run that was made in this sweep"
    for path in root.glob("adamw*/DONE"):
        path.unlink()
    make_report([root], tmp_path / "out")
    adamw, _ = table(tmp_path / "out", "small-pace")
    assert adamw[relative] == "cannot be computed: adamw has no finished run"
    for path in root.glob("*/timing.jsonl"):
        path.unlink()
    make_report([root], tmp_path / "none")
    assert not list((tmp_path / "none" / "tables").glob("*pace*"))
