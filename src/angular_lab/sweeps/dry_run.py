"""What a sweep would train and what that costs. Reads the store and writes nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from angular_lab.check import free_disk
from angular_lab.config.spec import Spec
from angular_lab.data.batches import Tokens
from angular_lab.data.passes import describe_passes
from angular_lab.data.shards import SPLITS
from angular_lab.errors import UserError
from angular_lab.experiments.cost import AT_MFU, DEVICES, device_hours, hours_form, model_size
from angular_lab.experiments.definition import Arm, Experiment
from angular_lab.show import rate_here
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.trials import PlannedRun, Trial
from angular_lab.text import counted, estimated_time, short_bytes
from angular_lab.training import build
from angular_lab.training.loggers import check_loggers
from angular_lab.training.start import data_place, is_prepared

MOST_PAIRS = 8  # that a line can list


@dataclass
class Work:
    """Runs, and what it takes to train them."""

    runs: int = 0
    steps: int = 0
    tokens: int = 0
    operations: float = 0.0
    disk: int = 0  # bytes of the checkpoints that stay

    def add(self, spec: Spec) -> None:
        _, flops = model_size(spec.model)
        steps = spec.steps - spec.parent_step
        tokens = steps * spec.tokens_per_step
        self.runs += 1
        self.steps += steps
        self.tokens += tokens
        self.operations += tokens * flops
        self.disk += checkpoints(spec) * _checkpoint_bytes(_storage(spec))


@dataclass
class ArmWork:
    """The work of one arm, without runs that an arm before it has as well."""

    arm: Arm
    values: tuple[float, ...]
    trials: int
    all: Work = field(default_factory=Work)
    left: Work = field(default_factory=Work)


def checkpoints(spec: Spec) -> int:
    """Return how many checkpoints of a finished run stay: the pinned ones and the newest."""
    every, first = spec.save_every or spec.steps, spec.parent_step + 1
    saved = {step for step in range(first, spec.steps + 1) if step % every == 0} | {spec.steps}
    pinned = {*spec.pinned} & {*range(first, spec.steps + 1)}
    return len(pinned) + min(spec.keep, len(saved - pinned))


def _storage(spec: Spec) -> Spec:
    """Return the spec with all that a checkpoint's size depends on, for the cache below."""
    usual, names = Spec(), ("model", "precision", "average", "extrapolate")
    rates = ("lr", "aux_lr", "radius_lr", "weight_decay", "angles")
    optim = replace(spec.optim, **{name: getattr(usual.optim, name) for name in rates})
    return replace(usual, **{name: getattr(spec, name) for name in names}, optim=optim)


@cache
def _checkpoint_bytes(spec: Spec) -> int:
    return build.checkpoint_bytes(spec, *build.without_memory(spec))


def check_disk(sweeps: Sequence[Sweep]) -> None:
    """Raise UserError if the checkpoints of the runs that are left do not fit on the disk."""
    works = [work for sweep in sweeps for work in work_of(sweep)]
    needed, store = sum(work.left.disk for work in works), sweeps[0].runs
    if needed > (free := free_disk(store)):
        raise UserError(
            f"the checkpoints of the runs that are left take {short_bytes(needed)}, and the disk "
            f"of {store} has {short_bytes(free)}: free {short_bytes(needed - free)} more, or lower "
            "keep"
        )


def work_of(sweep: Sweep) -> list[ArmWork]:
    """Return the work of every arm to be trained. Trials whose value is not chosen yet count like
    any other: the value makes no difference to their cost."""
    seen: set[Path] = set()
    result = []
    arms = sweep.experiment.trained_arms
    for arm, (waiting, trials) in zip(arms, sweep.planned(), strict=True):
        values = tuple(dict.fromkeys(trial.value for trial in trials))
        work = ArmWork(arm, values, waiting + len(trials))
        for trial in trials:
            left = {run.folder for run in _unfinished(trial)}
            for run in trial.runs:
                if run.folder in seen:
                    continue
                seen.add(run.folder)
                work.all.add(run.spec)
                if run.folder in left:
                    work.left.add(run.spec)
        # a variant's cooldowns leave the trunk of the arm that it is a variant of
        further = [*trials[0].ends.values()] if arm.variant_of else trials[0].runs
        for run in further * waiting:
            work.all.add(run.spec)
            work.left.add(run.spec)
        result.append(work)
    return result


def _unfinished(trial: Trial) -> list[PlannedRun]:
    return [] if trial.done else [run for run in trial.runs if not run.finished]


def total(works: Iterable[Work]) -> Work:
    parts = list(works)
    names = ("runs", "steps", "tokens", "operations", "disk")
    return Work(*(sum(getattr(part, name) for part in parts) for name in names))


def rows(works: Sequence[ArmWork]) -> list[dict[str, str]]:
    """Return the table: a row per arm, and their sum."""
    axes = {work.arm.axis for work in works}
    axis = axes.pop() if len(axes) == 1 else "value"
    everything = total(work.all for work in works)
    table = [
        _row(axis, work.arm.label, _values(work.values), work.trials, work.all, work.left)
        for work in works
    ]
    trials = sum(work.trials for work in works)
    return [
        *table,
        _row(axis, "all", "", trials, everything, total(work.left for work in works)),
    ]


def _row(axis: str, label: str, values: str, trials: int, work: Work, left: Work) -> dict[str, str]:
    return {
        "method": label,
        axis: values,
        "trials": f"{trials:,}",
        "runs": f"{work.runs:,}",
        "done": f"{work.runs - left.runs:,}",
        "steps": f"{work.steps:,}",
        "tokens": f"{work.tokens:.3g}",
        "FLOP": f"{work.operations:.3g}",
    }


def _values(values: Sequence[float]) -> str:
    texts = [f"{value:g}" for value in sorted(values)]
    return ", ".join(texts) if len(texts) <= 5 else f"{texts[0]} to {texts[-1]} ({len(texts)})"


def notes(sweep: Sweep, works: Sequence[ArmWork], tflops: float | None = None) -> list[str]:
    """Return what to know about the table."""
    plan, left = sweep.experiment, total(work.left for work in works)
    lines = [f"seeds      {_seeds(sweep)}", f"horizons   {_horizons(plan)}"]
    if plan.trained_pairs:
        lines.append(f"compares   {_pairs(plan.trained_pairs)}")
    everything = total(work.all for work in works)
    done = everything.runs - left.runs
    has = f"{counted(everything.runs, 'run')} {'is' if everything.runs == 1 else 'are'}"
    runs = counted(left.runs, "run")
    return [
        *lines,
        f"done       {done:,} of {has} in {sweep.runs}",
        f"left       {runs}, {left.tokens:.3g} tokens, {left.operations:.3g} FLOP",
        *_times(left.operations, tflops),
        f"corpus     {_passes(sweep)}",
        f"disk       about {short_bytes(everything.disk)} for the checkpoints of all runs",
    ]


def _seeds(sweep: Sweep) -> str:
    plan = sweep.experiment
    first, *others = map(str, plan.seeds)
    has_choice = any(len(arm.values) > 1 for arm in plan.trained_arms)
    if not has_choice:
        return f"{', '.join([first, *others])}: every method on each of them"
    if not others:
        return f"{first}: chooses the value of each method, and no other seed judges it"
    return f"{first} chooses the value of each method; judged on {', '.join(others)}"


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """Return which method is compared with which others; only how many pairs, if they are many."""
    if len(pairs) > MOST_PAIRS:
        return f"{len(pairs)} pairs of methods; the report judges each"
    others: dict[str, list[str]] = {}
    for a, b in pairs:
        others.setdefault(a, []).append(b)
    return "; ".join(f"{a} with {', '.join(listed)}" for a, listed in others.items())


def _horizons(plan: Experiment) -> str:
    if len(plan.horizons) == 1:
        return counted(plan.horizons[0], "step")
    *before, last = map(str, plan.horizons)
    listed = f"{', '.join(before)} and {last} steps"
    if all(len(plan.horizons_of(arm)) == 1 for arm in plan.trained_arms):
        return f"{listed}, by method"
    return f"{listed}, branching off one run at a constant learning rate"


def _times(operations: float, tflops: float | None) -> list[str]:
    if tflops is not None:
        hours = operations / (tflops * 1e12) / 3600
        return [f"time       {hours_form(hours)} device-hours at {tflops:g} TFLOP/s (--tflops)"]
    by_device, (rate, source) = device_hours(operations), rate_here()
    listed = ", ".join(f"{name} {hours_form(by_device[name])}" for name in DEVICES)
    return [
        f"GPU-hours  {listed}, {AT_MFU}",
        f"here       {estimated_time(operations / rate)} at {rate / 1e12:.3g} TFLOP/s ({source})",
    ]


def _passes(sweep: Sweep) -> str:
    longest = max(
        (run.spec for _, trials in sweep.planned() for trial in trials for run in trial.runs),
        key=lambda spec: spec.steps * spec.tokens_per_step,
    )
    if not is_prepared(longest):
        return "Python's standard library, which is not prepared yet"
    return f"{longest.data}; the longest run makes {describe_passes(longest, data_place(longest))}"


# -- what would fail later -----------------------------------------------------------------------


def check_specs(sweep: Sweep) -> None:
    """Raise UserError if a run of the sweep could not start."""
    seen: set[object] = set()
    for _, trials in sweep.planned():
        for trial in trials:
            for run in trial.runs:
                run.spec.check()
            spec = trial.runs[0].spec
            if is_prepared(spec) and spec.model not in seen:
                seen.add(spec.model)
                for split in SPLITS:
                    Tokens(data_place(spec), split, spec.model.sequence, spec.model.vocabulary)
            built = spec.model, spec.optim, spec.schedule
            if built not in seen:
                seen.add(built)
                _check_optimizer(trial.arm.label, spec)


def _check_optimizer(label: str, spec: Spec) -> None:
    try:
        build.without_memory(spec)
        check_loggers(spec)
    except UserError as error:
        raise UserError(f"method '{label}': {error}") from None
