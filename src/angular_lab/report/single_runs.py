"""Runs that belong to no sweep: a table, their curves, and which of them can be compared."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from angular_lab.evaluations import read_evaluations
from angular_lab.report.figures.heat_map import heat_map
from angular_lab.report.figures.plots import Figure, Panel, Trace
from angular_lab.report.figures.sweep_figures import angle_bottom, branch, colors, loss_top
from angular_lab.report.headlines import listed
from angular_lab.report.page import Section
from angular_lab.report.tables import Mark, Row, Table, form, loss, tokens_form
from angular_lab.run_folder import Run, parent_folder
from angular_lab.text import counted

HEAT_MAPS = 4  # of a section with many runs, the first ones have a heat map
KEYS = (
    ("val_loss", "validation loss", "Validation loss"),
    ("angle_mean", "mean angle per step (rad)", "Mean angle by which a step turns a row"),
    ("row_norm_mean", "mean row norm", "Mean length of the rows of the hidden matrices"),
    ("loss", "training loss", "Training loss, as logged"),
)


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the optimizers' names if they tell the runs apart, else the folders'."""
    names = [run.spec.optim.name for run in runs]
    if len(set(names)) == len(names):
        return names
    folders = [run.name for run in runs]
    if len(set(folders)) == len(folders):
        return folders
    return [f"{run.folder.parent.name}/{run.name}" for run in runs]


def _angles(run: Run) -> list[float]:
    """Return the angles of the constant phase, or all if none was logged there."""
    angles = run.values("angle_mean")
    constant = [angle for step, angle in angles.items() if step in run.spec.constant_phase]
    return constant or list(angles.values())


def row(run: Run) -> dict[str, Any]:
    """Return where a run ended and how fast it was."""
    last = run.metrics[-1] if run.metrics else None
    evaluated = run.evaluations[-1].get if run.evaluations else lambda _: None
    angles = _angles(run)
    return {
        "optimizer": run.spec.optim.name,
        "lr": run.spec.optim.lr,
        "aux lr": run.spec.optim.with_all_rates().aux_lr,
        "steps": last.step if last else None,
        "tokens": last.tokens if last else None,
        "validation loss": evaluated("val_loss"),
        **{
            f"of the average, {window:g}": evaluated(name)
            for window, name in run.spec.averages.items()
        },
        "bits per byte": evaluated("val_bits_per_byte"),
        "angle at full learning rate (mrad)": f"{1e3 * angles[0]:.2f} to {1e3 * angles[-1]:.2f}"
        if angles
        else None,
        "tokens/s": speed(run),
    }


def speed(run: Run) -> Mark | None:
    """Return the median tokens per second; marked if other processes used the device."""
    if run.speed is None:
        return None
    return Mark(run.speed, "", f"{form(run.speed)}{' shared' if run.shared_device else ''}")


def single_section(runs: Sequence[Run], key: str, title: str) -> Section:
    """Return the section of runs that can be compared (see `groups`)."""
    rows = []
    for run in runs:
        values = row(run)
        values["validation loss"] = loss(values["validation loss"])
        extra = {"seed": run.spec.seed, "status": run.status}
        rows.append(values | extra | {"folder": Mark(str(run.folder), "", run.name)})
    warnings = [
        f"{run.folder} is {run.status}: its last logged step is "
        f"{run.metrics[-1].step if run.metrics else 0:,} of {run.spec.steps:,}"
        for run in runs
        if run.status != "done"
    ]
    table = Table(f"{key}-summary", "Where the runs ended", rows)
    further = _evaluations(runs, key, warnings)
    figures = [figure for k in KEYS if (figure := _figure(runs, key, *k)) is not None]
    figures += _heat_maps(runs, key, warnings)
    return Section(
        key,
        title,
        headline=figures[0] if figures else None,
        sentences=sentences(runs),
        figures=figures[1:],
        tables=[table, *further],
        opened=[table.key],
        warnings=warnings,
    )


def sentences(runs: Sequence[Run]) -> list[str]:
    """Return which run ended lowest, what that is worth, and which runs did not end."""
    ends = {label: run for label, run in zip(labels(runs), runs, strict=True) if run.evaluations}
    order = sorted(ends, key=lambda label: _end(ends[label])[1])
    seeds = listed([*map(str, sorted({run.spec.seed for run in runs}))], most=8)
    one = len(runs) == 1
    worth = f"It is one run with seed {seeds}" if one else f"Each curve is one run (seed {seeds})"
    return [
        _lowest(order, ends) if order else "No run was evaluated yet.",
        f"{worth}, so no difference is judged: that takes a sweep with more seeds.",
        _finished(runs),
    ]


def _end(run: Run) -> tuple[int, float]:
    """Return tokens and validation loss of the last evaluation."""
    last = run.evaluations[-1]
    loss = last.get("val_loss")
    assert loss is not None
    return last.tokens, loss


def _lowest(order: Sequence[str], ends: Mapping[str, Run]) -> str:
    tokens, end = _end(ends[order[0]])
    text = f"{order[0]} ends at a validation loss of {end:.4f} after {tokens_form(tokens)} tokens"
    if len(order) == 1:
        return f"{text}."
    others = [_end(ends[label]) for label in order[1:]]
    highest = f" and {others[-1][1] - end:.4f} below {order[-1]}" if len(order) > 2 else ""
    equal = all(other[0] == tokens for other in others)
    unequal = "" if equal else "; the runs end at different numbers of tokens"
    lowest = text.replace(" ends at", " ends lowest, at", 1)
    return f"{lowest}: {others[0][1] - end:.4f} below {order[1]}{highest}{unequal}."


def _finished(runs: Sequence[Run]) -> str:
    open_runs = [
        f"{label} ({run.status} at step {run.metrics[-1].step if run.metrics else 0:,})"
        for label, run in zip(labels(runs), runs, strict=True)
        if run.status != "done"
    ]
    if not open_runs:
        return "It is finished." if len(runs) == 1 else f"All {len(runs)} runs are finished."
    verb = "is" if len(open_runs) == 1 else "are"
    return (
        f"{len(open_runs)} of {counted(len(runs), 'run')} {verb} not finished: {listed(open_runs)}."
    )


def _points(run: Run, runs: Sequence[Run], name: str) -> tuple[list[float], list[float]]:
    """Return the series of a run; a branch of another run here begins on that run's curve."""
    if run.spec.parent is None:
        return run.series(name)
    folder = parent_folder(run.folder, run.spec).resolve()
    trunk = next((other for other in runs if other.folder.resolve() == folder), None)
    return branch(trunk, run, name) if trunk else run.series(name)


def _evaluations(runs: Sequence[Run], key: str, warnings: list[str]) -> list[Table]:
    """Return the table of what `angular-lab eval` found, if it was used."""
    rows: list[Row] = [
        {"run": label, **evaluation.row}
        for label, run in zip(labels(runs), runs, strict=True)
        for evaluation in read_evaluations(run.folder, warnings)
    ]
    note = (
        "Losses in nats per token. Bits per byte are comparable between tokenizers. They count the "
        "bytes of the evaluated tokens; val_bits_per_byte, which training logs, takes the mean "
        "bytes per token of the whole validation split."
    )
    return [Table(f"{key}-evaluations", "Evaluations on other text", rows, note)] if rows else []


def _heat_maps(runs: Sequence[Run], key: str, warnings: list[str]) -> list[Figure]:
    """Return the angles by layer of the first few runs."""
    named = [*zip(labels(runs), runs, strict=True)][:HEAT_MAPS]
    drawn = (
        heat_map([run], f"{key}-angles-by-layer-{i + 1}", label, warnings)
        for i, (label, run) in enumerate(named)
    )
    return [figure for figure in drawn if figure is not None]


def _figure(runs: Sequence[Run], key: str, name: str, axis: str, what: str) -> Figure | None:
    texts = labels(runs)
    paint = colors([(x, run.spec.optim.name) for x, run in zip(texts, runs, strict=True)])
    traces = [
        Trace(*_points(run, runs, name), paint[label], label)
        for label, run in zip(texts, runs, strict=True)
        if run.series(name)[0]
    ]
    if not traces:
        return None
    is_angle = name == "angle_mean"
    top = loss_top(traces) if "loss" in name else None
    bottom = angle_bottom(traces) if is_angle else None
    panel = Panel(traces, "tokens", axis, log_y=is_angle, y_top=top, y_bottom=bottom)
    seeds = sorted({run.spec.seed for run in runs})
    many = "seed" if len(seeds) == 1 else "seeds"
    caption = f"{what}. {len(traces)} run{'s' * (len(traces) != 1)}, one for each curve, "
    caption += f"{many} {', '.join(map(str, seeds))}."
    return Figure(f"{key}-{name.replace('_', '-')}", panel, caption)


def groups(runs: Sequence[Run], warnings: list[str]) -> list[list[Run]]:
    """Group the runs whose losses can be compared; the largest group comes first."""
    kinds = Counter(run.comparable for run in runs)
    if len(kinds) > 1:
        listed = "; ".join(
            f"{count} with data {data[:12] or 'unknown'} and vocabulary {vocabulary:,}"
            for (data, vocabulary), count in kinds.most_common()
        )
        warnings.append(
            f"The single runs differ in data or vocabulary ({listed}): their losses are not "
            "comparable, so each group has its own section"
        )
    return [[run for run in runs if run.comparable == kind] for kind, _ in kinds.most_common()]
