"""Sweeps and runs as a report reads them: which run is what, and which losses count.

Whatever keeps a number out of a comparison ends up in `warnings`.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.experiments.comparison import EXPERIMENTS
from angular_lab.experiments.statistics import BestRate, Side, best_rate, judging_seeds
from angular_lab.pace.record import PACE, Pace
from angular_lab.run_folder import RUNS, SPEC, Run, read_run
from angular_lab.sweeps.sweep_file import OLD_FILE, SWEEPS, SweepRecord, TrialRecord

SKIPPED = ("checkpoints", "workers")  # folders that hold no runs


@dataclass(frozen=True)
class TrialResult:
    """An arm at a value with a seed: its runs by horizon, and their trunk if they have one."""

    arm: str
    axis: str
    value: float
    seed: int
    ends: dict[int, Run]
    trunk: Run | None
    planned: tuple[int, ...]  # horizons

    @property
    def runs(self) -> list[Run]:
        return [*([self.trunk] if self.trunk else []), *self.ends.values()]

    @property
    def diverged(self) -> bool:
        return any(run.diverged for run in self.runs)

    @property
    def status(self) -> str:
        if self.diverged:
            return "diverged"
        return "done" if all(self.final(h) for h in self.planned) else "unfinished"

    def final(self, horizon: int) -> tuple[int, float] | None:
        """Return tokens and loss after the cooldown; None if the trial did not get there."""
        run = self.ends.get(horizon)
        return None if run is None or self.diverged else run.final

    def evaluated_by(self, window: float) -> "TrialResult":
        ends = {horizon: run.evaluated_by(window) for horizon, run in self.ends.items()}
        return replace(self, ends=ends)

    @property
    def name(self) -> str:
        return f"{self.arm}, {short(self.axis)} {self.value:g}, seed {self.seed}"


@dataclass
class SweepResults:
    """A sweep with its runs. `arms` are the labels of arms that are not variants of another."""

    file: Path
    record: SweepRecord
    arms: list[str]
    horizons: list[int]
    trials: list[TrialResult]  # of these arms
    variants: list[TrialResult] = field(default_factory=list)  # of their variants
    best: dict[str, BestRate] = field(default_factory=dict)  # by arm, once there is a finished run
    warnings: list[str] = field(default_factory=list)
    key: str = ""  # of its files and ids on the page
    paces: list[Pace] = field(default_factory=list)  # measured times per step, of any model

    @property
    def experiment(self) -> str:
        return self.record.experiment

    @property
    def scale(self) -> str:
        return self.record.scale

    @property
    def title(self) -> str:
        return self.record.title

    @property
    def name(self) -> str:
        return f"{self.experiment}, scale {self.scale}"

    @property
    def seeds(self) -> list[int]:
        return [*self.record.seeds, *self.record.added_seeds]

    @property
    def ours(self) -> str | None:
        """The arm that the experiment is about."""
        return self.record.ours

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(self.record.pairs)

    @property
    def axis(self) -> str:
        """The setting that was swept; "value" if arms differ in it."""
        swept = [trial for trial in self.trials if self.has_grid(trial.arm)]
        axes = {short(trial.axis) for trial in swept or self.trials}
        return axes.pop() if len(axes) == 1 else "value"

    def on_axis(self, arm: str) -> bool:
        """True if the arm's values are of that setting, or all arms have to share a column."""
        axes = {short(trial.axis) for trial in self.of_arm(arm)}
        return self.axis == "value" or axes <= {self.axis}

    @property
    def has_choice(self) -> bool:
        """True if a value had to be chosen: then the seed that chose it cannot judge it."""
        return any(self.has_grid(arm) for arm in self.arms)

    @property
    def choosing_seed(self) -> int | None:
        """The seed that chose the values, here or in another sweep."""
        return self.seeds[0] if self.has_choice else self.record.tuning_seed

    @property
    def judges(self) -> list[int]:
        """Seeds that count in means and verdicts: not one that chose, unless it is the only one."""
        return judging_seeds(self.seeds, self.choosing_seed)

    def has_grid(self, arm: str) -> bool:
        return len({trial.value for trial in self.of_arm(arm)}) > 1

    def at_edge(self, arm: str) -> bool:
        """True if the best value is at the edge of its grid: the optimum may be outside."""
        return arm in self.best and self.best[arm].at_edge and self.has_grid(arm)

    def of_arm(self, arm: str) -> list[TrialResult]:
        return [trial for trial in self.trials if trial.arm == arm]

    def at_best(self, arm: str) -> dict[int, TrialResult]:
        """Return the arm's trials at its best value, by seed."""
        if arm not in self.best:
            return {}
        trials = {t.seed: t for t in self.of_arm(arm) if t.value == self.best[arm].lr}
        return {seed: trials[seed] for seed in sorted(trials)}

    def evaluated_by(self, window: float) -> "SweepResults":
        """Return the sweep with the losses of an average in place of the weights', each arm at the
        value that was chosen without it."""
        return replace(self, trials=[trial.evaluated_by(window) for trial in self.trials])

    def variant_views(self) -> list["SweepResults"]:
        """Return the sweep with variants in place of the arms that they vary, at the values chosen
        for those: one view for every length of the cooldown."""
        roots = {arm.label: arm.variant_of for arm in self.record.arms if arm.variant_of}
        shares = {
            trial.arm: round(run.spec.decay_steps / run.spec.steps, 3)
            for trial in self.variants
            for run in trial.ends.values()
        }
        views: dict[float, list[TrialResult]] = {}
        for trial in self.variants:
            if trial.arm in shares:  # trials without a run count: the grid is what was planned
                as_root = replace(trial, arm=roots[trial.arm] or "")
                views.setdefault(shares[trial.arm], []).append(as_root)
        return [
            replace(self, trials=trials, variants=[], horizons=sorted({*trials[0].planned}))
            for trials in views.values()
        ]

    def reaches(self, arm: str, horizon: int) -> bool:
        """True if the arm has this horizon; before it has a trial, it may have any."""
        trials = self.of_arm(arm)
        return not trials or any(horizon in trial.planned for trial in trials)

    def last(self, *arms: str) -> int:
        """Return the last horizon that all of these arms have."""
        common = (h for h in self.horizons if all(self.reaches(arm, h) for arm in arms))
        return max(common, default=self.horizons[-1])

    def first_losses(self, arm: str) -> dict[float, float]:
        """Return losses at the arm's last horizon by value: what the first seed chooses from."""
        losses: dict[float, float] = {}
        for trial in self.of_arm(arm):
            if trial.seed == self.seeds[0]:
                end = trial.final(self.last(arm))
                if end is not None or trial.diverged:
                    losses[trial.value] = inf if end is None else end[1]
        return losses

    def finals(self, arm: str, horizon: int) -> dict[int, float]:
        """Return losses after the cooldown by seed, at the arm's best value."""
        ends = {seed: trial.final(horizon) for seed, trial in self.at_best(arm).items()}
        return {seed: end[1] for seed, end in ends.items() if end is not None}

    def judged(self, arm: str, horizon: int) -> dict[int, float]:
        """Return the losses that count, by seed."""
        losses = self.finals(arm, horizon)
        return {seed: loss for seed, loss in losses.items() if seed in self.judges}

    def shown(self, arm: str, horizon: int) -> dict[int, float]:
        """Return the losses that count; before there are any, those of the seed that chose."""
        return self.judged(arm, horizon) or self.finals(arm, horizon)

    def tokens(self, horizon: int, *arms: str) -> list[float]:
        """Return the tokens at a horizon of these arms or of all, by the settings of their runs at
        the best value: one number unless batches differ, none before there is a run."""
        trials = (
            trial
            for arm in arms or self.arms
            for trial in [*self.at_best(arm).values()] or self.of_arm(arm)
        )
        specs = (trial.ends[horizon].spec for trial in trials if horizon in trial.ends)
        return sorted({float(spec.steps * spec.tokens_per_step) for spec in specs})

    def final_tokens(self) -> list[float]:
        """Return the tokens at which arms end, each at its own last horizon."""
        return sorted({x for arm in self.arms for x in self.tokens(self.last(arm), arm)})

    def settings(self, arm: str) -> Spec | None:
        """Return the settings of the arm's runs at its best value; None before there is a run."""
        runs = (run for trial in self.at_best(arm).values() for run in trial.runs)
        return next((run.spec for run in runs), None)

    def optimizer(self, arm: str) -> str:
        return next((a.optimizer for a in self.record.arms if a.label == arm), arm)


def short(axis: str) -> str:
    """Return `aux_lr` for `optim.aux_lr`."""
    return axis.rpartition(".")[2]


# -- reading -----------------------------------------------------------------------------------


def collect(sources: Sequence[Path], warnings: list[str]) -> tuple[list[SweepResults], list[Run]]:
    """Read all sweeps and the runs that belong to none. Raises UserError if there is nothing."""
    files: dict[Path, Path] = {}
    folders: dict[Path, Path] = {}
    for source in sources:
        sweep_files, run_folders = find(source)
        if not sweep_files and not run_folders and not find_paces(source):
            why = "holds no run and no sweep" if source.exists() else "does not exist"
            warnings.append(f"{source} {why}")
        files |= {path.resolve(): path for path in sweep_files}
        folders |= {path.resolve(): path for path in run_folders}
    if not files and not folders:
        raise UserError(
            f"no runs to report on: {'; '.join(warnings)}. Give a folder that holds runs; "
            "`angular-lab sweep` and `angular-lab train` make them"
        )
    sweeps = {path: read_sweep(files[path], warnings) for path in files}
    results = [sweep for sweep in sweeps.values() if sweep is not None]
    _set_keys(results)
    order = [*EXPERIMENTS]
    results.sort(
        key=lambda s: (order.index(s.experiment) if s.experiment in order else len(order), s.name)
    )
    referenced = {
        (_runs_folder(sweep.file) / name).resolve()
        for sweep in results
        for trial in sweep.record.trials
        for name in trial.all_runs
    }
    single = [folder for path, folder in folders.items() if path not in referenced]
    runs = (read_run(folder, warnings) for folder in single)
    return results, [run for run in runs if run is not None and run.metrics]


def _set_keys(sweeps: Sequence[SweepResults]) -> None:
    """Name each sweep by its file and, while another has the same name, by the folders above its
    store."""
    paths = [sweep.file.resolve() for sweep in sweeps]
    names = [(*path.parts[1:-2], path.stem) for path in paths]
    for sweep, name in zip(sweeps, names, strict=True):
        length = 1
        while length < len(name) and [x[-length:] for x in names].count(name[-length:]) > 1:
            length += 1
        sweep.key = "-".join(name[-length:])


def find(source: Path) -> tuple[list[Path], list[Path]]:
    """Return the sweep files and the run folders at or below a path, in a fixed order."""
    if source.is_file():
        if source.name == OLD_FILE:
            SweepRecord.read(source)  # raises, and names the command that converts
        return ([], []) if find_paces(source) else ([source], [])
    sweeps, runs = [], []
    for root, folders, files in os.walk(source):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        if OLD_FILE in files:
            SweepRecord.read(Path(root) / OLD_FILE)
        if Path(root).resolve().name == SWEEPS:  # the source may be `.`
            sweeps += [Path(root) / name for name in sorted(files) if name.endswith(".json")]
        if SPEC in files:
            runs.append(Path(root))
    return sweeps, runs


def find_paces(source: Path) -> list[Path]:
    """Return the files of `angular-lab pace` at or below a path."""
    if source.is_file():
        return [source] if source.resolve().parent.name == PACE else []
    paths = []
    for root, folders, files in os.walk(source):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        if Path(root).resolve().name == PACE:
            paths += [Path(root) / name for name in sorted(files) if name.endswith(".json")]
    return paths


def read_paces(sources: Sequence[Path], warnings: list[str]) -> list[Pace]:
    """Read all measured paces below the sources. A file that is not one is left out."""
    files = {path.resolve(): path for source in sources for path in find_paces(source)}
    paces = []
    for path in files.values():
        try:
            paces.append(Pace.read(path))
        except UserError as error:
            warnings.append(f"{error}: left out")
    return paces


def _runs_folder(file: Path) -> Path:
    return file.absolute().parent.parent / RUNS  # the file may be given without its folder


def read_sweep(file: Path, warnings: list[str]) -> SweepResults | None:
    """Read a sweep's file and its runs; None if the file is damaged."""
    try:
        record = SweepRecord.read(file)
        if not (record.arms and record.horizons and record.seeds):
            raise UserError(f"{file} has no arms, no horizons or no seeds")
    except UserError as error:
        warnings.append(f"{error}: its runs are shown one by one")
        return None
    problems: list[str] = []
    axes = {arm.label: arm.axis for arm in record.arms}
    varied = {arm.label for arm in record.arms if arm.variant_of}
    trials = [_trial(trial, axes[trial.arm], file, problems) for trial in record.trials]
    sweep = SweepResults(
        file=file,
        record=record,
        arms=[arm.label for arm in record.arms if not arm.variant_of],
        horizons=sorted(record.horizons),
        trials=[trial for trial in trials if trial.arm not in varied],
        variants=[trial for trial in trials if trial.arm in varied],
        warnings=problems,
    )
    _exclude_incomparable(sweep)
    _find_best(sweep)
    _note_gaps(sweep)
    return sweep


def _trial(record: TrialRecord, axis: str, file: Path, warnings: list[str]) -> TrialResult:
    store = _runs_folder(file)
    runs = {}
    for horizon, name in record.runs.items():
        if not (store / name).is_dir():
            continue
        run = read_run(store / name, warnings)
        if run is not None:
            # a straight run may be another sweep's cooldown: then its log starts in a trunk
            runs[horizon] = run if record.trunk else run.with_history(warnings)
    trunk = None
    if record.trunk and (store / record.trunk).is_dir():
        trunk = read_run(store / record.trunk, warnings)
    if not runs and trunk is None:
        warnings.append(
            f"{record.arm}, {record.value:g}, seed {record.seed}: {file} refers to "
            f"{next(iter(record.all_runs), 'no run')}, which is not in {store}"
        )
    return TrialResult(record.arm, axis, record.value, record.seed, runs, trunk, tuple(record.runs))


def _exclude_incomparable(sweep: SweepResults) -> None:
    """Remove trials on other tokens or another vocabulary: their losses are other quantities."""
    trials = [*sweep.trials, *sweep.variants]
    kinds = Counter(run.comparable for trial in trials for run in trial.runs)
    if len(kinds) < 2:
        return
    (data, vocabulary), _ = kinds.most_common(1)[0]
    wrong = {
        id(trial): run
        for trial in trials
        for run in trial.runs
        if run.comparable != (data, vocabulary)
    }
    sweep.warnings += [
        f"{trial.name} is left out of the comparison: data "
        f"{wrong[id(trial)].info.data[:12] or 'unknown'} and vocabulary "
        f"{wrong[id(trial)].spec.model.vocabulary:,}, where most runs have "
        f"{data[:12] or 'unknown'} and {vocabulary:,}"
        for trial in trials
        if id(trial) in wrong
    ]
    sweep.trials = [trial for trial in sweep.trials if id(trial) not in wrong]
    sweep.variants = [trial for trial in sweep.variants if id(trial) not in wrong]


def _find_best(sweep: SweepResults) -> None:
    """Take the value that the sweep chose; if it has not yet, the best so far."""
    for arm in sweep.arms:
        losses = sweep.first_losses(arm)
        try:
            best = best_rate(losses)
        except ValueError:
            sweep.warnings.append(f"{arm}: no finished run, so no best value yet")
            continue
        value = sweep.record.chosen.get(arm, best.lr)
        if value != best.lr:
            is_known = value in losses
            sweep.warnings.append(
                f"{arm}: {sweep.file.name} chose {value:g}, but {best.lr:g} has the lowest loss of "
                f"the runs here; {value if is_known else best.lr:g} is used"
            )
            best = _at(value, losses) if is_known else best
        elif arm not in sweep.record.chosen:
            sweep.warnings.append(f"{arm}: not chosen yet, {best.lr:g} is the best so far")
        sweep.best[arm] = best


def _at(value: float, losses: dict[float, float]) -> BestRate:
    edge: tuple[Side, ...] = ("below",) if value == min(losses) else ()
    edge += ("above",) if value == max(losses) else ()
    return BestRate(value, losses[value], bool(edge), edge)


def _gaps(trial: TrialResult) -> Iterator[str]:
    """Yield which losses the trial lacks, and why."""
    if trial.diverged:
        yield f"{trial.name} diverged: it counts as the worst of its grid"
    elif steps := [f"{h:,}" for h in trial.planned if trial.final(h) is None]:
        yield f"{trial.name} is unfinished: no final loss at step {', '.join(steps)}"


def _note_gaps(sweep: SweepResults) -> None:
    for trial in (*sweep.trials, *sweep.variants):
        sweep.warnings += _gaps(trial)
    for arm, best in sweep.best.items():
        for seed in sweep.record.seeds:
            if seed not in sweep.at_best(arm):
                sweep.warnings.append(f"{arm} at {best.lr:g}: seed {seed} is missing")
        if sweep.at_edge(arm):
            sweep.warnings.append(
                f"{arm}: the best value {best.lr:g} is at the edge of its grid; the optimum may be "
                f"{best.extend[0]} it"
            )
    for arm in sweep.arms:
        if not sweep.of_arm(arm):
            sweep.warnings.append(f"{arm}: planned, but it has no usable run")
