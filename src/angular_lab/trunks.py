"""Trunks of a store: which existing run can serve as the trunk that a sweep or a command needs.

A trunk may grow and keeps the folder that it was started in, so a longer one has no folder of its
own name. Its steps do not depend on its length: any run at a constant learning rate with the same
settings will do if it has a checkpoint at every branch point that it has passed. No torch here.
"""

from pathlib import Path

from angular_lab.config.spec import LENGTH, Spec
from angular_lab.errors import UserError
from angular_lab.run_folder import PREFIX, RunFolder, RunInfo


def trunk_folder(store: Path, spec: Spec, data: str) -> Path:
    """Return the folder for a trunk: its own if it exists or if no other trunk of the store will
    do. `data` identifies the tokens."""
    own = store / spec.folder_name(data)
    if own.exists() or not store.is_dir():
        return own
    label = own.name.rpartition("-")[0].removesuffix("-trunk")  # without pins it has no such word
    others = sorted(path for path in store.iterdir() if path.name.startswith(f"{label}-"))
    return next((folder for folder in others if can_serve(folder, spec, data)), own)


def can_serve(folder: Path, spec: Spec, data: str) -> bool:
    """True if cooldowns of the trunk `spec` can leave from this run, extended if necessary."""
    run = RunFolder(folder)
    try:
        info = run.info
    except UserError:  # not a run, or damaged
        return False
    if info.spec.parent is not None or not same_trunk(info, spec, data):
        return False
    if run.diverged and not has_passed(run, spec):
        return False
    return all(
        pin > info.spec.steps
        or has_checkpoint(run, pin)
        or (pin in info.spec.pinned and not run.done)
        for pin in spec.pins
    )


def same_trunk(info: RunInfo, spec: Spec, data: str) -> bool:
    """True if a run takes the steps of a trunk, whatever their lengths."""
    stored, wanted = (
        {key: value for key, value in identity.items() if key not in LENGTH}
        for identity in (info.spec.identity(info.data or data), spec.identity(data))
    )
    return stored == wanted


def has_passed(run: RunFolder, spec: Spec) -> bool:
    """True if the run was extended beyond the trunk `spec` and has its branch points: what happens
    to it later does not matter to the cooldowns."""
    is_trunk = spec.schedule.kind == "constant" and bool(spec.pins)
    if not (is_trunk and all(has_checkpoint(run, pin) for pin in spec.pins)):
        return False
    return run.read_spec().steps > spec.steps


def has_checkpoint(run: RunFolder, step: int) -> bool:
    return (run.checkpoints / f"{PREFIX}{step:08d}").exists()
