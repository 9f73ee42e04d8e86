"""Verdicts that a reader of the report must not misunderstand."""

from pathlib import Path

import pytest

from angular_lab.experiments.comparison import experiment
from angular_lab.report.report import make_report
from angular_lab.report.verdicts import PAPER_CLAIMS
from tests.lab.report.made import HORIZONS, OURS, choosing, one_horizon, table, visible, write_sweep


def test_every_claim_can_be_checked_on_its_experiment(tmp_path: Path) -> None:
    """A sweep with the experiment's own labels has what the checks look for."""
    assert len({claim.text for claim in PAPER_CLAIMS}) == len(PAPER_CLAIMS)
    for name in {claim.experiment for claim in PAPER_CLAIMS}:
        plan = experiment(name, "s")
        ends = {0: dict.fromkeys(HORIZONS[: len(plan.horizons)], 3.0)}
        methods = {arm.label: (arm.spec.optim.name, {0.01: ends, 0.02: ends}) for arm in plan.arms}
        write_sweep(tmp_path / "runs" / name, methods, experiment=name, scale="paper")
    make_report([tmp_path / "runs"], tmp_path / "out")
    rulings = table(tmp_path / "out", "claims")
    assert [row["the paper's claim"] for row in rulings] == [claim.text for claim in PAPER_CLAIMS]
    assert not any("cannot be checked" in row["reason"] for row in rulings)


def test_a_speed_up_that_is_too_small_on_every_seed_is_missed(tmp_path: Path) -> None:
    page = make_report([choosing(tmp_path / "small")], tmp_path / "out")
    claims = {row["the paper's claim"]: row for row in table(tmp_path / "out", "claims")}
    row = claims["AngularMuown reaches AdamW's loss with about half the tokens"]
    assert row["verdict"] == "missed"
    assert row["reason"].startswith("faster, but by less than claimed: speed-up 1.41, 1.41 where")
    assert "is missed where it lies above the interval" in visible(page)


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
    ids=["one seed is not faster", "below from the first horizon on"],
)
def test_an_unknown_speed_up_is_not_missed(
    tmp_path: Path,
    first: dict[int, float],
    second: dict[int, float],
    theirs: dict[int, float],
    reason: str,
) -> None:
    methods = {
        "adamw": ("adamw", {0.002: {0: theirs, 1: theirs}}),
        OURS: (OURS, {0.02: {0: first, 1: second}}),
    }
    make_report([write_sweep(tmp_path / "small", methods)], tmp_path / "out")
    rows = table(tmp_path / "out", "claims")
    row = next(row for row in rows if "AdamW" in row["the paper's claim"])
    assert row["verdict"] == "inconclusive"
    assert row["reason"].startswith(reason)


def test_comparisons_of_two_seeds_or_more_come_first(tmp_path: Path) -> None:
    ours, theirs = {0.02: {0: {400: 2.9}}}, {0.01: {0: {400: 3.0}}}
    one_seed = {OURS: (OURS, ours), "muon": ("muon", theirs)}
    sweeps = [
        choosing(tmp_path / "small"),
        one_horizon(tmp_path / "other"),
        write_sweep(tmp_path / "alone", one_seed, experiment="angles"),
    ]
    make_report(sweeps, tmp_path / "out")
    assert table(tmp_path / "out", "alone-pairs")[0]["seeds"] == "one seed (0)"
    rows = table(tmp_path / "out", "pairs")
    assert [row["experiment"] for row in rows] == ["teaser, scale s", "tuned-adamw, scale s"]
    assert [row["verdict"] for row in rows] == ["holds", "leads on 2 of 2 seeds"]
    assert float(rows[1]["mean difference"]) == pytest.approx(-0.08)
