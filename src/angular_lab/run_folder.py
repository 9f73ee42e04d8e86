"""The run folder: the only interface between training and reports. No torch here.

spec.json        all values of the run, versions, git state
metrics.jsonl    one line per logged step, deterministic: the same run writes the same bytes
timing.jsonl     what depends on the machine's mood: seconds, tokens/s, memory
checkpoints/     step_00001000/ ...
DONE             when all steps are taken
STOPPED          when a signal or the end of its time stopped it: exit code and step, as JSON
DIVERGED         when a loss or a weight was not finite: the message
LOCK             held by the process that trains
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from angular_lab.config.spec import Spec

SPEC = "spec.json"
STOPPED, DIVERGED = "STOPPED", "DIVERGED"
PREFIX = "step_"  # of the folder of a checkpoint
SWEEP = "sweep.json"  # in the folder of a sweep: which run is what


class RunDir:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timing_path(self) -> Path:
        return self.path / "timing.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def done(self) -> bool:
        return (self.path / "DONE").exists()

    @property
    def started(self) -> bool:
        """True if the folder holds a run with something to lose. A process that dies before it
        logs or saves a step leaves a spec.json alone, and the next one replaces it."""
        if not (self.path / SPEC).exists():
            return False
        logged = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        ended = self.done or (self.path / DIVERGED).exists()
        return logged or ended or any(self.checkpoints.glob(f"{PREFIX}*"))

    def claim(self) -> None:
        if not self.try_claim():
            raise ValueError(
                f"{self.path} is in use by another process: wait for it, or choose another --out"
            )

    def try_claim(self) -> bool:
        """Take the folder for this process, unless another one has it. The kernel drops the lock
        when the process dies."""
        path = self.path / "LOCK"
        while True:
            with suppress(FileExistsError):  # there when it was made, and then no more
                self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = open(path, "w")  # noqa: SIM115  (held for the process's life)
            except FileNotFoundError:  # one that let go just removed the folder
                _check_links(path)  # or it can never be made
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            if _is_open(lock, path):
                self._lock = lock
                return True
            lock.close()  # a lock on a file that is gone by now: another may have a new one

    @property
    def claimed(self) -> bool:
        """By this object."""
        return self._lock is not None

    def release(self) -> None:
        """Let go; a folder in which nothing began is not left behind."""
        if self._lock is None:
            return
        if sorted(self.path.iterdir()) == [self.path / "LOCK"]:
            (self.path / "LOCK").unlink()  # under the lock: nobody else has the folder
            with suppress(OSError):  # unless somebody came since
                self.path.rmdir()
        self._lock.close()
        self._lock = None

    def write_spec(self, spec: Spec, versions: dict[str, str], data: str = "") -> None:
        """`data` identifies the tokens: the same run cannot go on with others."""
        content = {
            "spec": spec.to_dict(),
            "versions": versions,
            "git": git_state(),
            "data": data,
        }
        write_atomically(self.path / SPEC, json.dumps(content, indent=2) + "\n")

    def show_like(self, spec: Spec) -> None:
        """Store the loggers and the dashboard of a resumed run's spec."""
        stored = self.read_spec()
        if (shown := stored.shown_like(spec)) != stored:
            content = {**self._content(), "spec": shown.to_dict()}
            write_atomically(self.path / SPEC, json.dumps(content, indent=2) + "\n")

    def read_spec(self) -> Spec:
        try:
            return Spec.from_dict(self._content()["spec"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.path / SPEC} cannot be read: {error}") from None

    def read_data(self) -> str:
        return self._content().get("data", "")

    def _content(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / SPEC).read_text())
        except FileNotFoundError:
            raise ValueError(f"{self.path} is no run folder: it has no spec.json") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path / SPEC} cannot be read: {error}") from None

    def append(self, path: Path, values: dict[str, Any]) -> None:
        """One line in one write: a reader never sees half a line unless the machine dies."""
        line = json.dumps(values, allow_nan=False) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            end = os.fstat(descriptor).st_size
            if os.write(descriptor, line.encode()) != len(line.encode()):  # a full disk
                os.ftruncate(descriptor, end)
                raise OSError(f"{path} cannot be written: is the disk full?")
        finally:
            os.close(descriptor)

    def sync_metrics(self) -> None:
        """To the disk, before a checkpoint that counts on these lines."""
        if self.metrics_path.exists():
            with open(self.metrics_path) as file:
                os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        return parse_lines(self.metrics_path)

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`: those steps are about to be taken again."""
        for path in (self.metrics_path, self.timing_path):
            kept = [line for line in parse_lines(path) if line["step"] <= step]
            if path.exists():
                write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))

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
        """The run takes steps again, also if it was finished."""
        (self.path / "DONE").unlink(missing_ok=True)

    def finish(self) -> None:
        self.sync_metrics()
        write_atomically(self.path / "DONE", "")


def parse_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: a killed process may leave half a one at the end."""
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if text.endswith("\n"):
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
    return lines


def trunk_name(entry: dict[str, Any]) -> str:
    """Of an entry of a sweep's manifest: the folder that a cool-down's name begins with; the end
    itself where there is one horizon."""
    return next((name.removesuffix(f"-to{h}") for h, name in entry["folders"].items()), "")


def _check_links(path: Path) -> None:
    """A link that leads nowhere is there for mkdir, and is not there for open."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise ValueError(
                f"{place} is a link to {os.readlink(place)}, which is not there: make that "
                "folder, or remove the link"
            )


def _is_open(file: IO[str], path: Path) -> bool:
    """Whether the path still names this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def alone(path: Path) -> Generator[None, None, None]:
    """One process at a time within the block; the others wait. `path` is made to hold the lock."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
            found = subprocess.run(
                ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent
            )
        except FileNotFoundError:  # no git here: nothing to tell
            return ""
        return found.stdout.strip() if found.returncode == 0 else ""

    return {"commit": ask("rev-parse", "HEAD"), "changed": bool(ask("status", "--porcelain"))}


def base_versions() -> dict[str, str]:
    return {"python": platform.python_version(), "machine": platform.machine()}
