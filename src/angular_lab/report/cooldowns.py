"""What the length of the cooldown does: the same trunks, and another cooldown off them."""

from collections.abc import Iterable
from dataclasses import replace

from angular_lab.experiments.statistics import best_rate, paired_differences
from angular_lab.report.read import SweepResults
from angular_lab.report.results import judges_note, key_of, mean_cells
from angular_lab.report.tables import Mark, Row, Table, difference, seeds_form, tokens_form
from angular_lab.report.verdicts import pair_table
from angular_lab.run_folder import Run


def share_form(runs: Iterable[Run]) -> str:
    """Return the share of the steps in which runs cool down; "" without runs."""
    specs = [run.spec for run in runs]
    shares = sorted({round(100 * spec.decay_steps / spec.steps, 1) for spec in specs})
    return " or ".join(f"{share:g}%" for share in shares)


def _share(sweep: SweepResults) -> str:
    last = sweep.horizons[-1]
    return share_form(t.ends[last] for t in sweep.trials if last in t.ends) or "?%"


def variant_shares(sweep: SweepResults) -> list[str]:
    return [_share(view) for view in sweep.variant_views()]


def cooldown_tables(sweep: SweepResults) -> list[Table]:
    """Return a table of losses and one of verdicts for every other length of the cooldown."""
    tables = []
    for view in sweep.variant_views():
        tables.append(_losses_table(sweep, view))
        pairs = pair_table(view)
        if pairs is not None:
            note = (
                f"Seed by seed, each method at the {sweep.axis} that the usual cooldown chose; "
                "negative is better for the first one."
            )
            if moved := [arm for arm in sweep.arms if _moved(view, arm)]:
                note += f" This cooldown would have chosen another for {', '.join(moved)}."
            title = f"Method against method, with a cooldown over {_share(view)} of the steps"
            key = key_of(sweep, f"pairs-cooldown-{_share(view).rstrip('%')}")
            tables.append(replace(pairs, key=key, title=title, note=note))
    return tables


def _losses_table(sweep: SweepResults, view: SweepResults) -> Table:
    last, axis = view.horizons[-1], sweep.axis
    share = _share(view)
    columns = {
        f"usual, {_share(sweep)} of the steps": mean_cells(sweep, last),
        f"{share} of the steps": mean_cells(view, last),
    }
    rows: list[Row] = []
    for arm in sweep.arms:
        best = sweep.best.get(arm)
        row: Row = {"method": arm, f"best {axis}": best.lr if best else None}
        row |= {name: cells[arm] for name, cells in columns.items()}
        paired = paired_differences(view.shown(arm, last), sweep.shown(arm, last))
        row[f"{share} - usual"] = difference(paired.mean)
        row["seeds of the difference"] = seeds_form(paired.seeds)
        row[f"best {axis} with {share}"] = _best_cell(view, arm)
        rows.append(row)
    note = (
        f"Mean validation loss at {tokens_form(*sweep.tokens(last))} tokens after two cooldowns "
        "off the same trunk, and their difference seed by seed (negative: the usual one is worse). "
        f"Both are at the {axis} that the usual one chose. The last column is what the other one "
        f"would have chosen on seed {sweep.seeds[0]}: where that differs, the method could do "
        f"better with it than shown. {judges_note(sweep)}n: number of seeds; † marks a best at "
        "the edge of its grid."
    )
    key = key_of(sweep, f"cooldown-{share.rstrip('%')}")
    return Table(key, "Final loss by length of the cooldown", rows, note)


def _best(view: SweepResults, arm: str) -> float | None:
    """Return what the first seed would choose."""
    try:
        return best_rate(view.first_losses(arm)).lr
    except ValueError:
        return None  # none is finished, and there is a warning about it


def _moved(view: SweepResults, arm: str) -> bool:
    best, chosen = _best(view, arm), view.best.get(arm)
    return best is not None and chosen is not None and chosen.lr != best


def _best_cell(view: SweepResults, arm: str) -> Mark | None:
    """Return that value, with a remark where it is not the chosen one."""
    best = _best(view, arm)
    if best is None:
        return None
    grid = {trial.value for trial in view.of_arm(arm) if trial.seed == view.seeds[0]}
    missing = len(grid - view.first_losses(arm).keys())
    edge = " †" if len(grid) > 1 and best in (min(grid), max(grid)) else ""
    remarks = [f"so far, {missing} unfinished"] if missing else []
    remarks += [f"chosen was {view.best[arm].lr:g}"] if _moved(view, arm) else []
    return Mark(best, "", f"{best:g}{edge}" + (f" ({', '.join(remarks)})" if remarks else ""))
