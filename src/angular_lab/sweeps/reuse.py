"""A run that another sweep has made already: taken over, not made again.

Sweeps whose folders lie side by side share many runs: an ablation's unchanged line is the
comparison's own. A cool-down off a trunk is the straight run of its length, up to rounding, so a
trunk's log up to the branch and the branch's own are that run.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from angular_lab.config.spec import Spec
from angular_lab.run_folder import SPEC, SWEEP, RunDir, parse_lines, write_atomically
from angular_lab.sweeps.trials import COMPARED, Entry
from angular_lab.training.ranks import start_ranks
from angular_lab.training.start import data_place, fingerprint, versions

WATCHED = ("log_every", "eval_every", "angle_every")
MADE = (*WATCHED, "recipe", "micro_batch", "compile", "deterministic", "parallel")  # as it was
LOGS = ("metrics.jsonl", "timing.jsonl")
VERSIONS = ("torch", "device", "ranks", "angular_muown")  # that round in their own ways


def reuse(entry: Entry, device: str) -> str | None:
    """Fill the entry's folder from a finished run of a sweep beside it, and say from which; None
    where there is none. The tokens must be the same, and what would run here: device, versions.
    The commit is told, not compared. Not for trunks: their cool-downs would need checkpoints."""
    if len(entry.horizons) > 1 or _was_begun(entry.folder):
        return None
    data, here = fingerprint(data_place(entry.spec)), versions(start_ranks(device))
    if not data:
        return None
    for source in _finished(entry.folder.parent):
        try:
            same = _is_same(source.read_spec(), entry.spec) and source.read_data() == data
            content = json.loads((source.path / SPEC).read_text())
            there = content["versions"]
            if same and all(there.get(key) == here[key] for key in VERSIONS):
                _copy(source, content, entry)
                return f"{content['made_in']}, made on top of {content['git']['commit'][:7]}"
        except (ValueError, KeyError) as error:  # damaged, or of another version: not for us
            print(f"{source.path} is not looked at: {error}", file=sys.stderr)
    return None


def _was_begun(folder: Path) -> bool:
    """Here. What a take-over left that was broken off is removed: it would tell another origin."""
    run = RunDir(folder)
    if run.started and not run.done and "made_in" in json.loads((folder / SPEC).read_text()):
        for name in (SPEC, *LOGS):
            (folder / name).unlink(missing_ok=True)
    return run.started


def _finished(root: Path) -> Iterator[RunDir]:
    """In the sweeps beside this one."""
    for done in sorted(root.resolve().parent.glob("*/*/DONE")):
        sweep = done.parent.parent
        if sweep != root.resolve() and (sweep / SWEEP).exists() and (done.parent / SPEC).exists():
            yield RunDir(done.parent)


def _is_same(stored: Spec, wanted: Spec) -> bool:
    """The same losses, and looked at as often: to a step, whoever logs more has what is asked."""
    if any(get(_spelled_out(stored)) != get(_spelled_out(wanted)) for get in COMPARED.values()):
        return False
    if stored.average != wanted.average and wanted.average:
        return False
    return _way(stored) == _way(wanted) and all(
        _as_often(getattr(stored, key), getattr(wanted, key)) for key in WATCHED
    )


def _spelled_out(spec: Spec) -> Spec:
    """All rates by their numbers; averages aside, which change no run."""
    schedule = replace(spec.schedule, decay=0.0)  # _way has it
    return replace(spec, average="", optim=spec.optim.spelled_out(), schedule=schedule)


def _way(spec: Spec) -> tuple[Any, ...]:
    return spec.steps, spec.schedule.kind, spec.schedule.kind == "wsd" and spec.decay_steps


def _as_often(stored: int, wanted: int) -> bool:
    return wanted == 0 or (stored > 0 and wanted % stored == 0)


def _copy(source: RunDir, content: dict[str, Any], entry: Entry) -> None:
    made, folder = source.read_spec(), entry.folder
    logs = {name: parse_lines(source.path / name) for name in LOGS}
    if made.parent:
        trunk = RunDir(source.path.with_name(Path(made.parent).name))
        if not trunk.done:
            raise ValueError(f"its trunk {trunk.path} is not there, or not finished")
        for name, lines in logs.items():
            before = [
                line for line in parse_lines(trunk.path / name) if line["step"] <= made.parent_step
            ]
            logs[name] = before + lines
    for name, lines in logs.items():
        write_atomically(folder / name, "".join(json.dumps(line) + "\n" for line in lines))
    content["spec"] = replace(entry.spec, **{key: getattr(made, key) for key in MADE}).to_dict()
    content.setdefault("made_in", f"{source.path.parent.name}/{source.path.name}")
    write_atomically(folder / SPEC, json.dumps(content, indent=2) + "\n")
    RunDir(folder).finish()
