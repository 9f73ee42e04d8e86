"""Start a run: fresh, resumed, extended, or branched off another."""

import logging
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from math import inf
from pathlib import Path

import torch

import angular_muown
from angular_lab.config.branches import cooldown_spec, extended_spec, horizon_from, step_at
from angular_lab.config.overrides import as_typed, differences, override
from angular_lab.config.spec import CHANGEABLE, DASHBOARD, LENGTH, Spec, get
from angular_lab.data.prepare import prepare_stdlib, stdlib_place
from angular_lab.data.shards import Manifest
from angular_lab.errors import UserError
from angular_lab.models import build_model
from angular_lab.run_folder import RUNS, RunFolder, base_versions, parent_folder
from angular_lab.status.screen import Shown
from angular_lab.text import command
from angular_lab.training import build, checkpoint
from angular_lab.training.loggers import check_loggers
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.ranks import Ranks, start_ranks
from angular_lab.training.signals import PREEMPTED, Preempted
from angular_lab.training.trainer import Trainer

STDLIB, STDLIB_FOLDER = "stdlib", Path("data/stdlib")
log = logging.getLogger(__name__)
# What to do about a damaged checkpoint.
RESUME_AT = (
    "continue with angular-lab resume RUN --from {}; trunk and sweep do so once the damaged folder "
    "is removed"
)
BRANCH_AT = "branch with --at {}"


def data_place(spec: Spec) -> Path:
    """Return the folder of the run's tokens, whether or not they are prepared yet."""
    return stdlib_place(STDLIB_FOLDER) if spec.data == STDLIB else Path(spec.data)


def is_prepared(spec: Spec) -> bool:
    """True unless the run's tokens are those of the standard library, and not prepared yet."""
    return spec.data != STDLIB or Manifest.load(data_place(spec)) is not None


def prepared_data(spec: Spec) -> Path:
    """Return the folder of the run's tokens; those of the standard library are prepared here."""
    if spec.data == STDLIB:
        prepare_stdlib(STDLIB_FOLDER)
    elif not Path(spec.data).is_dir():
        raise UserError(f"data={spec.data}: no such folder; make one with angular-lab prepare")
    return data_place(spec)


def data_folder(spec: Spec, ranks: Ranks) -> Path:
    """Return the folder of the run's tokens, on all ranks."""
    if ranks.first:
        prepared_data(spec)
    ranks.barrier()
    return prepared_data(spec)  # done by now, unless this is another machine's disk


def default_folder(spec: Spec) -> Path:
    """Return the run's folder in the store of the working directory."""
    return Path(RUNS) / spec.folder_name(data_id(spec))


def train(
    spec: Spec,
    out: Path | RunFolder,
    resume: bool = False,
    device: str = "",
    until: float = inf,
    models: build.Models | None = None,
    resume_step: int | None = None,
    changing: Set[str] = DASHBOARD,
    shown: Shown = "steps",
) -> RunFolder:
    """Train a spec in a folder. With `resume`, continue where it stopped; a finished run returns.
    With `resume_step` as well, continue from that checkpoint and replace what came after it.
    At `until`, on the monotonic clock, the run is saved and stops as if it got SIGTERM.
    `changing` has the settings that may differ from those with which the run was started.
    A folder that the caller has claimed stays claimed. `shown` says what the screen shows: all,
    steps (without header and summary), or one line at the end."""
    ranks = build.tensor_ranks(spec, start_ranks(device))
    run = out if isinstance(out, RunFolder) else RunFolder(out)
    if not run.started:
        _check_new(spec, ranks)
    if not _is_finished(run, spec):
        _check_loggers(spec, ranks)
    claims = ranks.first and not run.claimed
    if claims:
        run.claim()
    ranks.barrier()
    try:
        if run.started:
            _check_resumable(spec, run, resume, changing)
        if resume_step is not None:
            checkpoint.find(run.checkpoints, resume_step)
        elif _is_finished(run, spec):
            log.info("%s is already finished", run.path)
            return run
        trainer = Trainer(spec, run, ranks, _tokens(spec, run, ranks), until, models, shown)
        _write_and_restore(trainer, resume_step, changing)
        _take_steps(trainer)
        return run
    finally:
        if claims:
            run.release()


def _is_finished(run: RunFolder, spec: Spec) -> bool:
    """True if no step is left, also if the run is to be extended."""
    return run.started and run.done and run.read_spec().steps >= spec.steps


def _check_loggers(spec: Spec, ranks: Ranks) -> None:
    """Check on the first rank, whose machine alone needs an API key, and raise on all of them."""
    problem = ""
    if ranks.first:
        try:
            check_loggers(spec)
        except ValueError as error:
            problem = str(error)
    if problem := ranks.gather(problem)[0]:
        raise UserError(problem)


def _check_new(spec: Spec, ranks: Ranks) -> None:
    """Refuse what cannot become a run, before anything is written."""
    spec.check()
    if spec.tensor > 1 and ranks.world == 1:
        raise UserError(
            f"tensor={spec.tensor} in one process: start it with torchrun --nproc-per-node "
            f"{spec.tensor}, or leave tensor at 1"
        )
    with torch.device("meta"):  # no memory: shapes and settings alone
        build.make_optimizer(build_model(spec.model), spec)
    if spec.data != STDLIB:
        prepared_data(spec)


def _tokens(spec: Spec, run: RunFolder, ranks: Ranks) -> Path:
    """Return the folder of the run's tokens; a resumed run needs those that it was started on."""
    data = data_folder(spec, ranks)
    if run.started and run.info.data != fingerprint(data):
        raise UserError(f"{run.path} was started on other tokens than {data} holds now")
    return data


def _write_and_restore(trainer: Trainer, step: int | None, changing: Set[str]) -> None:
    run, spec, ranks = trainer.run, trainer.spec, trainer.ranks
    ranks.barrier()  # all have looked before one writes
    if ranks.first:  # not before: a spec that cannot run leaves no run
        if not run.started:
            run.write_spec(spec, versions(ranks), fingerprint(data_place(spec)))
        run.clear_records()
    _restore(trainer, step)
    if ranks.first:
        run.change_settings(spec, changing, trainer.step)


def _take_steps(trainer: Trainer) -> None:
    """Train, and record it in the run folder if the run ends before its last step."""
    run, first = trainer.run, trainer.ranks.first
    try:
        trainer.train()
    except Preempted:
        if first:
            run.record_stop(PREEMPTED, trainer.step)
        raise
    except NotFinite as error:
        if first:
            run.record_divergence(str(error))
        raise


def fingerprint(data: Path) -> str:
    """Return the fingerprint of a folder's tokens; "" for shards without a manifest."""
    manifest = Manifest.load(data)
    return manifest.fingerprint if manifest else ""


def data_id(spec: Spec) -> str:
    """Return what identifies the tokens in a digest: their path if they have no fingerprint."""
    data = prepared_data(spec)
    return fingerprint(data) or str(data.resolve())


def versions(ranks: Ranks) -> dict[str, str]:
    cuda = ranks.device.type == "cuda"
    return {
        **base_versions(),
        "angular_muown": angular_muown.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": str(ranks.world),
    }


def _restore(trainer: Trainer, step: int | None) -> None:
    """Restore the run's checkpoint at `step` or its newest, else its parent's. What the run logged
    and saved after that step is removed."""
    run, ranks = trainer.run, trainer.ranks
    if checkpoint.steps(run.checkpoints):
        _load(trainer, checkpoint.find(run.checkpoints, step), RESUME_AT)
    elif trainer.spec.parent:
        _load(trainer, _branch_point(run, trainer.spec), BRANCH_AT)
    ranks.barrier()  # all have read before one removes
    if ranks.first:
        run.reopen()
        # Checkpoints first: a later one without its log lines would leave a gap in the log.
        checkpoint.drop_after(run.checkpoints, trainer.step)
        run.rewind(trainer.step)
        checkpoint.clean(run.checkpoints)
    ranks.barrier()


def _load(trainer: Trainer, source: Path, how: str) -> None:
    try:
        trainer.restore(source)
    except checkpoint.DamagedError as error:
        raise error.advise(how) from None
    if trainer.progress.screen.shown != "all":  # a header says it
        log.info("%s: continues after step %s", trainer.run.path, trainer.step)


def _branch_point(run: RunFolder, spec: Spec) -> Path:
    parent = RunFolder(parent_folder(run.path, spec))
    source = checkpoint.step_folder(parent.checkpoints, spec.parent_step)
    if not source.exists():
        raise UserError(f"{source} is gone: {run.path} cannot start from its parent")
    return source


def _check_resumable(spec: Spec, run: RunFolder, resume: bool, changing: Set[str]) -> None:
    if not resume:
        raise UserError(
            f"{run.path} holds a run already: add --resume auto to continue, or give another --out"
        )
    before = run.read_spec()
    if spec.parent and before.parent and _same_parent(run, before, spec):
        before = replace(before, parent=spec.parent)
    stored = run.info.data
    if before.data != spec.data and stored and stored == fingerprint(data_place(spec)):
        before = replace(before, data=spec.data)
    changed = [key for key in differences(before, spec) if key not in changing]
    if not changed:
        return
    texts = [f"{k}={as_typed(get(before, k))} (now {as_typed(get(spec, k))})" for k in changed]
    advice = "give the same, or a new --out"
    if CHANGEABLE.issuperset(changed):
        assignments = (f"{key}={as_typed(get(spec, key))}" for key in changed)
        advice += f"; to change it from here on: {command('resume', run.path, *assignments)}"
    raise UserError(f"{run.path} was started with {', '.join(texts)}: {advice}")


def _same_parent(run: RunFolder, before: Spec, spec: Spec) -> bool:
    """True if two specs name the same folder as the parent."""
    folders = (parent_folder(run.path, branch).resolve() for branch in (before, spec))
    return len({*folders}) == 1


def branch_specs(
    parent: Path, points: Sequence[int | Fraction], decay: int | Fraction | None
) -> list[Spec]:
    """Return the specs of the cooldowns from several points of a run, in order. A share as a point
    is one of the run's steps; as `decay` it is one of all steps to the end of the cooldown. Without
    `decay`, the run's own share."""
    run = RunFolder(parent)
    spec = run.read_spec()
    starts = sorted({step_at(point, spec.steps) for point in points})
    if isinstance(decay, int):
        return [branch_spec(run, start, decay) for start in starts]
    share = spec.schedule.decay if decay is None else float(decay)
    return [branch_spec(run, start, horizon_from(start, share) - start) for start in starts]


def branch_spec(run: RunFolder, at: int, decay: int) -> Spec:
    """Return the spec of a cooldown of `decay` steps from the run's checkpoint at step `at`."""
    spec = run.read_spec()
    kept = checkpoint.steps(run.checkpoints)
    if at > spec.full_rate_until:
        raise UserError(
            f"at step {at} the learning rate of {run.path} falls already, from step "
            f"{spec.full_rate_until} on: a branch would raise it again"
        )
    if at not in kept:
        raise UserError(
            f"{run.path} has no checkpoint at step {at}: it keeps {kept or 'none'}; pin branch "
            "points with pins=STEP,STEP"
        )
    if decay < 1:
        raise UserError(f"a cooldown of {decay} steps: it must have at least one")
    return cooldown_spec(spec, str(run.path), at, at + decay)


# --- a run that continues: its settings are those of spec.json ---

MOVABLE = CHANGEABLE | {"data"}  # the tokens may have moved


def resume(
    folder: Path,
    assignments: Sequence[str] = (),
    device: str = "",
    step: int | None = None,
    shown: Shown = "steps",
) -> RunFolder:
    """Continue a run that was stopped, from its newest checkpoint or from that of `step`.
    Assignments change how it is run from here on; what a loss depends on stays."""
    with claimed(folder, device) as run:
        before = run.read_spec()
        spec = override(before, assignments)
        check_changes(run, before, spec)
        if run.done and step is None and spec != before:
            raise UserError(
                f"{folder} is finished, and {' '.join(assignments)} would have no effect: give "
                "--from STEP to continue from a checkpoint"
            )
        return train(spec, run, True, device, resume_step=step, changing=MOVABLE, shown=shown)


def extend(
    folder: Path,
    steps: int,
    assignments: Sequence[str] = (),
    device: str = "",
    shown: Shown = "steps",
) -> RunFolder:
    """Continue a run at a constant learning rate to more steps. Called again after a kill, it
    continues."""
    with claimed(folder, device) as run:
        before = run.read_spec()
        changed = override(before, assignments)
        check_changes(run, before, changed)
        spec = extended_spec(changed, steps)
        if run.diverged:
            raise UserError(f"{folder} has diverged: it cannot be extended")
        if run.done and not checkpoint.steps(run.checkpoints):
            raise UserError(f"{folder} has no checkpoint left to continue from")
        return train(spec, run, True, device, changing=MOVABLE | LENGTH, shown=shown)


def extend_trunk(
    spec: Spec,
    folder: Path,
    device: str = "",
    models: build.Models | None = None,
    shown: Shown = "steps",
) -> RunFolder:
    """Train a trunk. A folder that holds it already, shorter or longer, is extended as needed."""
    if not RunFolder(folder).started:
        return train(spec, folder, True, device, models=models, shown=shown)
    with claimed(folder, device) as run:
        stored = run.read_spec()
        wanted = replace(spec, steps=stored.steps, pins=stored.pins)
        longer = extended_spec(wanted, max(spec.steps, stored.steps), spec.pins)
        changing = DASHBOARD | LENGTH
        return train(longer, run, True, device, models=models, changing=changing, shown=shown)


@contextmanager
def claimed(folder: Path, device: str) -> Iterator[RunFolder]:
    """Hold the folder while its settings are read and until the run ends: another process could
    change them in between."""
    ranks, run = start_ranks(device), RunFolder(folder)
    _ = run.info  # raises UserError before LOCK is written to a folder that is not a run
    if ranks.first:
        run.claim()
    ranks.barrier()
    try:
        yield run
    finally:
        run.release()


def check_changes(run: RunFolder, before: Spec, spec: Spec) -> None:
    """Raise UserError if a resumed run would change what its losses depend on."""
    for key in differences(before, spec):
        if key in CHANGEABLE or (key == "data" and _same_tokens(run, spec)):
            continue
        old, new = as_typed(get(before, key)), as_typed(get(spec, key))
        raise UserError(
            f"{run.path} has {key}={old}, and resume cannot change it to {new}: {_advice(key)}"
        )


def _same_tokens(run: RunFolder, spec: Spec) -> bool:
    stored = run.info.data
    return bool(stored) and stored == fingerprint(data_place(spec))


def _advice(key: str) -> str:
    if key == "data":
        return "the tokens are not those that the run was started on; use train for another run"
    if key == "steps":
        return (
            "extend RUN --to STEPS continues a run at a constant learning rate; use train for "
            "another run"
        )
    if key == "name":
        return "it is a part of the run's identity; use train for another run"
    return (
        "the losses depend on it; use train for another run, or branch for a cooldown from one of "
        "its checkpoints"
    )
