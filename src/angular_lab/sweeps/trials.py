"""Trials: an arm at a value with a seed, as runs of the store. Most are one run; where there are
several horizons, a trunk and the cooldowns that branch off it."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from pathlib import Path

from angular_lab.config.branches import branch_point, cooldown_spec, extended_spec, trunk_spec
from angular_lab.config.overrides import override
from angular_lab.config.spec import LENGTH, Spec
from angular_lab.errors import UserError
from angular_lab.experiments.definition import Arm, Experiment
from angular_lab.run_folder import RunFolder, read_run
from angular_lab.sweeps.sweep_file import TrialRecord
from angular_lab.trunks import has_passed, trunk_folder


@dataclass(frozen=True)
class PlannedRun:
    """A run of a trial and its folder in the store."""

    spec: Spec
    data: str  # fingerprint of the tokens
    store: Path
    name: str | None = None  # of its folder; None: the usual one

    @cached_property
    def folder(self) -> Path:
        return self.store / (self.name or self.spec.folder_name(self.data))

    def named(self, name: str | None) -> "PlannedRun":
        """Return the run in a numbered folder: the same settings, trained again."""
        is_numbered = name is not None and name.startswith(f"{self.folder.name}-")
        return replace(self, name=name) if is_numbered else self

    @property
    def exists(self) -> bool:
        return self.folder.exists()

    @property
    def finished(self) -> bool:
        """True if it is done or diverged. Raises UserError if the folder holds another run."""
        run = RunFolder(self.folder)
        if not (run.done or run.diverged or has_passed(run, self.spec)):
            return False
        self.check(run)
        return run.diverged or not self._is_trunk or run.read_spec().steps >= self.spec.steps

    @property
    def diverged(self) -> bool:
        """True if it diverged; a trunk, before its last branch point."""
        run = RunFolder(self.folder)
        return run.diverged and not has_passed(run, self.spec)

    @property
    def _is_trunk(self) -> bool:
        return self.spec.schedule.kind == "constant" and bool(self.spec.pins)

    def continued(self, stored: Spec) -> Spec:
        """Return the spec with which a run continues that began with `stored`: as it began,
        whatever no loss depends on. A trunk that is too short is extended."""
        spec = replace(stored, data=self.spec.data)  # the path may be another
        if not self._is_trunk:
            return spec
        return extended_spec(spec, max(spec.steps, self.spec.steps), self.spec.pins)

    def check(self, run: RunFolder) -> None:
        """Digests leave defaults out, so that new settings rename nothing. The price: once a
        default changes, a run made under the old one has the digest of one under the new."""
        info = run.info
        stored, wanted = info.spec.identity(info.data or self.data), self.spec.identity(self.data)
        for key, value in wanted.items():
            may_differ = self._is_trunk and key in LENGTH
            if stored.get(key) != value and not may_differ:
                raise UserError(
                    f"{run.path} was made with {key}={stored.get(key)!r}, and this sweep needs "
                    f"{value!r}: give another --out, or remove the folder"
                )


@dataclass(frozen=True)
class Trial:
    arm: Arm
    value: float
    seed: int
    ends: dict[int, PlannedRun]  # by horizon
    trunk: PlannedRun | None = None  # the run that the ends branch from

    @property
    def runs(self) -> list[PlannedRun]:
        return [*([self.trunk] if self.trunk else []), *self.ends.values()]

    @property
    def exists(self) -> bool:
        """True if it has begun; a trunk may be gone once its cooldowns are done."""
        return any(run.exists for run in self.runs)

    @property
    def diverged(self) -> bool:
        return any(run.diverged for run in self.runs)

    @property
    def done(self) -> bool:
        return all(run.finished for run in self.ends.values()) or (
            any(run.finished and run.diverged for run in self.runs)
        )

    @property
    def next_runs(self) -> list[PlannedRun]:
        """Runs that can start now: the trunk, and once it is done, the cooldowns."""
        if self.done:
            return []
        if self.trunk and not self.trunk.finished:
            return [self.trunk]
        return [run for run in self.ends.values() if not run.finished]

    @property
    def loss(self) -> float:
        """The final loss at the longest horizon; infinite if training diverged."""
        if self.diverged:
            return inf
        folder = self.ends[max(self.ends)].folder
        return _final_loss(folder, (folder / "DONE").stat().st_mtime_ns)

    def as_recorded(self, record: TrialRecord) -> "Trial":
        """Return the trial with the runs that a sweep's file refers to."""
        trunk = self.trunk.named(record.trunk) if self.trunk else None
        parent = trunk.folder.name if trunk else None
        ends = {
            horizon: replace(run, spec=replace(run.spec, parent=parent)).named(
                record.runs.get(horizon)
            )
            for horizon, run in self.ends.items()
        }
        return replace(self, ends=ends, trunk=trunk)

    @property
    def record(self) -> TrialRecord:
        names = {horizon: run.folder.name for horizon, run in self.ends.items()}
        trunk = self.trunk.folder.name if self.trunk else None
        return TrialRecord(self.arm.label, self.value, self.seed, names, trunk)


@cache
def _final_loss(folder: Path, _finished_at: int) -> float:
    """Return the final loss of a finished run: it does not change any more."""
    run = read_run(folder, [])
    if run is None or run.final is None:
        raise UserError(
            f"{folder} is done, but its metrics.jsonl has no val_loss at the last step: remove the "
            "folder, and the run is made again; eval_every must not be none"
        )
    return run.final[1]


def make_trial(
    experiment: Experiment, arm: Arm, value: float, seed: int, data: str, store: Path
) -> Trial:
    """Return the trial with the specs of its runs; `data` is the fingerprint of the tokens."""
    spec = replace(override(arm.spec, [f"{arm.axis}={value!r}"]), seed=seed)
    horizons = experiment.horizons_of(arm)
    starts = _branch_points(experiment, arm)
    if len(starts) == 1:
        straight = PlannedRun(replace(spec, steps=horizons[0]), data, store)
        return Trial(arm, value, seed, {horizons[0]: straight})
    trunk = PlannedRun(trunk_spec(spec, starts), data, store)
    trunk = replace(trunk, name=trunk_folder(store, trunk.spec, data).name)
    ends = {}
    for horizon in horizons:
        start = branch_point(horizon, spec.schedule.decay)
        cooldown = cooldown_spec(trunk.spec, trunk.folder.name, start, horizon)
        ends[horizon] = PlannedRun(cooldown, data, store)
    return Trial(arm, value, seed, ends, trunk)


def _branch_points(experiment: Experiment, arm: Arm) -> tuple[int, ...]:
    """Return the steps at which cooldowns leave the trunk, those of the arm and of its variants;
    one step, 0, if there is a single end and so no trunk."""
    label = arm.variant_of or arm.label
    family = [other for other in experiment.arms if label in (other.label, other.variant_of)]
    ends = [(horizon, a) for a in family for horizon in experiment.horizons_of(a)]
    if len(ends) == 1:
        return (0,)
    return tuple(sorted({branch_point(h, a.spec.schedule.decay) for h, a in ends}))
