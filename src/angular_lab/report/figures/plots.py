"""Figures, as SVG text or PNG files. No torch here."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, log
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, NamedTuple

from angular_lab.report.figures.line_labels import line_ends, place_labels
from angular_lab.report.tables import with_minus
from angular_lab.text import short_number

# Okabe and Ito, 2008, without the yellow, which is pale on white. Black becomes the text colour.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))  # of a colour that is used again
WIDTH = 4.8  # inches of a panel: on a phone its letters have about the size of the text
LETTER = 0.085  # inches
ACROSS = 46  # characters of a heading, or of a legend's line, that fit across a panel
FEW = 12  # points: a line of at most as many shows where they are
Kind = Literal[
    "line", "branch", "dots", "points", "prediction", "best", "diverged", "settled", "open",
    "cut_low", "cut_high",
]  # fmt: skip
STYLES: dict[Kind, dict[str, Any]] = {
    "line": {"linewidth": 1.8},
    "branch": {"linewidth": 1.3, "marker": "o", "markersize": 3.5, "markevery": [-1]},
    "dots": {"linewidth": 1.8, "marker": "o", "markersize": 4},
    "points": {"linestyle": "none", "marker": "o", "markersize": 6, "fillstyle": "none"},
    "prediction": {"linewidth": 1.1, "linestyle": (0, (4, 3)), "alpha": 0.85},
    "best": {"linestyle": "none", "marker": "*", "markersize": 14},
    "diverged": {"linestyle": "none", "marker": "x", "markersize": 8, "markeredgewidth": 2},
    "settled": {"linestyle": "none", "marker": "o", "markersize": 7},
    "open": {"linestyle": "none", "marker": "o", "markersize": 7, "fillstyle": "none"},
    "cut_low": {"linestyle": "none", "marker": "<", "markersize": 6, "clip_on": False},
    "cut_high": {"linestyle": "none", "marker": ">", "markersize": 6, "clip_on": False},
}


@dataclass(frozen=True)
class Trace:
    """Points of one colour; without a label it is not in the legend."""

    xs: Sequence[float]
    ys: Sequence[float]  # ignored for "diverged", which is drawn at the top
    color: int
    label: str = ""
    kind: Kind = "line"
    spans: Sequence[tuple[float, float]] = ()  # whiskers along x, one for each point


@dataclass(frozen=True)
class Image:
    """Coloured cells, on a logarithmic scale: rows from the top, columns from edge to edge."""

    edges: Sequence[float]  # of the columns, one more than there are
    rows: Sequence[Sequence[float]]  # nan: no value
    groups: Sequence[tuple[str, int]]  # of consecutive rows: name, and how many
    label: str  # of the colour bar
    lowest: float | None = None  # of the colours: values below have the same one


class Panel(NamedTuple):
    traces: Sequence[Trace]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = ()  # () leaves them to matplotlib
    y_top: float | None = None  # cuts off values that would squeeze the rest
    y_bottom: float | None = None
    y_names: Sequence[str] = ()  # of the rows 0, 1, ..., from the top
    y_headings: Sequence[int] = ()  # rows that hold nothing but their name, across the figure
    y_notes: Sequence[str] = ()  # at the right end of the rows
    x_limits: tuple[float, float] | None = None
    x_band: float | None = None  # shades -band to band, around a line at zero
    image: Image | None = None  # drawn instead of traces


@dataclass(frozen=True)
class Figure:
    key: str  # its file name and id
    panel: Panel
    caption: str


def draw_image(axes: Any, panel: Panel, image: Image) -> None:
    """Draw the cells with a colour bar, and name the groups of rows."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ends = [*accumulate((count for _, count in image.groups), initial=0)]
    # One picture in the SVG: thousands of rectangles would be slow.
    cells = axes.pcolormesh(
        image.edges, range(len(image.rows) + 1), image.rows, rasterized=True,
        norm=LogNorm(image.lowest, clip=True),
    )  # fmt: skip
    axes.set_ylim(len(image.rows), 0)
    centers = [(a + b) / 2 for a, b in pairwise(ends)]
    axes.set_yticks(centers, [name for name, _ in image.groups])
    axes.tick_params(axis="y", length=0)
    axes.hlines(ends[1:-1], image.edges[0], image.edges[-1], color="white", linewidth=1.5)
    axes.set_xlabel(panel.x_label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(cells, ax=axes, label=image.label, pad=0.02, extend="min")
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.outline.set_visible(False)


def draw(axes: Any, panel: Panel) -> None:
    if panel.image:
        draw_image(axes, panel, panel.image)
        return
    for trace in panel.traces:
        style = _style(trace)
        if trace.kind == "diverged":
            axes.plot(trace.xs, [0.96] * len(trace.xs), transform=axes.get_xaxis_transform(),
                      label=with_minus(trace.label) or None, **style)  # fmt: skip
        else:
            axes.plot(trace.xs, trace.ys, label=with_minus(trace.label) or None, **style)
        if trace.spans:
            lows, highs = zip(*trace.spans, strict=True)
            axes.hlines(trace.ys, lows, highs, color=style["color"], linewidth=1.5)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    _scale(axes, panel)
    _name_rows(axes, panel)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if line_ends(panel) is None:
        _add_legend(axes, panel)


def _style(trace: Trace) -> dict[str, Any]:
    """Return how a trace is drawn: every point of a short line is marked."""
    again, color = divmod(trace.color, len(COLORS))
    dashed = {"linestyle": DASHES[min(again, len(DASHES) - 1)]} if again else {}
    short = {"marker": "o", "markersize": 3.5} if len(trace.xs) <= FEW else {}
    marks = short if trace.kind == "line" else {}
    return {**dashed, **marks, **STYLES[trace.kind], "color": COLORS[color]}


def _add_legend(axes: Any, panel: Panel) -> None:
    """Add a legend below the axes, where it hides nothing."""
    labels = _legend_labels(panel)
    if not labels:
        return
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "borderaxespad": 0}
    owner = axes
    if panel.y_names:  # its height varies, and with it the room below
        place, owner = {"loc": "outside lower center"}, axes.figure
    columns = _legend_columns(labels)
    handles, _ = axes.get_legend_handles_labels()
    style = {"frameon": False, "fontsize": 10, "handlelength": 1.6, "ncols": columns}
    owner.legend(handles, labels, **style, **place)


def _name_rows(axes: Any, panel: Panel) -> None:
    """Label rows on the y axis; mark zero and what is close to it."""
    if panel.y_names:
        _write_rows(axes, panel)
    if panel.x_limits:
        axes.set_xlim(*panel.x_limits)
    if panel.x_band is not None:
        for ends in stretches(panel):
            axes.fill_betweenx(ends, -panel.x_band, panel.x_band, color="#808080", alpha=0.2,
                               linewidth=0)  # fmt: skip
            axes.vlines(0, *ends, color=COLORS[-1], linewidth=0.8)


def stretches(panel: Panel) -> list[tuple[float, float]]:
    """Return from where to where there are rows other than headings, from the top."""
    edges = [-1, *panel.y_headings, len(panel.y_names)]
    return [(a + 0.5, b - 0.5) for a, b in pairwise(edges) if b - a > 1]


def _write_rows(axes: Any, panel: Panel) -> None:
    across = axes.get_yaxis_transform()
    rows = [row for row in range(len(panel.y_names)) if row not in panel.y_headings]
    axes.set_yticks(rows, [panel.y_names[row] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(panel.y_names) - 0.5, -0.5)
    for row in panel.y_headings:  # they reach over the notes' column, so they claim no room
        axes.text(0.01, row + 0.1, panel.y_names[row], transform=across, va="center", weight="bold",
                  fontsize=10, in_layout=False)  # fmt: skip
    for row, note in enumerate(panel.y_notes):
        axes.text(1.035, row, note, transform=across, va="center", fontsize=10)


def _legend_height(panel: Panel) -> float:
    """Return the inches that a panel's legend takes."""
    labels = _legend_labels(panel)
    lines = sum(label.count("\n") + 1 for label in labels)
    return 0.2 * ceil(lines / _legend_columns(labels)) if labels else 0


def _legend_labels(panel: Panel) -> list[str]:
    """Return what the legend says; nothing where notes say the same, row by row."""
    labels = [trace.label for trace in panel.traces if trace.label and not panel.y_notes]
    return [fill(with_minus(label), ACROSS) for label in labels]


def _legend_columns(labels: Sequence[str]) -> int:
    """Return the number of columns that fit next to each other.

    Matplotlib fills one after the other; where they are not equal, the first have one label more.
    """
    for columns in range(min(4, len(labels)), 1, -1):
        short, longer = divmod(len(labels), columns)
        starts = [i * short + min(i, longer) for i in range(columns + 1)]
        parts = [labels[a:b] for a, b in pairwise(starts)]
        if sum(max(map(len, part)) + 6 for part in parts) <= 52:
            return columns
    return 1


def _scale(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    if panel.log_x:
        axes.set_xscale("log")
    if panel.x_ticks:
        axes.xaxis.set_major_locator(FixedLocator(ticks_with_room(panel)))
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.y_names:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    form = "{:.5g}".format if panel.y_names else short_number  # losses, or tokens and settings
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: with_minus(form(value))))
    if panel.log_y:
        _log_y(axes, panel)
    low, high = axes.get_ylim()
    axes.set_ylim(
        low if panel.y_bottom is None else panel.y_bottom,
        high if panel.y_top is None else panel.y_top,
    )


def ticks_with_room(panel: Panel) -> list[float]:
    """Return the panel's ticks without those whose numbers would touch the one before."""
    ends = line_ends(panel) or []
    longest = max((len(line) for end in ends for line in end.text.splitlines()), default=0)
    width = WIDTH - 0.7 - (0.2 + LETTER * longest if ends else 0.0)  # inches, roughly

    def scaled(x: float) -> float:
        return log(x) if panel.log_x else x

    first, last = scaled(min(panel.x_ticks)), scaled(max(panel.x_ticks))
    ticks: list[float] = []
    for x in sorted(panel.x_ticks):
        if ticks and last > first:
            letters = len(short_number(x)) + len(short_number(ticks[-1]))
            apart = width * (scaled(x) - scaled(ticks[-1])) / (last - first)
            if apart < LETTER * (letters / 2 + 1):
                continue
        ticks.append(x)
    return ticks


def _log_y(axes: Any, panel: Panel) -> None:
    """Label 1, 2 and 5 of every decade with plain numbers, or only decades where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    lowest = panel.y_bottom or 0
    values = [max(y, lowest) for trace in panel.traces for y in trace.ys if y > 0]
    wide = bool(values) and max(values) / min(values) > 300
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _figure(panels: Sequence[Panel]) -> Any:
    from matplotlib.figure import Figure as Canvas

    named = max(len(panel.y_names) for panel in panels)
    height = 0.8 + 0.24 * named if named else 3.3
    rows_of_cells = max((len(panel.image.rows) for panel in panels if panel.image), default=0)
    if rows_of_cells:
        height = min(max(2.8, 1.0 + 0.055 * rows_of_cells), 9.0)
    ends = [line_ends(panel) for panel in panels]
    listing = [panel for panel, found in zip(panels, ends, strict=True) if found is None]
    size = WIDTH * len(panels), height + max(map(_legend_height, listing), default=0.0)
    figure = Canvas(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        draw(axes, panel)
    figure.draw_without_rendering()  # where a line ends on the paper depends on the layout
    for axes, panel, found in zip(all_axes, panels, ends, strict=True):
        if found is not None and not place_labels(axes, found, COLORS):
            _add_legend(axes, panel)
            figure.set_figheight(max(figure.get_figheight(), height + _legend_height(panel)))
    return figure


def save(panels: Sequence[Panel], stem: Path) -> str:
    """Write panels side by side in stem.svg and stem.png, on white.

    Returns the SVG for a page, in the page's colours.
    """
    from matplotlib import rc_context

    # Neither date nor version: the same numbers give the same file.
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "angular-lab"}):
        figure, buffer = _figure(panels), io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        figure.savefig(stem.with_suffix(".png"), dpi=130, metadata={"Software": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    standalone = text.replace("<svg", '<svg style="background: #ffffff"', 1)
    stem.with_suffix(".svg").write_text(standalone)
    return _for_page(text, stem.name)


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """Write panels side by side in one picture, on white."""
    _figure(panels).savefig(path, dpi=110, metadata={"Software": None})


def _for_page(text: str, key: str) -> str:
    """Return the SVG with ids that are unique on a page, and colours that the page can change."""
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", text)
    for i, color in enumerate(COLORS[:-1]):
        text = text.replace(color, f"var(--c{i}, {color})")
    return text.replace("#000000", "currentColor")
