"""A sweep's differences at one glance: a dot for each pair, and its interval as a whisker."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from angular_lab.experiments.statistics import LEAST, Outcome, verdict
from angular_lab.report.figures.plots import ACROSS, Figure, Kind, Panel, Trace
from angular_lab.report.read import SweepResults
from angular_lab.report.results import key_of
from angular_lab.report.tables import tokens_form, with_minus

# Outcomes differ in colour and in shape: an open pair is a ring.
LOOKS: dict[Outcome, tuple[str, int, Kind]] = {
    "holds": ("holds", 2, "settled"),
    "reversed": ("reversed", 1, "settled"),
    "inconclusive": ("open", 6, "open"),
}
READING = (
    "Whiskers: 95% interval, with an arrow where it is cut. Rings are open pairs. Grey: "
    f"differences below {LEAST:g}, which do not count."
)
ROOM = 0.6  # of the dots' range to each side; whiskers that are longer are cut


@dataclass(frozen=True)
class Difference:
    pair: str  # of methods
    tokens: str
    outcome: Outcome
    mean: float
    interval: tuple[float, float] | None  # None for one seed

    @property
    def note(self) -> str:
        return f"{with_minus(f'{self.mean:+.4f}')} {LOOKS[self.outcome][0]}"


def differences(sweep: SweepResults) -> list[Difference]:
    """Return the judged differences of all pairs at all horizons."""
    return [
        difference
        for a, b in sweep.pairs
        for horizon in sweep.horizons
        if (difference := _difference(sweep, a, b, horizon)) is not None
    ]


def _difference(sweep: SweepResults, a: str, b: str, horizon: int) -> Difference | None:
    result = verdict(sweep.judged(a, horizon), sweep.judged(b, horizon))
    if result.paired.mean is None:
        return None
    tokens = tokens_form(*sweep.tokens(horizon, a, b))
    name = pair_name(sweep, a, b)
    return Difference(name, tokens, result.outcome, result.paired.mean, result.interval)


def pair_name(sweep: SweepResults, a: str, b: str) -> str:
    """Return how a pair is called where the sweep is known: by its second method if the first is
    always the same."""
    firsts = {first for first, _ in sweep.pairs}  # not a and b: a sentence may quote them
    return b if len(firsts) == 1 else f"{a} against {b}"


def difference_figure(sweep: SweepResults) -> Figure | None:
    """Draw every difference with its interval; None if no pair has a common seed."""
    rows = differences(sweep)
    if not rows:
        return None
    firsts = sorted({a for a, _ in sweep.pairs})
    what = f"loss of {firsts[0]} minus the other's"
    if len(firsts) > 1 or len(what) > 40:
        what = "difference of losses"
    better = "the first method" if len(firsts) > 1 else firsts[0]
    caption = f"Every difference, seed by seed: left of zero {better} is better. {READING}"
    groups: dict[str, list[tuple[str, Difference]]] = {}
    for row in rows:
        heading = row.pair if len(firsts) > 1 else f"against {row.pair}"
        tokens = row.tokens if len(sweep.horizons) > 1 else ""
        groups.setdefault(heading, []).append((tokens, row))
    return Figure(key_of(sweep, "differences"), _panel(groups, what), caption)


def closest_figure(sweeps: Sequence[SweepResults], key: str) -> Figure | None:
    """Draw each sweep's closest comparison at its last horizon; None if none has two seeds."""
    groups: dict[str, list[tuple[str, Difference]]] = {}
    for sweep in sweeps:
        judged = {
            f"{a} against {b}": row
            for a, b in sweep.pairs
            if (row := _difference(sweep, a, b, sweep.last(a, b))) is not None and row.interval
        }
        if judged:
            name, closest = min(judged.items(), key=lambda item: abs(item[1].mean))
            groups.setdefault(f"{sweep.experiment}: {name}", []).append(("", closest))
    if not groups:
        return None
    caption = (
        "The closest comparison of every sweep at its last horizon: left of zero the first "
        f"method is better. {READING}"
    )
    return Figure(key, _panel(groups, "difference of losses"), caption)


def _panel(groups: dict[str, list[tuple[str, Difference]]], what: str) -> Panel:
    """Return rows under headings: a pair's name is longer than a phone has room for on a side."""
    names: list[str] = []
    notes: list[str] = []
    headings: list[int] = []
    rows: list[tuple[int, Difference]] = []
    for heading, members in groups.items():
        for line in wrap(heading, ACROSS):
            headings.append(len(names))
            names.append(line)
            notes.append("")
        for name, difference in members:
            rows.append((len(names), difference))
            names.append(name)
            notes.append(difference.note)
    limits = _limits([row for _, row in rows])
    traces = [trace for outcome in LOOKS for trace in _traces(rows, outcome, limits)]
    return Panel(
        traces, what, "", y_names=names, y_headings=headings, y_notes=notes, x_limits=limits,
        x_band=LEAST,
    )  # fmt: skip


def _limits(rows: Sequence[Difference]) -> tuple[float, float]:
    """Return the range of the dots with some room: intervals of two seeds would squeeze them."""
    low = min(-LEAST, *(row.mean for row in rows))
    high = max(LEAST, *(row.mean for row in rows))
    ends = [end for row in rows for end in row.interval or ()]
    room, margin = ROOM * (high - low), 0.05 * (high - low)
    return (
        max(low - room, min(low, *ends) - margin) if ends else low - margin,
        min(high + room, max(high, *ends) + margin) if ends else high + margin,
    )


def _traces(
    rows: Sequence[tuple[int, Difference]], outcome: Outcome, limits: tuple[float, float]
) -> list[Trace]:
    chosen = [(place, row) for place, row in rows if row.outcome == outcome]
    if not chosen:
        return []
    label, color, kind = LOOKS[outcome]
    places = [float(place) for place, _ in chosen]
    spans = [row.interval or (row.mean, row.mean) for _, row in chosen]
    traces = [Trace([row.mean for _, row in chosen], places, color, label, kind, spans)]
    low = [place for place, span in zip(places, spans, strict=True) if span[0] < limits[0]]
    high = [place for place, span in zip(places, spans, strict=True) if span[1] > limits[1]]
    ends: tuple[tuple[float, list[float], Kind], ...] = (
        (limits[0], low, "cut_low"),
        (limits[1], high, "cut_high"),
    )
    return traces + [Trace([x] * len(ys), ys, color, kind=cut) for x, ys, cut in ends if ys]
