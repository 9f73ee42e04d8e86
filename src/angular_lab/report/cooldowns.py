"""What the length of the cool-down does: the same trunks, a normal and a longer end."""

from collections.abc import Iterable
from dataclasses import replace

from angular_lab.experiments.statistics import best_rate, paired_differences
from angular_lab.report.results import judges_note, key_of, mean_cells
from angular_lab.report.runs import Run
from angular_lab.report.sweeps import SweepData
from angular_lab.report.tables import Mark, Row, Table, seeds_form, tokens_form
from angular_lab.report.verdicts import pair_table


def share_form(runs: Iterable[Run]) -> str:
    """The part of its steps in which a run cools down, as the specs have it; "" without runs."""
    specs = [run.spec for run in runs]
    shares = sorted({round(100 * spec.decay_steps / spec.steps, 1) for spec in specs})
    return " or ".join(f"{share:g}%" for share in shares)


def longer_share(sweep: SweepData) -> str:
    return share_form(member.longer for member in sweep.members if member.longer)


def cooldown_tables(sweep: SweepData) -> list[Table]:
    longer = sweep.cooled_longer()
    if longer is None:
        return []
    found = [_losses_table(sweep, longer)]
    pairs = pair_table(longer)
    if pairs is not None:
        note = (
            f"Seed by seed, each line at the {sweep.axis} that the normal cool-down chose; "
            "negative is better for the first line."
        )
        if moved := [label for label in sweep.lines if _moved(longer, label)]:
            note += f" The longer one would have chosen another for {', '.join(moved)}."
        title = "Line against line, with the longer cool-down "
        title += f"({longer_share(sweep)} of the steps)"
        found.append(replace(pairs, key=key_of(sweep, "pairs-longer"), title=title, note=note))
    return found


def _losses_table(sweep: SweepData, longer: SweepData) -> Table:
    last, axis = sweep.horizons[-1], sweep.axis
    normal = share_form(m.ends[last] for m in sweep.members if last in m.ends) or "?%"
    columns = {
        f"normal, {normal} of the steps": mean_cells(sweep, last),
        f"longer, {longer_share(sweep)} of the steps": mean_cells(longer, last),
    }
    rows: list[Row] = []
    for label in sweep.lines:
        best = sweep.best.get(label)
        row: Row = {"line": label, f"best {axis}": best.lr if best else None}
        row |= {name: cells[label] for name, cells in columns.items()}
        paired = paired_differences(longer.shown(label, last), sweep.shown(label, last))
        mean = paired.mean
        row["longer - normal"] = None if mean is None else Mark(mean, "", f"{mean:+.4f}")
        row["seeds of the difference"] = seeds_form(paired.seeds)
        row[f"best {axis} with the longer one"] = _best_cell(longer, label)
        rows.append(row)
    note = (
        f"Mean validation loss at {tokens_form(sweep.tokens(last))} tokens after two cool-downs "
        "off the same trunk, and their difference seed by seed (negative: the longer one is "
        f"better). Both are at the {axis} that the normal one chose. The last column is what the "
        f"longer one would have chosen on seed {sweep.seeds[0]}: where that is another, the line "
        "could do better with the longer one than is shown. "
        f"{judges_note(sweep)}n: number of seeds; † marks a best at the edge of its grid."
    )
    title = "Final loss by length of the cool-down"
    return Table(key_of(sweep, "cool-downs"), title, rows, note)


def _best(longer: SweepData, label: str) -> float | None:
    """What the first seed would choose."""
    try:
        return best_rate(longer.first_losses(label)).lr
    except ValueError:
        return None  # none finished, and there is a warning about it


def _moved(longer: SweepData, label: str) -> bool:
    found, chosen = _best(longer, label), longer.best.get(label)
    return found is not None and chosen is not None and chosen.lr != found


def _best_cell(longer: SweepData, label: str) -> Mark | None:
    """It says so where that is not what was chosen."""
    found = _best(longer, label)
    if found is None:
        return None
    grid = {member.value for member in longer.of_line(label) if member.seed == longer.seeds[0]}
    missing = len(grid - longer.first_losses(label).keys())
    edge = " †" if len(grid) > 1 and found in (min(grid), max(grid)) else ""
    said = [f"so far, {missing} unfinished"] if missing else []
    said += [f"chosen was {longer.best[label].lr:g}"] if _moved(longer, label) else []
    return Mark(found, "", f"{found:g}{edge}" + (f" ({', '.join(said)})" if said else ""))
