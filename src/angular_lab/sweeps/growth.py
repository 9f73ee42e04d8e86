"""A sweep that is known by its name alone may grow. It may not change or lose what it has."""

from angular_lab.config.overrides import as_typed
from angular_lab.errors import UserError
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.sweep_file import SweepRecord, TrialRecord

ANOTHER = "give another --name, or the same words and more"


def check_growth(sweep: Sweep) -> None:
    """Raise UserError if the sweep's file has methods, seeds or horizons that the sweep lacks, or
    methods of the same name with other settings."""
    sweep.check()
    record = sweep.record()
    if record is None:
        return
    plan = sweep.experiment
    labels = [arm.label for arm in plan.arms]
    for what, before, now in (
        ("method", [arm.label for arm in record.arms], labels),
        ("seed", record.seeds, plan.seeds),
        ("horizon", record.horizons, plan.horizons),
    ):
        if missing := [x for x in before if x not in now]:
            listed = ", ".join(map(str, missing))
            raise UserError(f"{sweep.path} also has the {what} {listed}: {ANOTHER}")
    if record.seeds[0] != plan.seeds[0]:
        raise UserError(
            f"{sweep.path} chose values on seed {record.seeds[0]}, not {plan.seeds[0]}: add "
            f"--pick-on {record.seeds[0]}, or give another --name"
        )
    for trial in record.trials:
        _check_trial(sweep, record, trial)


def _check_trial(sweep: Sweep, record: SweepRecord, before: TrialRecord) -> None:
    """Compare the runs that the file refers to with those that the sweep needs."""
    arm = next(arm for arm in sweep.experiment.arms if arm.label == before.arm)
    axis = next(a.axis for a in record.arms if a.label == before.arm)
    if axis != arm.axis:
        raise UserError(f"{sweep.path} tuned {axis} of {before.arm}, not {arm.axis}: {ANOTHER}")
    ends = sweep.trial(arm, before.value, before.seed).ends
    for horizon, name in before.runs.items():
        stored, run = RunFolder(sweep.runs / name), ends[horizon]
        if run.folder == stored.path or not stored.started:
            continue
        wanted, recorded = (spec.identity("") for spec in (run.spec, stored.read_spec()))
        changed = [
            f"{key}={as_typed(recorded[key])} (now {as_typed(wanted.get(key))})"
            for key in recorded
            if recorded[key] != wanted.get(key)
        ]
        if changed:
            raise UserError(f"{sweep.path} has {before.arm} with {', '.join(changed)}: {ANOTHER}")
