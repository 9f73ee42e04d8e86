"""Convert runs and sweeps of the first edition to the flat store.

The first edition kept runs inside the folders of sweeps, copied those that several sweeps shared,
found trunks by their names, and wrote 0 and "" for settings that were not given. Conversion loses
nothing: every run folder is kept once, copies become references, sweeps become lists of trials.
Sources are left as they are; checkpoints are hard links to theirs where the file system allows it.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.experiments.comparison import EXPERIMENTS
from angular_lab.experiments.definition import Experiment
from angular_lab.run_folder import RUNS, SPEC, RunFolder, RunInfo
from angular_lab.sweeps.sweep_file import (
    OLD_FILE,
    SWEEPS,
    ArmRecord,
    SweepRecord,
    TrialRecord,
)

# What stood for "not given", by setting.
NOT_GIVEN: dict[str, dict[str, Any]] = {
    "": {"micro_batch": 0, "clip": 0.0, "eval_every": 0, "save_every": 0, "log_every": 0,
         "angle_every": 0, "parent": ""},
    "model": {"kv_heads": 0, "mlp": 0, "soft_cap": 0.0},
    "optim": {"aux_lr": 0.0, "radius_lr": 0.0, "scale": "", "row_beta": 0.0},
    "schedule": {"decay_steps": 0},
    "dashboard": {"entity": "", "group": ""},
}  # fmt: skip
RETIRED = ("tangent_momentum", "exact_angle", "column_gains")
RENAMED_EXPERIMENTS = {"leads": "variants", "rivals": "concurrent"}


@dataclass(frozen=True)
class OldRun:
    folder: Path
    info: RunInfo
    copy_of: str  # "sweep/run" in the first edition's store; "": an original


def convert(sources: Sequence[Path], out: Path) -> str:
    """Convert all sweeps and runs below the sources, and describe what was written."""
    runs = {run.folder: run for source in sources for run in _runs(source)}
    sweeps = sorted({path for source in sources for path in source.rglob(OLD_FILE)})
    if not runs:
        raise UserError(f"{', '.join(map(str, sources))}: no run of the first edition is there")
    names = _new_names(runs, {path.parent for path in sweeps}, out / RUNS)
    for folder, name in names.items():
        _write_run(runs[folder], names, out / RUNS / name)
    for path in sweeps:
        record = _sweep(path, names, runs)
        _write_sweep(record, out / SWEEPS)
    return (
        f"{len({*names.values()})} runs and {len(sweeps)} sweeps in {out}; "
        f"{len(runs) - len({*names.values()})} copies became references"
    )


def _runs(source: Path) -> Iterator[OldRun]:
    for path in sorted(source.rglob(SPEC)):
        content = json.loads(path.read_text())
        if "format" not in content:
            spec = convert_spec(content["spec"])
            described = content.get("versions", {}), content.get("git", {})
            info = RunInfo(spec, *described, data=content.get("data", ""))
            yield OldRun(path.parent, info, content.get("made_in", ""))


def convert_spec(values: dict[str, Any]) -> Spec:
    """Return the spec that a dictionary of the first edition stands for."""
    values = dict(values)
    for part, missing in NOT_GIVEN.items():
        old = dict(values.get(part, {})) if part else values
        old |= {key: None for key, nothing in missing.items() if old.get(key) == nothing}
        if part:
            values[part] = old
    optim = values["optim"]
    optim["retired"] = [key for key in RETIRED if optim.pop(key, False)]
    values["name"] = values.pop("recipe")
    values["pins"] = [int(x) for x in values["pins"].split(",") if x]
    windows = (x for x in values.get("average", "").split(",") if x)
    values["average"] = [int(x) if x.strip().isdecimal() else float(x) for x in windows]
    values["loggers"] = [x for x in values["loggers"].split(",") if x]
    tags = values["dashboard"].get("tags", "")
    values["dashboard"]["tags"] = [tag for tag in tags.split(",") if tag]
    return Spec.from_dict(values)


def _new_names(runs: dict[Path, OldRun], sweeps: set[Path], store: Path) -> dict[Path, str]:
    """Return the new name of every folder. Runs of sweeps are named by their digest, others keep
    their names. Copies take the name of their original; runs that the store has stay there."""
    names: dict[Path, str] = {}
    originals = {path.parent.name: path.parent for path in store.glob(f"*/{SPEC}")}

    def name(folder: Path) -> str:
        if folder in names:
            return names[folder]
        run = runs[folder]
        place = folder.parent.parent / run.copy_of
        original = place if run.copy_of and place in runs else None
        spec, data = run.info.spec, run.info.data
        chosen = spec.folder_name(data) if folder.parent in sweeps else folder.name
        if original is not None and original != folder:
            same = runs[original].info.spec.folder_name(data) == spec.folder_name(data)
            if same and runs[original].info.data == data:
                names[folder] = name(original)
                return names[folder]
        # the same settings, trained twice: both are kept
        number, unique = 1, chosen
        while unique in originals and not _same_log(originals[unique], folder):
            number += 1
            unique = f"{chosen}-{number}"
        originals.setdefault(unique, folder)
        names[folder] = unique
        return unique

    for folder in sorted(runs, key=lambda folder: (bool(runs[folder].copy_of), folder)):
        name(folder)
    return names


def _same_log(a: Path, b: Path) -> bool:
    logs = [RunFolder(folder).metrics_path for folder in (a, b)]
    return all(path.exists() for path in logs) and logs[0].read_bytes() == logs[1].read_bytes()


def _write_run(run: OldRun, names: dict[Path, str], target: Path) -> None:
    if (target / SPEC).exists():  # a copy: its original is there
        return
    target.mkdir(parents=True, exist_ok=True)
    for path in run.folder.iterdir():
        if path.is_dir():
            copy = _link if path.name == "checkpoints" else shutil.copy2
            shutil.copytree(path, target / path.name, copy_function=copy, dirs_exist_ok=True)
        elif path.name not in (SPEC, "LOCK"):
            shutil.copy2(path, target / path.name)
    spec = run.info.spec
    if spec.parent:
        trunk = run.folder.parent / Path(spec.parent).name
        spec = replace(spec, parent=names.get(trunk, spec.parent))
    replace(run.info, spec=spec).write(target)


def _link(source: str, target: str) -> None:
    """Link a file, which an interrupted conversion may have done before."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_sweep(record: SweepRecord, folder: Path) -> None:
    """Write a sweep's file, numbered if there is another of the same experiment and scale."""
    name = f"{record.experiment}-{record.scale}"
    path, numbers = folder / f"{name}.json", count(2)
    while path.exists() and SweepRecord.read(path) != record:
        path = folder / f"{name}-{next(numbers)}.json"
    record.write(path)


# -- sweeps ------------------------------------------------------------------------------------


def _sweep(path: Path, names: dict[Path, str], runs: dict[Path, OldRun]) -> SweepRecord:
    old, root = json.loads(path.read_text()), path.parent
    arms: dict[str, ArmRecord] = {}
    trials: list[TrialRecord] = []
    for entry in old["entries"]:
        for label, variant_of, ends in _arms_of(entry, root, runs):
            trials.append(_trial(entry, label, ends, root, names))
            first = next((runs[root / n] for n in ends.values() if root / n in runs), None)
            optimizer = first.info.spec.optim.name if first else label.partition(",")[0]
            before = arms.get(label, ArmRecord(label, optimizer, entry["axis"], (), variant_of))
            values = tuple(sorted({*before.values, float(entry["value"])}))
            arms[label] = replace(before, values=values)
    planned = [_label(label) for label in old["lines"]]
    missing = {
        label: ArmRecord(label, label.partition(",")[0], "optim.lr", ())
        for label in planned
        if label not in arms
    }
    order = [*planned, *(label for label in arms if label not in planned)]
    name = RENAMED_EXPERIMENTS.get(old["experiment"], old["experiment"])
    plan = EXPERIMENTS[name](old["scale"]) if name in EXPERIMENTS else None
    data = next((run.info.data for f, run in runs.items() if f.parent == root), "")
    labels = {*order}
    return SweepRecord(
        experiment=name,
        scale=old["scale"],
        title=plan.title if plan else old["title"],
        data=data,
        horizons=tuple(sorted(old["horizons"])),
        seeds=tuple(old["seeds"]),
        arms=tuple((arms | missing)[label] for label in order),
        trials=tuple(trials),
        chosen={_label(label): best["value"] for label, best in old["chosen"].items()},
        ours=plan.ours if plan and plan.ours in labels else None,
        pairs=_pairs(plan, order) if plan else (),
        tuning_seed=old.get("settled_by"),
    )


def _pairs(plan: Experiment, labels: list[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs that the plan compares, with those of arms that it no longer has."""
    references = {b for _, b in plan.pairs}
    if plan.ours is None and len(references) == 1:
        (reference,) = references
        return tuple((label, reference) for label in labels if label != reference)
    return tuple(pair for pair in plan.pairs if {*pair} <= {*labels})


def _arms_of(
    entry: dict[str, Any], root: Path, runs: dict[Path, OldRun]
) -> Iterator[tuple[str, str | None, dict[str, str]]]:
    """Yield the arms that an entry belongs to, with the folders of their runs: its own and, where
    it had a longer cooldown, the variant that takes its place."""
    label = _label(entry["label"])
    yield label, None, entry["folders"]
    if "longer" in entry:
        horizon = max(entry["folders"], key=int)
        run = runs.get(root / entry["longer"])
        share = run.info.spec.decay_steps / run.info.spec.steps if run else 0.2
        yield f"{label}, cooldown {share:.0%}", label, {horizon: entry["longer"]}


def _label(label: str) -> str:
    return label.replace("cool-down", "cooldown")


def _trial(
    entry: dict[str, Any], label: str, ends: dict[str, str], root: Path, names: dict[Path, str]
) -> TrialRecord:
    trunk = next(name.removesuffix(f"-to{h}") for h, name in entry["folders"].items())
    has_trunk = len(entry["folders"]) > 1 or "longer" in entry
    return TrialRecord(
        arm=label,
        value=float(entry["value"]),
        seed=int(entry["seed"]),
        runs={int(h): names.get(root / name, name) for h, name in ends.items()},
        trunk=names.get(root / trunk, trunk) if has_trunk else None,
    )
