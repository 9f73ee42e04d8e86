"""What a curve shows: its label, its points, and where it leaves another."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from angular_lab.report.figures.line_labels import line_ends, spread, wrapped
from angular_lab.report.figures.plots import FEW, Panel, Trace, _figure, _style
from angular_lab.report.figures.sweep_figures import sweep_figures
from angular_lab.report.read import collect
from angular_lab.report.report import make_report
from angular_lab.report.single_runs import single_section
from angular_lab.run_folder import read_run
from tests.lab.report.made import choosing, spec_of, write_run
from tests.lab.report.test_cooldowns import add_variants


def labelled(*ends: float, x: float = 10.0) -> Panel:
    """Return lines with labels that end at these heights."""
    names = ("adamw", "angular_muown", "muon, decay 0.1", "normuon, decay 0.1, linear", "muown")
    traces = [Trace([1, x], [4 + end, end], i, names[i]) for i, end in enumerate(ends)]
    return Panel(traces, "tokens", "loss")


@pytest.mark.parametrize(
    "ends", [(3.0,), (3.0, 3.0), (3.0, 3.001, 3.002, 3.4), (4.0, 3.6, 3.61, 3.2, 3.0)]
)
def test_labels_at_line_ends_do_not_overlap(ends: tuple[float, ...]) -> None:
    figure = _figure([labelled(*ends)])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_legend() is None
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert len(boxes) == len(ends)
    for above, below in pairwise(sorted(boxes.values(), key=lambda box: -box.y0)):
        assert above.y0 >= below.y1 - 1
    plot, page = axes.get_window_extent(), figure.bbox
    for box in boxes.values():
        assert box.x0 > plot.x1
        assert box.x1 <= page.x1
    by_height = sorted(range(len(ends)), key=lambda i: ends[i])
    heights = [box.y0 for box in boxes.values()]
    assert [heights[i] for i in by_height] == sorted(heights), "labels keep the order of the lines"


def test_a_legend_where_labels_would_be_far_from_their_lines() -> None:
    crowded = labelled(3.0, 3.0, 3.0, 3.0, 3.0)
    (axes,) = _figure([replace_lines(crowded, 15)]).axes
    assert axes.get_legend() is not None
    assert not axes.texts
    early = [*labelled(3.0, 3.2).traces, Trace([1, 100], [5, 3], 2, "muon")]
    assert line_ends(Panel(early, "tokens", "loss")) is None
    diverged = [*labelled(3.0).traces, Trace([1], [], 1, "x", "diverged")]
    assert line_ends(Panel(diverged, "tokens", "loss")) is None
    assert line_ends(Panel([Trace([1, 2], [1, 2], 0, "a" * 21)], "tokens", "loss")) is None


def replace_lines(panel: Panel, count: int) -> Panel:
    traces = [replace(panel.traces[0], label=f"method {i}", color=i) for i in range(count)]
    return panel._replace(traces=traces)


def test_a_label_follows_the_branch_that_gets_furthest() -> None:
    branch = Trace([8, 10], [3.5, 3.0], 0, kind="branch")
    (end,) = line_ends(Panel([Trace([1, 9], [5, 3.4], 0, "muon"), branch], "x", "y")) or []
    assert (end.x, end.y) == (10, 3.0)


def test_positions_are_spread_as_little_as_possible() -> None:
    assert spread([0.5, 0.5], [0.1, 0.1], 0, 1) == pytest.approx([0.45, 0.55])
    assert spread([0.9, 0.1], [0.1, 0.1], 0, 1) == [0.9, 0.1]
    assert spread([0.0, 0.0, 0.0], [0.2] * 3, 0, 1) == pytest.approx([0, 0.2, 0.4])
    assert spread([1.0, 1.0], [0.2, 0.2], 0, 1) == pytest.approx([0.8, 1.0])
    assert spread([], [], 0, 1) == []


def test_long_labels_are_broken_after_commas() -> None:
    assert wrapped("adamw") == "adamw"
    assert wrapped("normuon, decay 0.1, linear to zero") == "normuon, decay 0.1,\nlinear to zero"
    assert wrapped("angular_muown, kappa = 1") == "angular_muown,\nkappa = 1"


def test_short_curves_show_their_points() -> None:
    assert _style(Trace(range(FEW), range(FEW), 0)).get("marker") == "o"
    assert "marker" not in _style(Trace(range(FEW + 1), range(FEW + 1), 0))
    assert _style(Trace([1, 2], [1, 2], 0, kind="prediction")).get("marker") is None


def test_cooldowns_begin_on_their_trunk(tmp_path: Path) -> None:
    (sweep,), _ = collect([choosing(tmp_path / "small")], [])
    figure = next(f for f in sweep_figures(sweep) if f.key == "small-loss-curves")
    trunks = {t.color: t for t in figure.panel.traces if t.label}
    branches = [t for t in figure.panel.traces if t.kind == "branch"]
    assert len(branches) == 4
    for trace in branches:
        assert on_curve(trunks[trace.color], trace.xs[0]) == pytest.approx(trace.ys[0])
        assert trace.xs[0] in (90_000, 180_000)  # where nine tenths of the steps are taken


def on_curve(trace: Trace, x: float) -> float:
    """Return the height of a curve between two of its points."""
    points = [*zip(trace.xs, trace.ys, strict=True)]
    (x0, y0), (x1, y1) = next((a, b) for a, b in pairwise(points) if a[0] <= x <= b[0])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def test_cooldowns_of_another_length_begin_on_their_trunk(tmp_path: Path) -> None:
    page = make_report([add_variants(choosing(tmp_path / "small"))], tmp_path / "out")
    assert 'id="fig-small-cooldowns"' in page.read_text()
    page = make_report([choosing(tmp_path / "plain")], tmp_path / "out")
    assert 'id="fig-plain-cooldowns"' not in page.read_text()


def test_a_single_runs_branch_begins_on_its_trunk(tmp_path: Path) -> None:
    spec = spec_of("muon")
    trunk = replace(spec, schedule=replace(spec.schedule, kind="constant"))
    folders = [
        write_run(tmp_path / "runs" / "trunk", trunk, 3.0),
        write_run(tmp_path / "runs" / "end", replace(spec, parent="trunk", parent_step=230), 2.9),
    ]
    runs = [run for folder in folders if (run := read_run(folder, [])) is not None]
    headline = single_section(runs, "runs", "Runs").headline
    assert headline is not None
    traces = {trace.label: trace for trace in headline.panel.traces}
    assert traces["end"].xs[0] == 230_000
    assert traces["end"].ys[0] == pytest.approx(on_curve(traces["trunk"], 230_000))
    alone = single_section(runs[1:], "runs", "Runs").headline
    assert alone is not None
    assert alone.panel.traces[0].xs[0] > 230_000  # its trunk is not here
