"""A sweep's differences at one glance: a dot for each pair, and its interval as a whisker."""

from collections.abc import Sequence
from dataclasses import dataclass

from angular_lab.experiments.statistics import LEAST, Outcome, verdict
from angular_lab.report.plots import Figure, Kind, Panel, Trace
from angular_lab.report.read import SweepResults
from angular_lab.report.results import key_of
from angular_lab.report.tables import tokens_form

# Outcomes differ in colour and in shape: an open pair is a ring.
LOOKS: dict[Outcome, tuple[str, int, Kind]] = {
    "holds": ("holds", 2, "settled"),
    "reversed": ("reversed", 1, "settled"),
    "inconclusive": ("open", 6, "open"),
}
ROOM = 0.6  # of the dots' range to each side; whiskers that are longer are cut


@dataclass(frozen=True)
class Difference:
    name: str
    outcome: Outcome
    mean: float
    interval: tuple[float, float] | None  # None for one seed


def differences(sweep: SweepResults) -> list[Difference]:
    """Return the judged differences of all pairs at all horizons."""
    firsts = {a for a, _ in sweep.pairs}
    found = []
    for a, b in sweep.pairs:
        for horizon in sweep.horizons:
            result = verdict(sweep.judged(a, horizon), sweep.judged(b, horizon))
            if result.paired.mean is None:
                continue
            name = b if len(firsts) == 1 else f"{a} - {b}"
            if len(sweep.horizons) > 1:
                name += f", {tokens_form(sweep.tokens(horizon))}"
            found.append(Difference(name, result.outcome, result.paired.mean, result.interval))
    return found


def difference_figure(sweep: SweepResults) -> Figure | None:
    """Draw every difference with its interval; None if no pair has a common seed."""
    rows = differences(sweep)
    if not rows:
        return None
    limits = _limits(rows)
    traces = [trace for outcome in LOOKS for trace in _traces(rows, outcome, limits)]
    firsts = sorted({a for a, _ in sweep.pairs})
    what = f"loss of {firsts[0]} minus the other's" if len(firsts) == 1 else "difference of losses"
    names = [row.name for row in rows]
    panel = Panel(traces, what, "", y_names=names, x_limits=limits, x_band=LEAST)
    better = "the first method" if len(firsts) > 1 else firsts[0]
    caption = (
        f"Every difference, seed by seed: left of zero {better} is better. Whiskers: 95% interval, "
        "with an arrow where it is cut. Rings are open pairs. Grey: differences below "
        f"{LEAST:g}, which do not count."
    )
    return Figure(key_of(sweep, "differences"), panel, caption)


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
    rows: Sequence[Difference], outcome: Outcome, limits: tuple[float, float]
) -> list[Trace]:
    chosen = [(place, row) for place, row in enumerate(rows) if row.outcome == outcome]
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
