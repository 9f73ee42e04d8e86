"""The report on sweeps: its numbers against numbers computed by hand. Nothing is trained here."""

import re
import shutil
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from angular_lab.report.figures.plots import COLORS
from angular_lab.report.figures.sweep_figures import colors, interpolate, prediction, sweep_figures
from angular_lab.report.headlines import judged_sentence, verdicts_sentence
from angular_lab.report.read import collect, read_sweep
from angular_lab.report.report import make_report
from angular_lab.report.verdicts import all_pairs_table, constant_phase_ratio
from angular_lab.run_folder import RUNS, read_run
from angular_lab.sweeps.sweep_file import TrialRecord
from tests.lab.report.made import (
    HORIZONS,
    OURS,
    Grid,
    choosing,
    one_horizon,
    paper_teaser,
    spec_of,
    table,
    visible,
    write_record,
    write_run,
    write_sweep,
)


def test_the_papers_numbers_give_the_papers_speed_ups(tmp_path: Path) -> None:
    page = make_report([paper_teaser(tmp_path / "runs" / "teaser-s")], tmp_path / "out")
    rows = {row["over"]: row for row in table(tmp_path / "out", "teaser-s-speed-up")}
    for name, expected in (("adamw", 2.15), ("normuon", 1.86), ("muown", 1.62)):
        for column in ("in tokens", "the paper's figure, in tokens"):
            assert float(rows[name][column]) == pytest.approx(expected, abs=0.005)
        assert rows[name]["95% interval"] == "none: one seed"
        assert rows[name]["seeds"] == "one seed (0)"
        assert visible(page).count(f"{expected:.2f}×") == 2
    claims = table(tmp_path / "out", "claims")
    assert [row["verdict"] for row in claims] == ["inconclusive"] * 4  # one seed
    assert "agrees on 1 of 1 seed, and it takes at least 4: speed-up" in claims[1]["reason"]


def test_with_more_seeds_the_papers_claims_hold(tmp_path: Path) -> None:
    make_report([paper_teaser(tmp_path / "teaser-s", (0, 1, 2))], tmp_path / "out")
    assert [row["verdict"] for row in table(tmp_path / "out", "claims")] == ["holds"] * 4
    pairs = table(tmp_path / "out", "teaser-s-pairs")
    assert len(pairs) == 3 * len(HORIZONS)
    last = next(
        r for r in pairs if r["claim"].endswith("below muown") and r["tokens"] == "400000.0"
    )
    assert float(last["mean difference"]) == pytest.approx(2.902 - 2.949)
    assert last["seeds"] == "3 seeds (0, 1, 2)"  # no grid: no seed had to choose


def test_tables_by_hand(tmp_path: Path) -> None:
    make_report([choosing(tmp_path / "small")], tmp_path / "out")
    adamw, ours = table(tmp_path / "out", "small-final-loss")
    assert float(ours["at 100k"]) == pytest.approx(3.03)  # (3.04 + 3.02) / 2: not seed 0
    assert float(adamw["at 200k"]) == pytest.approx(2.93)
    assert ours["seeds"] == "2 seeds (1, 2)"
    assert float(ours["best lr"]) == 0.02
    assert float(ours["paper at 10B"]) == 2.902
    # Seed 1: 2.94 lies half-way from 3.04 to 2.84; seed 2 is the same, 0.02 lower.
    (speed,) = table(tmp_path / "out", "small-speed-up")
    assert float(speed["in tokens"]) == pytest.approx(sqrt(2))
    assert speed["95% interval"] == "1.41 to 1.41"
    assert [row["verdict"] for row in table(tmp_path / "out", "small-pairs")] == ["holds"] * 2
    by_value = table(tmp_path / "out", "small-loss-by-value")
    assert [float(by_value[1][v]) for v in ("0.01", "0.02", "0.04")] == [3.1, 2.8, 2.9]
    assert by_value[0]["0.01"] == ""
    markdown = (tmp_path / "out" / "tables" / "small-loss-by-value.md").read_text()
    assert "**2.8000**" in markdown  # the best, inside its grid
    assert "**3.0000 †**" in markdown  # the best, at the edge of its grid
    runs = table(tmp_path / "out", "small-runs")
    assert {row["tokens/s"] for row in runs} == {"1000.0"}
    assert {row["status"] for row in runs} == {"done"}


def test_values_of_another_setting_and_training_losses(tmp_path: Path) -> None:
    page = make_report([one_horizon(tmp_path / "small")], tmp_path / "out")
    ours, adamw = table(tmp_path / "out", "small-final-loss")
    assert (ours["best aux_lr"], adamw["best aux_lr"]) == ("", "0.016")
    (by_value,) = table(tmp_path / "out", "small-loss-by-value")
    assert by_value.pop("method") == "adamw"
    assert list(by_value) == ["0.008", "0.016"]
    chosen = "Each method at its best value (angular_muown, lr 0.02, adamw, aux_lr 0.016)"
    assert chosen in visible(page)
    assert "Speed-ups cannot be computed: one horizon" in visible(page)
    ours, adamw = table(tmp_path / "out", "small-training")
    above = 1.01 - 335 / 400  # a run's mean over its steps 270 to 400, above its end
    assert float(ours["training"]) == pytest.approx(2.93 + above)
    assert ours["training, by seed"] == f"1: {2.92 + above:.4f}, 2: {2.94 + above:.4f}"
    assert float(adamw["validation"]) == pytest.approx(3.01)
    assert float(adamw["validation - training"]) == pytest.approx(-above)


def test_width_qwen2_moe_and_speedrun(tmp_path: Path) -> None:
    def grid(*losses: float) -> Grid:
        return {lr: {0: {100: x}} for lr, x in zip((0.01, 0.02, 0.04), losses, strict=True)}

    root = tmp_path / "runs"
    widths = {"d = 8": (OURS, grid(3, 2.9, 3.1)), "d = 16": (OURS, grid(2.9, 2.8, 3.0))}
    write_sweep(root / "width-s", widths, experiment="width")
    qwen2 = {
        OURS: (OURS, grid(2.8, 2.7, 2.6)),
        "angular_muown, kappa = 1": (OURS, grid(2.7, 2.75, 2.9)),
        "normuon": ("normuon", grid(2.7, 2.72, 2.75)),
    }
    write_sweep(root / "qwen2-s", qwen2, experiment="qwen2")
    labels = ("angular_muown, RMS scale", "angular_muown, spectral scale", "muon")
    moe = {x: (x.partition(",")[0], grid(2.5, 2.4, 2.45)) for x in labels}
    write_sweep(root / "moe-s", moe, experiment="moe")
    losses = {seed: {100: loss} for seed, loss in enumerate((3.276, 3.277, 3.278, 3.277))}
    speedrun = {OURS: (OURS, {0.02: losses})}
    write_sweep(root / "speedrun-paper", speedrun, experiment="speedrun", scale="paper")
    page = make_report([root], tmp_path / "out")
    claims = table(tmp_path / "out", "claims")
    found = [(row["experiment"].partition(",")[0], row["verdict"]) for row in claims]
    unsure = [("width", "inconclusive"), *[("qwen2", "inconclusive")] * 3, ("moe", "inconclusive")]
    assert found == [*unsure, ("speedrun", "holds")]  # (3.28 - 3.277) * 2 = 0.006
    assert (
        "agrees on 1 of 1 seed, and it takes at least 4: d = 8: 0.02, d = 16: 0.02"
        in claims[0]["reason"]
    )
    assert "0.02: -0.0200, 0.04: -0.1500" in claims[2]["reason"]
    assert "0.2000 above the best" in claims[3]["reason"]
    (run,) = table(tmp_path / "out", "speedrun-paper-speedrun")
    assert float(run["(target - mean) * sqrt(n)"]) == pytest.approx(0.006)
    assert run["passes"] == "True"
    losses_by_width = (tmp_path / "out" / "tables" / "width-s-final-loss.md").read_text()
    assert "| 2.8000 (n=1) |" in losses_by_width  # not bold: sizes do not compete
    assert visible(page).count("Speed-ups cannot be computed") == 2  # qwen2, moe
    rows = table(tmp_path / "out", "qwen2-s-loss-by-value")
    assert [row["source"] for row in rows] == ["ours", "the paper's"] * 3
    assert (rows[1]["0.04"], rows[0]["0.04"], rows[0]["0.004"]) == ("2.648", "2.6", "")
    assert table(tmp_path / "out", "moe-s-loss-by-value")[5]["0.0006"] == "2.5255"


@pytest.mark.usefixtures("drawn")
def test_every_figure_is_on_the_page_and_in_two_stable_files(tmp_path: Path) -> None:
    root, out = choosing(tmp_path / "small"), tmp_path / "out"
    page = make_report([root], out)
    names = {
        "differences",
        "loss-curves",
        "horizons",
        "above-ours",
        "loss-by-value",
        "angles",
        "row-norms",
    }
    files = {path.name: path.read_bytes() for path in (out / "figures").iterdir()}
    assert files.keys() == {f"small-{name}.{kind}" for name in names for kind in ("svg", "png")}
    for name, content in files.items():
        assert b"<metadata" not in content, name  # neither version nor date
        assert b"Software" not in content, name
    text = page.read_text()
    assert text.count("<svg") == text.count("<figcaption>") == len(names)
    assert all(link.startswith("#") for link in re.findall(r"(?:src|href)=[\"']?([^\"' >]+)", text))
    assert "Dashed, the theory: a plateau at √(2·lr·weight decay); lr·κ_t" in visible(page)
    make_report([root], out)
    assert files == {path.name: path.read_bytes() for path in (out / "figures").iterdir()}


def test_one_figure_shows_differences_seed_by_seed(tmp_path: Path) -> None:
    """At 100k tokens AdamW is 0.09 above ours on both seeds."""
    (sweep,), _ = collect([choosing(tmp_path / "small")], [])
    figure = next(f for f in sweep_figures(sweep) if f.key == "small-above-ours")
    traces = {trace.label: trace for trace in figure.panel.traces if trace.label}
    assert list(traces["adamw"].ys) == pytest.approx([0.09, 0.1])
    assert list(traces[OURS].ys) == [0, 0]


def test_predicted_angles(tmp_path: Path) -> None:
    def predicted(name: str, kind: str = "wsd", **optim: Any) -> list[float]:
        spec = spec_of(name)
        optim = {"lr": 0.02, **optim}
        spec = replace(spec, optim=replace(spec.optim, **optim))
        spec = replace(spec, schedule=replace(spec.schedule, kind=kind))
        run = read_run(write_run(tmp_path / "-".join([name, kind, *optim]), spec, 3.0), [])
        assert run is not None
        found = prediction(run)
        return found.ys if found else []

    without_decay = {name: predicted(name) for name in ("muown", "normuown", OURS)}
    plateau = pytest.approx([sqrt(0.004)] * 35)  # 20 .. 360
    assert predicted("muon", weight_decay=0.1) == plateau
    assert predicted("normuon", weight_decay=0.1) == plateau
    assert predicted("adamw", weight_decay=0.1) == plateau
    assert predicted("adamw", "constant", weight_decay=0.1) == [sqrt(0.004)] * 39  # 20 .. 400
    assert predicted("adamw", "cosine", weight_decay=0.1) == []
    # Decay does not move a direction that has a length of its own, or a fixed one.
    assert predicted("hyperball", weight_decay=0.1) == []
    assert predicted("magnitude_direction", weight_decay=0.1) == []
    for name in without_decay:
        assert predicted(name, weight_decay=0.1) == without_decay[name]
    # The angles were written as 0.5 / sqrt(t): the height is found again.
    assert without_decay["muown"] == pytest.approx(
        [0.5 / sqrt(step) for step in range(20, 361, 10)]
    )
    kappa = [0.02 / (1 + 1e-3 * max(0, step - 11)) for step in range(10, 401, 10)]
    assert without_decay[OURS] == pytest.approx(kappa)
    assert predicted(OURS, scale="rms") == []


@pytest.mark.parametrize(
    ("kind", "expected"),  # medians of the first and last quarter of steps 20 to 360, or to 400
    [
        ("wsd", (320**-0.5 + 330**-0.5) / (50**-0.5 + 60**-0.5)),
        ("constant", sqrt(60 / 360)),
        ("cosine", None),
    ],
)
def test_change_of_the_angle_over_the_constant_phase(
    tmp_path: Path, kind: str, expected: float | None
) -> None:
    spec = spec_of("muown")
    spec = replace(spec, schedule=replace(spec.schedule, kind=kind))
    run = read_run(write_run(tmp_path / "run", spec, 3.0), [])
    assert run is not None
    assert constant_phase_ratio(run) == (expected and pytest.approx(expected))


def test_interpolation_and_colors() -> None:
    assert interpolate([1, 3], [10, 20], 2) == 15
    assert interpolate([1, 3], [10, 20], 0.5) is None
    assert interpolate([1, 3], [10, 20], 9) == 20
    painted = colors([("a", "muon"), ("b", "muon"), ("c", OURS)])
    assert painted == {"a": 4, "b": 4 + len(COLORS), "c": 1}  # b: dashed, in Muon's colour
    painted = colors([(name, OURS) for name in "abc"])
    assert painted == {"a": 1, "b": 0, "c": 2}  # one optimizer: the colours tell methods apart


def test_single_runs_next_to_a_sweep(tmp_path: Path) -> None:
    choosing(tmp_path / "runs" / "small")
    for name in ("muon", "muown"):
        write_run(tmp_path / "runs" / "deep" / name, spec_of(name), 3.1)
    sweeps, runs = collect([tmp_path / "runs", tmp_path / "runs" / "small"], [])
    assert [sweep.experiment for sweep in sweeps] == ["teaser"]
    assert [run.name for run in runs] == ["muon", "muown"]
    page = make_report([tmp_path / "runs"], tmp_path / "out")
    rows = table(tmp_path / "out", "single-runs-1-summary")
    ends = [(row["optimizer"], row["validation loss"]) for row in rows]
    assert ends == [("muon", "3.1"), ("muown", "3.1")]
    assert "Single runs" in visible(page)


def test_a_straight_trial_may_be_another_sweeps_cooldown(tmp_path: Path) -> None:
    """Then it has the trunk's log up to the branch point, and is not a single run."""
    root, name = choosing(tmp_path / "small"), "angular-muown-lr0.02-seed0"
    write_record(root, [TrialRecord(OURS, 0.02, 0, {200: f"{name}-to200"})], name="straight")
    sweeps, single = collect([root], [])
    assert single == []
    small, straight = sorted(sweeps, key=lambda sweep: sweep.key)
    run = straight.trials[0].ends[200]
    assert [line.step for line in run.metrics] == list(range(10, 201, 10))
    trunk = small.of_arm(OURS)[1].trunk
    assert trunk is not None
    assert run.metrics[:18] == trunk.metrics  # it has 180 steps
    assert run.final == (200_000, 2.8)
    assert straight.warnings == ["angular_muown: not chosen yet, 0.02 is the best so far"]
    cooldown = small.of_arm(OURS)[1].ends[200]
    assert [line.step for line in cooldown.metrics] == [190, 200]
    make_report([root], tmp_path / "out")
    rows = table(tmp_path / "out", "straight-runs")
    assert [row["run"] for row in rows] == [f"{name}-to200"]


def test_a_cooldown_whose_trunk_is_gone_keeps_its_own_log(tmp_path: Path) -> None:
    root, name = choosing(tmp_path / "small"), "angular-muown-lr0.02-seed0"
    write_record(root, [TrialRecord(OURS, 0.02, 0, {200: f"{name}-to200"})], name="straight")
    shutil.rmtree(root / RUNS / name)
    sweep = read_sweep(root / "sweeps" / "straight.json", [])
    assert sweep is not None
    assert [line.step for line in sweep.trials[0].ends[200].metrics] == [190, 200]
    assert f"{root / RUNS / name} is not a run folder: it has no spec.json: left out" in (
        sweep.warnings
    )


def test_an_arm_with_horizons_of_its_own_chooses_at_its_last_one(tmp_path: Path) -> None:
    """Its learning rate is not that of the sweep's last horizon, which it does not reach."""
    short: Grid = {0.01: {0: {100: 3.3}}, 0.02: {s: {100: 3.2 - s / 10} for s in (0, 1, 2)}}
    longer: Grid = {0.01: {0: {400: 2.8}, 1: {400: 2.9}}, 0.02: {0: {400: 2.9}, 1: {400: 2.95}}}
    methods = {"100 steps": (OURS, short), "other": (OURS, short), "400 steps": (OURS, longer)}
    root = write_sweep(tmp_path / "lengths", methods, pairs=(("100 steps", "other"),))
    warnings: list[str] = []
    (sweep,), _ = collect([root], warnings)
    assert sweep.horizons == [100, 400]
    assert {arm: best.lr for arm, best in sweep.best.items()} == {
        "100 steps": 0.02, "other": 0.02, "400 steps": 0.01,
    }  # fmt: skip
    assert sweep.judged("100 steps", 100) == {1: 3.1, 2: 3.0}
    assert sweep.judged("100 steps", 400) == {}
    assert sweep.judged("400 steps", 400) == {1: 2.9}
    make_report([root], tmp_path / "report")
    (pair,) = table(tmp_path / "report", "lengths-pairs")
    assert pair["tokens"] == "100000.0", "no row for a horizon that neither method has"
    by_value = {r["method"]: r for r in table(tmp_path / "report", "lengths-loss-by-value")}
    assert (by_value["100 steps"]["0.02"], by_value["400 steps"]["0.01"]) == ("3.2", "2.8")
    assert verdicts_sentence(sweep).startswith("The comparison with other at 100k tokens is open")
    over_all = all_pairs_table([sweep], "all")
    assert over_all is not None
    assert len(over_all.rows) == 1
    assert judged_sentence([sweep]).endswith("(2 seeds)")
    assert sweep.last("100 steps", "400 steps") == 400, "none in common: the last of all"
