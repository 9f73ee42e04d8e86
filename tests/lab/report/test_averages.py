"""The tables of averages: numbers computed by hand, and which runs they come from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.config.spec import ScheduleSpec, Spec
from angular_lab.report.report import make_report
from angular_lab.run_folder import RUNS
from angular_lab.sweeps.sweep_file import ArmRecord, TrialRecord
from tests.lab.report.made import OURS, edit_sweep, spec_of, table, write_lines, write_record

BASE = spec_of(steps=200, average=(2, 20), schedule=ScheduleSpec(warmup=10, decay=0.1))
VARIANT = f"{OURS}, cooldown 20%"
BEFORE, AFTER = "before the cooldown", "after the cooldown"
Losses = dict[int, tuple[float, ...]]  # by step: the loss of the weights, and of each average


def write(folder: Path, spec: Spec, losses: Losses) -> None:
    lines = []
    for step, (weights, *averages) in losses.items():
        named = dict(zip(spec.averages.values(), averages, strict=True))
        lines.append({"step": step, "loss": 3.0, "val_loss": weights, **named})
    write_lines(folder, spec, lines)


def write_ends(root: Path, spec: Spec, losses: dict[int, tuple[float, ...]]) -> None:
    """Write a sweep of one run by seed, with these losses at its end."""
    for seed, values in losses.items():
        write(root / RUNS / f"a{seed}", replace(spec, seed=seed), {spec.steps: values})
    write_record(root, [TrialRecord(OURS, 1e-2, seed, {spec.steps: f"a{seed}"}) for seed in losses])


def trunk_and_branches(runs: Path, seed: int, gain: float) -> list[TrialRecord]:
    """Write a trunk that ends at step 180, cooldowns that end at 100 and 200, and a variant."""
    trunk, constant = f"a{seed}", replace(BASE.schedule, kind="constant")
    write(
        runs / trunk,
        replace(BASE, seed=seed, steps=180, schedule=constant),
        {90: (9.0, 9.0, 9.0), 180: (3.5, 3.5 - gain, 3.2)},
    )
    for end, value in ((100, 3.4), (200, 3.1)):
        branch = replace(BASE, seed=seed, steps=end, parent=trunk, parent_step=end * 9 // 10)
        write(runs / f"{trunk}-to{end}", branch, {end: (value, value + gain / 100, value)})
    schedule = replace(BASE.schedule, decay=0.2)
    variant = replace(BASE, seed=seed, parent=trunk, parent_step=160, schedule=schedule)
    write(runs / f"{trunk}-variant", variant, {200: (2.0, 1.0, 1.0)})
    ends = {end: f"{trunk}-to{end}" for end in (100, 200)}
    return [
        TrialRecord(OURS, 0.02, seed, ends, trunk),
        TrialRecord(VARIANT, 0.02, seed, {200: f"{trunk}-variant"}, trunk),
    ]


def test_each_average_is_compared_with_the_weights_of_its_run(tmp_path: Path) -> None:
    root = tmp_path / "small"
    trials = [
        trial
        for seed, gain in ((0, 0.1), (1, 0.2))
        for trial in trunk_and_branches(root / RUNS, seed, gain)
    ]
    arms = (
        ArmRecord(OURS, OURS, "optim.lr", (0.02,)),
        ArmRecord(VARIANT, OURS, "optim.lr", (0.02,), variant_of=OURS),
    )
    make_report([write_record(root, trials, arms=arms)], tmp_path / "out")
    rows = table(tmp_path / "out", "small-average")
    places = [(row["evaluated"], int(row["tokens"]) // 1000, int(row["window"])) for row in rows]
    assert sorted(places) == sorted(
        (name, step, window)
        for name, step in ((BEFORE, 180), (AFTER, 100), (AFTER, 200))
        for window in (2, 20)
    )
    by_place = dict(zip(places, rows, strict=True))
    before = by_place[BEFORE, 180, 2]
    assert (before["method"], before["lr"]) == (OURS, "0.02")
    numbers = [float(before[key]) for key in ("weights", "average", "mean difference")]
    assert numbers == pytest.approx([3.5, 3.35, -0.15])
    assert before["the average is below"] == "leads on 2 of 2 seeds"  # -0.1 and -0.2
    assert before["seeds"] == "2 seeds (0, 1)"
    assert by_place[BEFORE, 180, 20]["the average is below"] == "holds"
    after = by_place[AFTER, 200, 2]
    assert float(after["mean difference"]) == pytest.approx(0.0015)
    assert after["the average is below"] == "inconclusive: less than 0.005"


@pytest.mark.parametrize(
    ("kind", "places"),
    [("wsd", {(BEFORE, "150000"), (AFTER, "200000")}), ("cosine", {(AFTER, "200000")})],
)
def test_a_run_without_a_trunk(tmp_path: Path, kind: str, places: set[Any]) -> None:
    """The last evaluation before the cooldown, which starts at 180, and the last of all."""
    root = tmp_path / "small"
    spec = replace(BASE, schedule=replace(BASE.schedule, kind=kind))
    values = {50: 5.0, 150: 4.0, 190: 3.5, 200: 3.0}
    write(root / RUNS / "a", spec, {step: (value, value, value) for step, value in values.items()})
    write(root / RUNS / "b", replace(spec, seed=1), {50: (5.0, 5.0, 5.0)})
    (root / RUNS / "b" / "DONE").unlink()
    write_record(root, [TrialRecord(OURS, 1e-2, s, {200: x}) for s, x in enumerate("ab")])
    make_report([root], tmp_path / "out")
    rows = table(tmp_path / "out", "small-average")
    assert {(row["evaluated"], row["tokens"]) for row in rows} == places
    assert {row["seeds"] for row in rows} == {"one seed (0)"}
    assert len(rows) == 2 * len(places)


def test_windows_are_shown_as_they_were_set(tmp_path: Path) -> None:
    write_ends(tmp_path / "small", replace(BASE, average=(0.1, 549)), {0: (3.0, 2.5, 2.75)})
    page = make_report([tmp_path / "small"], tmp_path / "out").read_text()
    rows = table(tmp_path / "out", "small-average")
    assert [(row["window"], float(row["average"])) for row in rows] == [("0.1", 2.5), ("549", 2.75)]
    (row,) = table(tmp_path / "out", "small-final-loss-averaged")
    assert row == {"method": OURS, "weights": "3.0", "average, 0.1": "2.5", "average, 549": "2.75"}
    assert all(f">{window}</td>" in page for window in ("0.1", "549"))


def test_a_seed_that_chose_elsewhere_does_not_judge(tmp_path: Path) -> None:
    """It still counts where an average is compared with the weights of its own run."""
    root = tmp_path / "small"
    write_ends(root, BASE, {0: (3.0, 2.5, 2.75), 1: (3.2, 2.9, 3.0)})
    for seed, mean in ((None, "3.1"), (7, "3.1"), (0, "3.2")):
        edit_sweep(root, tuning_seed=seed)
        page = make_report([root], tmp_path / "out")
        rows = table(tmp_path / "out", "small-average")
        assert {row["seeds"] for row in rows} == {"2 seeds (0, 1)"}
        (row,) = table(tmp_path / "out", "small-final-loss-averaged")
        assert float(row["weights"]) == pytest.approx(float(mean))
    assert "Seed 0 chose the value, in another sweep, and does not count" in page.read_text()


def test_no_table_without_averages(tmp_path: Path) -> None:
    write_ends(tmp_path / "small", replace(BASE, average=()), {0: (3.0,)})
    make_report([tmp_path / "small"], tmp_path / "out")
    assert not list((tmp_path / "out" / "tables").glob("*average*"))


def test_methods_are_compared_by_their_averages_too(tmp_path: Path) -> None:
    """By the weights ours is 0.1 behind, by the averages over 2 steps 0.3 ahead, and where the
    other's average was not evaluated there is nothing to compare."""
    root, trials = tmp_path / "small", []
    for seed in (0, 1):
        for arm, average, losses in (
            (OURS, (2, 0.5), (3.1, 2.5, 2.4)),
            ("adamw", (2,), (3.0, 2.8)),
        ):
            for end, more in ((100, 1.0), (200, 0.0)):
                spec = replace(BASE, steps=end, seed=seed, average=average)
                values = tuple(x + more + 0.01 * seed for x in losses)
                write(root / RUNS / f"{arm}{seed}-to{end}", spec, {end: values})
            runs = {end: f"{arm}{seed}-to{end}" for end in (100, 200)}
            trials.append(TrialRecord(arm, 0.02, seed, runs))
    write_record(root, trials, {OURS: OURS, "adamw": "adamw"})
    make_report([root], tmp_path / "out")
    by_weights = {row["tokens"]: row for row in table(tmp_path / "out", "small-pairs")}
    assert float(by_weights["200000.0"]["mean difference"]) == pytest.approx(0.1)
    pairs = table(tmp_path / "out", "small-pairs-averaged")
    by_window = {(row["window"], row["tokens"]): row for row in pairs}
    assert float(by_window["2", "200000.0"]["mean difference"]) == pytest.approx(-0.3)
    assert by_window["2", "200000.0"]["verdict"] == "holds"
    assert not by_window["0.5", "200000.0"]["mean difference"]
    (faster, nothing) = table(tmp_path / "out", "small-speed-up-averaged")
    # 2.8 lies 0.7 of the way from 3.5 to 2.5, of a doubling of tokens
    assert float(faster["in tokens"]) == pytest.approx(2**0.3)
    assert nothing["window"] == "0.5"
    assert "cannot be computed" in nothing["in tokens"]
