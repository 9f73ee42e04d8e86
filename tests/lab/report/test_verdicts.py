"""Verdicts that a reader of the report must not misunderstand."""

import json
from math import sqrt
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from angular_lab.experiments.comparison import experiment
from angular_lab.report.figures.differences import closest_figure, difference_figure
from angular_lab.report.figures.plots import draw
from angular_lab.report.read import collect
from angular_lab.report.report import make_report
from angular_lab.report.verdicts import PAPER_CLAIMS
from angular_lab.run_folder import RUNS
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


def last_loss(run: Path) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["val_loss"]


def test_numbers_of_the_pairs_follow_from_the_metrics(tmp_path: Path) -> None:
    """Mean difference and interval of two seeds, and a speed-up, without the package."""
    root, other = one_horizon(tmp_path / "small"), choosing(tmp_path / "other")
    make_report([root, other], tmp_path / "out")
    runs = root / RUNS
    first, second = (
        last_loss(runs / f"angular-muown-lr0.02-seed{seed}")
        - last_loss(runs / f"adamw-lr0.016-seed{seed}")
        for seed in (1, 2)
    )
    mean, half = (first + second) / 2, 12.7062 * abs(first - second) / 2
    pairs = table(tmp_path / "out", "pairs")
    (alone,) = table(tmp_path / "out", "small-pairs")
    for row in (alone, next(row for row in pairs if "tuned-adamw" in row["experiment"])):
        assert float(row["mean difference"]) == pytest.approx(mean)
        ends = [float(end) for end in row["95% interval"].split(" to ")]
        assert ends == pytest.approx([mean - half, mean + half], abs=6e-5)
    ours = [last_loss(other / RUNS / f"angular-muown-lr0.02-seed1-to{h}") for h in (100, 200)]
    theirs = last_loss(other / RUNS / "adamw-lr0.002-seed1-to200")
    ratio = 2 ** (1 - (ours[0] - theirs) / (ours[0] - ours[1]))
    claims = table(tmp_path / "out", "claims")
    row = next(row for row in claims if "AdamW" in row["the paper's claim"])
    assert f"speed-up {ratio:.2f}, " in row["reason"]
    assert f"95% interval {sqrt(2):.2f} to {sqrt(2):.2f}" in row["reason"]


def test_pairs_say_what_would_settle_them_and_which_grid_is_too_narrow(tmp_path: Path) -> None:
    ours = {0.01: {0: {400: 3.2}}, 0.02: {s: {400: 2.9 + 0.02 * s} for s in (0, 1, 2)}}
    ours |= {0.04: {0: {400: 3.2}}}
    near = {0.01: {0: {400: 3.2}}, 0.02: {0: {400: 2.9}, 1: {400: 2.97}, 2: {400: 2.95}}}
    far = {0.01: {0: {400: 3.2}, 1: {400: 3.3}, 2: {400: 3.3199}}, 0.02: {0: {400: 3.3}}}
    methods = {OURS: (OURS, ours), "muon": ("muon", near), "adamw": ("adamw", far)}
    page = make_report([write_sweep(tmp_path / "small", methods)], tmp_path / "out")
    muon, adamw = table(tmp_path / "out", "small-pairs")
    # -0.05 and -0.01: 2.776 standard errors of five seeds are 0.0351, 2.571 of six 0.0297
    assert (muon["verdict"], muon["to settle"]) == ("leads on 2 of 2 seeds", "4 more seeds")
    assert (adamw["verdict"], adamw["to settle"]) == ("holds", "")
    assert (muon["edge"], adamw["edge"]) == ("edge: muon", "edge: adamw")
    assert "0.01 edge" in visible(page)  # next to the final losses
    assert "0.02 edge" in visible(page)
    inside = make_report([choosing(tmp_path / "other")], tmp_path / "second")
    assert "0.02 edge" not in visible(inside)


def test_one_figure_shows_all_differences_before_the_tables(tmp_path: Path) -> None:
    """-0.1 and -0.06: the interval of two seeds is far longer than the dots' range."""
    root = one_horizon(tmp_path / "small")
    (sweep,), _ = collect([root], [])
    figure = difference_figure(sweep)
    assert figure is not None
    dots, *arrows = figure.panel.traces
    assert list(dots.xs) == pytest.approx([-0.08])
    assert (dots.kind, dots.label) == ("open", "open")
    assert figure.panel.y_names == ["against adamw", ""]  # a heading, and its row
    assert figure.panel.y_notes == ["", "−0.0800 open"]
    assert list(dots.ys) == [1]
    half = 12.7062 * 0.02
    assert dots.spans[0] == pytest.approx((-0.08 - half, -0.08 + half), abs=1e-5)
    assert [arrow.kind for arrow in arrows] == ["cut_low", "cut_high"]
    text = make_report([root], tmp_path / "out").read_text()
    section = text[text.index('<section id="small-sweep">') :]
    assert 0 < section.index('id="fig-small-differences"') < section.index("<table>")
    (settled,), _ = collect([choosing(tmp_path / "other")], [])
    drawn = difference_figure(settled)
    assert drawn is not None
    assert [trace.kind for trace in drawn.panel.traces] == ["settled"]
    assert drawn.panel.y_names == ["against adamw", "100k", "200k"]
    assert list(drawn.panel.traces[0].ys) == [1, 2]
    assert list(drawn.panel.traces[0].xs) == pytest.approx([-0.09, -0.1])


def test_the_closest_comparison_names_both_methods_outside_the_band(tmp_path: Path) -> None:
    sweeps, _ = collect([choosing(tmp_path / "a"), one_horizon(tmp_path / "b")], [])
    figure = closest_figure(sweeps, "closest")
    assert figure is not None
    assert figure.panel.y_names[0] == "teaser: angular_muown against adamw"
    assert "left of zero the first method is better" in figure.caption
    axes = Figure().add_subplot()
    draw(axes, figure.panel)
    bands = [path.vertices[:, 1] for drawn in axes.collections for path in drawn.get_paths()]
    shaded = [(min(ys), max(ys)) for ys in bands if max(ys) > min(ys)]
    assert shaded
    for heading in figure.panel.y_headings:
        assert not any(low < heading < high for low, high in shaded)
