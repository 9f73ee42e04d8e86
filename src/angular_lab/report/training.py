"""Training losses beside validation losses: what a line learns, and what of it carries over."""

from statistics import fmean

from angular_lab.report.results import judges_note, key_of
from angular_lab.report.runs import Run
from angular_lab.report.sweeps import SweepData
from angular_lab.report.tables import Row, Table, loss, seeds_form, tokens_form

LAST = 14  # logged losses: single batches scatter by more than lines differ


def training_table(sweep: SweepData) -> Table | None:
    """At the last horizon, each line at its best value."""
    last = sweep.horizons[-1]
    rows: list[Row] = []
    for label in sweep.lines:
        kept = sweep.shown(label, last)
        ends = {s: m.ends[last] for s, m in sweep.at_best(label).items() if s in kept}
        found = {seed: end for seed, run in ends.items() if (end := at_the_end(run)) is not None}
        if not found:
            continue
        row: Row = {"line": label, "training": loss(fmean(found.values()))}
        row["validation"] = loss(fmean(kept[seed] for seed in found))
        row["validation - training"] = loss(fmean(kept[s] - found[s] for s in found))
        row["training, by seed"] = ", ".join(f"{s}: {found[s]:.4f}" for s in found)
        rows.append(row | {"seeds": seeds_form(list(found))})
    if len(rows) < 2:
        return None
    note = (
        f"Mean of the last {LAST} training losses that a run logged, and its validation loss, at "
        f"{tokens_form(sweep.tokens(last))} tokens. {judges_note(sweep)}"
    )
    return Table(key_of(sweep, "training"), "Training loss", rows, note.strip())


def at_the_end(run: Run) -> float | None:
    """None where a run logged less."""
    _, losses = run.series("loss")
    return fmean(losses[-LAST:]) if len(losses) >= LAST else None
