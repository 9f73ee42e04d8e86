"""The runs below a folder: which there are, how far they are, and whether they still train.

No torch here: a listing should appear at once.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from angular_lab.errors import UserError
from angular_lab.report.tables import Mark, loss, text_table
from angular_lab.run_folder import DIVERGED, SPEC, STOPPED, Run, RunFolder, is_locked, read_run
from angular_lab.text import short_number

SKIPPED = ("checkpoints", "workers")  # folders that hold no runs
DIGEST = 8  # characters at the end of a folder's name in a store
HEXADECIMAL = "0123456789abcdef"
ELLIPSIS = "…"
AGES = ((86_400 * 7, "w"), (86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))


@dataclass(frozen=True)
class Summary:
    """A line of the listing."""

    id: str  # what the commands accept in place of the folder, in the folder that was listed
    folder: str
    label: str  # the named run; a trunk and a branch say so
    optimizer: str
    lr: float
    seed: int
    step: int
    steps: int
    tokens: int
    last_loss: float | None  # of validation
    best_loss: float | None
    state: str  # running, finished, stopped or failed
    reason: str  # why it failed or stopped
    age: float  # seconds since the run last wrote a file


def run_folders(source: Path) -> list[Path]:
    """Return the run folders at or below a folder, by name."""
    if not source.is_dir():
        raise UserError(f"{source} is not a folder: give one that holds runs")
    found = []
    for root, folders, files in os.walk(source):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        if SPEC in files:
            found.append(Path(root))
    return found


def find_run(text: str) -> Path:
    """Return a run's folder from its path, or from FOLDER/ID: the beginning of the id of a run
    below that folder, by default the working directory."""
    path = Path(text)
    if path.is_dir():
        return path
    if not path.parent.is_dir():
        raise UserError(f"{text}: no such folder")
    matches = [run for run in run_folders(path.parent) if _id(run.name).startswith(path.name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(map(str, matches[:4]))
        raise UserError(f"{text} matches {len(matches)} runs: {listed}; give more characters")
    raise UserError(
        f"{text}: neither a folder nor the id of a run below {path.parent.resolve()}; "
        "`angular-lab ls` lists the runs there"
    )


def looks_like_a_run(text: str) -> bool:
    """True if a text is a folder, or the beginning of the id of a run below the working
    directory."""
    path = Path(text)
    is_id = all(c in HEXADECIMAL for c in path.name)
    return path.is_dir() or len(path.parts) > 1 or is_id


def _id(name: str) -> str:
    """Return the digest at the end of a name that the store gave, else the name."""
    digest = name.rpartition("-")[2]
    is_digest = len(digest) == DIGEST and all(c in HEXADECIMAL for c in digest)
    return digest if is_digest and "-seed" in name else name


def state_of(run: Run) -> tuple[str, str]:
    """Return running, finished, stopped or failed, and the reason where there is one."""
    folder = run.folder
    if run.done and not run.diverged:
        return "finished", ""
    if is_locked(folder):
        return "running", ""
    if run.diverged:
        return "failed", (folder / DIVERGED).read_text(errors="replace").strip() or "diverged"
    if (step := stopped_at(folder)) is not None:
        return "stopped", f"saved at step {step:,} after a signal or at the end of its time"
    if not RunFolder(folder).started:
        return "failed", "its process ended before the first step was logged"
    return "failed", "its process ended without saving: killed, or an error"


def stopped_at(folder: Path) -> int | None:
    """Return the step at which a signal or the end of its time stopped the run."""
    try:
        return int(json.loads((folder / STOPPED).read_text())["step"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return 0  # damaged: it was stopped, but the step is not known


def summarize(run: Run) -> Summary:
    """Return the line of a run."""
    spec, last = run.spec, run.metrics[-1] if run.metrics else None
    state, reason = state_of(run)
    losses = [x for line in run.evaluations if (x := line.get("val_loss")) is not None]
    is_trunk = spec.schedule.kind == "constant" and spec.pins
    kind = " branch" if spec.parent else " trunk" if is_trunk else ""
    step = spec.steps if run.done else last.step if last else spec.parent_step
    return Summary(
        id=_id(run.name),
        folder=str(run.folder),
        label=f"{spec.name}{kind}",
        optimizer=spec.optim.name,
        lr=spec.optim.lr,
        seed=spec.seed,
        step=max(step, stopped_at(run.folder) or 0),
        steps=spec.steps,
        tokens=last.tokens if last else spec.parent_step * spec.tokens_per_step,
        last_loss=losses[-1] if losses else None,
        best_loss=min(losses, default=None),
        state=state,
        reason=reason,
        age=max(0.0, time.time() - last_write(run.folder)),
    )


def last_write(folder: Path) -> float:
    """Return when a file of the run last changed, in seconds of the epoch."""
    names = (SPEC, "metrics.jsonl", "timing.jsonl", "DONE", STOPPED, DIVERGED)
    paths = (folder / name for name in names)
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def list_runs(source: Path, warnings: list[str]) -> list[Summary]:
    """Return the runs below a folder, the one that wrote last at the end."""
    runs = (read_run(folder, warnings) for folder in run_folders(source))
    lines = [summarize(run) for run in runs if run]
    times = Counter(line.id for line in lines)
    unique = (line if times[line.id] == 1 else replace(line, id=line.folder) for line in lines)
    return sorted(unique, key=lambda line: -line.age)


def to_json(runs: Sequence[Summary]) -> str:
    return json.dumps([asdict(run) for run in runs], indent=2)


def to_text(runs: Sequence[Summary], width: int) -> str:
    """Return the listing as a table that fits into `width` columns, and why runs failed."""
    rows = [_row(run) for run in runs]
    shrinkable = ("run", "label", "optimizer")
    while len(text_table(rows).partition("\n")[0]) > width:
        lengths = {name: max(len(row[name]) for row in rows) for name in shrinkable}
        widest = max(lengths, key=lambda name: lengths[name])
        if lengths[widest] <= DIGEST:
            break  # narrower would say nothing
        for row in rows:
            row[widest] = _shorten(row[widest], lengths[widest] - 1)
    failed = [f"{run.id} failed: {run.reason}" for run in runs if run.state == "failed"]
    notes = [*failed, "angular-lab doctor RUN says what to do"] if failed else []
    return "\n".join([text_table(rows), *([""] if notes else []), *notes])


def _row(run: Summary) -> dict[str, Any]:
    return {
        "run": run.id,
        "label": run.label,
        "optimizer": run.optimizer,
        "lr": Mark(run.lr, "", f"{run.lr:g}"),
        "seed": run.seed,
        "steps": Mark(run.step, "", f"{run.step}/{run.steps}"),
        "tokens": Mark(run.tokens, "", short_number(run.tokens)),
        "last": loss(run.last_loss),
        "best": loss(run.best_loss),
        "state": run.state,
        "age": Mark(run.age, "", age(run.age)),
    }


def _shorten(text: str, length: int) -> str:
    """Return a text with its middle left out: names differ at both ends."""
    if len(text) <= length:
        return text
    text = text.replace(ELLIPSIS, "")
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}{ELLIPSIS}{text[len(text) - tail :]}"


def age(seconds: float) -> str:
    """Return 45s, 12m, 3h, 5d or 8w."""
    size, unit = next(((size, unit) for size, unit in AGES if seconds >= size), (1, "s"))
    return f"{seconds / size:.0f}{unit}"
