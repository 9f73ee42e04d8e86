"""Drawing a panel."""

import pytest
from matplotlib.figure import Figure

from angular_lab.report.figures.plots import (
    Panel,
    Trace,
    _figure,
    _legend_columns,
    draw,
    ticks_with_room,
)
from angular_lab.report.figures.sweep_figures import loss_top


def test_legend_columns_are_filled_as_matplotlib_does() -> None:
    """Four labels in three columns are two, one and one: wider than two and two."""
    labels = ["as in the paper", "momentum projected", "momentum transported", "exponential map"]
    assert _legend_columns(labels) == 2
    assert _legend_columns(["a", "b", "c"]) == 3
    assert _legend_columns(["a" * 60, "b"]) == 1


def test_an_axis_may_begin_at_zero() -> None:
    axes = Figure().add_subplot()
    draw(axes, Panel([Trace([1, 2], [5, 6], 0)], "x", "y", y_bottom=0))
    assert axes.get_ylim()[0] == 0


def test_ticks_do_not_touch_each_other() -> None:
    rates = [0.001, 0.0012, 0.002, 0.02, 0.021]
    panel = Panel([], "lr (log)", "loss", log_x=True, x_ticks=rates)
    assert ticks_with_room(panel) == [0.001, 0.002, 0.02]
    labelled = panel._replace(traces=[Trace([0.001, 0.021], [2, 1], 0, "a" * 20)])
    assert ticks_with_room(labelled) == [0.001, 0.02]  # labels at line ends take room
    assert ticks_with_room(Panel([], "steps", "loss", x_ticks=[100])) == [100]


def test_the_losses_of_short_runs_are_not_cut_off() -> None:
    """The first tenth is cut off, but not the end of a run that ended there."""
    long = Trace([10, 500, 1000], [9, 4, 3], 0)
    assert loss_top([long]) == 4 + 0.05
    short, diverged = Trace([1, 20], [10, 7], 1), Trace([1, 20], [9, 1e6], 2)
    assert loss_top([long, short]) == 7 + 0.05 * 4
    assert loss_top([long, diverged]) == 9 + 0.05 * 6


@pytest.mark.parametrize("count", [12, 29])
def test_long_names_stay_inside_the_figure(count: int) -> None:
    name = "normuon, decay 0.1, linear to zero, aux_beta2 0.99, momentum from"
    names = [f"{name} {i}" for i in range(count)]
    traces = [Trace([0, 1e6], [2.0, 1.0], i % 7, name) for i, name in enumerate(names)]
    figure = _figure([Panel(traces, "tokens", "loss")])
    figure.draw_without_rendering()
    [axes] = figure.axes
    width, _ = figure.get_size_inches() * figure.dpi
    assert axes.get_window_extent().width > width / 2
    labels = axes.get_legend().get_texts()
    assert len(labels) == count
    assert all(0 <= end <= width for text in labels for end in text.get_window_extent().intervalx)
