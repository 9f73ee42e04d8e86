"""Labels at the ends of lines: they replace a legend where there is room for them."""

from collections.abc import Sequence
from math import log
from typing import Any, NamedTuple

from angular_lab.report.tables import with_minus

FONT_SIZE = 10  # points
LINE_HEIGHT = 1.2  # of the font size
LONGEST = 20  # characters in one line of a label
RIGHT = 0.85  # of the width of the axes: lines that end further left are too far from their labels
LABEL_AT, LEADER_TO = 1.07, 1.055  # of the width of the axes
FURTHEST = 0.25  # of the height: a label that has to move further is hard to follow to its line
DRAWN_AS_LINES = ("line", "dots", "branch")


class End(NamedTuple):
    """Where the line of a label ends."""

    text: str  # in lines
    color: int
    x: float
    y: float


def line_ends(panel: Any) -> list[End] | None:
    """Return where every labelled line ends; None if the panel takes a legend instead."""
    labelled = [trace for trace in panel.traces if trace.label]
    if not labelled or any(trace.kind not in DRAWN_AS_LINES[:2] for trace in labelled):
        return None
    ends = [_end(panel, trace) for trace in labelled if len(trace.xs)]
    texts = [line for end in ends for line in end.text.splitlines()]
    if len(ends) < len(labelled) or max(map(len, texts)) > LONGEST:
        return None
    xs = [_scaled(x, panel.log_x) for trace in panel.traces for x in trace.xs]
    left, right = min(xs), max(xs)
    near = all(_scaled(end.x, panel.log_x) >= left + RIGHT * (right - left) for end in ends)
    return ends if near and right > left else None


def _scaled(x: float, is_log: bool) -> float:
    return log(x) if is_log and x > 0 else x


def _end(panel: Any, labelled: Any) -> End:
    """Return the last point of a line, or of a branch that leaves it and gets further."""
    points = [
        (trace.xs[-1], trace.ys[-1])
        for trace in panel.traces
        if trace.color == labelled.color and trace.kind in DRAWN_AS_LINES and len(trace.xs)
    ]
    x, y = max(points, key=lambda point: point[0])
    return End(wrapped(labelled.label), labelled.color, x, y)


def wrapped(label: str) -> str:
    """Return a long label in several lines, broken after commas."""
    lines = [""]
    for part in label.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) <= LONGEST or not lines[-1]:
            lines[-1] = joined
        else:
            lines[-1] += ","
            lines.append(part)
    return "\n".join(lines)


def spread(wanted: Sequence[float], gaps: Sequence[float], low: float, high: float) -> list[float]:
    """Return heights close to the wanted ones that keep their order and do not overlap.

    `gaps` are the labels' own heights. Labels that collide move by the same amount.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    offsets, height = [], 0.0
    for rank, i in enumerate(order):
        height += (gaps[order[rank - 1]] + gaps[i]) / 2 if rank else 0.0
        offsets.append(height)
    blocks: list[tuple[float, int]] = []  # the mean position of labels that touch, their number
    for i, offset in zip(order, offsets, strict=True):
        blocks.append((wanted[i] - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [((n * a + m * b) / (n + m), n + m)]
    starts = [start for start, count in blocks for _ in range(count)]
    top = high - offsets[-1] if offsets else high
    places = {
        i: max(low, min(start, top)) + offset
        for i, start, offset in zip(order, starts, offsets, strict=True)
    }
    return [places[i] for i in range(len(wanted))]


def place_labels(axes: Any, ends: Sequence[End], colors: Sequence[str]) -> bool:
    """Write the labels to the right of the axes, each with a line to its end.

    The figure must have been laid out. Returns False, and writes nothing, if there is no room.
    """
    per_point = axes.figure.dpi / 72
    height = axes.get_window_extent().height
    gaps = [
        FONT_SIZE * LINE_HEIGHT * per_point * (end.text.count("\n") + 1) / height for end in ends
    ]
    if sum(gaps) > 1:
        return False
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [to_axes.transform((end.x, end.y)) for end in ends]
    heights = [min(max(float(y), 0.0), 1.0) for _, y in points]
    places = spread(heights, gaps, 0.0, 1.0)
    moved = [abs(a - b) for a, b in zip(places, heights, strict=True)]
    if max(moved, default=0.0) > FURTHEST:
        return False
    for end, (x, _), height, place in zip(ends, points, heights, places, strict=True):
        color = colors[end.color % len(colors)]
        axes.plot([min(x, 1.0), LEADER_TO], [height, place], color=color, linewidth=1.0,
                  transform=axes.transAxes, clip_on=False, scalex=False, scaley=False)  # fmt: skip
        axes.text(LABEL_AT, place, with_minus(end.text), transform=axes.transAxes, va="center",
                  ha="left", fontsize=FONT_SIZE, linespacing=1.0)  # fmt: skip
    return True
