"""The run folder: the only interface between training and reports, with one writer and one reader.

spec.json        all settings of the run, versions, git state, fingerprint of the data, and which
                 settings changed at which step
metrics.jsonl    one line per logged step, deterministic: the same run writes the same bytes
timing.jsonl     what depends on the machine: seconds, tokens/s, memory, other processes
angles.jsonl     mean angle by which a step turned the rows of each matrix
samples.jsonl    text that the model generated during training
evaluations.jsonl  losses of checkpoints on other text, by `angular-lab eval`
checkpoints/     step_00001000/ ...
DONE             when all steps are taken
STOPPED          when a signal or the end of its time stopped it: exit code and step, as JSON
DIVERGED         when a loss or a weight was not finite: the message
LOCK             held by the process that trains

Runs live in a store: `runs/<label>-<digest>/`, one folder each. A cooldown that starts from another
run names that run as its parent; its own log starts after the branch point. No torch here.
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from filelock import FileLock, Timeout

from angular_lab.config.overrides import as_typed, override
from angular_lab.config.spec import Spec, get
from angular_lab.errors import UserError
from angular_lab.records import DAMAGED, check_format, from_json

SPEC = "spec.json"
RUNS = "runs"  # the folder of all runs of a store
STOPPED, DIVERGED = "STOPPED", "DIVERGED"
PREFIX = "step_"  # of a checkpoint's folder
FORMAT = 2  # of spec.json
CONVERT = "angular-lab convert-runs"
OTHER_LOAD = 0.25  # per core: above it, a machine has something else to do


@dataclass(frozen=True)
class Change:
    """A setting that changed when the run was resumed; values as the command line takes them."""

    step: int  # the last step that was taken before
    key: str
    before: str
    after: str


@dataclass(frozen=True)
class RunInfo:
    """The content of spec.json."""

    spec: Spec
    versions: dict[str, str]
    git: dict[str, Any]
    data: str  # fingerprint of the tokens; "": shards without a manifest
    format: int = FORMAT
    changes: tuple[Change, ...] = ()  # oldest first; `spec` includes them

    def undo_changes(self, spec: Spec) -> Spec:
        """Return the spec with the values with which the run was started."""
        return override(spec, [f"{c.key}={c.before}" for c in reversed(self.changes)])

    def changed(self, spec: Spec, keys: Collection[str], step: int) -> "RunInfo":
        """Return this with the values that `spec` has for `keys`, changed after `step`. The run
        may have been set back: what had changed later now holds from `step` on."""
        kept = tuple(replace(change, step=min(change.step, step)) for change in self.changes)
        texts = {key: (as_typed(get(self.spec, key)), as_typed(get(spec, key))) for key in keys}
        new = tuple(Change(step, k, a, b) for k, (a, b) in sorted(texts.items()) if a != b)
        updated = override(self.spec, [f"{change.key}={change.after}" for change in new])
        return replace(self, spec=updated, changes=kept + new)

    @staticmethod
    def read(folder: Path) -> "RunInfo":
        path = folder / SPEC
        try:
            content = json.loads(path.read_text())
            if "format" not in content:
                raise UserError(
                    f"{folder} was written by an earlier version: convert it with {CONVERT} "
                    f"{folder} --out STORE"
                )
            check_format(content, FORMAT, path)
            return from_json(RunInfo, content)
        except FileNotFoundError:
            raise UserError(f"{folder} is not a run folder: it has no {SPEC}") from None
        except DAMAGED as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    def write(self, folder: Path) -> None:
        write_atomically(folder / SPEC, json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class Metrics:
    """A line of metrics.jsonl. `more` holds what not every line has: evaluations, angles, norms."""

    step: int
    tokens: int
    loss: float | None  # None: not finite
    lr: float | None
    grad_norm: float | None
    more: Mapping[str, float | None] = field(default_factory=dict)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Metrics":
        named = {key: values.get(key) for key in ("loss", "lr", "grad_norm")}
        more = {key: x for key, x in values.items() if key not in (*named, "step", "tokens")}
        return Metrics(values["step"], values["tokens"], **named, more=more)

    def to_dict(self) -> dict[str, Any]:
        values = {key: x for key, x in vars(self).items() if key != "more"}
        return {**values, **self.more}

    def get(self, key: str) -> float | None:
        """Return a value by its name in the file; None if it was not logged or not finite."""
        value = self.to_dict().get(key)
        is_number = isinstance(value, int | float) and isfinite(value)
        return value if is_number else None


class RunFolder:
    """A run folder to write to."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: FileLock | None = None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timing_path(self) -> Path:
        return self.path / "timing.jsonl"

    @property
    def angles_path(self) -> Path:
        return self.path / "angles.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def evaluations_path(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def logs(self) -> tuple[Path, ...]:
        """All files of lines that belong to a step."""
        measured = self.metrics_path, self.timing_path, self.angles_path
        return *measured, self.samples_path, self.evaluations_path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def done(self) -> bool:
        return (self.path / "DONE").exists()

    @property
    def diverged(self) -> bool:
        return (self.path / DIVERGED).exists()

    @property
    def started(self) -> bool:
        """True if the folder holds a run with something to lose. A process that dies before it
        logs or saves a step leaves a spec.json alone, and the next one replaces it."""
        if not (self.path / SPEC).exists():
            return False
        logged = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        return logged or self.done or self.diverged or any(self.checkpoints.glob(f"{PREFIX}*"))

    # -- the lock ------------------------------------------------------------------------------

    def claim(self) -> None:
        if not self.try_claim():
            raise UserError(
                f"{self.path} is in use by another process: wait for it, or choose another --out"
            )

    def try_claim(self) -> bool:
        """Take the folder for this process, unless another one holds it. The kernel drops the lock
        when the process dies."""
        lock = FileLock(self.path / "LOCK")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # `ls` and `watch` test the lock, and hold it for an instant
            lock.acquire(timeout=0.05, poll_interval=0.002)
        except Timeout:
            return False
        except (FileExistsError, NotADirectoryError):
            raise UserError(
                f"{self.path} cannot be a folder: a file or a broken link is in its place"
            ) from None
        self._lock = lock
        return True

    @property
    def claimed(self) -> bool:
        """True if this object holds the lock."""
        return self._lock is not None

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- spec.json -----------------------------------------------------------------------------

    @property
    def info(self) -> RunInfo:
        return RunInfo.read(self.path)

    def read_spec(self) -> Spec:
        return self.info.spec

    def write_spec(self, spec: Spec, versions: dict[str, str], data: str = "") -> None:
        """Write spec.json; `data` identifies the tokens, so that the run never continues with
        others."""
        RunInfo(spec, versions, git_state(), data).write(self.path)

    def change_settings(self, spec: Spec, keys: Collection[str], step: int) -> None:
        """Store the values that a resumed run's spec has for `keys`, and since which step."""
        info = self.info
        if (updated := info.changed(spec, keys, step)) != info:
            updated.write(self.path)

    # -- logs ----------------------------------------------------------------------------------

    def append(self, path: Path, values: dict[str, Any]) -> None:
        """Append one line in one write: a reader never sees half a line unless the machine dies."""
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            end = os.fstat(descriptor).st_size
            if os.write(descriptor, line) != len(line):
                os.ftruncate(descriptor, end)
                raise OSError(f"{path} cannot be written: is the disk full?")
        finally:
            os.close(descriptor)

    def sync_metrics(self) -> None:
        """Force the logs to disk, before a checkpoint that relies on their lines."""
        for path in (self.metrics_path, self.angles_path, self.samples_path):
            if path.exists():
                with open(path) as file:
                    os.fsync(file.fileno())

    def read_metrics(self) -> list[Metrics]:
        """Return the logged lines. Raises UserError at a damaged one; an unfinished last line,
        which a killed process may leave, is skipped."""
        return [Metrics.from_dict(values) for _, values in _lines(self.metrics_path, _refuse)]

    def read_timing(self) -> dict[int, dict[str, Any]]:
        """Return the lines of timing.jsonl by step."""
        lines = (values for _, values in _lines(self.timing_path, _refuse))
        return {line["step"]: line for line in lines if "step" in line}

    def rewind(self, step: int) -> None:
        """Remove the lines logged after `step`: the run is about to take those steps again."""
        for path in self.logs:
            if path.exists():
                lines = [
                    text for text, line in _lines(path, _refuse) if line.get("step", 0) <= step
                ]
                write_atomically(path, "".join(lines))

    # -- how it ended --------------------------------------------------------------------------

    def record_stop(self, exit_code: int, step: int) -> None:
        """Leave what a script needs to requeue the run, whatever exit code its launcher returns."""
        content = {"exit_code": exit_code, "step": step}
        write_atomically(self.path / STOPPED, json.dumps(content) + "\n")

    def record_divergence(self, message: str) -> None:
        write_atomically(self.path / DIVERGED, f"{message}\n")

    def clear_records(self) -> None:
        """Remove the records of how an earlier attempt ended: the run continues."""
        for name in (STOPPED, DIVERGED):
            (self.path / name).unlink(missing_ok=True)

    def reopen(self) -> None:
        """Let the run take steps again, even if it was finished."""
        (self.path / "DONE").unlink(missing_ok=True)

    def finish(self) -> None:
        self.sync_metrics()
        write_atomically(self.path / "DONE", "")


@dataclass(frozen=True)
class Run:
    """A run folder as it was read, once."""

    folder: Path
    info: RunInfo
    metrics: tuple[Metrics, ...]
    speeds: tuple[float, ...]  # tokens per second, as logged
    done: bool
    diverged: bool
    shared_device: bool | None = (
        None  # with other processes, so its times mean little; None: unknown
    )

    @property
    def spec(self) -> Spec:
        return self.info.spec

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def comparable(self) -> tuple[str, int]:
        """Losses may be compared between runs for which this is the same."""
        return self.info.data, self.spec.model.vocabulary

    @property
    def status(self) -> str:
        return "diverged" if self.diverged else "done" if self.done else "unfinished"

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Return tokens and values of the lines that have this value."""
        points = [(m.tokens, x) for m in self.metrics if (x := m.get(key)) is not None]
        return [float(tokens) for tokens, _ in points], [value for _, value in points]

    def values(self, key: str) -> dict[int, float]:
        """Return the logged values by step."""
        return {m.step: x for m in self.metrics if (x := m.get(key)) is not None}

    @cached_property
    def evaluations(self) -> list[Metrics]:
        return [line for line in self.metrics if line.get("val_loss") is not None]

    @property
    def final(self) -> tuple[int, float] | None:
        """Tokens and loss at the planned end; None if the run did not get there."""
        if not self.done or self.diverged or not self.evaluations:
            return None
        last = self.evaluations[-1]
        loss = last.get("val_loss")
        planned = self.spec.steps * self.spec.tokens_per_step
        return (last.tokens, loss) if last.tokens == planned and loss is not None else None

    @property
    def speed(self) -> float | None:
        return median(self.speeds) if self.speeds else None

    def evaluated_by(self, window: float) -> "Run":
        """Return the run as if the loss of this average were that of the weights."""
        key = self.spec.averages.get(window, "")

        def swap(line: Metrics) -> Metrics:
            more = {k: v for k, v in line.more.items() if k != "val_loss"}
            return replace(
                line, more=more | ({"val_loss": line.more[key]} if key in line.more else {})
            )

        return replace(self, metrics=tuple(map(swap, self.metrics)))

    def with_history(self, warnings: list[str]) -> "Run":
        """Return the run with its parent's log up to the branch point in front of its own."""
        if self.spec.parent is None:
            return self
        parent = read_run(parent_folder(self.folder, self.spec), warnings)
        if parent is None:
            return self
        whole = parent.with_history(warnings)
        before = tuple(m for m in whole.metrics if m.step <= self.spec.parent_step)
        return replace(self, metrics=before + self.metrics)


def is_locked(folder: Path) -> bool:
    """True if a process holds the run. The lock is tested and never waited for; a file that a dead
    process left is not locked."""
    try:
        with open(folder / "LOCK") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def parent_folder(folder: Path, spec: Spec) -> Path:
    """Return the folder of a branch's parent: a run of the same store, or the path as given."""
    assert spec.parent is not None
    given = Path(spec.parent)
    sibling = folder.parent / given.name
    is_name = len(given.parts) == 1
    return given if given.exists() and not (is_name and sibling.exists()) else sibling


def read_run(folder: Path, warnings: list[str]) -> Run | None:
    """Read a run for a report: use what is intact, and describe in `warnings` what is not. None if
    the folder holds no readable run."""
    run = RunFolder(folder)
    try:
        info = run.info
    except UserError as error:
        warnings.append(f"{error}: left out")
        return None
    metrics: list[Metrics] = []
    for text, values in _lines(run.metrics_path, warnings.append):
        if all(isinstance(values.get(key), int) for key in ("step", "tokens")):
            metrics.append(Metrics.from_dict(values))
        else:
            warnings.append(
                f"{run.metrics_path}: a line lacks step or tokens ({text[:40]!r}): left out"
            )
    if not metrics and not run.diverged:
        warnings.append(f"{folder} has no metrics: it has not logged a step yet")
    timing = [values for _, values in _lines(run.timing_path, warnings.append)]
    logged = [values.get("tokens_per_second") for values in timing]
    speeds = tuple(x for x in logged if isinstance(x, int | float) and isfinite(x) and x > 0)
    shared = shared_device(timing)
    result = Run(folder, info, tuple(metrics), speeds, run.done, run.diverged, shared)
    if result.done and not result.diverged and result.final is None:
        last = result.evaluations
        planned = info.spec.steps * info.spec.tokens_per_step
        where = (
            f"its last evaluation is at {last[-1].tokens:,} tokens, not at {planned:,}"
            if last
            else "it has no evaluation"
        )
        warnings.append(f"{folder} is done, but {where}: its final loss is not used")
    return result


def shared_device(timing: Iterable[Mapping[str, Any]]) -> bool | None:
    """True if lines of timing.jsonl show other processes on the run's GPU or, without a GPU, a load
    clearly above that of the run's own threads. None if nothing was recorded."""
    found: set[bool | None] = {None}
    for line in timing:
        others, load, own = (line.get(k) for k in ("other_gpu_processes", "load", "own_load"))
        if "other_gpu_processes" in line:
            found.add(others > 0 if isinstance(others, int) else None)
        elif isinstance(load, int | float) and isinstance(own, int | float):
            found.add(load - own > OTHER_LOAD)
    return True if True in found else False if False in found else None


def read_lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """Return the intact lines of a log; describe in `warnings` those that are damaged."""
    return [values for _, values in _lines(path, warnings.append)]


def _lines(path: Path, report: Callable[[str], None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the intact lines of a log, as text and as values; report those that are damaged."""
    if not path.exists():
        return
    for number, text in enumerate(path.read_text(errors="replace").splitlines(True), start=1):
        if not text.endswith("\n"):
            if report is not _refuse:  # resuming writes it again
                report(f"{path}, line {number} is half-written ({text[:40]!r}): left out")
            continue
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise UserError("not an object")
        except ValueError as error:
            report(f"{path}, line {number} is not JSON ({text[:40]!r}, {error}): left out")
            continue
        yield text, values


def _refuse(problem: str) -> None:
    raise UserError(problem.removesuffix(": left out"))


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def git_state() -> dict[str, Any]:
    def ask(*arguments: str) -> str:
        try:
            result = subprocess.run(
                ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent
            )
        except FileNotFoundError:  # git is not installed
            return ""
        return result.stdout.strip() if result.returncode == 0 else ""

    return {"commit": ask("rev-parse", "HEAD"), "changed": bool(ask("status", "--porcelain"))}


def base_versions() -> dict[str, str]:
    return {"python": platform.python_version(), "machine": platform.machine()}
