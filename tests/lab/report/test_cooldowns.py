"""Variants of a sweep's cooldown: numbers by hand, and warnings about what is missing."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.report.cooldowns import share_form
from angular_lab.report.figures.sweep_figures import sweep_figures
from angular_lab.report.read import collect
from angular_lab.report.report import make_report
from angular_lab.run_folder import RUNS, RunFolder, read_run
from angular_lab.sweeps.sweep_file import SweepRecord, TrialRecord
from tests.lab.report.made import (
    choosing,
    edit_json,
    edit_sweep,
    spec_of,
    sweep_file,
    table,
    visible,
    write_run,
)

Losses = Mapping[tuple[str, float, int], float]  # by method, value and seed
LOSSES: Losses = {
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
VARIANT = ", cooldown 20%"
OURS = "angular-muown-lr0.02-seed1-to200-cooldown-20"
USUAL, OTHER = "usual, 10% of the steps", "20% of the steps"


def add_variants(root: Path, losses: Losses = LOSSES, speed: float = 10.0) -> Path:
    """Add a variant of every arm that cools down over 40 of the 200 steps. Trials that have a loss
    get a finished run, the others none."""
    record = SweepRecord.read(sweep_file(root))
    trials = []
    for trial in record.trials:
        usual = trial.runs[200]
        name = f"{usual}-cooldown-20"
        trials.append(
            TrialRecord(f"{trial.arm}{VARIANT}", trial.value, trial.seed, {200: name}, trial.trunk)
        )
        key = trial.arm, trial.value, trial.seed
        if key in losses:
            spec = RunFolder(root / RUNS / usual).read_spec()
            spec = replace(spec, parent_step=160, schedule=replace(spec.schedule, decay=0.2))
            write_run(root / RUNS / name, spec, losses[key], speed=speed)
    variants = [
        replace(arm, label=f"{arm.label}{VARIANT}", variant_of=arm.label) for arm in record.arms
    ]
    edit_sweep(root, arms=(*record.arms, *variants), trials=(*record.trials, *trials))
    return root


def warnings_of(root: Path) -> list[str]:
    (sweep,), _ = collect([root], [])
    return sweep.warnings


def test_numbers_by_hand(tmp_path: Path) -> None:
    page = make_report([add_variants(choosing(tmp_path / "small"))], tmp_path / "out")
    adamw, ours = table(tmp_path / "out", "small-cooldown-20")
    assert float(ours["best lr"]) == 0.02
    assert float(ours[USUAL]) == pytest.approx((2.84 + 2.82) / 2)  # not seed 0
    assert float(ours[OTHER]) == pytest.approx((2.80 + 2.76) / 2)
    assert float(ours["20% - usual"]) == pytest.approx(-(0.04 + 0.06) / 2)
    assert float(adamw["20% - usual"]) == pytest.approx(0)  # -0.01 and +0.01
    assert ours["seeds of the difference"] == adamw["seeds of the difference"] == "2 seeds (1, 2)"
    assert float(ours["best lr with 20%"]) == 0.04
    assert float(adamw["best lr with 20%"]) == 0.002
    markdown = (tmp_path / "out" / "tables" / "small-cooldown-20.md").read_text()
    assert "| 0.02 | **2.8300 (n=2)** | **2.7800 (n=2)** |" in markdown  # the lowest are bold
    assert "| 0.002 | 2.9300 (n=2) | 2.9300 (n=2) |" in markdown
    (pair,) = table(tmp_path / "out", "small-pairs-cooldown-20")
    assert (pair["claim"], pair["verdict"]) == (
        "angular_muown is below adamw",
        "leads on 2 of 2 seeds",
    )
    assert float(pair["mean difference"]) == pytest.approx(-(0.13 + 0.17) / 2)
    words = visible(page)
    assert "2.7800 (n=2)" in words
    assert "0.04 † (chosen was 0.02)" in words
    assert "This cooldown would have chosen another for angular_muown." in words
    assert "0.002 † (" not in words  # the same as was chosen: nothing to say
    assert "at step 100, 200, and one over 20% of the steps to the last." in words


def test_the_table_of_every_trial_has_variants_too(tmp_path: Path) -> None:
    make_report([add_variants(choosing(tmp_path / "small"))], tmp_path / "out")
    rows = table(tmp_path / "out", "small-runs")
    assert len(rows) == 2 * len(LOSSES)
    variants = [row for row in rows if row["method"].endswith(VARIANT)]
    assert {
        (row["method"].removesuffix(VARIANT), float(row["lr"]), int(row["seed"])): float(
            row["200k tokens"]
        )
        for row in variants
    } == LOSSES
    assert {row["100k tokens"] for row in variants} == {""}  # a variant has one horizon
    assert {row["status"] for row in rows} == {"done"}
    assert OURS in {row["run"] for row in variants}


def test_variants_change_no_other_number_or_curve(tmp_path: Path) -> None:
    plain, out = choosing(tmp_path / "a" / "small"), tmp_path / "out"
    varied = add_variants(choosing(tmp_path / "b" / "small"))
    before, after = (collect([root], [])[0][0] for root in (plain, varied))
    assert sweep_figures(before) == sweep_figures(after)
    assert before.warnings == after.warnings
    make_report([plain], out / "plain")
    make_report([varied], out / "varied")
    tables = [
        {p.stem: p.read_text() for p in (out / x / "tables").glob("*.csv")}
        for x in ("plain", "varied")
    ]
    added = {"small-cooldown-20", "small-pairs-cooldown-20"}
    assert tables[1].keys() - tables[0].keys() == added
    for name in tables[0].keys() - {"small-runs"}:
        assert tables[0][name] == tables[1][name], name
    assert tables[1]["small-runs"].startswith(tables[0]["small-runs"])  # the same rows, and more


def test_before_the_judging_seeds_are_done(tmp_path: Path) -> None:
    """The first seed stands in, as in the other tables, but is not paired with other seeds."""
    first = {key: value for key, value in LOSSES.items() if key[2] == 0 and key[1] != 0.04}
    root = add_variants(choosing(tmp_path / "small"), first)
    page = make_report([root], tmp_path / "out")
    ours = table(tmp_path / "out", "small-cooldown-20")[1]
    assert float(ours[OTHER]) == 2.75
    assert (ours["20% - usual"], ours["seeds of the difference"]) == ("", "no seed")
    assert "0.02 (so far, 1 unfinished)" in visible(page)
    (pair,) = table(tmp_path / "out", "small-pairs-cooldown-20")
    assert (pair["verdict"], pair["seeds"]) == ("inconclusive: no seed", "no seed")


def test_the_seed_that_chose_does_not_judge_a_variant_with_one_value(tmp_path: Path) -> None:
    """The value was chosen, whether or not the variant has runs at the others."""
    best = {key: value for key, value in LOSSES.items() if key[1] in (0.02, 0.002)}
    make_report([add_variants(choosing(tmp_path / "small"), best)], tmp_path / "out")
    ours = table(tmp_path / "out", "small-cooldown-20")[1]
    assert float(ours[OTHER]) == pytest.approx((2.80 + 2.76) / 2)
    (pair,) = table(tmp_path / "out", "small-pairs-cooldown-20")
    assert pair["seeds"] == "2 seeds (1, 2)"


def test_an_arm_whose_variant_has_no_run(tmp_path: Path) -> None:
    ours = {key: value for key, value in LOSSES.items() if key[0] == "angular_muown"}
    make_report([add_variants(choosing(tmp_path / "small"), ours)], tmp_path / "out")
    adamw = table(tmp_path / "out", "small-cooldown-20")[0]
    assert float(adamw[USUAL]) == pytest.approx(2.93)
    assert adamw[OTHER] == adamw["best lr with 20%"] == ""


def test_variants_without_any_run(tmp_path: Path) -> None:
    page = make_report([add_variants(choosing(tmp_path / "small"), {})], tmp_path / "out")
    assert not list((tmp_path / "out" / "tables").glob("*cooldown*"))
    assert f"adamw{VARIANT}, lr 0.002, seed 2 is unfinished: no final loss at step 200" in visible(
        page
    )


def test_missing_and_unfinished_variants(tmp_path: Path) -> None:
    root = add_variants(choosing(tmp_path / "small"))
    shutil.rmtree(root / RUNS / OURS)
    for name in ("adamw-lr0.002-seed2-to200", "adamw-lr0.002-seed2-to200-cooldown-20"):
        (root / RUNS / name / "DONE").unlink()
    warnings = warnings_of(root)
    unfinished = "is unfinished: no final loss at step 200"
    assert f"angular_muown{VARIANT}, lr 0.02, seed 1 {unfinished}" in warnings
    assert f"adamw, lr 0.002, seed 2 {unfinished}" in warnings
    assert f"adamw{VARIANT}, lr 0.002, seed 2 {unfinished}" in warnings
    make_report([root], tmp_path / "out")
    (pair,) = table(tmp_path / "out", "small-pairs-cooldown-20")
    assert "only one side has seeds 1, 2" in pair["reason"]
    status = {
        (row["method"], row["lr"], row["seed"]): row["status"]
        for row in table(tmp_path / "out", "small-runs")
    }
    assert status[f"angular_muown{VARIANT}", "0.02", "1"] == "unfinished"
    assert status["angular_muown", "0.02", "1"] == "done"


def test_a_variant_on_other_data_is_left_out_alone(tmp_path: Path) -> None:
    root = add_variants(choosing(tmp_path / "small"))
    edit_json(root / RUNS / OURS / "spec.json", data="other tokens")
    start = f"angular_muown{VARIANT}, lr 0.02, seed 1 is left out of"
    assert any(text.startswith(start) for text in warnings_of(root))
    make_report([root], tmp_path / "out")
    assert table(tmp_path / "out", "small-final-loss")[1]["seeds"] == "2 seeds (1, 2)"
    (pair,) = table(tmp_path / "out", "small-pairs-cooldown-20")
    assert pair["seeds"] == "one seed (2)"


@pytest.mark.parametrize("name", [OURS, OURS.removesuffix("-cooldown-20")])
def test_a_run_that_cannot_be_read_is_one_warning(tmp_path: Path, name: str) -> None:
    root = add_variants(choosing(tmp_path / "small"))
    (root / RUNS / name / "spec.json").write_text("{")
    (warning,) = [text for text in warnings_of(root) if f"{name}/" in text]
    assert "cannot be read" in warning


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
