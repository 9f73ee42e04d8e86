"""Averages of the last weights: compared with the weights of the same runs, and with each other."""

from collections.abc import Callable, Iterator
from statistics import fmean

from angular_lab.experiments.statistics import verdict
from angular_lab.report.read import SweepResults, TrialResult, short
from angular_lab.report.results import judges_note, key_of, mean_cells, speed_table
from angular_lab.report.tables import (
    Mark,
    Row,
    Table,
    difference,
    loss,
    seeds_form,
    token_count,
    tokens_form,
)
from angular_lab.report.verdicts import pair_table
from angular_lab.run_folder import Metrics, Run

BEFORE, AFTER = "before the cooldown", "after the cooldown"
NOTE = (
    "The validation loss of an average of a run's last weights, minus that of its weights. A "
    "window is the average's length in steps or, below 1, as a share of the steps so far. "
    f"“{BEFORE.capitalize()}” is the last evaluation at the full learning rate; the cooldown "
    "continues to more tokens, so these rows do not say whether an average replaces it. All seeds "
    "count, because nothing was chosen between the two."
)
Key = tuple[str, str, float, str, int, float]  # method, axis, value, evaluated, tokens, window


def average_tables(sweep: SweepResults) -> list[Table]:
    tables = [
        average_table(sweep),
        ends_table(sweep),
        _by_window(sweep, pair_table, "pairs-averaged", "Method against method, by averages"),
        _by_window(sweep, speed_table, "speed-up-averaged", "Speed-up by averages"),
    ]
    return [table for table in tables if table is not None]


def _by_window(
    sweep: SweepResults, make: Callable[[SweepResults], Table | None], name: str, title: str
) -> Table | None:
    """Make a table as if the averages' losses were those of the weights."""
    tables = {window: make(sweep.evaluated_by(window)) for window in _windows(sweep)}
    rows = [{"window": w, **row} for w, table in tables.items() if table for row in table.rows]
    note = (
        "As the table of the weights' losses, but both methods are evaluated with an average of "
        "their last weights, at the value that the weights' losses chose. All windows that were "
        "evaluated are shown."
    )
    return Table(key_of(sweep, name), f"{title} of the last weights", rows, note) if rows else None


def _windows(sweep: SweepResults) -> list[float]:
    """Return the windows of all averages in the sweep."""
    averages = (run.spec.averages for trial in sweep.trials for run in trial.runs)
    return list(dict.fromkeys(window for windows in averages for window in windows))


def ends_table(sweep: SweepResults) -> Table | None:
    """Show what a method's change and an average do together, at the last horizon."""
    last, windows = sweep.horizons[-1], _windows(sweep)
    cells = {"weights": mean_cells(sweep, last)}
    cells |= {f"average, {w:g}": mean_cells(sweep.evaluated_by(w), last) for w in windows}
    rows: list[Row] = [
        {"method": label, **{name: column[label] for name, column in cells.items()}}
        for label in sweep.arms
    ]
    tokens = tokens_form(*sweep.tokens(last))
    title = f"Final loss of the weights and of their averages, at {tokens} tokens"
    note = (
        "After the cooldown. An average's window is in steps or, below 1, a share of the steps; n: "
        f"number of seeds. {judges_note(sweep)}"
    )
    key = key_of(sweep, "final-loss-averaged")
    return Table(key, title, rows, note.strip()) if windows else None


def average_table(sweep: SweepResults) -> Table | None:
    """Compare every average with the weights of the same run; None if no run has one."""
    weights: dict[Key, dict[int, float]] = {}
    averages: dict[Key, dict[int, float]] = {}
    for trial in sweep.trials:
        for run, name, line in _evaluations(trial):
            for window, metric in run.spec.averages.items():
                value, average = line.get("val_loss"), line.get(metric)
                if value is not None and average is not None:
                    key = trial.arm, trial.axis, trial.value, name, line.tokens, window
                    weights.setdefault(key, {})[trial.seed] = value
                    averages.setdefault(key, {})[trial.seed] = average
    rows = [_row(key, weights[key], averages[key]) for key in weights]
    title = "An average of the last weights against the weights"
    return Table(key_of(sweep, "average"), title, rows, NOTE) if rows else None


def _evaluations(trial: TrialResult) -> Iterator[tuple[Run, str, Metrics]]:
    """Yield the last evaluations of finished runs, before and after the cooldown."""
    for run in trial.runs:
        if trial.diverged or run.final is None:
            continue
        before = [line for line in run.evaluations if line.step in run.spec.constant_phase]
        if before:
            yield run, BEFORE, before[-1]
        if run.spec.schedule.kind != "constant":
            yield run, AFTER, run.evaluations[-1]


def _row(key: Key, weights: dict[int, float], averages: dict[int, float]) -> Row:
    label, axis, value, name, tokens, window = key
    result = verdict(averages, weights)
    return {
        "method": label,
        short(axis): value,
        "evaluated": name,
        "tokens": token_count(tokens),
        "window": window,
        "weights": loss(fmean(weights.values())),
        "average": loss(fmean(averages.values())),
        "mean difference": difference(result.paired.mean),
        "seeds": seeds_form(result.paired.seeds),
        "the average is below": Mark(result.label, result.outcome),
        "reason": result.reason,
    }
