"""The first edition: the loss of every optimizer at 90M tokens, as a table and as a figure."""

from dataclasses import dataclass
from statistics import fmean

from evidence.comparison import Comparison
from evidence.dots import DotFigure, DotRow
from evidence.kept import OURS, Kept, Rows
from evidence.measures import LATE, BySeed, Facts, judging, lead, speed_up
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
        rows = [
            DotRow(r.name, r.detail.replace("`", ""), r.losses, r.name == "AngularMuown")
            for r in self.results
        ]
        return DotFigure("Validation loss at 90M tokens", rows).svg()
