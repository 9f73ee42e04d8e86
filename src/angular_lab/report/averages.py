"""Averages of the weights against the weights, in the same runs."""

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

from angular_lab.experiments.statistics import verdict
from angular_lab.report.claims import pair_table
from angular_lab.report.results import judges_note, key_of, mean_cells
from angular_lab.report.runs import Run
from angular_lab.report.speed import speed_table
from angular_lab.report.sweeps import Member, SweepData, short
from angular_lab.report.tables import Mark, Row, Table, loss, seeds_form, tokens_form

COOLED, UNCOOLED = "cooled down", "full rate"
NOTE = (
    "Each run is its own partner: the validation loss of an average of its last weights, minus "
    "that of the weights. A window is the average's length in steps or, below 1, as a share of the "
    f"steps so far. “{UNCOOLED}” is the last evaluation before the cool-down, which goes on to "
    "more tokens: these rows do not say whether an average replaces it. All seeds count, because "
    "nothing was chosen between the two."
)
Key = tuple[str, str, float, str, int, float]  # line, axis, value, read-out, tokens, window


def average_tables(sweep: SweepData) -> list[Table]:
    found = [
        average_table(sweep),
        ends_table(sweep),
        _by_window(sweep, pair_table, "pairs-averaged", "Line against line, by averages"),
        _by_window(sweep, speed_table, "speed-up-averaged", "Speed-up by averages"),
    ]
    return [table for table in found if table is not None]


def _by_window(
    sweep: SweepData, make: Callable[[SweepData], Table | None], name: str, title: str
) -> Table | None:
    """A table as it were if the losses of the averages were those of the weights."""
    made = {window: make(sweep.read_from(window)) for window in _windows(sweep)}
    rows = [{"window": w, **row} for w, table in made.items() if table for row in table.rows]
    note = (
        "As the table of the weights' losses, but both lines are read out from an average of their "
        "last weights, at the value that the weights' losses chose. No window was chosen: all that "
        "were evaluated are here."
    )
    return Table(key_of(sweep, name), f"{title} of the last weights", rows, note) if rows else None


def _windows(sweep: SweepData) -> list[float]:
    """Of all averages that a run of the sweep has."""
    kept = (run.spec.averages for member in sweep.members for run in member.runs)
    return list(dict.fromkeys(window for averages in kept for window in averages))


def ends_table(sweep: SweepData) -> Table | None:
    """Lines by read-out, at the last horizon: what a line's change and an average do together."""
    last, windows = sweep.horizons[-1], _windows(sweep)
    cells = {"weights": mean_cells(sweep, last)}
    cells |= {f"average, {w:g}": mean_cells(sweep.read_from(w), last) for w in windows}
    rows: list[Row] = [
        {"line": label, **{name: column[label] for name, column in cells.items()}}
        for label in sweep.lines
    ]
    title = f"Final loss at {tokens_form(sweep.tokens(last))} tokens, by what is read out"
    note = (
        "After the cool-down, from the weights and from averages of the last ones, over so many "
        f"steps or, below 1, over that share of them; n: number of seeds. {judges_note(sweep)}"
    )
    return Table(key_of(sweep, "read-out"), title, rows, note.strip()) if windows else None


def average_table(sweep: SweepData) -> Table | None:
    """None where no run has an average."""
    weights: dict[Key, dict[int, float]] = {}
    averages: dict[Key, dict[int, float]] = {}
    for member in sweep.members:
        for run, name, line in _readings(member):
            for window, metric in run.spec.averages.items():
                if metric in line:
                    place = name, int(line["tokens"]), window
                    key = member.label, member.axis, member.value, *place
                    weights.setdefault(key, {})[member.seed] = line["val_loss"]
                    averages.setdefault(key, {})[member.seed] = line[metric]
    rows = [_row(key, weights[key], averages[key]) for key in weights]
    title = "An average of the last weights against the weights"
    return Table(key_of(sweep, "average"), title, rows, NOTE) if rows else None


def _readings(member: Member) -> Iterator[tuple[Run, str, dict[str, Any]]]:
    """Lines of finished runs at which an average may be read out: before and after cool-downs."""
    for run in member.normal:
        if member.diverged or run.final is None:
            continue
        evaluated = [line for line in run.metrics if "val_loss" in line]
        full_rate = [line for line in evaluated if line["step"] <= run.full_rate_until]
        if full_rate:
            yield run, UNCOOLED, full_rate[-1]
        if run.spec.schedule.kind != "constant":
            yield run, COOLED, evaluated[-1]


def _row(key: Key, weights: dict[int, float], averages: dict[int, float]) -> Row:
    label, axis, value, name, tokens, window = key
    result = verdict(averages, weights)
    mean = fmean(result.paired.differences)
    return {
        "line": label,
        short(axis): value,
        "read out": name,
        "tokens": Mark(tokens, "", tokens_form(tokens)),
        "window": window,
        "weights": loss(fmean(weights.values())),
        "average": loss(fmean(averages.values())),
        "mean difference": Mark(mean, "", f"{mean:+.4f}"),
        "seeds": seeds_form(result.paired.seeds),
        "the average is below": Mark(result.outcome, result.outcome),
        "reason": result.reason,
    }
