"""A sweep: the trials of an experiment. Finished runs are skipped, interrupted ones resumed.

The first seed runs every value of every arm; the best value is judged on the other seeds. Runs are
folders of the store, named by what is in them, so that sweeps share the runs they have in common.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path

from filelock import FileLock

from angular_lab.config.overrides import override
from angular_lab.config.spec import DASHBOARD, LENGTH, Spec
from angular_lab.data.passes import describe_passes, passes
from angular_lab.errors import UserError
from angular_lab.experiments.definition import Arm, Experiment
from angular_lab.experiments.statistics import BestRate, Verdict, best_rate
from angular_lab.run_folder import RUNS, RunFolder
from angular_lab.sweeps.open_pairs import Losses, judge, new_seeds, seeds_of_pair
from angular_lab.sweeps.progress import announcement
from angular_lab.sweeps.sweep_file import SWEEPS, ArmRecord, DamagedFileError, SweepRecord
from angular_lab.sweeps.trials import PlannedRun, Trial, make_trial
from angular_lab.text import counted
from angular_lab.training.build import Models
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.signals import Preempted, Sigterm
from angular_lab.training.start import STDLIB, data_id, data_place, is_prepared, train

FAILED = ".failed"
WAIT = 0.5  # seconds between polls of runs that other processes make
AGAIN = "run the same command to continue"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grid:
    """An arm on the first seed; `best` is None until all values are done, or if all diverged."""

    trials: list[Trial]
    best: BestRate | None = None

    @property
    def done(self) -> bool:
        return all(trial.done for trial in self.trials)


class Sweep:
    """An experiment in a store. What is done and what is left is read from the run folders each
    time, never remembered: other processes may work on them."""

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        data: str | None = None,
        device: str = "",
        name: str | None = None,
        prepare: bool = True,
    ) -> None:
        """Without `prepare`, the standard library is not prepared as a corpus: nothing is written,
        and no run can be made."""
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError(
                "a sweep under torchrun: each of its runs is one process; start it without "
                "torchrun, with sweep --processes N or as jobs with submit"
            )
        if data:
            arms = [replace(arm, spec=replace(arm.spec, data=data)) for arm in experiment.arms]
            experiment = replace(experiment, arms=tuple(arms))
        self.experiment, self.device = experiment, device
        self.name = name or f"{experiment.name}-{experiment.scale}"
        if Path(self.name).name != self.name:
            raise UserError(f"--name {name}: it must be a plain file name")
        self.path, self.runs = out / SWEEPS / f"{self.name}.json", out / RUNS
        spec = experiment.arms[0].spec
        self.data = data_id(spec) if prepare or is_prepared(spec) else ""
        self.until, self.extend = inf, 0
        self.max_seeds = 0  # that may judge an open pair; 0: only those of the experiment
        self.models = Models()
        self.marks: Path | None = None  # where processes that share the work mark what failed
        self.announce: Callable[[PlannedRun], str] | None = None  # a line for each run that starts

    # -- what there is to do -------------------------------------------------------------------

    def trial(self, arm: Arm, value: float, seed: int) -> Trial:
        trial = make_trial(self.experiment, arm, value, seed, self.data, self.runs)
        before = self.record()
        key = (arm.label, value, seed)
        recorded = (t for t in (before.trials if before else ()) if (t.arm, t.value, t.seed) == key)
        return next((trial.as_recorded(record) for record in recorded), trial)

    def grid(self, arm: Arm, extend: int = 0) -> Grid:
        """Return the arm's values on the first seed, with those that were added at an edge before.
        If the best value is at an edge, up to `extend` values are added; if all diverged, smaller
        ones are. A variant has the values of its arm."""
        if arm.variant_of:
            values = [trial.value for trial in self.grid(self._root(arm), extend).trials]
            return Grid([self.trial(arm, value, self.experiment.seeds[0]) for value in values])
        values = self._values(arm)
        while True:
            grid = Grid([self.trial(arm, value, self.experiment.seeds[0]) for value in values])
            if not grid.done:
                return grid
            best = _best(grid.trials)
            edges = best.extend if best else ("below",)
            has_one_edge = len(edges) == 1 and len(values) > 1  # a single value is not a grid
            if not has_one_edge or len(values) - len(arm.values) >= extend:
                return Grid(grid.trials, best)
            values = sorted([*values, _next_value(values, edges[0])])

    def _values(self, arm: Arm) -> list[float]:
        """Return the arm's values, with those that the sweep's file has."""
        recorded = self._recorded_arm(arm.label)
        return sorted({*arm.values, *(recorded.values if recorded else ())})

    def best(self, arm: Arm, extend: int = 0) -> BestRate | None:
        """Return the arm's chosen value; a variant takes that of the arm it is a variant of."""
        return self.grid(self._root(arm), extend).best

    def _root(self, arm: Arm) -> Arm:
        return next((a for a in self.experiment.arms if a.label == arm.variant_of), arm)

    def planned(self) -> Iterator[tuple[int, list[Trial]]]:
        """For every arm to be trained yield the trials that are planned so far, and how many more
        will follow once its value is chosen. An arm with one value has no choice to wait for."""
        judges, added = self.experiment.seeds[1:], self._added_seeds()
        for arm in self.experiment.trained_arms:
            grid, value = self.grid(arm, self.extend), self._chosen_value(arm)
            if value is None:
                waiting = 0 if self.grid(self._root(arm), self.extend).done else len(judges)
                yield waiting, grid.trials
            else:
                seeds = (*judges, *added.get(arm.label, ()))
                yield 0, [*grid.trials, *(self.trial(arm, value, seed) for seed in seeds)]

    def _chosen_value(self, arm: Arm) -> float | None:
        best = self.best(arm, self.extend)
        return best.lr if best else arm.values[0] if len(arm.values) == 1 else None

    # -- pairs that are open -------------------------------------------------------------------

    def _added_seeds(self) -> dict[str, list[int]]:
        """Return the judging seeds, by arm, that its open pairs get in addition."""
        planned = {*self.experiment.seeds}
        added: dict[str, set[int]] = {}
        for pair, seeds in self._seeds_by_pair().items() if self.max_seeds else ():
            for label in pair:
                added.setdefault(label, set()).update({*seeds} - planned)
        return {label: sorted(seeds) for label, seeds in added.items()}

    def verdicts(self) -> dict[tuple[str, str], Verdict | None]:
        """Judge the pairs of trained arms at the last horizon; None where a run is unfinished."""
        return {
            pair: judge(seeds, self._losses(pair[0]), self._losses(pair[1]))
            for pair, seeds in self._seeds_by_pair().items()
        }

    def _seeds_by_pair(self) -> dict[tuple[str, str], list[int]]:
        plan = self.experiment
        has_choice = any(len(self._values(arm)) > 1 for arm in plan.arms if not arm.variant_of)
        choosing = plan.seeds[0] if has_choice else plan.tuning_seed
        judges = [seed for seed in plan.seeds if seed != choosing]
        return {
            (a, b): seeds_of_pair(
                judges,
                new_seeds(plan.seeds, plan.tuning_seed),
                self._losses(a),
                self._losses(b),
                self.max_seeds,
            )
            for a, b in plan.trained_pairs
        }

    def _losses(self, label: str) -> Losses:
        """Return the final loss of an arm at its chosen value, as a function of the seed."""
        arm = next(arm for arm in self.experiment.arms if arm.label == label)
        value = self._chosen_value(arm)

        def loss(seed: int) -> float | None:
            trial = None if value is None else self.trial(arm, value, seed)
            return trial.loss if trial and trial.done else None

        return loss

    def pending(self) -> list[Trial]:
        """Return the unfinished trials of which a run can start now."""
        return [trial for _, trials in self.planned() for trial in trials if not trial.done]

    def next_runs(self) -> list[PlannedRun]:
        """Return the runs that can start now and have not failed."""
        runs = (run for trial in self.pending() for run in trial.next_runs)
        return [run for run in runs if not self.has_failed(run)]

    def counts(self) -> tuple[int, int]:
        """Return how many trials are done, and how many there are in all."""
        done = total = 0
        for waiting, trials in self.planned():
            done += sum(trial.done for trial in trials)
            total += waiting + len(trials)
        return done, total

    def check(self) -> None:
        """Raise UserError if the sweep's file is of another experiment or other data."""
        record, plan = self.record(), self.experiment
        if record is None:
            return
        for what, before, now in (
            ("experiment", record.experiment, plan.name),
            ("scale", record.scale, plan.scale),
            ("data", record.data[:12], self.data[:12]),
        ):
            if before != now and now:  # data that is not prepared is not known
                raise UserError(
                    f"{self.path} was made with {what} {before}, and this sweep has {now}: give it "
                    "another name with --name"
                )

    def state(self) -> str:
        """Describe the sweep: no one should train on the default data without knowing it."""
        plan, (done, total) = self.experiment, self.counts()
        data = plan.arms[0].spec.data
        text = f"{STDLIB} (the Python standard library, as bytes)" if data == STDLIB else data
        counts = f"{plan.name}, scale {plan.scale}: {done} of {counted(total, 'trial')} done"
        if plan.only is not None:
            counts += f", of {len(plan.trained_arms)} of {counted(len(plan.arms), 'method')}"
        return f"{counts}; data: {text}; longest run: {self.passes_text}"

    @property
    def longest(self) -> Spec:
        """The spec that reads the most tokens, at its last horizon."""
        plan = self.experiment
        specs = [replace(arm.spec, steps=max(plan.horizons_of(arm))) for arm in plan.trained_arms]
        return max(specs, key=lambda spec: spec.steps * spec.tokens_per_step)

    @property
    def passes(self) -> float | None:
        """How often the longest run reads the corpus; None if that is not prepared yet."""
        data = data_place(self.longest)
        return passes(self.longest, data) if data.is_dir() else None

    @property
    def passes_text(self) -> str:
        known = self.passes is not None
        return describe_passes(self.longest, data_place(self.longest)) if known else "not prepared"

    @property
    def chosen(self) -> dict[str, BestRate]:
        arms = (arm for arm in self.experiment.arms if not arm.variant_of)
        best = {arm.label: self.best(arm, self.extend) for arm in arms}
        return {label: value for label, value in best.items() if value}

    # -- the file ------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the sweep's file. Its content is read under the lock, so that the last writer is
        right. Trials that the plan no longer has stay listed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.name}.lock")):
            self._content().write(self.path)

    def record(self) -> SweepRecord | None:
        """Return the file's content; None if there is no file."""
        with suppress(FileNotFoundError):
            status = self.path.stat()
            return _read(self.path, (status.st_ino, status.st_size, status.st_mtime_ns))
        return None

    def _recorded_arm(self, label: str) -> ArmRecord | None:
        record = self.record()
        return next((arm for arm in record.arms if arm.label == label), None) if record else None

    def _content(self) -> SweepRecord:
        plan, before = self.experiment, self.record()
        added = {seed for seeds in self._added_seeds().values() for seed in seeds}
        added |= {*(before.added_seeds if before else ())}
        arms = [self._arm_record(arm) for arm in plan.arms]
        trials = [
            trial.record
            for arm in plan.arms
            for seed in (*plan.seeds, *sorted(added - {*plan.seeds}))
            for value in self._values_with_extension(arm)
            if (trial := self.trial(arm, value, seed)).exists
        ]
        if before is not None:
            labels = {arm.label for arm in arms}
            arms += [arm for arm in before.arms if arm.label not in labels]
            listed = {(trial.arm, trial.value, trial.seed) for trial in trials}
            dropped = [t for t in before.trials if (t.arm, t.value, t.seed) not in listed]
            trials += [t for t in dropped if any((self.runs / n).exists() for n in t.all_runs)]
        return SweepRecord(
            experiment=plan.name,
            scale=plan.scale,
            title=plan.title,
            data=self.data,
            horizons=plan.horizons,
            seeds=plan.seeds,
            arms=tuple(arms),
            trials=tuple(trials),
            chosen={label: best.lr for label, best in self.chosen.items()},
            ours=plan.ours,
            pairs=plan.pairs,
            tuning_seed=plan.tuning_seed,
            added_seeds=tuple(sorted(added - {*plan.seeds})),
        )

    def _values_with_extension(self, arm: Arm) -> list[float]:
        return [trial.value for trial in self.grid(self._root(arm), self.extend).trials]

    def _arm_record(self, arm: Arm) -> ArmRecord:
        values = tuple(self._values_with_extension(arm))
        return ArmRecord(arm.label, arm.spec.optim.name, arm.axis, values, arm.variant_of)

    # -- making runs ---------------------------------------------------------------------------

    def make_one(self) -> bool | None:
        """Make one run. False if other processes are at work on all that can run now; None if
        nothing is left."""
        runs = self.next_runs()
        if not runs:
            return None
        # First those that need no new model; a trunk's cooldowns start from memory.
        for planned in sorted(runs, key=lambda run: not self.models.fits(run.spec)):
            if self.try_make(planned):
                return True
        return False

    def try_make(self, planned: PlannedRun) -> bool:
        """Make a run. False if another process is at work on it or has dealt with it."""
        run = RunFolder(planned.folder)
        if not run.try_claim():
            return False
        try:
            if planned.finished or self.has_failed(planned):
                return False
            self._train(planned, run)
            return True
        finally:
            run.release()

    def _train(self, planned: PlannedRun, run: RunFolder) -> None:
        starts = f"{self.name}: starts {planned.folder.name}"
        log.info(self.announce(planned) if self.announce else starts)
        self.write()
        try:
            spec = planned.spec
            if run.started:
                planned.check(run)
                spec = planned.continued(run.read_spec())
            elif spec.loggers and spec.dashboard.group is None:
                spec = override(spec, [f"dashboard.group={self.name}"])
            changing = DASHBOARD | LENGTH
            train(spec, run, True, self.device, self.until, self.models, None, changing)
        except Preempted:
            raise Preempted(f"{planned.folder.name} is saved") from None
        except NotFinite as error:  # a learning rate too high is a result, not a failure
            log.warning("%s diverged: %s", planned.folder.name, error)
        except Exception:
            if self.marks:
                (self.marks / f"{planned.folder.name}{FAILED}").touch()
            raise
        finally:
            self.write()

    def has_failed(self, run: PlannedRun) -> bool:
        """True if a process of this call or submission failed at the run."""
        return self.marks is not None and (self.marks / f"{run.folder.name}{FAILED}").exists()


@lru_cache(maxsize=64)
def _read(path: Path, _version: tuple[int, ...]) -> SweepRecord | None:
    try:
        return SweepRecord.read(path)
    except DamagedFileError as error:
        aside = path.with_suffix(".damaged")
        os.replace(path, aside)
        log.warning("%s: kept as %s, and written anew", error, aside)
        return None


def run_sweeps(sweeps: Sequence[Sweep], budget: float = inf, extend: int = 0) -> None:
    """Run all sweeps, with one compiled model for all runs of its shape. Raises Preempted when the
    budget is spent or at SIGTERM and Ctrl-C, with everything saved; the same call continues.
    `extend`: how many values a grid may grow by at the edge where its best value is. Runs that
    other processes make are waited for once nothing else is left, of any sweep."""
    until = time.monotonic() + budget
    begin(sweeps, extend)
    for sweep in sweeps:
        sweep.announce = lambda planned: announcement(sweeps, planned)
    try:
        make_all(sweeps, until, extend)
    except Preempted as stopped:
        parts = (str(stopped), unfinished(sweeps), AGAIN)
        raise Preempted("; ".join(filter(None, parts))) from None


def begin(sweeps: Sequence[Sweep], extend: int) -> None:
    """Check all sweeps before the first one is written. Once per command."""
    for sweep in sweeps:
        sweep.extend = extend
        sweep.check()
    for sweep in sweeps:
        sweep.write()
        log.info(sweep.state())


def unfinished(sweeps: Sequence[Sweep]) -> str:
    """Describe the sweeps that have trials left; "" if all are done."""
    counts = [(sweep.name, *sweep.counts()) for sweep in sweeps]
    return "; ".join(
        f"{name}: {done} of {counted(total, 'trial')} done, {total - done} left"
        for name, done, total in counts
        if done < total
    )


def make_all(sweeps: Sequence[Sweep], until: float, extend: int) -> None:
    """Make runs until none is left."""
    models, waiting = sweeps[0].models, False
    for sweep in sweeps:
        sweep.models, sweep.until, sweep.extend = models, until, extend
    with Sigterm(signal.SIGINT) as stop:
        while True:
            if stop.received or time.monotonic() >= until:
                if not any(sweep.next_runs() for sweep in sweeps):
                    return
                raise Preempted("a signal arrived" if stop.received else "the budget is spent")
            results: list[bool | None] = []
            for sweep in sweeps:  # the first that has something to do
                results.append(sweep.make_one())
                if results[-1]:
                    break
            if all(result is None for result in results):
                return
            if not results[-1] and not waiting:
                log.info("waiting: other processes make all that can run now")
            waiting = not results[-1]
            if waiting:
                time.sleep(WAIT)


def _best(trials: list[Trial]) -> BestRate | None:
    losses = {trial.value: trial.loss for trial in trials}
    return best_rate(losses) if any(loss < inf for loss in losses.values()) else None


def _next_value(values: Sequence[float], edge: str) -> float:
    """Return one more value beyond the edge, as far from it as its neighbour is, in ratio."""
    ordered = sorted(values)
    last, neighbour = (ordered[0], ordered[1]) if edge == "below" else (ordered[-1], ordered[-2])
    return last**2 / neighbour
