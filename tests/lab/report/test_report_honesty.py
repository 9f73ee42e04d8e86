"""What a reader of the report must not be led to believe."""

import json
from pathlib import Path

import pytest

from angular_lab.report.figures import sweep_figures
from angular_lab.report.report import collect, make_report
from tests.lab.report.test_report_sweeps import (
    choosing,
    no_git,  # noqa: F401  (a fixture)
    table,
    visible,
    write_sweep,
)


def one_horizon(root: Path) -> Path:
    """AngularMuown at one rate, AdamW over a grid of another setting."""
    ours = {0.02: {0: {400: 2.9}, 1: {400: 2.92}, 2: {400: 2.94}}}
    theirs = {0.008: {0: {400: 3.2}}, 0.016: {0: {400: 3.0}, 1: {400: 3.02}, 2: {400: 3.0}}}
    lines = {"angular_muown": ("angular_muown", ours), "adamw": ("adamw", theirs)}
    write_sweep(root, lines, experiment="tuned-adamw")
    content = json.loads((root / "sweep.json").read_text())
    for entry in content["entries"]:
        if entry["label"] == "adamw":
            entry["axis"] = "optim.aux_lr"
    (root / "sweep.json").write_text(json.dumps(content))
    return root


def test_a_speed_up_that_every_seed_has_too_little_of_is_missed(tmp_path: Path) -> None:
    page = make_report([choosing(tmp_path / "small")], tmp_path / "out")
    claims = {row["the paper's claim"]: row for row in table(tmp_path / "out", "claims")}
    row = claims["AngularMuown reaches AdamW's loss with about half the tokens"]
    assert row["verdict"] == "missed"
    assert row["reason"].startswith("faster, but by less than claimed: speed-up 1.41, 1.41 where")
    assert "missed where every seed has one and all have less than that" in visible(page)


@pytest.mark.parametrize(
    ("first", "second", "theirs", "reason"),
    [
        (
            {100: 3.04, 200: 2.84},
            {100: 3.2, 200: 3.1},
            {100: 3.1, 200: 2.94},
            "not faster on every seed: speed-up 1.41, below 1 where",
        ),
        (
            {200: 2.9, 300: 2.8},
            {200: 2.9, 300: 2.8},
            {200: 3.0, 300: 2.92},
            "faster, by how much cannot be told: speed-up at least 1.50, at least 1.50 where",
        ),
    ],
    ids=["one seed has none", "below from the first horizon on"],
)
def test_a_speed_up_that_cannot_be_told_is_not_missed(
    tmp_path: Path,
    first: dict[int, float],
    second: dict[int, float],
    theirs: dict[int, float],
    reason: str,
) -> None:
    lines = {
        "adamw": ("adamw", {0.002: {0: theirs, 1: theirs}}),
        "angular_muown": ("angular_muown", {0.02: {0: first, 1: second}}),
    }
    make_report([write_sweep(tmp_path / "small", lines)], tmp_path / "out")
    rows = table(tmp_path / "out", "claims")
    row = next(row for row in rows if "AdamW" in row["the paper's claim"])
    assert row["verdict"] == "inconclusive"
    assert row["reason"].startswith(reason)


def test_values_of_another_setting_are_not_called_by_its_name(tmp_path: Path) -> None:
    page = make_report([one_horizon(tmp_path / "small")], tmp_path / "out")
    ours, adamw = table(tmp_path / "out", "small-final-loss")
    assert (ours["best aux_lr"], adamw["best aux_lr"]) == ("", "0.016")
    (by_value,) = table(tmp_path / "out", "small-loss-by-value")
    assert by_value.pop("line") == "adamw"
    assert list(by_value) == ["0.008", "0.016"]
    assert "Each line at its best value (angular_muown, lr 0.02, adamw, aux_lr 0.016)" in visible(
        page
    )


def test_training_losses_stand_beside_the_others(tmp_path: Path) -> None:
    make_report([one_horizon(tmp_path / "small")], tmp_path / "out")
    ours, adamw = table(tmp_path / "out", "small-training")
    later = 1.01 - 335 / 400  # a made run's mean over steps 270 to 400, above its end
    assert float(ours["training"]) == pytest.approx(2.93 + later)
    assert ours["training, by seed"] == f"1: {2.92 + later:.4f}, 2: {2.94 + later:.4f}"
    assert float(adamw["validation"]) == pytest.approx(3.01)
    assert float(adamw["validation - training"]) == pytest.approx(-later)


def test_who_is_ahead_is_said_first(tmp_path: Path) -> None:
    ours, theirs = {0.02: {0: {400: 2.9}}}, {0.01: {0: {400: 3.0}}}
    judged_by_one = {"angular_muown": ("angular_muown", ours), "muon": ("muon", theirs)}
    sweeps = [
        choosing(tmp_path / "small"),
        one_horizon(tmp_path / "other"),
        write_sweep(tmp_path / "alone", judged_by_one, experiment="angles"),
    ]
    make_report(sweeps, tmp_path / "out")
    assert table(tmp_path / "out", "alone-pairs")[0]["seeds"] == "one seed (0)"
    rows = table(tmp_path / "out", "pairs")
    assert [row["experiment"] for row in rows] == ["teaser, scale s", "tuned-adamw, scale s"]
    assert [row["verdict"] for row in rows] == ["holds", "holds"]
    assert float(rows[1]["mean difference"]) == pytest.approx(-0.08)


def test_speeds_of_shares_are_left_out(tmp_path: Path) -> None:
    """Runs that all shared their device tell who was beside whom."""
    root = choosing(tmp_path / "small")
    for path in root.glob("*/timing.jsonl"):
        path.write_text(path.read_text().replace('"runs_at_once": 1', '"runs_at_once": 4'))
    page = make_report([root], tmp_path / "out")
    assert not (tmp_path / "out" / "tables" / "small-pace.csv").exists()
    (speed,) = table(tmp_path / "out", "small-speed-up")
    assert "in wall-clock" not in speed
    assert "Speeds are not compared: no run is known to have had its device" in visible(page)
    assert all(float(row["tokens/s"]) > 0 for row in table(tmp_path / "out", "small-runs"))


def test_differences_have_a_figure_of_their_own(tmp_path: Path) -> None:
    """Seed by seed: at 100k tokens AdamW is 0.09 above ours on both seeds."""
    (sweep,), _ = collect([choosing(tmp_path / "small")], [])
    figure = next(f for f in sweep_figures(sweep) if f.key == "small-above-ours")
    lines = {trace.label: trace for trace in figure.panel.traces if trace.label}
    assert list(lines["adamw"].ys) == pytest.approx([0.09, 0.1])
    assert list(lines["angular_muown"].ys) == [0, 0]
