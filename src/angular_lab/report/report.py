"""The report: one page about sweeps and single runs, with the seeds behind every number.

It reads run folders only, without torch; the page needs no network.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from angular_lab.errors import UserError
from angular_lab.report.averages import average_tables
from angular_lab.report.cooldowns import cooldown_tables, variant_shares
from angular_lab.report.figures.differences import closest_figure, difference_figure
from angular_lab.report.figures.plots import save
from angular_lab.report.figures.sweep_figures import cooldown_figure, sweep_figures
from angular_lab.report.headlines import judged_sentence, listed, sentences
from angular_lab.report.page import Section, write_page
from angular_lab.report.read import SweepResults, collect, read_paces
from angular_lab.report.results import (
    by_value_table,
    finals_table,
    key_of,
    pace_table,
    runs_table,
    speed_table,
    speedrun_table,
    training_table,
)
from angular_lab.report.single_runs import groups, row, single_section
from angular_lab.report.tables import Table, text_table
from angular_lab.report.verdicts import RULE, all_pairs_table, claims_table, pair_table
from angular_lab.run_folder import Run, RunFolder, read_run
from angular_lab.text import counted

log = logging.getLogger(__name__)
__all__ = ["make_report", "summary", "text_table", "write_report"]

ONLY_RUNS = (
    "These runs belong to no sweep. Their losses are validation losses in nats. No difference "
    "between them is judged: that takes further seeds, which a sweep trains.",
)
INTRODUCTION = (
    "Losses are validation losses in nats, and only those after the cooldown are compared. "
    "A method is one "
    "way of training; its value, mostly the learning rate, was chosen on one seed and is judged on "
    "the others, in pairs of the same seed.",
    f"A comparison asks whether the first method is below the second. {RULE} It is reversed if the "
    "same is true in the other direction. Everything else is open: the first one leads or trails "
    "on all seeds so far, or the comparison is inconclusive. Numbers in italics are the paper's, "
    "not ours.",
)


def make_report(sources: Sequence[Path], out: Path) -> Path:
    """Write the page about all sweeps and runs below the sources.

    Problems with the runs are shown on the page and on stderr; the rest of the report is written.
    """
    warnings: list[str] = []
    sweeps, runs = collect(sources, warnings)
    parts = groups(runs, warnings)
    paces = read_paces(sources, warnings)
    for sweep in sweeps:
        sweep.paces = paces
    alone = len(sweeps) + len(parts) == 1 and not paces
    sections = [] if alone else [_opening(sweeps, runs)]
    sections += [_sweep_section(sweep, alone) for sweep in sweeps]
    if paces:
        tables = [pace_table(pace, i) for i, pace in enumerate(paces, 1)]
        sections.append(Section("pace", "Time per step", tables=tables))
    for i, part in enumerate(parts):
        many = f", group {i + 1} of {len(parts)}" if len(parts) > 1 else ""
        sections.append(single_section(part, f"single-runs-{i + 1}", f"Single runs{many}"))
    sections[0].warnings = [*warnings, *sections[0].warnings]
    notes = INTRODUCTION if sweeps else ONLY_RUNS
    page = write_page(out, _title(sweeps, runs), sections, notes=notes)
    for section in sections:
        for text in section.warnings:
            log.warning("warning: %s: %s", section.title, text)
    return page


def _title(sweeps: Sequence[SweepResults], runs: Sequence[Run]) -> str:
    """Return what the page is about: the question of its sweep, or what was trained."""
    if len(sweeps) == 1:
        return sweeps[0].title
    names = [sweep.experiment for sweep in sweeps] or [run.spec.optim.name for run in runs]
    distinct = [*dict.fromkeys(names)]
    more = f" and {len(distinct) - 4} more" if len(distinct) > 4 else ""
    kind, count = ("sweep", len(sweeps)) if sweeps else ("run", len(runs))
    return f"{count} {kind}{'s' * (count != 1)}: {', '.join(distinct[:4])}{more}"


def _opening(sweeps: Sequence[SweepResults], runs: Sequence[Run]) -> Section:
    pairs = all_pairs_table(sweeps, "pairs")
    result = [text] if (text := judged_sentence(sweeps)) else []
    if edges := [sweep.experiment for sweep in sweeps if any(map(sweep.at_edge, sweep.arms))]:
        among = f"In {len(edges)} of {len(sweeps)} sweeps a" if len(sweeps) > 1 else "A"
        result.append(
            f"{among} best value is at the edge of "
            f"its grid, so a wider one may change the result: {listed(edges)}"
        )
    trials = sum(len(sweep.trials) for sweep in sweeps)
    more = f", and {counted(len(runs), 'single run')}" if runs else ""
    result.append(f"{counted(len(sweeps), 'sweep')} with {counted(trials, 'trial')}{more}")
    tables = claims_table(sweeps, "claims"), pairs
    return Section(
        "short",
        "In short",
        headline=closest_figure(sweeps, "closest-comparisons"),
        sentences=[f"{text}." for text in result],
        tables=[table for table in tables if table is not None],
    )


def _sweep_section(sweep: SweepResults, alone: bool) -> Section:
    """Return the part about a sweep; if it is the only one, with the tables over all sweeps."""
    speed_ups = speed_table(sweep)
    words = [f"{sweep.file}. {_plan(sweep)}"]
    if speed_ups is None and sweep.pairs:
        words.append(_no_speed_up(sweep))
    tables: list[Table | None] = [
        pair_table(sweep),
        claims_table([sweep], "claims") if alone else None,
        all_pairs_table([sweep], "pairs") if alone else None,
        finals_table(sweep),
        by_value_table(sweep) if sweep.has_choice else None,
        speed_ups,
        training_table(sweep),
        *cooldown_tables(sweep),
        *average_tables(sweep),
        speedrun_table(sweep) if sweep.experiment == "speedrun" else None,
    ]
    figures, cooldowns = sweep_figures(sweep), cooldown_figure(sweep)
    return Section(
        key=key_of(sweep, "sweep"),
        title=f"{sweep.title} ({sweep.name})",
        headline=figures[0] if figures else None,
        sentences=sentences(sweep),
        words=words,
        overview=difference_figure(sweep),
        warnings=sweep.warnings,
        figures=[*figures[1:], *([cooldowns] if cooldowns else [])],
        tables=[table for table in tables if table is not None],
        details=[runs_table(sweep)],
    )


def _plan(sweep: SweepResults) -> str:
    *before, last = map(str, sweep.seeds)
    seeds = f"seeds {', '.join(before)} and {last}" if before else f"one seed ({last})"
    count = len(sweep.horizons)
    ends = f"{count} horizons, step" if count > 1 else "one horizon, step"
    if any(len(trial.planned) > 1 for trial in sweep.trials):
        ends = f"{count} cooldowns off one trunk, at step"
    horizons = ", ".join(f"{h:,}" for h in sweep.horizons)
    shares = " and ".join(variant_shares(sweep))
    more = f", and one over {shares} of the steps to the last" if shares else ""
    methods = f"{len(sweep.arms)} method{'s' * (len(sweep.arms) != 1)}"
    return f"{methods}; {seeds}; {ends} {horizons}{more}."


def _no_speed_up(sweep: SweepResults) -> str:
    why = "one horizon gives a curve of one point, and it takes two"
    if len(sweep.horizons) > 1:
        why = "no method is AngularMuown"
    return f"Speed-ups cannot be computed: {why}."


def summary(run: RunFolder) -> dict[str, Any]:
    """Return the row of a run, for a terminal."""
    return row(_readable_run(run.path, []))


def _readable_run(folder: Path, warnings: list[str]) -> Run:
    run = read_run(folder, warnings)
    if run is None:
        raise UserError(warnings[-1])
    if not run.metrics:
        raise UserError(f"{folder} has no metrics yet: train it first")
    return run


def write_report(
    folders: Sequence[Path],
    out: Path,
    title: str,
    texts: Sequence[tuple[str, str]] = (),
    words: Sequence[str] = (),
) -> Path:
    """Write index.html, curves.svg and curves.png about a few runs.

    `words` are paragraphs below the result, `texts` are (heading, text) pairs at the end.
    """
    if not folders:
        raise UserError("no runs to report on")
    warnings: list[str] = []
    runs = [_readable_run(folder, warnings) for folder in folders]
    section = single_section(runs, "runs", title)
    section.warnings, section.texts = [*warnings, *section.warnings], texts
    section.words = words
    page = write_page(out, title, [section])
    save([figure.panel for figure in section.all_figures[:2]], out / "curves")
    return page
