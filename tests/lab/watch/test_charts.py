"""The data that a page holds for its charts is that of its figures."""

import json
from math import inf, nan

from angular_lab.report.figures.charts import chart_data, chart_json
from angular_lab.report.figures.plots import Panel, Trace


def test_axes_and_traces() -> None:
    line = Trace([1000.0, 2000.0], [3.141592653589793, nan], 2, "a <b>")
    row = Trace([0.5], [0.0], 6, "open", "open", [(-inf, 1.0)])
    panel = Panel([line, row], "tokens", "loss", log_x=True, y_top=4.0, y_names=["first"])
    data = chart_data(panel)
    assert (data["x"]["label"], data["x"]["log"], data["x"]["limits"]) == ("tokens", True, None)
    assert (data["y"]["log"], data["y"]["top"], data["y"]["names"]) == (False, 4.0, ["first"])
    assert data["traces"][0] == {
        "label": "a <b>", "kind": "line", "color": 2, "x": [1000, 2000], "y": [3.141593, None],
    }  # fmt: skip
    assert data["traces"][1]["spans"] == [[None, 1]]


def test_the_text_cannot_end_its_element() -> None:
    text = chart_json(Panel([Trace([1.0], [1.0], 0, "</script><b>")], "x", "y"))
    assert "<" not in text
    assert json.loads(text)["traces"][0]["label"] == "</script><b>"
