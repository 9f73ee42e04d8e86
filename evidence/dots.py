"""A figure of losses: one row for each method, one dot for each seed; readable on small screens."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from evidence.measures import CHOOSER, BySeed, judged, judging

WIDTH, RIGHT, TOP, ROW = 560, 474, 132, 48
INK, GREY, ACCENT = "#1f2328", "#59636e", "#0072b2"
STEPS = (0.01, 0.02, 0.04, 0.05, 0.1)  # between ticks
TICK = 48  # pixels that a tick's number needs


@dataclass(frozen=True)
class DotRow:
    """A method's losses by seed. Rows in the accent colour are those of AngularMuown."""

    name: str
    detail: str
    losses: BySeed
    is_ours: bool

    @property
    def title(self) -> str:
        return f"{self.name}, {self.detail}" if self.detail else self.name

    @property
    def is_judged(self) -> bool:
        return bool(judging(self.losses))

    @property
    def shown(self) -> float:
        """The mean over the seeds that judge; without any, the loss of the seed that chose."""
        return judged(self.losses) if self.is_judged else self.losses[CHOOSER]


class DotFigure:
    """Rows from the lowest loss to the highest, as SVG."""

    def __init__(self, heading: str, rows: Sequence[DotRow]) -> None:
        self.heading, self.rows = heading, sorted(rows, key=lambda row: row.shown)
        values = [loss for row in rows for loss in row.losses.values()]
        margin = 0.04 * (max(values) - min(values))
        self.low, self.high = min(values) - margin, max(values) + margin
        self.left = max(max(10.5 * len(row.name), 7.4 * len(row.detail)) for row in rows) + 32
        self.bottom = TOP + ROW * len(rows)

    def x(self, loss: float) -> float:
        share = (loss - self.low) / (self.high - self.low)
        return self.left + share * (RIGHT - self.left)

    def svg(self) -> str:
        height = self.bottom + 44
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="18" fill="{INK}">'
        )
        background = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
        rows = [line for i, row in enumerate(self.rows) for line in self._row(i, row)]
        return "\n".join([opening, background, *self._legend(), *self._axis(), *rows, "</svg>", ""])

    def _legend(self) -> list[str]:
        return [
            _text(12, 32, self.heading, "start", size=22),
            _dot(20, 62, GREY, True, "a seed that judges"),
            _text(32, 68, "seed that judges", "start", GREY),
            _bar(206, 62, GREY),
            _text(216, 68, "mean of the seeds that judge", "start", GREY),
            _dot(20, 92, GREY, False, "the seed that chose the learning rate"),
            _text(32, 98, "seed that chose the learning rate", "start", GREY),
        ]

    def _axis(self) -> list[str]:
        most = (RIGHT - self.left) / TICK
        step = next((x for x in STEPS if (self.high - self.low) / x < most), STEPS[-1])
        first = int(self.low / step) + 1
        lines = []
        for count in range(first, int(self.high / step) + 1):
            x = self.x(count * step)
            path = f"M{x:.1f} {TOP - 14}V{self.bottom}"
            lines.append(f'<path d="{path}" stroke="#d1d9e0" fill="none"/>')
            lines.append(_text(x, self.bottom + 24, f"{count * step:.2f}", "middle", GREY))
        return lines

    def _row(self, i: int, row: DotRow) -> list[str]:
        y = TOP + ROW * i + ROW // 2 - 8
        color = ACCENT if row.is_ours else INK
        shift = -4 if row.detail else 6
        lines = [_text(self.left - 18, y + shift, row.name, "end", color, bold=row.is_ours)]
        if row.detail:
            lines.append(_text(self.left - 18, y + 14, row.detail, "end", GREY, size=16))
        if row.is_judged:
            lines.append(_bar(self.x(row.shown), y, color))
        apart = min(9.0, 28 / max(1, len(row.losses) - 1))  # close losses would hide each other
        for place, (seed, loss) in enumerate(sorted(row.losses.items())):
            label = f"{row.title}, seed {seed}: {loss:.4f}"
            offset = apart * (place - (len(row.losses) - 1) / 2)
            lines.append(_dot(self.x(loss), y + offset, color, seed != CHOOSER, label))
        number = color if row.is_judged else GREY
        return [*lines, _text(WIDTH - 10, y + 6, f"{row.shown:.3f}", "end", number)]


def _text(
    x: float, y: float, text: str, anchor: str, color: str = "", size: int = 0, bold: bool = False
) -> str:
    extra = f' fill="{color}"' * bool(color) + f' font-size="{size}"' * bool(size)
    weight = ' font-weight="bold"' * bold
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{extra}{weight}>{escape(text)}</text>'


def _dot(x: float, y: float, color: str, filled: bool, label: str) -> str:
    fill = color if filled else "#ffffff"
    return (
        f'<circle cx="{x:.1f}" cy="{y:g}" r="5" fill="{fill}" fill-opacity="0.8" stroke="{color}" '
        f'stroke-width="2"><title>{escape(label)}</title></circle>'
    )


def _bar(x: float, y: float, color: str) -> str:
    return f'<path d="M{x:.1f} {y - 18}V{y + 18}" stroke="{color}" stroke-width="3"/>'
