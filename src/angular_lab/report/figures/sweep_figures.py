"""A sweep's figures, and the angle per step that docs/explanation/derivation.md predicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median
from textwrap import wrap

from angular_lab.report.figures.heat_map import heat_map
from angular_lab.report.figures.plots import ACROSS, COLORS, DASHES, Figure, Panel, Trace
from angular_lab.report.headlines import ranking
from angular_lab.report.read import SweepResults, TrialResult, short
from angular_lab.report.results import key_of
from angular_lab.report.tables import seeds_form, tokens_form
from angular_lab.run_folder import Run

# Each has its colour everywhere.
FAMILY = (
    "adamw", "angular_muown", "muown", "normuon", "muon", "magnitude_direction", "hyperball",
)  # fmt: skip
# Weight decay holds the angle only where it shortens the vector that the step is added to. In the
# other optimizers it acts on a length that has no part in the direction.
DECAYING = ("adamw", "muon", "normuon")
GROWING = ("muon", "normuon", "muown", "normuown")  # rows grow without weight decay
ANGLE_RANGE = 300  # highest over lowest angle of a figure
UNIT_STEP = (None, "fan_ratio")  # scales at which a row's step has length lr


def colors(names: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return a colour by label, from (label, optimizer).

    Methods of one optimizer share its colour and differ in their dashes. Those beyond the number
    of dashes get colours that are free, as do all but the first if there is only one optimizer.
    """
    by_optimizer: dict[str, list[str]] = {}
    for label, optimizer in names:
        by_optimizer.setdefault(optimizer, []).append(label)
    share = len(by_optimizer) > 1
    taken: dict[str, int] = {}
    for optimizer, labels in by_optimizer.items():
        if optimizer in FAMILY:
            again = len(DASHES) if share else 1
            for i, label in enumerate(labels[:again]):
                taken[label] = FAMILY.index(optimizer) + i * len(COLORS)
    free = (i for i in range(len(names) + 3 * len(COLORS)) if i not in taken.values())
    return taken | {label: next(free) for label, _ in names if label not in taken}


def sweep_figures(sweep: SweepResults) -> list[Figure]:
    """Return all figures; the first is the headline: what a reader of this sweep comes for."""
    paint, first = _paint(sweep), _first_trials(sweep)
    by_value = value_figure(sweep, paint)
    figures = [
        *([] if sweep.pairs else [by_value]),
        horizon_figure(sweep, paint),
        final_figure(sweep, paint),
        horizon_figure(sweep, paint, sweep.ours) if sweep.ours else None,
        loss_curves(sweep, first, paint),
        *([by_value] if sweep.pairs else []),
        angle_figure(sweep, first, paint),
        norm_figure(sweep, first, paint),
        _heat_map(sweep, first),
    ]
    return [figure for figure in figures if figure is not None]


def _paint(sweep: SweepResults) -> dict[str, int]:
    """Return the colours of the sweep's methods; those without a run come last."""
    drawn = sorted(sweep.arms, key=lambda arm: arm not in sweep.best)
    return colors([(label, sweep.optimizer(label)) for label in drawn])


def _first_trials(sweep: SweepResults) -> dict[str, TrialResult]:
    """Return each method's trial at its best value with the first seed."""
    seed = sweep.seeds[0]
    return {arm: trials[seed] for arm in sweep.arms if seed in (trials := sweep.at_best(arm))}


def final_figure(sweep: SweepResults, paint: dict[str, int]) -> Figure | None:
    """Draw the final losses of a sweep with one horizon: a row for each method."""
    losses = ranking(sweep)
    if len(sweep.horizons) > 1 or not sweep.pairs or not losses:
        return None
    short_names = max(map(len, losses)) <= 18
    names, notes, headings, traces = [], [], [], []
    for label, by_seed in losses.items():
        for line in () if short_names else wrap(label, ACROSS):
            headings.append(len(names))
            names.append(line)
            notes.append("")
        mean, place = fmean(by_seed.values()), float(len(names))
        rings = [*by_seed.values()], [place] * len(by_seed)
        traces.append(Trace(*rings, paint[label] % len(COLORS), kind="points"))
        traces.append(Trace([mean], [place], paint[label] % len(COLORS), kind="settled"))
        names.append(label if short_names else "")
        notes.append(f"{mean:.4f}")
    panel = Panel(traces, "final loss", "", y_names=names, y_headings=headings, y_notes=notes)
    seeds = sorted({seed for by_seed in losses.values() for seed in by_seed})
    caption = (
        f"Loss after the cooldown at {tokens_form(*sweep.final_tokens())} tokens, the "
        "lowest mean first: rings are runs, the dot is their mean. "
        f"{seeds_form(seeds).capitalize()}."
    )
    return Figure(key_of(sweep, "finals"), panel, caption)


def _chosen(sweep: SweepResults, trials: dict[str, TrialResult]) -> str:
    """Return which runs a figure shows, for its caption."""
    axes = {short(m.axis) for m in trials.values()}
    shared = len(axes) == 1
    values = ", ".join(
        f"{label} {m.value:g}" if shared else f"{label}, {short(m.axis)} {m.value:g}"
        for label, m in trials.items()
    )
    what = axes.pop() if shared else "value"
    return f"Each method at its best {what} ({values}), one seed ({sweep.seeds[0]})."


def path(trial: TrialResult) -> list[Run]:
    """Return the runs that lead to the last horizon: the trunk and its last cooldown."""
    last = [trial.ends[max(trial.ends)]] if trial.ends else []
    return [*([trial.trunk] if trial.trunk else []), *last]


def joined(trial: TrialResult, key: str) -> tuple[list[float], list[float]]:
    """Return a series along the path; where runs overlap, the later run counts."""
    points: dict[float, float] = {}
    for run in path(trial):
        start = run.spec.parent_step * run.spec.tokens_per_step
        points = {x: y for x, y in points.items() if x <= start or not run.spec.parent_step}
        points |= dict(zip(*run.series(key), strict=True))
    return list(points), list(points.values())


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """Interpolate linearly; return the last value after the end and None before the start."""
    before = [i for i, at in enumerate(xs) if at <= x]
    if not before:
        return None
    i = before[-1]
    if xs[i] == x or i + 1 == len(xs):
        return ys[i]
    return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])


def branch(trunk: Run, run: Run, key: str) -> tuple[list[float], list[float]]:
    """Return the series of a cooldown from the point of the trunk where it leaves."""
    xs, ys = run.series(key)
    if not xs:
        return [], []
    start = float(run.spec.parent_step * run.spec.tokens_per_step)
    level = interpolate(*trunk.series(key), start)
    return (xs, ys) if level is None else ([start, *xs], [level, *ys])


def loss_curves(
    sweep: SweepResults, trials: dict[str, TrialResult], paint: dict[str, int]
) -> Figure | None:
    traces: list[Trace] = []
    runs = [trial.trunk or run for trial in trials.values() for run in trial.ends.values()]
    # Short runs are evaluated once, at the end: a single point is not a curve.
    evaluated = any(len(run.series("val_loss")[0]) > 1 for run in runs)
    key, what = ("val_loss", "Validation") if evaluated else ("loss", "Training")
    for label, trial in trials.items():
        for run in [trial.trunk] if trial.trunk else trial.ends.values():
            traces.append(Trace(*run.series(key), paint[label], label))
        if trial.trunk:
            for run in trial.ends.values():
                points = branch(trial.trunk, run, key)
                traces.append(Trace(*points, paint[label], kind="branch"))
    if not any(trace.xs for trace in traces):
        return None
    panel = Panel(traces, "tokens", f"{what.lower()} loss", y_top=loss_top(traces))
    how = "over training"
    if any(trial.trunk for trial in trials.values()):
        how = "of the trunks at a constant learning rate, and of the cooldowns that leave them"
    caption = f"{what} loss {how}. {_chosen(sweep, trials)}"
    return Figure(key_of(sweep, "loss-curves"), panel, caption)


def cooldown_figure(sweep: SweepResults) -> Figure | None:
    """Draw the cooldowns of all lengths that leave the trunks; None if they have one length."""
    paint, trials = _paint(sweep), _first_trials(sweep)
    traces: list[Trace] = []
    for label, trial in trials.items():
        if trial.trunk is None or not (others := _other_cooldowns(sweep, trial)):
            continue
        usual = trial.ends.get(sweep.horizons[-1])
        traces.append(Trace(*trial.trunk.series("val_loss"), paint[label], label))
        for run in [*([usual] if usual else []), *others]:
            points = branch(trial.trunk, run, "val_loss")
            traces.append(Trace(*points, paint[label], kind="branch"))
    if not traces:
        return None
    start = 0.6 * max(x for trace in traces for x in trace.xs)  # before it there is only the trunk
    shown = [y for t in traces for x, y in zip(t.xs, t.ys, strict=True) if x >= start]
    panel = Panel(traces, "tokens", "validation loss", y_top=1.01 * max(shown))
    caption = "Cooldowns of different lengths, each from the point where it leaves its trunk. "
    return Figure(key_of(sweep, "cooldowns"), panel, caption + _chosen(sweep, trials))


def _other_cooldowns(sweep: SweepResults, trial: TrialResult) -> list[Run]:
    """Return the cooldowns of another length that leave the same trunk."""
    assert trial.trunk is not None
    return [
        run
        for variant in sweep.variants
        if variant.trunk and variant.trunk.folder == trial.trunk.folder
        for run in variant.ends.values()
    ]


def loss_top(traces: Sequence[Trace]) -> float | None:
    """Return where to cut off the losses of the first tenth, which would squeeze the others.

    A run that ended there stays visible: at its end, or where it began to diverge.
    """
    end = max((x for trace in traces for x in trace.xs), default=0.0)
    late = [y for t in traces for x, y in zip(t.xs, t.ys, strict=True) if x >= 0.1 * end]
    late += [min(trace.ys[0], trace.ys[-1]) for trace in traces if trace.ys]
    low = min((y for trace in traces for y in trace.ys), default=0.0)
    return max(late) + 0.05 * (max(late) - low) if late and max(late) > low else None


def horizon_figure(sweep: SweepResults, paint: dict[str, int], ours: str = "") -> Figure | None:
    """Draw final losses, or how far they are above those of our method, seed by seed.

    Curves that overlap in the first figure are apart in the second.
    """
    if len(sweep.horizons) < 2:
        return None

    def heights(label: str, horizon: int) -> dict[int, float]:
        losses = sweep.shown(label, horizon)
        level = sweep.shown(ours, horizon) if ours else dict.fromkeys(losses, 0.0)
        return {seed: losses[seed] - level[seed] for seed in losses if seed in level}

    traces: list[Trace] = []
    seeds: dict[str, str] = {}
    for label in sweep.arms:
        means: list[tuple[float, float]] = []
        for horizon in sweep.horizons:
            losses = heights(label, horizon)
            if losses:
                [tokens] = sweep.tokens(horizon, label)
                means.append((tokens, fmean(losses.values())))
                points = [tokens] * len(losses), list(losses.values())
                traces.append(Trace(*points, paint[label], kind="points"))
                seeds[label] = seeds_form(list(losses))
        if means:
            xs, ys = zip(*means, strict=True)
            traces.append(Trace(xs, ys, paint[label], label))
    if not traces:
        return None
    ticks = sorted({tokens for h in sweep.horizons for tokens in sweep.tokens(h)})
    what = f"loss above {ours}'s" if ours else "cooled-down loss"
    panel = Panel(traces, "tokens (log)", what, log_x=True, x_ticks=ticks)
    alike = len(set(seeds.values())) == 1
    listed = (
        next(iter(seeds.values())) if alike else "; ".join(f"{x}: {s}" for x, s in seeds.items())
    )
    losses = f"How far losses are above {ours}'s" if ours else "Loss"
    caption = f"{losses} after the cooldown against the horizon: rings are runs, the line is their "
    caption += f"mean. {listed[0].upper()}{listed[1:]}."
    return Figure(key_of(sweep, "above-ours" if ours else "horizons"), panel, caption)


def value_figure(sweep: SweepResults, paint: dict[str, int]) -> Figure | None:
    first = sweep.seeds[0]
    traces: list[Trace] = []
    labels = [label for label in sweep.arms if sweep.on_axis(label)]
    for label in labels:
        grid = sorted((m for m in sweep.of_arm(label) if m.seed == first), key=lambda m: m.value)
        ends = [(m.value, end[1]) for m in grid if (end := m.final(sweep.last(label))) is not None]
        diverged = [m.value for m in grid if m.diverged]
        if ends:
            best = sweep.best.get(label)
            edge = " (edge)" if sweep.at_edge(label) else ""
            xs, ys = zip(*ends, strict=True)
            traces.append(Trace(xs, ys, paint[label], f"{label}{edge}", "dots"))
            if best:
                traces.append(Trace([best.lr], [best.loss], paint[label], kind="best"))
        if diverged:
            traces.append(Trace(diverged, [], paint[label], f"{label} diverged", "diverged"))
    values = sorted({m.value for label in labels for m in sweep.of_arm(label)})
    if not sweep.has_choice or not traces:
        return None
    axis = sweep.axis
    panel = Panel(traces, f"{axis} (log)", "final loss", log_x=True, x_ticks=values)
    at = tokens_form(*sweep.final_tokens())
    caption = (
        f"Final loss at {at} tokens against {axis}, one seed ({first})"
        "; a star marks each method's best. Edge: it lies at the end of its grid, so the optimum "
        "may lie outside."
    )
    return Figure(key_of(sweep, "loss-by-value"), panel, caption)


def angle_figure(
    sweep: SweepResults, trials: dict[str, TrialResult], paint: dict[str, int]
) -> Figure | None:
    traces: list[Trace] = []
    laws: dict[str, None] = {}
    for label, trial in trials.items():
        xs, ys = joined(trial, "angle_mean")
        if any(y > 0 for y in ys):
            traces.append(Trace(xs, ys, paint[label], label))
        for run in path(trial):
            expected = prediction(run)
            if expected is not None:
                traces.append(Trace(expected.xs, expected.ys, paint[label], kind="prediction"))
                laws[expected.text] = None
    if not traces:
        return None
    panel = Panel(
        traces, "tokens", "mean angle per step (rad)", log_y=True, y_bottom=angle_bottom(traces)
    )
    caption = f"Mean angle by which a step turns a row. {_chosen(sweep, trials)}"
    if laws:
        caption += f" Dashed, the theory: {'; '.join(laws)}."
    return Figure(key_of(sweep, "angles"), panel, caption)


def angle_bottom(traces: Sequence[Trace]) -> float | None:
    """Return where to cut off angles that a learning rate takes with it to zero."""
    angles = [y for trace in traces for y in trace.ys if y > 0]
    least = max(angles, default=0.0) / ANGLE_RANGE
    return least if angles and min(angles) < least else None


def norm_figure(
    sweep: SweepResults, trials: dict[str, TrialResult], paint: dict[str, int]
) -> Figure | None:
    norms = {label: joined(trial, "row_norm_mean") for label, trial in trials.items()}
    traces = [Trace(*points, paint[label], label) for label, points in norms.items() if points[0]]
    if not traces:
        return None
    caption = f"Mean length of the rows of the hidden matrices. {_chosen(sweep, trials)}"
    return Figure(key_of(sweep, "row-norms"), Panel(traces, "tokens", "mean row norm"), caption)


def _heat_map(sweep: SweepResults, trials: dict[str, TrialResult]) -> Figure | None:
    """Draw the angles of every matrix, of our method at its best value."""
    if sweep.ours is None or sweep.ours not in trials:
        return None
    trial = trials[sweep.ours]
    what = f"{sweep.ours} at {short(trial.axis)} {trial.value:g}, seed {trial.seed}"
    return heat_map(path(trial), key_of(sweep, "angles-by-layer"), what, sweep.warnings)


@dataclass(frozen=True)
class Prediction:
    xs: list[float]
    ys: list[float]
    text: str


def prediction(run: Run) -> Prediction | None:
    """Return the predicted angles; None if none of the three regimes is this run's.

    The plateau and the power law assume a constant learning rate: they cover the constant phase.
    """
    optim = run.spec.optim
    measured = {step: angle for step, angle in run.values("angle_mean").items() if angle > 0}
    if optim.name == "angular_muown":
        return _explicit(run, [*measured]) if optim.scale in UNIT_STEP else None
    angles = {step: x for step, x in measured.items() if step in run.spec.constant_phase}
    if len(angles) < 2:
        return None
    tokens = [float(step * run.spec.tokens_per_step) for step in angles]
    if optim.weight_decay > 0 and optim.name in DECAYING:
        level = sqrt(2 * optim.lr * optim.weight_decay)
        return Prediction(tokens, [level] * len(angles), "a plateau at √(2·lr·weight decay)")
    if optim.name not in GROWING:
        return None
    # The exponent is predicted; the height is that of the measured angles.
    height = median(angle * sqrt(step) for step, angle in angles.items())
    text = "t^(-1/2) where rows grow (no decay), at the measured height"
    return Prediction(tokens, [height / sqrt(step) for step in angles], text)


def _explicit(run: Run, steps: Sequence[int]) -> Prediction | None:
    """Return the schedule that was set, without a fit: it also covers warmup and cooldown."""
    rates, kappas = run.values("lr"), run.values("kappa")
    steps = [step for step in steps if rates.get(step)]
    if len(steps) < 2:
        return None
    ys = [rates[step] * (kappas.get(step) or run.spec.kappa(step) or 1.0) for step in steps]
    xs = [float(step * run.spec.tokens_per_step) for step in steps]
    return Prediction(xs, ys, "lr·κ_t for AngularMuown")
