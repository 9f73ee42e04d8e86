"""Draw the pictures of the how-to pages: cuts, the geometry of a step, the exchange between ranks.

    python -m evidence.pictures          # writes docs/figures/howto/*.svg
    python -m evidence.pictures --png    # and PNG files next to them, to look at

They show no measurement, so they need no kept runs.
"""

import argparse
from collections.abc import Callable, Sequence
from math import atan2, cos, degrees, radians, sin
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, FancyArrowPatch, Rectangle

from evidence.kept import ROOT

FOLDER = ROOT / "docs" / "figures" / "howto"
BLUE, ORANGE, GREEN, PURPLE = "#4c8fd6", "#f0a040", "#58b368", "#a874c8"
INK, GRAY = "#222222", "#777777"
STYLE = {
    "font.size": 13,
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "angular-muown",  # the same bytes each time
}


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty white drawing, whose units are tenths of an inch."""
    figure = plt.figure(figsize=(width / 10, height / 10), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, w: float, h: float, color: str, text: str = "") -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor="white", linewidth=1.5))
    if text:
        write(axes, x + w / 2, y + h / 2, text, color="white", weight="bold")


def write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    style = {"ha": "center", "va": "center", "color": INK, **style}
    axes.text(x, y, text, **style)


def arrow(
    axes: Axes, start: Sequence[float], end: Sequence[float], color: str = GRAY, **style: Any
) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 18, "linewidth": 2, **style}
    kind = FancyArrowPatch(
        (start[0], start[1]), (end[0], end[1]), color=color, shrinkA=0, shrinkB=0, **style
    )
    axes.add_patch(kind)


def code(axes: Axes, x: float, y: float, text: str) -> None:
    write(axes, x, y, text, family="DejaVu Sans Mono", fontsize=12)


def cut_contiguous() -> Figure:
    """Three blocks of rows, one after the other."""
    figure, axes = canvas(54, 38)
    code(axes, 27, 35, 'blocks={"*.qkv.weight": 3}')
    for i, (color, name) in enumerate(zip((BLUE, ORANGE, GREEN), "qkv", strict=True)):
        box(axes, 4, 20 - 8 * i, 13, 8, color, name)
        box(axes, 36, 21.5 - 9.5 * i, 13, 8, color, name)
        arrow(axes, (19, 24 - 8 * i), (34, 25.5 - 9.5 * i))
    write(axes, 10.5, 30.5, "one parameter", color=GRAY)
    write(axes, 42.5, 31.5, "three matrices", color=GRAY)
    return figure


def cut_interleaved() -> Figure:
    """Rows of q, k and v that alternate head by head."""
    figure, axes = canvas(54, 44)
    code(axes, 27, 41.5, 'blocks={"*.query_key_value.weight": 3}')
    code(axes, 27, 38.5, 'interleaved={"*.query_key_value.weight": heads}')
    colors, heads = (BLUE, ORANGE, GREEN), 3
    for head in range(heads):
        for i, (color, name) in enumerate(zip(colors, "qkv", strict=True)):
            y = 31 - 3.3 * (3 * head + i)
            box(axes, 4, y - 3, 13, 3.3, color, f"{name}{head}")
            target = 31 - 10.4 * i - 3.0 * head
            box(axes, 36, target - 2.7, 13, 3.0, color, f"{name}{head}")
            arrow(axes, (17.5, y - 1.4), (35.5, target - 1.2), color, linewidth=1.4)
    write(axes, 10.5, 34, "one parameter", color=GRAY)
    write(axes, 42.5, 34, "three matrices", color=GRAY)
    return figure


def cut_experts() -> Figure:
    """A stack (E, m, n): every expert is a matrix, and each may have blocks."""
    figure, axes = canvas(54, 38)
    code(axes, 27, 35, 'stacks=["*.experts.gate_up_proj"]')
    code(axes, 27, 32, 'blocks={"*.experts.gate_up_proj": 2}')
    for i in (2, 1, 0):
        x, y = 3 + 3.2 * i, 5 + 3.2 * i
        box(axes, x, y + 7, 12, 7, BLUE, "gate" if i == 0 else "")
        box(axes, x, y, 12, 7, PURPLE, "up" if i == 0 else "")
    write(axes, 12, 2.2, "(experts, 2m, n)", color=GRAY)
    arrow(axes, (23, 15), (29.5, 15))
    for i in range(3):
        for j, (color, name) in enumerate(((BLUE, "gate"), (PURPLE, "up"))):
            box(axes, 31 + 11 * j, 21.5 - 8.2 * i, 10, 7, color, f"{name} {i}")
    write(axes, 41.5, 2.2, "a matrix each", color=GRAY)
    return figure


def cut_convolution() -> Figure:
    """A convolution (out, in, height, width) is read as a matrix out x (in height width)."""
    figure, axes = canvas(54, 32)
    colors = (BLUE, ORANGE, GREEN)
    for row, color in enumerate(colors):
        y = 20 - 7.5 * row
        for channel in range(2):
            for i in range(4):
                box(axes, 7 + 6 * channel + 2.5 * (i % 2), y + 2.5 * (i // 2), 2.5, 2.5, color)
        for i in range(8):
            box(axes, 29 + 2.6 * i, y + 0.8, 2.6, 3.6, color)
        arrow(axes, (20, y + 2.5), (27.5, y + 2.5))
    write(axes, 3.5, 15, "outputs", color=GRAY, rotation=90)
    write(axes, 12.8, 28.5, "inputs × height × width", color=GRAY)
    write(axes, 39.4, 28.5, "one row per output", color=GRAY)
    write(axes, 27, 2, "no declaration is needed", color=GRAY)
    return figure


def geometry_of_a_step() -> Figure:
    """A row on its circle: the tangent step, the retraction, the angle, the new length."""
    figure, axes = canvas(54, 44)
    origin, radius, start, step = (7.0, 6.0), 26.0, 24.0, 0.52

    def at(angle: float, length: float) -> tuple[float, float]:
        return (
            origin[0] + length * radius * cos(radians(angle)),
            origin[1] + length * radius * sin(radians(angle)),
        )

    circle = Arc(origin, 2 * radius, 2 * radius, theta1=-4, theta2=98, color=GRAY, linewidth=1.5)
    axes.add_patch(circle)
    tangent = start + 90 - 8  # the polar factor is not exactly tangent
    unit = at(start, 1)
    moved = (
        unit[0] + step * radius * cos(radians(tangent)),
        unit[1] + step * radius * sin(radians(tangent)),
    )
    end = degrees(atan2(moved[1] - origin[1], moved[0] - origin[0]))
    before, after = at(start, 1.55), at(end, 1.42)
    for tip, color in ((before, BLUE), (after, ORANGE)):
        arrow(axes, origin, tip, color, linewidth=1.2, linestyle=(0, (4, 3)))
    arrow(axes, origin, unit, BLUE, linewidth=3)
    arrow(axes, origin, at(end, 1), ORANGE, linewidth=3)
    arrow(axes, unit, moved, GREEN, linewidth=3)
    axes.add_patch(Arc(origin, 17, 17, theta1=start, theta2=end, color=INK, linewidth=2))
    axes.plot(*origin, "o", color=INK)
    halfway = at((start + end) / 2, 0.44)
    write(axes, halfway[0] + 2.2, halfway[1] + 1.6, "≈ η κ", fontsize=13)
    write(axes, unit[0] - 5.2, unit[1] - 5.2, "U", color=BLUE, weight="bold", fontsize=15)
    write(axes, 13.2, 24.5, "U′", color=ORANGE, weight="bold", fontsize=15)
    write(axes, moved[0] + 7.0, moved[1] - 3.0, "−η κ s Q", color=GREEN, weight="bold")
    write(axes, before[0] + 1.2, before[1] - 3.6, "W = g U", color=BLUE)
    write(axes, after[0] + 0.5, after[1] + 2.0, "W′ = g′ U′", color=ORANGE)
    write(axes, 26, 2.6, "the unit circle of one row", color=GRAY)
    return figure


def exchange() -> Figure:
    """Rows are sharded; each matrix is whole at its owner for the polar factor, then goes back."""
    figure, axes = canvas(54, 78)
    colors, names, columns = (BLUE, ORANGE, GREEN), "ABC", (4.0, 22.0, 40.0)
    for rank, x in enumerate(columns):
        write(axes, x + 5, 75.5, f"rank {rank}", weight="bold")
        for i, (color, name) in enumerate(zip(colors, names, strict=True)):
            box(axes, x, 63.5 - 4.4 * i, 10, 3.6, color, f"{name} {rank}")
            box(axes, x, 12.6 - 4.4 * i, 10, 3.6, color, f"Q{name} {rank}")
        for part in range(3):
            box(axes, x, 38.4 - 3.6 * part, 10, 3.6, colors[rank], f"{names[rank]} {part}")
    write(axes, 27, 70.5, "every rank holds some rows of each matrix", color=GRAY)
    write(axes, 27, 44.7, "each matrix is whole at its owner", color=GRAY)
    write(axes, 27, 28.7, "polar factor: Q = polar(A), …", color=GRAY)
    write(axes, 27, 19.2, "rows of Q return; each rank turns its rows", color=GRAY)
    for row, x in enumerate(columns):
        for column, target in enumerate(columns):
            style: dict[str, Any] = {"linewidth": 1.2, "mutation_scale": 11}
            arrow(axes, (x + 5, 54.2), (target + 5, 46.8), colors[column], **style)
            arrow(axes, (x + 5, 27.0), (target + 5, 21.0), colors[row], **style)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "cut-contiguous": cut_contiguous,
    "cut-interleaved": cut_interleaved,
    "cut-experts": cut_experts,
    "cut-convolution": cut_convolution,
    "geometry-of-a-step": geometry_of_a_step,
    "exchange": exchange,
}


def draw(folder: Path, png: bool = False) -> list[Path]:
    """Draw all pictures and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with plt.rc_context(STYLE):
        for name, picture in PICTURES.items():
            figure = picture()
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            paths.append(path)
            if png:
                figure.savefig(path.with_suffix(".png"), dpi=100)
            plt.close(figure)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", action="store_true", help="also write PNG files")
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    for path in draw(given.out, given.png):
        print(path)
