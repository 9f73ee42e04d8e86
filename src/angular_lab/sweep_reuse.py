"""A run that another sweep has made already: taken over, not made again.

Sweeps whose folders lie side by side share many runs: an ablation's unchanged line is the
comparison's own. A cool-down off a trunk ends like the straight run of its length, so a trunk's
log up to the branch and the branch's own are that run.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from angular_lab.rundir import RunDir, write_atomically
from angular_lab.runs import data_place, fingerprint
from angular_lab.spec import Spec
from angular_lab.sweep_entries import COMPARED, MANIFEST, Entry

WATCHED = ("log_every", "eval_every", "angle_every")
MADE = (*WATCHED, "recipe", "micro_batch", "compile", "deterministic")  # how, as its folder says


def reuse(entry: Entry) -> Path | None:
    """Fill the entry's folder from a finished run of a sweep beside it, and say from which; None
    where there is none. Not for trunks: their cool-downs would need the checkpoints."""
    if len(entry.horizons) > 1 or RunDir(entry.folder).started:
        return None
    data = fingerprint(data_place(entry.spec))
    for source in _finished(entry.folder.parent):
        if _is_same(source.read_spec(), entry.spec) and source.read_data() == data:
            _copy(source, entry)
            return source.path
    return None


def _finished(root: Path) -> Iterator[RunDir]:
    """In the sweeps beside this one, with all that was logged."""
    for done in sorted(root.resolve().parent.glob("*/*/DONE")):
        run = RunDir(done.parent)
        beside = done.parent.parent != root.resolve() and (done.parent.parent / MANIFEST).exists()
        if beside and run.started and all(log.metrics_path.exists() for log in _logs(run)):
            yield run


def _logs(run: RunDir) -> list[RunDir]:
    """The trunk that it left, where it is a branch, and itself."""
    parent = run.read_spec().parent
    return [*([RunDir(run.path.with_name(Path(parent).name))] if parent else []), run]


def _is_same(stored: Spec, wanted: Spec) -> bool:
    """The same losses, and looked at as often: to a step, whoever logs more has what is asked."""
    if any(get(_spelled_out(stored)) != get(_spelled_out(wanted)) for get in COMPARED.values()):
        return False
    if stored.average != wanted.average and wanted.average:
        return False
    return _path(stored) == _path(wanted) and all(
        _as_often(getattr(stored, key), getattr(wanted, key)) for key in WATCHED
    )


def _spelled_out(spec: Spec) -> Spec:
    """Rates that are "as lr" by their numbers; averages aside, which change no run."""
    rate = spec.optim.lr
    rates = {"aux_lr": spec.optim.aux_lr or rate, "radius_lr": spec.optim.radius_lr or rate}
    schedule = replace(spec.schedule, decay=0.0)  # _path has it
    return replace(spec, average="", optim=replace(spec.optim, **rates), schedule=schedule)


def _path(spec: Spec) -> tuple[Any, ...]:
    return spec.steps, spec.schedule.kind, spec.schedule.kind == "wsd" and spec.decay_steps


def _as_often(stored: int, wanted: int) -> bool:
    return wanted == 0 or (stored > 0 and wanted % stored == 0)


def _copy(source: RunDir, entry: Entry) -> None:
    made, folder = source.read_spec(), entry.folder
    for name in ("metrics.jsonl", "timing.jsonl"):
        *trunk, own = (run.path / name for run in _logs(source))
        text = "".join(_until(path, made.parent_step) for path in trunk if path.exists())
        write_atomically(folder / name, text + (own.read_text() if own.exists() else ""))
    content = json.loads((source.path / "spec.json").read_text())
    content["spec"] = replace(entry.spec, **{key: getattr(made, key) for key in MADE}).to_dict()
    content.setdefault("made_in", f"{source.path.parent.name}/{source.path.name}")
    write_atomically(folder / "spec.json", json.dumps(content, indent=2) + "\n")
    RunDir(folder).finish()


def _until(path: Path, step: int) -> str:
    lines = path.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if json.loads(line)["step"] <= step)
