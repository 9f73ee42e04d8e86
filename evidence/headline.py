"""The first edition: the loss of every optimizer at 90M tokens, as a table and as a figure."""

from dataclasses import dataclass, replace

from evidence.comparison import Comparison
from evidence.dots import DotFigure, DotRow
from evidence.kept import OURS, Kept, Rows
from evidence.measures import LATE, BySeed, Facts, judging, lead, speed_up
from evidence.verdicts import judge

FIGURE = "final-loss.svg"


@dataclass(frozen=True)
class Result(DotRow):
    """An optimizer at 90M tokens, with AngularMuown's losses of the same sweep."""

    ours: BySeed


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
            Result("AngularMuown", "", ours, True, ours),
            Result("NorMuon", "", teaser.at("normuon", "90M"), False, ours),
            Result("Muown", "", teaser.at("muown", "90M"), False, ours),
            Result("Muon", "", teaser.at("muon", "90M"), False, ours),
            Result("AdamW", "one learning rate", teaser.at("adamw", "90M"), False, ours),
            Result("AdamW", "`aux_lr` tuned", adamw, False, tuned.finals(OURS, LATE)),
            Result("Hyperball", "", concurrent.finals("hyperball", LATE), False, again),
            Result("MagnitudeDirection", "linear decay", falling, False, again),
        ]
        self.results = sorted(results, key=lambda result: result.shown)

    def table(self) -> Rows:
        head = ["optimizer", "loss", "AngularMuown is lower?", "by", "95% interval", "fewer tokens"]
        return [head, *map(self._row, self.results)]

    def _row(self, result: Result) -> list[str]:
        cells = [result.title, f"{result.shown:.4f}"]
        if result.is_ours:
            return [*cells, "", "", "", ""]
        above = lead(result.ours, result.losses)
        interval = f"{above['low']:.3f} to {above['high']:.3f}"
        faster: Facts = speed_up(self.curves, result.losses)
        times = f"{faster['mean']:.2f}×" if faster else "not reached"
        verdict = judge(judging(result.ours), judging(result.losses))
        return [*cells, verdict, f"{above['mean']:.3f}", interval, times]

    def figure(self) -> str:
        rows = [replace(row, detail=row.detail.replace("`", "")) for row in self.results]
        return DotFigure("Validation loss at 90M tokens", rows).svg()
