"""Figures of runs, as SVG text. Reads folders, never imports torch."""

import io
from collections.abc import Sequence
from typing import Any

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito, 2008
Curve = tuple[str, Sequence[float], Sequence[float]]


def line_plot(
    curves: Sequence[Curve], x_label: str, y_label: str, log_y: bool = False, **limits: Any
) -> str:
    """An SVG with one line per (label, xs, ys); text and axes take the page's colour."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "angular-lab"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        for color, (label, xs, ys) in zip(COLORS, curves, strict=False):
            axes.plot(xs, ys, label=label, color=color, linewidth=2)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if log_y:
            axes.set_yscale("log")
        axes.set(**limits)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")
