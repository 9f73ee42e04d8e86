"""The table of averages: numbers that were made by hand, and which runs they come from."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab import run_folder as rundir
from angular_lab.config.spec import ModelSpec, OptimSpec, ScheduleSpec, Spec
from angular_lab.report.report import make_report
from angular_lab.run_folder import RunFolder

BASE = Spec(
    batch=4,
    steps=200,
    average="2,20",
    model=ModelSpec(vocabulary=257, sequence=250, layers=1, width=8, heads=1),
    optim=OptimSpec(name="angular_muown"),
    schedule=ScheduleSpec(warmup=10, decay=0.1),
)
Lines = dict[int, tuple[float, ...]]  # by step: the loss of the weights, and of each average


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "git_state", dict)


def write(folder: Path, spec: Spec, losses: Lines, done: bool = True) -> None:
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.write_spec(spec, {"device": "cpu"}, "tokens")
    for step, (weights, *averages) in losses.items():
        named = dict(zip(spec.averages.values(), averages, strict=True))
        tokens = step * spec.tokens_per_step
        line = {"step": step, "tokens": tokens, "loss": 3.0, "val_loss": weights, **named}
        run.append(run.metrics_path, line)
    if done:
        run.finish()


def sweep(root: Path, entries: list[dict[str, Any]], horizons: list[int]) -> None:
    common = {"label": "angular_muown", "axis": "optim.lr", "status": "done"}
    content = {
        "experiment": "average", "scale": "s", "title": "A made one", "lines": ["angular_muown"],
        "horizons": horizons, "seeds": [0, 1], "chosen": {},
        "entries": [{**common, **entry} for entry in entries],
    }  # fmt: skip
    (root / "sweep.json").write_text(json.dumps(content))


def table(root: Path, out: Path) -> list[dict[str, str]]:
    make_report([root], out)
    found = list(out.rglob("*-average.csv"))
    return list(csv.DictReader(found[0].read_text().splitlines())) if found else []


def trunk_and_branches(root: Path, seed: int, gain: float) -> dict[str, Any]:
    """Read out at 180, where the trunk ends, and at 100 and 200, where its cool-downs do."""
    constant = replace(BASE.schedule, kind="constant")
    trunk = replace(BASE, seed=seed, steps=180, schedule=constant)
    write(root / f"a{seed}", trunk, {90: (9.0, 9.0, 9.0), 180: (3.5, 3.5 - gain, 3.2)})
    for end, value in ((100, 3.4), (200, 3.1)):
        branch = replace(BASE, seed=seed, steps=end, parent="a", parent_step=end * 9 // 10)
        write(root / f"a{seed}-to{end}", branch, {end: (value, value + gain / 100, value)})
    longer = replace(BASE, seed=seed, parent="a", parent_step=160)  # not the normal cool-down
    write(root / f"a{seed}-to200-longer", longer, {200: (2.0, 1.0, 1.0)})
    folders = {str(end): f"a{seed}-to{end}" for end in (100, 200)}
    return {"value": 0.02, "seed": seed, "folders": folders, "longer": f"a{seed}-to200-longer"}


def test_each_run_is_its_own_partner(tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    entries = [trunk_and_branches(root, seed, gain) for seed, gain in ((0, 0.1), (1, 0.2))]
    sweep(root, entries, [100, 200])
    rows = table(root, tmp_path / "report")
    places = [(row["read out"], int(row["tokens"]) // 1000, int(row["window"])) for row in rows]
    assert sorted(places) == sorted(
        (name, step, window)
        for name, step in (("full rate", 180), ("cooled down", 100), ("cooled down", 200))
        for window in (2, 20)
    )
    found = dict(zip(places, rows, strict=True))
    uncooled = found["full rate", 180, 2]
    assert (uncooled["line"], uncooled["lr"]) == ("angular_muown", "0.02")
    numbers = [float(uncooled[key]) for key in ("weights", "average", "mean difference")]
    assert numbers == pytest.approx([3.5, 3.35, -0.15])
    assert uncooled["the average is below"] == "holds"
    assert uncooled["seeds"] == "2 seeds (0, 1)"
    assert found["full rate", 180, 20]["the average is below"] == "holds"
    cooled = found["cooled down", 200, 2]
    assert float(cooled["mean difference"]) == pytest.approx(0.0015)
    assert cooled["the average is below"] == "inconclusive"


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("wsd", {("full rate", "150000"), ("cooled down", "200000")}),
        ("cosine", {("cooled down", "200000")}),
    ],
)
def test_a_run_without_a_trunk(tmp_path: Path, kind: str, places: set[Any]) -> None:
    """Of its evaluations the last before the cool-down, which starts at 180, and the last."""
    root = tmp_path / "sweep"
    spec = replace(BASE, schedule=replace(BASE.schedule, kind=kind))
    values = {50: 5.0, 150: 4.0, 190: 3.5, 200: 3.0}
    write(root / "a", spec, {step: (value, value, value) for step, value in values.items()})
    write(root / "b", replace(spec, seed=1), {50: (5.0, 5.0, 5.0)}, done=False)
    ends = [(0, "a"), (1, "b")]
    sweep(root, [{"value": 1e-2, "seed": s, "folders": {"200": f}} for s, f in ends], [200])
    rows = table(root, tmp_path / "report")
    assert {(row["read out"], row["tokens"]) for row in rows} == places
    assert {row["seeds"] for row in rows} == {"one seed (0)"}
    assert len(rows) == 2 * len(places)


def test_windows_are_shown_as_they_are(tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    write(root / "a", replace(BASE, average="0.1,549"), {200: (3.0, 2.5, 2.75)})
    sweep(root, [{"value": 1e-2, "seed": 0, "folders": {"200": "a"}}], [200])
    rows = table(root, tmp_path / "report")
    assert [(row["window"], float(row["average"])) for row in rows] == [("0.1", 2.5), ("549", 2.75)]
    (ends,) = (tmp_path / "report" / "tables").glob("*-read-out.csv")
    (row,) = csv.DictReader(ends.read_text().splitlines())
    assert row == {"line": "angular_muown", "weights": "3.0"} | {
        "average, 0.1": "2.5",
        "average, 549": "2.75",
    }
    assert all(
        f">{window}</td>" in (tmp_path / "report" / "index.html").read_text()
        for window in ("0.1", "549")
    )


def test_a_seed_that_chose_elsewhere_is_no_judge(tmp_path: Path) -> None:
    """It still counts where a run is its own partner."""
    root = tmp_path / "sweep"
    ends = {0: (3.0, 2.5, 2.75), 1: (3.2, 2.9, 3.0)}
    for seed, losses in ends.items():
        write(root / f"a{seed}", replace(BASE, seed=seed), {200: losses})
    entries = [{"value": 1e-2, "seed": seed, "folders": {"200": f"a{seed}"}} for seed in ends]
    sweep(root, entries, [200])
    content = json.loads((root / "sweep.json").read_text())
    for settled_by, mean in ((None, "3.1"), (0, "3.2"), (7, "3.1")):
        (root / "sweep.json").write_text(json.dumps({**content, "settled_by": settled_by}))
        rows = table(root, tmp_path / f"report-{settled_by}")
        assert {row["seeds"] for row in rows} == {"2 seeds (0, 1)"}
        (found,) = (tmp_path / f"report-{settled_by}" / "tables").glob("*-read-out.csv")
        (row,) = csv.DictReader(found.read_text().splitlines())
        assert float(row["weights"]) == pytest.approx(float(mean))
    page = (tmp_path / "report-0" / "index.html").read_text()
    assert "Seed 0 chose the value, in another sweep, and does not count" in page


def test_no_table_without_averages(tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    write(root / "a", replace(BASE, average=""), {200: (3.0,)})
    sweep(root, [{"value": 1e-2, "seed": 0, "folders": {"200": "a"}}], [200])
    assert table(root, tmp_path / "report") == []
    assert not list((tmp_path / "report" / "tables").glob("*-read-out.csv"))


def test_lines_are_compared_by_their_averages_too(tmp_path: Path) -> None:
    """By the weights ours is 0.1 behind, by the averages over 2 steps 0.3 ahead, and where the
    other's average was not evaluated there is nothing to compare."""
    root, entries = tmp_path / "sweep", []
    for seed in (0, 1):
        for label, (weights, two, share) in (
            ("angular_muown", (3.1, 2.5, 2.4)),
            ("adamw", (3.0, 2.8, 2.9)),
        ):
            for end, more in ((100, 1.0), (200, 0.0)):
                losses = tuple(x + more + 0.01 * seed for x in (weights, two, share))
                average = "2,0.5" if label == "angular_muown" else "2"
                spec = replace(BASE, steps=end, seed=seed, average=average)
                kept = losses[: 1 + len(spec.averages)]
                write(root / f"{label}{seed}-to{end}", spec, {end: kept})
            folders = {str(end): f"{label}{seed}-to{end}" for end in (100, 200)}
            entries.append({"label": label, "value": 0.02, "seed": seed, "folders": folders})
    sweep(root, entries, [100, 200])
    content = json.loads((root / "sweep.json").read_text())
    content["lines"].append("adamw")
    (root / "sweep.json").write_text(json.dumps(content))
    table(root, tmp_path / "report")

    def rows(name: str) -> list[dict[str, str]]:
        (path,) = (tmp_path / "report").rglob(f"*-{name}.csv")
        return list(csv.DictReader(path.read_text().splitlines()))

    by_weights = {row["tokens"]: row for row in rows("pairs")}
    assert float(by_weights["200000.0"]["mean difference"]) == pytest.approx(0.1)
    found = {(row["window"], row["tokens"]): row for row in rows("pairs-averaged")}
    assert float(found["2", "200000.0"]["mean difference"]) == pytest.approx(-0.3)
    assert found["2", "200000.0"]["verdict"] == "holds"
    assert not found["0.5", "200000.0"]["mean difference"]
    (faster, nothing) = rows("speed-up-averaged")
    # 2.8 lies 0.7 of the way from 3.5 to 2.5, of a doubling of tokens
    assert float(faster["in tokens"]) == pytest.approx(2**0.3)
    assert nothing["window"] == "0.5"
    assert "cannot be computed" in nothing["in tokens"]
