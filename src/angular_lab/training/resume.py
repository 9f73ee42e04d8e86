"""Continue a run from its folder alone: its settings are those of spec.json."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from angular_lab.config.branches import extended_spec
from angular_lab.config.overrides import as_typed, differences, override
from angular_lab.config.spec import CHANGEABLE, DASHBOARD, LENGTH, Spec, get
from angular_lab.errors import UserError
from angular_lab.run_folder import RunFolder
from angular_lab.training import checkpoint
from angular_lab.training.build import Models
from angular_lab.training.ranks import start_ranks
from angular_lab.training.start import data_place, fingerprint, train

MOVABLE = CHANGEABLE | {"data"}  # the tokens may have moved


def resume(
    folder: Path, assignments: Sequence[str] = (), device: str = "", step: int | None = None
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
        return train(spec, run, True, device, resume_step=step, changing=MOVABLE)


def extend(
    folder: Path, steps: int, assignments: Sequence[str] = (), device: str = ""
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
        return train(spec, run, True, device, changing=MOVABLE | LENGTH)


def extend_trunk(
    spec: Spec, folder: Path, device: str = "", models: Models | None = None
) -> RunFolder:
    """Train a trunk. A folder that holds it already, shorter or longer, is extended as needed."""
    if not RunFolder(folder).started:
        return train(spec, folder, True, device, models=models)
    with claimed(folder, device) as run:
        stored = run.read_spec()
        wanted = replace(spec, steps=stored.steps, pins=stored.pins)
        longer = extended_spec(wanted, max(spec.steps, stored.steps), spec.pins)
        return train(longer, run, True, device, models=models, changing=DASHBOARD | LENGTH)


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
