"""Tables of a sweep: final losses, losses by value, training losses, speed-ups, every run.

Where the paper has a number for the same thing, it stands next to ours.
"""

from math import inf
from statistics import fmean

from angular_lab.experiments import published as paper
from angular_lab.experiments.statistics import (
    Curve,
    SpeedUps,
    speed_up,
    speed_up_interval,
    speedrun_passes,
)
from angular_lab.pace.record import Pace, slug
from angular_lab.report.read import SweepResults, TrialResult, short
from angular_lab.report.tables import Mark, Row, Table, difference, loss, seeds_form, tokens_form
from angular_lab.run_folder import Run

OTHER_SCALE = (
    "The paper's numbers are from another scale (its own model, data and tokens, one seed)"
)
SAME_SCALE = "The paper's numbers are from one seed"
PAPER_ROWS = {
    "qwen2": {sweep.label: sweep.losses for sweep in paper.QWEN2},
    "moe": {sweep.label: sweep.losses for sweep in paper.MOE},
}
LESS_TIME = "less time"
LAST = 14  # logged training losses to average: single batches differ by more than methods do


def key_of(sweep: SweepResults, name: str) -> str:
    """Return a file name and id."""
    key = "".join(c if c.isalnum() else "-" for c in sweep.key or sweep.file.stem)
    return f"{key}-{name}"


def paper_note(sweep: SweepResults) -> str:
    return SAME_SCALE if sweep.scale == "paper" else OTHER_SCALE


def judges_note(sweep: SweepResults) -> str:
    added = added_note(sweep) and f"{added_note(sweep)} "
    if sweep.choosing_seed not in sweep.seeds or len(sweep.seeds) < 2:
        return added
    where = "" if sweep.has_choice else ", in another sweep,"
    return (
        f"Seed {sweep.choosing_seed} chose the value{where} and does not count once other seeds "
        f"are finished. {added}"
    )


def added_note(sweep: SweepResults) -> str:
    """Return what to know about seeds that only open pairs got."""
    if not sweep.record.added_seeds:
        return ""
    many = "judge" if len(sweep.record.added_seeds) > 1 else "judges"
    return (
        f"{seeds_form(sweep.record.added_seeds).capitalize()} {many} only pairs that were still "
        "open: methods differ in their number of seeds, and a verdict that was looked at several "
        "times is weaker than its interval says."
    )


def mean_cells(sweep: SweepResults, horizon: int) -> dict[str, Mark | None]:
    """Return every method's mean loss and number of seeds; if methods compete, the lowest of those
    with the same tokens is marked."""
    losses = {label: list(sweep.shown(label, horizon).values()) for label in sweep.arms}
    means = {label: fmean(values) for label, values in losses.items() if values}
    tokens = {label: tuple(sweep.tokens(horizon, label)) for label in means}
    lowest = {at: min(x for y, x in means.items() if tokens[y] == at) for at in tokens.values()}

    def cell(label: str) -> Mark | None:
        is_best = bool(sweep.pairs) and means[label] == lowest[tokens[label]]
        return loss(means[label], "best" * is_best, f" (n={len(losses[label])})")

    return {label: cell(label) if label in means else None for label in sweep.arms}


def finals_table(sweep: SweepResults) -> Table:
    rows: list[Row] = []
    cells = {h: mean_cells(sweep, h) for h in sweep.horizons}
    columns = horizon_columns(sweep, "at {}")
    for label in sweep.arms:
        best = sweep.best.get(label) if sweep.on_axis(label) else None
        edge = " edge" if sweep.at_edge(label) else ""
        cell = Mark(best.lr, edge.strip(), f"{best.lr:.4g}{edge}") if best else None
        row: Row = {"method": label, f"best {sweep.axis}": cell, **dict.fromkeys(columns.values())}
        for horizon in sweep.horizons:
            if cells[horizon][label]:
                row[columns[horizon, label]] = cells[horizon][label]
        seeds = {seed for h in sweep.horizons for seed in sweep.shown(label, h)}
        row["seeds"] = seeds_form(sorted(seeds))
        rows.append(row | _paper_teaser(sweep, label))
    note = "Mean validation loss after the cooldown, by number of tokens; n: number of seeds. "
    note += "Edge: the best value lies at the end of its grid. " * any(
        map(sweep.at_edge, sweep.arms)
    )
    note += judges_note(sweep)
    note += f"{paper_note(sweep)}." if sweep.experiment == "teaser" else ""
    title = "Final loss by method and horizon"
    return Table(key_of(sweep, "final-loss"), title, rows, note.strip())


def horizon_columns(sweep: SweepResults, form: str) -> dict[tuple[int, str], str]:
    """Return the column of every method at every horizon that it has: methods share one if they
    have the same tokens there."""
    tokens = {
        (horizon, label): sweep.tokens(horizon, label) or sweep.tokens(horizon)
        for horizon in sweep.horizons
        for label in sweep.arms
        if sweep.reaches(label, horizon)
    }
    in_order = sorted(tokens, key=lambda place: tokens[place] or [inf])
    return {place: form.format(tokens_form(*tokens[place])) for place in in_order}


def _paper_teaser(sweep: SweepResults, label: str) -> Row:
    if sweep.experiment != "teaser" or label not in paper.TEASER:
        return {}
    row = paper.TEASER[label]
    cells: Row = {"paper, best lr": Mark(row.best_rate, "paper")}
    for tokens, value in row.curve:
        cells[f"paper at {tokens_form(tokens)}"] = Mark(value, "paper", f"{value:.3f}")
    return cells


def by_value_table(sweep: SweepResults) -> Table:
    """Return the losses that the first seed chose from."""
    first = sweep.seeds[0]
    theirs = PAPER_ROWS.get(sweep.experiment, {})
    labels = [label for label in sweep.arms if sweep.on_axis(label)]
    values = {m.value for label in labels for m in sweep.of_arm(label)}
    values |= {value for losses in theirs.values() for value in losses}
    rows: list[Row] = []
    for label in labels:
        trials = {m.value: m for m in sweep.of_arm(label) if m.seed == first}
        row: Row = {"method": label, **({"source": "ours"} if theirs else {})}
        row |= {f"{v:.4g}": _value_cell(sweep, trials.get(v)) for v in sorted(values)}
        rows.append(row)
        if label in theirs:
            cells = {f"{v:.4g}": _paper_cell(v, theirs[label]) for v in sorted(values)}
            rows.append({"method": label, "source": Mark("the paper's", "paper"), **cells})
    at = tokens_form(*sweep.final_tokens())
    note = f"One seed ({first}), at {at} tokens; the best value of a method is bold, "
    note += "† marks a best at the edge of its grid."
    note += f" {paper_note(sweep)}." if theirs else ""
    return Table(key_of(sweep, "loss-by-value"), f"Final loss by {sweep.axis}", rows, note)


def _value_cell(sweep: SweepResults, trial: TrialResult | None) -> Mark | None:
    if trial is None:
        return None
    if trial.diverged:
        return Mark("diverged")
    end, best = trial.final(sweep.last(trial.arm)), sweep.best.get(trial.arm)
    if end is None:
        return Mark("unfinished")
    is_best = best is not None and best.lr == trial.value
    edge = " †" if is_best and sweep.at_edge(trial.arm) else ""
    return loss(end[1], "best" if is_best else "", edge)


def _paper_cell(rate: float, losses: dict[float, float]) -> Mark | None:
    """Return the paper's loss with as many digits as its table has."""
    if rate not in losses:
        return None
    digits = max(len(f"{value:g}".partition(".")[2]) for value in losses.values())
    best = " best" if losses[rate] == min(losses.values()) else ""
    return Mark(losses[rate], f"paper{best}", f"{losses[rate]:.{digits}f}")


def training_table(sweep: SweepResults) -> Table | None:
    """Compare training and validation losses at the last horizon, at each method's best value."""
    rows: list[Row] = []
    for label in sweep.arms:
        last = sweep.last(label)
        validation = sweep.shown(label, last)
        runs = {s: m.ends[last] for s, m in sweep.at_best(label).items() if s in validation}
        ends = {seed: final_training_loss(run) for seed, run in runs.items()}
        training = {seed: end for seed, end in ends.items() if end is not None}
        if not training:
            continue
        gap = fmean(validation[seed] - training[seed] for seed in training)
        rows.append(
            {
                "method": label,
                "training": loss(fmean(training.values())),
                "validation": loss(fmean(validation[seed] for seed in training)),
                "validation - training": loss(gap),
                "training, by seed": ", ".join(f"{s}: {x:.4f}" for s, x in training.items()),
                "seeds": seeds_form(list(training)),
            }
        )
    if len(rows) < 2:
        return None
    note = (
        f"Mean of the last {LAST} training losses that a run logged, and its validation loss, at "
        f"{tokens_form(*sweep.final_tokens())} tokens. {judges_note(sweep)}"
    )
    return Table(key_of(sweep, "training"), "Training loss", rows, note.strip())


def final_training_loss(run: Run) -> float | None:
    """Return the mean of the last training losses; None if the run logged too few."""
    _, losses = run.series("loss")
    return fmean(losses[-LAST:]) if len(losses) >= LAST else None


def curves(sweep: SweepResults, label: str) -> dict[int, Curve]:
    """Return (tokens, loss after the cooldown) over the horizons, by judging seed."""
    by_seed: dict[int, Curve] = {}
    for seed, trial in sweep.at_best(label).items():
        ends = [end for h in sweep.horizons if (end := trial.final(h)) is not None]
        if seed in sweep.judges and ends:
            by_seed[seed] = [(float(tokens), value) for tokens, value in ends]
    return by_seed


def speed_table(sweep: SweepResults) -> Table | None:
    """Return how many times fewer tokens our method needs for another's final loss."""
    if sweep.ours is None or len(sweep.horizons) < 2:
        return None
    rows = [_speed_row(sweep, sweep.ours, label) for label in sweep.arms if label != sweep.ours]
    if not rows:
        return None
    note = (
        f"Tokens of the other method over the tokens at which {sweep.ours}'s curve of losses after "
        "the cooldown, interpolated in log tokens, reaches the other's final loss. Interval: "
        "Student's, of the mean over seeds."
    )
    if any(LESS_TIME in column for row in rows for column in row):
        note += (
            " Less time: the same factor times the time per step of the other method over ours, as "
            "`angular-lab pace` measured it."
        )
    if sweep.experiment == "teaser":
        note += f" {paper_note(sweep)}, computed in the same way."
    return Table(key_of(sweep, "speed-up"), f"Speed-up of {sweep.ours}", rows, note)


def _speed_row(sweep: SweepResults, ours: str, other: str) -> Row:
    speed_ups = speed_up_interval(curves(sweep, ours), curves(sweep, other))
    reasons = "; ".join(f"seed {seed}: {why}" for seed, why in speed_ups.missing.items())
    row: Row = {"over": other}
    row["in tokens"] = _times(speed_ups) or f"cannot be computed: {reasons or 'no seed'}"
    row["95% interval"] = _interval(speed_ups)
    row["seeds"] = seeds_form(sorted(speed_ups.by_seed))
    row["by seed"] = ", ".join(f"{s}: {x:.2f}" for s, x in speed_ups.by_seed.items()) or None
    row["seeds without one"] = (reasons or None) if speed_ups.mean else None
    row |= _less_time(sweep, ours, other, speed_ups.mean)
    if sweep.experiment == "teaser" and other in paper.TEASER and ours in paper.TEASER:
        ratio = speed_up(paper.TEASER[ours].curve, paper.TEASER[other].curve)
        claimed = paper.CLAIMED_SPEED_UPS.get(other)
        row["the paper's figure, in tokens"] = Mark(ratio, "paper", f"{ratio:.2f}×")
        row["the paper's claim"] = Mark(claimed, "paper", f"about {claimed:g}×")
    return row


def _less_time(sweep: SweepResults, ours: str, other: str, in_tokens: float | None) -> Row:
    """Return factors in wall-clock time, by device: where both methods' steps were timed in turn
    on the tokens of these runs, and nothing else used the device."""
    specs = sweep.settings(ours), sweep.settings(other)
    row: Row = {}
    for pace in sweep.paces:
        same_tokens = pace.data == sweep.record.data  # an embedding's step takes longer for some
        if in_tokens is None or None in specs or pace.disturbed_by or not same_tokens:
            continue
        mine, theirs = (pace.find(spec) for spec in specs if spec is not None)
        if mine is not None and theirs is not None:
            factor = in_tokens * pace.ratios(theirs, mine).median
            row[f"{LESS_TIME} on {pace.device}"] = Mark(factor, "", f"{factor:.2f}×")
    return row


def _times(speed_ups: SpeedUps) -> Mark | None:
    """Return the mean, which is too high if seeds never get there: then with their number."""
    if speed_ups.mean is None:
        return None
    n, missing = len(speed_ups.by_seed), len(speed_ups.missing)
    seeds = f" ({n} of {n + missing} seeds)" if missing else ""
    return Mark(speed_ups.mean, "", f"{speed_ups.mean:.2f}×{seeds}")


def _interval(speed_ups: SpeedUps) -> str | None:
    if speed_ups.interval is None:
        return "none: one seed" if speed_ups.by_seed else None
    return f"{speed_ups.interval[0]:.2f} to {speed_ups.interval[1]:.2f}"


def speedrun_table(sweep: SweepResults) -> Table:
    """Apply the speedrun's rule: (3.28 - mean) * sqrt(runs) of at least 0.004."""
    rows: list[Row] = []
    for label in sweep.arms:
        losses = sweep.judged(label, sweep.horizons[-1])
        row: Row = {"method": label, "steps": sweep.horizons[-1], "runs": len(losses)}
        if not losses:
            rows.append({**row, "passes": "cannot be computed: no finished run"})
            continue
        result = speedrun_passes(list(losses.values()))
        more = result.further_runs
        row["mean loss"] = loss(fmean(losses.values()), suffix=f" (n={len(losses)})")
        row["(target - mean) * sqrt(n)"] = difference(result.statistic)
        row["passes"] = result.passes
        row["further runs at this mean"] = "no number is enough" if more is None else more
        rows.append(row)
    note = (
        f"Target {paper.SPEEDRUN_TARGET}, needed {paper.SPEEDRUN_MARGIN}. The preliminary version "
        f"took {paper.SPEEDRUN_STEPS:,} steps (the track's record, not ours)."
    )
    if sweep.scale != "paper":
        note += " At this scale the target means nothing; the row shows how the rule is applied."
    return Table(key_of(sweep, "speedrun"), "The speedrun's rule", rows, note)


def runs_table(sweep: SweepResults) -> Table:
    """Return every trial behind the numbers."""
    rows: list[Row] = []
    columns = dict.fromkeys(horizon_columns(sweep, "{} tokens").values())
    for trial in (*sweep.trials, *sweep.variants):
        ends = [end for horizon in sweep.horizons if (end := trial.final(horizon))]
        speeds = [speed for run in trial.runs if (speed := run.speed) is not None]
        rows.append(
            {
                "method": trial.arm,
                short(trial.axis): trial.value,
                "seed": trial.seed,
                "status": trial.status,
                **columns,
                **{f"{tokens_form(tokens)} tokens": loss(value) for tokens, value in ends},
                "tokens/s": fmean(speeds) if speeds else None,
                "run": next((run.name for run in reversed(trial.runs)), None),
            }
        )
    return Table(key_of(sweep, "runs"), "Every trial", rows)


# -- time per step, by `angular-lab pace`: never by runs, which may have shared their device ------


def pace_rows(pace: Pace, with_factors: bool = True) -> list[Row]:
    """Return the rows of a measured pace. Factors of disturbed times are marked."""
    times, ratio = "×", f"time / {pace.reference}'s"
    if pace.disturbed_by:
        times = "× (shared)"
    rows: list[Row] = []
    for values in pace.rows():
        digits = 2 if values["ms"]["median"] < 100 else 0
        ms, factor, speed = values["ms"], values["time_ratio"], values["tokens_per_second"]
        row: Row = {
            "optimizer": values["optimizer"],
            "ms per step": Mark(ms["median"], "", f"{ms['median']:.{digits}f}"),
            "quartiles": f"{ms['first']:.{digits}f} to {ms['third']:.{digits}f}",
            "tokens/s": Mark(speed, "", f"{speed:,.0f}"),
        }
        if with_factors:
            row[ratio] = Mark(factor["median"], "", f"{factor['median']:.3f}{times}")
            row["its quartiles"] = f"{factor['first']:.3f} to {factor['third']:.3f}"
        if values["memory_gib"] is not None:
            row["memory (GiB)"] = Mark(values["memory_gib"], "", f"{values['memory_gib']:.2f}")
        rows.append(row)
    return rows


def pace_table(pace: Pace, number: int) -> Table:
    """Return the times per step on one device; `number` tells several files apart."""
    spec, rounds = pace.spec, pace.timed[0].seconds
    note = (
        f"{spec.name}, {spec.batch} sequences of {spec.model.sequence} tokens a step. Median and "
        f"quartiles over {len(rounds)} rounds of {len(rounds[0])} steps each; in a round, the "
        "optimizers take turns. A step includes its batch, both passes, clipping and the update."
    )
    if pace.disturbed_by:
        note += f" The device was shared ({'; '.join(pace.disturbed_by)}), so no factor is shown."
    else:
        note += f" Factors are paired by round with {pace.reference}."
    key = slug(f"pace {number} {spec.name} {pace.device}")
    rows = pace_rows(pace, not pace.disturbed_by)
    shared = ", shared" * bool(pace.disturbed_by)
    return Table(key, f"Time per step of {spec.name} on {pace.device}{shared}", rows, note)
