"""Figures, as SVG text or PNG files. No torch here."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from angular_lab.report.tables import short_number

# Okabe and Ito, 2008, without the yellow, which is pale on white. Black becomes the text colour.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
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
        dashed = {"linestyle": (0, (1, 1))} if trace.color >= len(COLORS) else {}
        style = {**dashed, **STYLES[trace.kind]}
        style["color"] = COLORS[trace.color % len(COLORS)]
        if trace.kind == "diverged":
            axes.plot(trace.xs, [0.96] * len(trace.xs), transform=axes.get_xaxis_transform(),
                      label=trace.label or None, **style)  # fmt: skip
        else:
            axes.plot(trace.xs, trace.ys, label=trace.label or None, **style)
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
    if labels := [trace.label for trace in panel.traces if trace.label]:  # below, hiding nothing
        place = {
            "loc": "upper center",
            "bbox_to_anchor": (0.5, -0.17),
            "borderaxespad": 0,
        }
        columns, owner = _legend_columns(labels), axes
        if panel.y_names:  # its height varies, and with it the room below
            place, owner = {"loc": "outside lower center"}, axes.figure
        owner.legend(frameon=False, fontsize=9.5, handlelength=1.6, ncols=columns, **place)


def _name_rows(axes: Any, panel: Panel) -> None:
    """Label rows on the y axis; mark zero and what is close to it."""
    if panel.y_names:
        axes.set_yticks(range(len(panel.y_names)), panel.y_names)
        axes.set_ylim(len(panel.y_names) - 0.5, -0.5)
    if panel.x_limits:
        axes.set_xlim(*panel.x_limits)
    if panel.x_band is not None:
        axes.axvspan(-panel.x_band, panel.x_band, color="#808080", alpha=0.2, linewidth=0)
        axes.axvline(0, color=COLORS[-1], linewidth=0.8)


def _legend_columns(labels: Sequence[str]) -> int:
    """Return the number of columns that fit next to each other.

    Matplotlib fills one after the other; where they are not equal, the first have one label more.
    """
    for columns in range(min(4, len(labels)), 1, -1):
        short, longer = divmod(len(labels), columns)
        starts = [i * short + min(i, longer) for i in range(columns + 1)]
        parts = [labels[a:b] for a, b in pairwise(starts)]
        if sum(max(map(len, part)) + 6 for part in parts) <= 58:
            return columns
    return 1


def _scale(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if panel.log_x:
        axes.set_xscale("log")
    if panel.x_ticks:
        axes.xaxis.set_major_locator(FixedLocator(list(panel.x_ticks)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    if panel.log_y:
        _log_y(axes, panel)
    low, high = axes.get_ylim()
    axes.set_ylim(
        low if panel.y_bottom is None else panel.y_bottom,
        high if panel.y_top is None else panel.y_top,
    )


def _log_y(axes: Any, panel: Panel) -> None:
    """Label 1, 2 and 5 of every decade with plain numbers, or only decades where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    values = [y for trace in panel.traces for y in trace.ys if y > 0]
    wide = bool(values) and max(values) / min(values) > 300
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _figure(panels: Sequence[Panel]) -> Any:
    from matplotlib.figure import Figure as Canvas

    labels = [[trace.label for trace in panel.traces if trace.label] for panel in panels]
    rows = max((ceil(len(x) / _legend_columns(x)) for x in labels if x), default=0)
    named = max(len(panel.y_names) for panel in panels)
    height = 1.0 + 0.28 * named if named else 3.5
    rows_of_cells = max((len(panel.image.rows) for panel in panels if panel.image), default=0)
    if rows_of_cells:
        height = min(max(2.8, 1.0 + 0.055 * rows_of_cells), 9.0)
    width = (7.0 if named else 5.2) * len(panels)
    figure = Canvas(figsize=(width, height + 0.2 * rows), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, panel)
    return figure


def save(panels: Sequence[Panel], stem: Path) -> str:
    """Write panels side by side in stem.svg and stem.png, on white.

    Returns the SVG for a page, in the page's colours.
    """
    from matplotlib import rc_context

    # Neither date nor version: the same numbers give the same file.
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "font.size": 10.5, "svg.hashsalt": "angular-lab"}):
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
