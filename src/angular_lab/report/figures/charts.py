"""The data of a figure as JSON, from which assets/chart.js draws the interactive chart.

The picture stays on the page: it is shown without JavaScript, and on paper. No torch here.
"""

import json
from collections.abc import Iterable
from importlib.resources import files
from math import isfinite
from typing import Any

from markupsafe import Markup

from angular_lab.report.figures.plots import Panel, Trace

ASSETS = files("angular_lab.report") / "assets"
DIGITS = 7  # significant; a loss in bf16 has three, one in fp32 seven


def chart_script() -> Markup:
    return Markup((ASSETS / "chart.js").read_text())


def chart_style() -> Markup:
    return Markup((ASSETS / "chart.css").read_text())


def chart_json(panel: Panel) -> Markup:
    """Return the data of a chart, safe inside a script element."""
    text = json.dumps(chart_data(panel), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def chart_data(panel: Panel) -> dict[str, Any]:
    """Return a panel's axes and traces: x_label becomes the label of x, log_x its log. A value
    that is not finite becomes null: a gap."""
    data: dict[str, Any] = {"x": {}, "y": {}, "traces": [_trace(trace) for trace in panel.traces]}
    for name, value in panel._asdict().items():
        parts = name.split("_")
        if parts[0] in ("x", "y"):
            data[parts[0]]["_".join(parts[1:])] = value
        elif parts[0] == "log":
            data[parts[1]]["log"] = value
    return data


def _trace(trace: Trace) -> dict[str, Any]:
    data: dict[str, Any] = {
        "label": trace.label,
        "kind": trace.kind,
        "color": trace.color,
        "x": _numbers(trace.xs),
        "y": _numbers(trace.ys),
    }
    if trace.spans:
        data["spans"] = [_numbers(span) for span in trace.spans]
    return data


def _numbers(values: Iterable[float]) -> list[float | int | None]:
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | int | None:
    if not isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:  # tokens: 1000, not 1000.0
        return int(value)
    return float(f"{value:.{DIGITS}g}")
