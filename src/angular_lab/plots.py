"""Figures, as SVG text or PNG files. Never imports torch."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito, 2008
Curve = tuple[str, Sequence[float], Sequence[float]]


class Panel(NamedTuple):
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    log_y: bool = False


def draw(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import EngFormatter

    for color, (label, xs, ys) in zip(COLORS, panel.curves, strict=False):
        axes.plot(xs, ys, label=label, color=color, linewidth=2)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 600k, 2.5M
    if panel.log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)


def svg(panel: Panel) -> str:
    """One figure as SVG text; lines of text and axes take the page's colour."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "angular-lab"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        draw(figure.subplots(), panel)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """Panels side by side in one picture, on white."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * len(panels), 4.2), layout="constrained", dpi=110)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, panel)
    figure.savefig(path)
