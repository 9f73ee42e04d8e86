"""The main result: the loss of every optimizer at 90M tokens, as a table and as a figure."""

from dataclasses import dataclass
from statistics import fmean
from xml.sax.saxutils import escape

from evidence.comparison import Comparison
from evidence.kept import OURS, Kept, Rows
from evidence.measures import CHOOSER, LATE, BySeed, Facts, judging, lead, speed_up
from evidence.verdicts import judge

FIGURE = "final-loss.svg"


@dataclass(frozen=True)
class Result:
    """An optimizer's losses at 90M tokens by seed, and AngularMuown's of the same sweep."""

    name: str
    detail: str  # what differs from the protocol
    losses: BySeed
    ours: BySeed

    @property
    def title(self) -> str:
        return f"{self.name}, {self.detail}" if self.detail else self.name

    @property
    def mean(self) -> float:
        return fmean(judging(self.losses).values())


class Headline:
    """All optimizers, the lowest loss first."""

    def __init__(self, kept: Kept) -> None:
        teaser, concurrent = Comparison(kept), kept.sweeps["concurrent"]
        tuned = kept.sweeps["tuned-adamw"]
        self.curves = teaser.curves
        ours, again = teaser.at(OURS, "90M"), concurrent.finals(OURS, LATE)
        falling = concurrent.finals("magnitude_direction, falling rate", LATE)
        adamw = tuned.finals("adamw", LATE)
        results = [
            Result("AngularMuown", "", ours, ours),
            Result("NorMuon", "", teaser.at("normuon", "90M"), ours),
            Result("Muown", "", teaser.at("muown", "90M"), ours),
            Result("Muon", "", teaser.at("muon", "90M"), ours),
            Result("AdamW", "one learning rate", teaser.at("adamw", "90M"), ours),
            Result("AdamW", "`aux_lr` tuned", adamw, tuned.finals(OURS, LATE)),
            Result("Hyperball", "", concurrent.finals("hyperball", LATE), again),
            Result("MagnitudeDirection", "linear decay", falling, again),
        ]
        self.results = sorted(results, key=lambda result: result.mean)

    def table(self) -> Rows:
        head = ["optimizer", "loss", "AngularMuown is lower?", "by", "95% interval", "fewer tokens"]
        return [head, *map(self._row, self.results)]

    def _row(self, result: Result) -> list[str]:
        cells = [result.title, f"{result.mean:.4f}"]
        if result.name == "AngularMuown":
            return [*cells, "", "", "", ""]
        above = lead(result.ours, result.losses)
        interval = f"{above['low']:.3f} to {above['high']:.3f}"
        faster: Facts = speed_up(self.curves, result.losses)
        times = f"{faster['mean']:.2f}×" if faster else "not reached"
        verdict = judge(judging(result.ours), judging(result.losses))
        return [*cells, verdict, f"{above['mean']:.3f}", interval, times]

    def figure(self) -> str:
        return Drawing(self.results).svg()


class Drawing:
    """One row for each optimizer, one dot for each seed; large letters, for small screens."""

    WIDTH, LEFT, RIGHT, TOP, ROW = 700, 262, 606, 118, 46
    INK, GREY, ACCENT = "#1f2328", "#59636e", "#0072b2"

    def __init__(self, results: list[Result]) -> None:
        self.results = results
        values = [loss for result in results for loss in result.losses.values()]
        self.low, self.high = min(values) - 0.006, max(values) + 0.006
        self.bottom = self.TOP + self.ROW * len(results)

    def x(self, loss: float) -> float:
        share = (loss - self.low) / (self.high - self.low)
        return self.LEFT + share * (self.RIGHT - self.LEFT)

    def svg(self) -> str:
        height = self.bottom + 56
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.WIDTH} {height}" '
            'role="img" font-family="Helvetica, Arial, sans-serif" font-size="19" '
            f'fill="{self.INK}">'
        )
        background = f'<rect width="{self.WIDTH}" height="{height}" fill="#ffffff"/>'
        rows = [line for i, result in enumerate(self.results) for line in self._row(i, result)]
        return "\n".join([opening, background, *self._legend(), *self._axis(), *rows, "</svg>", ""])

    def _legend(self) -> list[str]:
        y = 74
        return [
            _text(16, 36, "Validation loss at 90M tokens, lower is better", "start", size=24),
            _dot(26, y, self.GREY, True, "a seed that judges"),
            _text(40, y + 6, "seed", "start", self.GREY),
            _dot(108, y, self.GREY, False, "the seed that chose the learning rate"),
            _text(122, y + 6, "seed that chose the learning rate", "start", self.GREY),
            _bar(430, y, self.GREY),
            _text(442, y + 6, "mean of the other seeds", "start", self.GREY),
            _text(self.WIDTH - 14, self.bottom + 26, "mean", "end", self.GREY),
        ]

    def _axis(self) -> list[str]:
        lines = []
        tick = int(self.low / 0.04) * 0.04
        while (tick := tick + 0.04) < self.high:
            x = self.x(tick)
            lines.append(
                f'<path d="M{x:.1f} {self.TOP - 14}V{self.bottom}" stroke="#d1d9e0" fill="none"/>'
            )
            lines.append(_text(x, self.bottom + 26, f"{tick:.2f}", "middle", self.GREY))
        return lines

    def _row(self, i: int, result: Result) -> list[str]:
        y = self.TOP + self.ROW * i + self.ROW // 2 - 8
        ours = result.name == "AngularMuown"
        color = self.ACCENT if ours else self.INK
        shift = -5 if result.detail else 6
        lines = [_text(self.LEFT - 22, y + shift, result.name, "end", color, bold=ours)]
        if result.detail:
            detail = result.detail.replace("`", "")
            lines.append(_text(self.LEFT - 22, y + 14, detail, "end", self.GREY, size=16))
        lines.append(_bar(self.x(result.mean), y, color))
        for seed, loss in sorted(result.losses.items()):
            label = f"{result.title}, seed {seed}: {loss:.4f}"
            apart = 9 * (seed - 1)  # close losses would hide each other
            lines.append(_dot(self.x(loss), y + apart, color, seed != CHOOSER, label))
        return [*lines, _text(self.WIDTH - 14, y + 6, f"{result.mean:.3f}", "end", color)]


def _text(
    x: float, y: float, text: str, anchor: str, color: str = "", size: int = 0, bold: bool = False
) -> str:
    extra = f' fill="{color}"' * bool(color) + f' font-size="{size}"' * bool(size)
    weight = ' font-weight="bold"' * bold
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{extra}{weight}>{escape(text)}</text>'


def _dot(x: float, y: float, color: str, filled: bool, label: str) -> str:
    fill = color if filled else "#ffffff"
    return (
        f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{fill}" fill-opacity="0.8" stroke="{color}" '
        f'stroke-width="2"><title>{escape(label)}</title></circle>'
    )


def _bar(x: float, y: float, color: str) -> str:
    return f'<path d="M{x:.1f} {y - 16}V{y + 16}" stroke="{color}" stroke-width="3"/>'
