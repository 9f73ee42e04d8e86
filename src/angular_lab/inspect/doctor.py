"""The examination of a run folder: what is damaged, what is missing, and what to do about it.

Nothing is written. Only checkpoints and the standard library's tokens need torch, and it is
imported when there are some.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from angular_lab.errors import UserError
from angular_lab.inspect.listing import state_of, summarize
from angular_lab.run_folder import (
    PREFIX,
    STOPPED,
    Metrics,
    Run,
    RunFolder,
    is_locked,
    parent_folder,
    read_run,
)
from angular_lab.text import command, counted, short_bytes, short_number

TORN = "is half-written"  # only a last line can be


@dataclass(frozen=True)
class Finding:
    """One thing that was examined. `advice` says what to do where the status is wrong."""

    part: str
    status: str  # ok, note or wrong
    text: str
    advice: str = ""


def examine(folder: Path) -> list[Finding]:
    """Return what is right and wrong with a run folder. Raises UserError if it is not one."""
    if not (folder / "spec.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no spec.json")
    warnings: list[str] = []
    run = read_run(folder, warnings)
    if run is None:
        return [_unreadable(warnings[-1].removesuffix(": left out"))]
    findings = [Finding("spec.json", "ok", f"settings of {run.spec.name}, all read")]
    for check in CHECKS:
        findings += check(run)
    return findings


def _unreadable(text: str) -> Finding:
    if "convert" in text:  # of the first edition: the message names the command
        return Finding("spec.json", "wrong", text)
    advice = "copy spec.json from a backup, or train the run again in another folder"
    return Finding("spec.json", "wrong", text, advice)


# -- state and lock ----------------------------------------------------------------------------


def _state(run: Run) -> Iterator[Finding]:
    state, reason = state_of(run)
    summary = summarize(run)
    where = f"step {summary.step:,} of {summary.steps:,}"
    if state in ("finished", "running"):
        yield Finding("state", "ok", f"{state}, {where}")
    elif state == "stopped":
        yield Finding("state", "note", f"{reason}; {where}", _continue(run))
    elif run.diverged:
        advice = "train it again with a lower optim.lr, or with on_nan=skip"
        yield Finding("state", "wrong", reason, advice)
    else:
        yield Finding("state", "wrong", f"{reason}; {where}", _continue(run))
    if not is_locked(run.folder) and (run.folder / "LOCK").exists() and state == "failed":
        text = "left by a process that ended; it blocks nothing"
        yield Finding("LOCK", "note", text)
    path = run.folder / STOPPED
    try:
        if path.exists():
            json.loads(path.read_text())["step"]
    except (ValueError, KeyError, TypeError) as error:
        yield Finding(STOPPED, "wrong", f"cannot be read: {error!r}", f"remove {path}")


def _continue(run: Run) -> str:
    saved = _saved_steps(run)
    where = f"after step {saved[-1]:,}" if saved else "from the beginning"
    return f"{command('resume', run.folder)}: it continues {where}"


# -- logs --------------------------------------------------------------------------------------


def _logs(run: Run) -> Iterator[Finding]:
    problems: list[str] = []
    files = RunFolder(run.folder)
    # times first: a running process writes a step's metrics before its time
    timing = [values.get("step") for _, values in _numbered(files.timing_path, problems)]
    lines = list(_numbered(files.metrics_path, problems))
    metrics = []
    for number, values in lines:
        if all(isinstance(values.get(key), int) for key in ("step", "tokens")):
            metrics.append(Metrics.from_dict(values))
        else:
            problems.append(f"metrics.jsonl, line {number} has no step or no tokens")
    problems += _disorder(run, metrics)
    steps = {line.step for line in metrics}
    if lost := [step for step in timing if step not in steps]:
        problems.append(f"metrics.jsonl lacks {_listed(lost)}, which timing.jsonl has")
    problems += _missing_end(run, metrics)
    for text in problems:
        if TORN in text and not run.done:  # the mark of a kill
            yield Finding("logs", "note", f"{text}; continuing writes it again")
        else:
            yield Finding("logs", "wrong", text, _rewind_advice(run))
    if not problems and metrics:
        last = metrics[-1]
        end = f"step {last.step:,} ({last.tokens:,} tokens)"
        text = f"{counted(len(metrics), 'line')} in order, to {end}"
        yield Finding("logs", "ok", text)
    elif not problems:
        yield Finding("logs", "note", "no step was logged yet")


def _numbered(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the lines of a log with their numbers; describe those that are damaged."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return
    for number, line in enumerate(text.splitlines(True), start=1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if isinstance(values, dict) and line.endswith("\n"):
            yield number, values
        else:
            what = "is not a JSON object" if line.endswith("\n") else TORN
            problems.append(f"{path.name}, line {number} {what}: {line[:40]!r}")


def _disorder(run: Run, metrics: list[Metrics]) -> Iterator[str]:
    """Describe steps that are repeated, out of order, or do not match their tokens."""
    for before, line in pairwise(metrics):
        if line.step <= before.step:
            yield f"metrics.jsonl has step {line.step:,} after step {before.step:,}"
    size = run.spec.tokens_per_step
    for line in metrics:
        if line.tokens != line.step * size:
            yield (
                f"metrics.jsonl has {line.tokens:,} tokens at step {line.step:,}, where its "
                f"settings give {line.step * size:,}"
            )
            return
    if metrics and metrics[-1].step > run.spec.steps:
        yield f"metrics.jsonl has step {metrics[-1].step:,} of {run.spec.steps:,}"


def _missing_end(run: Run, metrics: list[Metrics]) -> Iterator[str]:
    """Describe lines that are missing at the end of the log."""
    last = metrics[-1].step if metrics else run.spec.parent_step
    steps = [run.spec.parent_step, *(line.step for line in metrics)]
    usual = max((b - a for a, b in pairwise(steps)), default=0)
    saved = max(_saved_steps(run), default=0)
    if run.done and metrics and last < run.spec.steps and run.spec.log_every:
        yield f"the run is finished, but its log ends at step {last:,} of {run.spec.steps:,}"
    elif usual and saved - last >= usual:
        yield f"the log ends at step {last:,}, but there is a checkpoint of step {saved:,}"
    elif run.done and run.spec.eval_every and run.final is None:
        yield "the run is finished, but its last line has no validation loss"


def _listed(steps: list[object]) -> str:
    more = f" and {len(steps) - 3} more" if len(steps) > 3 else ""
    return f"step {', '.join(map(str, steps[:3]))}{more}"


def _rewind_advice(run: Run) -> str:
    """Return what restores the lines after the last step that is intact and saved."""
    good = _intact_until(run)
    earlier = [step for step in _saved_steps(run) if step <= good]
    if earlier:
        resume = command("resume", run.folder, "--from", max(earlier))
        return (
            f"remove the damaged lines and what follows them, then {resume}: it takes the later "
            "steps again"
        )
    return "train the run again in another folder; no checkpoint is as old as the intact lines"


def _intact_until(run: Run) -> int:
    """Return the step up to which both logs are intact and in order."""
    files, step = RunFolder(run.folder), run.spec.parent_step
    timing = {values.get("step") for _, values in _numbered(files.timing_path, [])}
    known = sorted(x for x in timing if isinstance(x, int))
    for number, (position, values) in enumerate(_numbered(files.metrics_path, []), start=1):
        new = values.get("step")
        is_next = isinstance(new, int) and new > step and number == position
        skipped = [x for x in known if isinstance(new, int) and step < x < new]
        if not is_next or skipped:
            return step
        step = int(str(new))
    return step


# -- checkpoints -------------------------------------------------------------------------------


def _saved_steps(run: Run) -> list[int]:
    """Return the steps with a checkpoint, oldest first."""
    names = (p.name.removeprefix(PREFIX) for p in RunFolder(run.folder).checkpoints.glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def _checkpoints(run: Run) -> Iterator[Finding]:
    saved, folder = _saved_steps(run), RunFolder(run.folder).checkpoints
    if not saved:
        text = "none: its weights are gone" if run.done else "none yet"
        advice = "train the run again to sample from it or to export it" if run.done else ""
        yield Finding("checkpoints", "note", text, advice)
        return
    from angular_lab.training.checkpoint import problems, step_folder

    found = {step: problems(step_folder(folder, step)) for step in saved}
    good = [step for step, texts in found.items() if not texts]
    for step, texts in found.items():
        if texts:
            yield Finding("checkpoints", "wrong", f"step {step:,}: {'; '.join(texts)}",
                          _checkpoint_advice(folder, step, good))  # fmt: skip
    if good:
        size = short_bytes(_size(step_folder(folder, good[-1])))
        listed = ", ".join(f"{step:,}" for step in good)
        yield Finding("checkpoints", "ok", f"step {listed}: complete and intact, {size} each")
    left = [p.name for p in (*folder.glob(".saving-*"), *folder.glob(".removing-*"))]
    if left and not is_locked(run.folder):
        text = f"{', '.join(left)} of an interrupted save; the next save removes it"
        yield Finding("checkpoints", "note", text)


def _checkpoint_advice(folder: Path, step: int, good: list[int]) -> str:
    later = [x for x in good if x > step]
    path = folder / f"{PREFIX}{step:08d}"
    if later:
        return f"remove {path}; step {later[-1]:,} is newer and intact"
    if good:
        resume = command("resume", folder.parent)
        return f"remove {path}, then {resume}: it continues after step {good[-1]:,}"
    return "train the run again in another folder; no checkpoint is intact"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- what a run needs to continue ----------------------------------------------------------------


def _data(run: Run) -> Iterator[Finding]:
    from angular_lab.training.start import STDLIB, data_place

    place = data_place(run.spec)
    status = "note" if run.done else "wrong"  # a finished run is read without its tokens
    if not place.is_dir():
        if run.spec.data == STDLIB:
            yield Finding("data", "note", f"{place} is not there; the next command prepares it")
        else:
            advice = "copy the folder to that path, or prepare the corpus again"
            yield Finding("data", status, f"{place} is missing", advice)
        return
    try:
        text = _tokens_in(place, run.info.data)
    except UserError as error:
        yield Finding("data", status, str(error), "restore the folder that the run was started on")
        return
    yield Finding("data", "ok", text)


def _tokens_in(place: Path, expected: str) -> str:
    """Describe the tokens of a folder. Raises UserError if they are not those of the run, or if a
    file is missing or has another size."""
    from angular_lab.data.shards import Manifest, read_header

    manifest = Manifest.load(place)
    fingerprint = manifest.fingerprint if manifest else ""
    if fingerprint != expected:
        raise UserError(
            f"{place} holds other tokens: fingerprint {fingerprint[:12] or 'none'}, but the run "
            f"was started on {expected[:12] or 'tokens without a fingerprint'}"
        )
    if manifest is None:
        return f"{place}, without a manifest: the tokens cannot be identified"
    for split in manifest.splits.values():
        for info in split.files:
            tokens, _ = read_header(place / info.name)
            if tokens != info.tokens:
                raise UserError(f"{place / info.name} has {tokens:,} tokens, not {info.tokens:,}")
    total = short_number(manifest.splits["train"].tokens)
    return f"{place}: {total} tokens, fingerprint {fingerprint[:12]} as at the start"


def _parent(run: Run) -> Iterator[Finding]:
    if run.spec.parent is None:
        return
    folder = parent_folder(run.folder, run.spec)
    source = RunFolder(folder).checkpoints / f"{PREFIX}{run.spec.parent_step:08d}"
    if not (folder / "spec.json").exists():
        text = f"{folder} is missing: curves begin at step {run.spec.parent_step:,}"
        yield Finding("parent", "note", text)
    elif source.is_dir() or _saved_steps(run):
        yield Finding("parent", "ok", f"{folder} at step {run.spec.parent_step:,}")
    else:
        advice = "train the parent again with this step in pins"
        yield Finding("parent", "wrong", f"{source} is gone: the branch cannot start", advice)


def _disk(run: Run) -> Iterator[Finding]:
    free = shutil.disk_usage(run.folder).free
    saved = _saved_steps(run)
    folder = RunFolder(run.folder).checkpoints
    needed = max((_size(folder / f"{PREFIX}{step:08d}") for step in saved), default=0)
    if run.done or free >= needed:
        yield Finding("disk", "ok", f"{short_bytes(free)} free")
        return
    yield Finding(
        "disk", "wrong",
        f"{short_bytes(free)} free, but a checkpoint takes {short_bytes(needed)}",
        f"free {short_bytes(needed - free)} more, or lower keep",
    )  # fmt: skip


CHECKS: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    _state, _logs, _checkpoints, _data, _parent, _disk,
)  # fmt: skip


# -- as text -----------------------------------------------------------------------------------


def is_sound(findings: list[Finding]) -> bool:
    return all(finding.status != "wrong" for finding in findings)


def to_json(folder: Path, findings: list[Finding]) -> str:
    content = {"folder": str(folder), "sound": is_sound(findings)}
    return json.dumps({**content, "findings": [asdict(f) for f in findings]}, indent=2)


def to_text(folder: Path, findings: list[Finding]) -> str:
    """Return the findings as aligned lines, each problem followed by what to do."""
    lines = [str(folder), ""]
    advices = [finding.advice for finding in findings]
    for finding, following in zip(findings, [*advices[1:], ""], strict=True):
        status = finding.status.upper() if finding.status == "wrong" else finding.status
        lines.append(f"{status:6}{finding.part:13}{finding.text}")
        if finding.advice and finding.advice != following:
            lines.append(f"{'':19}to do: {finding.advice}")
    count = sum(finding.status == "wrong" for finding in findings)
    verdict = counted(count, "problem") if count else "nothing is wrong"
    return "\n".join([*lines, "", verdict])
