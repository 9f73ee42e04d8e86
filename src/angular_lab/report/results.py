"""A sweep's numbers as tables, in the paper's form and with the paper's numbers beside ours."""

from statistics import fmean

from angular_lab.experiments import published as paper
from angular_lab.experiments.statistics import speedrun_passes
from angular_lab.report.sweeps import Member, SweepData, short
from angular_lab.report.tables import Mark, Row, Table, loss, seeds_form, tokens_form

OTHER_SCALE = (
    "The paper's numbers are from another scale (its own model, data and tokens, one seed)"
)
SAME_SCALE = "The paper's numbers are from one seed"
PAPER_ROWS: dict[str, dict[str, paper.Sweep]] = {
    "qwen2": dict(
        zip(("angular_muown", "angular_muown, kappa = 1", "normuon"), paper.QWEN2, strict=True)
    ),
    "moe": dict(
        zip(
            ("angular_muown, RMS scale", "angular_muown, spectral scale", "muon"),
            paper.MOE,
            strict=True,
        )
    ),
}


def key_of(sweep: SweepData, name: str) -> str:
    """A file name and an id on the page; the folder keeps two sweeps of one kind apart."""
    folder = "".join(c if c.isalnum() else "-" for c in sweep.key or sweep.folder.name)
    return f"{folder}-{name}"


def paper_note(sweep: SweepData) -> str:
    return SAME_SCALE if sweep.scale == "paper" else OTHER_SCALE


def judges_note(sweep: SweepData) -> str:
    if sweep.chooser not in sweep.seeds or len(sweep.seeds) < 2:
        return ""
    where = "" if sweep.chose else ", in another sweep,"
    return f"Seed {sweep.chooser} chose the value{where} and does not count once others are there. "


def mean_cells(sweep: SweepData, horizon: int) -> dict[str, Mark | None]:
    """The mean loss of every line, with the number of seeds behind it; the lowest is marked."""
    losses = {label: list(sweep.shown(label, horizon).values()) for label in sweep.lines}
    means = {label: fmean(found) for label, found in losses.items() if found}
    sizes_differ = sweep.experiment == "width"
    lowest = None if sizes_differ else min(means.values(), default=None)
    return {
        label: loss(means[label], "best" * (means[label] == lowest), f" (n={len(losses[label])})")
        if label in means
        else None
        for label in sweep.lines
    }


def finals_table(sweep: SweepData) -> Table:
    """Cooled-down loss by line and horizon."""
    rows: list[Row] = []
    cells = {h: mean_cells(sweep, h) for h in sweep.horizons}
    for label in sweep.lines:
        best = sweep.best.get(label) if sweep.on_axis(label) else None
        row: Row = {"line": label, f"best {sweep.axis}": best.lr if best else None}
        for horizon in sweep.horizons:
            row[f"ours at {tokens_form(sweep.tokens(horizon))}"] = cells[horizon][label]
        seeds = {seed for h in sweep.horizons for seed in sweep.shown(label, h)}
        row["seeds"] = seeds_form(sorted(seeds))
        rows.append(row | _paper_teaser(sweep, label))
    note = "Mean validation loss after the cool-down, at so many tokens; n: number of seeds. "
    note += judges_note(sweep)
    note += f"{paper_note(sweep)}." if sweep.experiment == "teaser" else ""
    return Table(key_of(sweep, "final-loss"), "Final loss by line and horizon", rows, note.strip())


def _paper_teaser(sweep: SweepData, label: str) -> Row:
    if sweep.experiment != "teaser" or label not in paper.TEASER:
        return {}
    row = paper.TEASER[label]
    cells: Row = {"paper, best lr": Mark(row.best_rate, "paper")}
    for tokens, value in row.curve:
        cells[f"paper at {tokens_form(tokens)}"] = Mark(value, "paper", f"{value:.3f}")
    return cells


def by_value_table(sweep: SweepData) -> Table:
    """Loss by line and swept value: what the first seed chose from."""
    last, first = sweep.horizons[-1], sweep.seeds[0]
    theirs = PAPER_ROWS.get(sweep.experiment, {})
    lines = [label for label in sweep.lines if sweep.on_axis(label)]
    values = {m.value for label in lines for m in sweep.of_line(label)}
    values |= {v for s in theirs.values() for v in s.losses}
    rows: list[Row] = []
    for label in lines:
        found = {m.value: m for m in sweep.of_line(label) if m.seed == first}
        row: Row = {"line": label, **({"source": "ours"} if theirs else {})}
        row |= {f"{v:.4g}": _value_cell(sweep, found.get(v), last) for v in sorted(values)}
        rows.append(row)
        if label in theirs:
            losses = theirs[label].losses
            cells = {f"{v:.4g}": _paper_cell(v, losses) for v in sorted(values)}
            rows.append({"line": label, "source": Mark("the paper's", "paper"), **cells})
    note = f"One seed ({first}), at {tokens_form(sweep.tokens(last))} tokens; the best of a line "
    note += "is bold, † marks a best at the edge of its grid."
    note += f" {paper_note(sweep)}." if theirs else ""
    return Table(key_of(sweep, "loss-by-value"), f"Final loss by {sweep.axis}", rows, note)


def _value_cell(sweep: SweepData, member: Member | None, horizon: int) -> Mark | None:
    if member is None:
        return None
    if member.diverged:
        return Mark("diverged")
    end, best = member.final(horizon), sweep.best.get(member.label)
    if end is None:
        return Mark("unfinished")
    is_best = best is not None and best.lr == member.value
    edge = " †" if is_best and sweep.at_edge(member.label) else ""
    return loss(end[1], "best" if is_best else "", edge)


def _paper_cell(rate: float, losses: dict[float, float]) -> Mark | None:
    """With as many digits as the paper's table has."""
    if rate not in losses:
        return None
    digits = max(len(f"{loss:g}".partition(".")[2]) for loss in losses.values())
    best = " best" if losses[rate] == min(losses.values()) else ""
    return Mark(losses[rate], f"paper{best}", f"{losses[rate]:.{digits}f}")


def speedrun_table(sweep: SweepData) -> Table:
    """The track's rule: (3.28 - mean) * sqrt(runs) of at least 0.004."""
    rows: list[Row] = []
    for label in sweep.lines:
        losses = sweep.judged(label, sweep.horizons[-1])
        row: Row = {"line": label, "steps": sweep.horizons[-1], "runs": len(losses)}
        if not losses:
            rows.append({**row, "passes": "cannot be computed: no finished run"})
            continue
        result = speedrun_passes(list(losses.values()))
        more = result.further_runs
        rows.append(
            {
                **row,
                "mean loss": loss(fmean(losses.values()), suffix=f" (n={len(losses)})"),
                "(target - mean) * sqrt(n)": Mark(result.statistic, "", f"{result.statistic:+.4f}"),
                "passes": result.passes,
                "further runs at this mean": "no number is enough" if more is None else more,
            }
        )
    note = (
        f"Target {paper.SPEEDRUN_TARGET}, needed {paper.SPEEDRUN_MARGIN}. The preliminary version "
        f"took {paper.SPEEDRUN_STEPS:,} steps (the track's record, not ours)."
    )
    if sweep.scale != "paper":
        note += " At this scale the target means nothing; the row shows that the rule is applied."
    return Table(key_of(sweep, "speedrun"), "The speedrun's rule", rows, note)


def members_table(sweep: SweepData) -> Table:
    """Every run behind the numbers."""
    rows: list[Row] = []
    last = sweep.horizons[-1]
    for m in sweep.members:
        finals = {
            f"{tokens_form(sweep.tokens(h))} tokens": loss(end[1]) if (end := m.final(h)) else None
            for h in sweep.horizons
        }
        done = all(end is not None for end in finals.values()) and not m.lacks_longer(last)
        if m.plans_longer:
            end = m.cooled_longer(last).final(last)
            name = f"{tokens_form(sweep.tokens(last))} tokens, longer cool-down"
            finals[name] = loss(end[1]) if end else None
        speeds = [speed for run in m.normal if (speed := run.speed) is not None]
        status = "diverged" if m.diverged else "done" if done else "unfinished"
        run = next(iter(m.runs), None)
        rows.append(
            {
                "line": m.label,
                short(m.axis): m.value,
                "seed": m.seed,
                "status": status,
                **finals,
                "tokens/s": fmean(speeds) if speeds else None,
                "folder": run and (f"as {run.made_in}" if run.made_in else run.name),
            }
        )
    return Table(key_of(sweep, "runs"), "Every run", rows)
