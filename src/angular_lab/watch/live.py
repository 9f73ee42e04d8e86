"""The runs and sweeps below the watched folders, and how far they are.

Logs are read from where the last reading ended: to look at runs that train must not slow them down.
"""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from angular_lab.errors import UserError
from angular_lab.inspect.listing import run_folders, summarize
from angular_lab.report.figures.sweep_figures import FAMILY
from angular_lab.run_folder import RUNS, SPEC, Metrics, Run, RunFolder, RunInfo
from angular_lab.sweeps.sweep_file import SWEEPS, SweepRecord
from angular_lab.watch.series import Cursor, read_series
from angular_lab.watch.tail import Position, number, read_after

RECENT = 20  # lines of the log that the speed and the remaining time are computed from
Stamp = tuple[int, int, int]  # changes with the file


def _stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino


class LiveRun:
    """A run, with what its line in the list needs."""

    info: RunInfo

    def __init__(self, folder: Path) -> None:
        self.files = RunFolder(folder)
        self.stamps: tuple[Stamp, ...] = ()
        self._forget()

    def _forget(self) -> None:
        self.metrics = self.timing = Position()
        self.loss: float | None = None
        self.last: Metrics | None = None
        self.best: Metrics | None = None  # evaluation
        self.evaluated: Metrics | None = None  # the last one
        self.pace: deque[tuple[int, float]] = deque(maxlen=RECENT)  # steps and seconds
        self.speed: float | None = None
        self.finished: dict[str, Any] = {}  # the line in the list, once it does not change any more

    def refresh(self) -> None:
        """Read what was logged since the last call. Raises UserError for a damaged spec."""
        files = self.files
        stamps = tuple(map(_stamp, (files.path / SPEC, files.metrics_path, files.timing_path)))
        if stamps == self.stamps:
            return
        if not self.stamps or stamps[0] != self.stamps[0]:
            self.info = RunInfo.read(files.path)
        metrics = read_after(files.metrics_path, self.metrics)
        timing = read_after(files.timing_path, self.timing)
        if metrics.restarted or timing.restarted:
            self._forget()
            metrics = read_after(files.metrics_path, self.metrics)
            timing = read_after(files.timing_path, self.timing)
        self.metrics, self.timing, self.stamps = metrics.end, timing.end, stamps
        self.finished = {}
        for values in metrics.lines:
            self._note(values)
        for values in timing.lines:
            self._note_time(values)

    def _note(self, values: dict[str, Any]) -> None:
        if not all(isinstance(values.get(key), int) for key in ("step", "tokens")):
            return
        line = self.last = Metrics.from_dict(values)
        self.loss = line.get("loss")
        if (loss := line.get("val_loss")) is not None:
            self.evaluated = line
            best = self.best.get("val_loss") if self.best else None
            self.best = line if best is None or loss <= best else self.best

    def _note_time(self, values: dict[str, Any]) -> None:
        step, seconds = number(values, "step"), number(values, "seconds")
        self.speed = number(values, "tokens_per_second") or self.speed
        if step is None or seconds is None:
            return
        if self.pace and seconds < self.pace[-1][1]:  # the run was resumed
            self.pace.clear()
        self.pace.append((int(step), seconds))

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step, at the speed of the last lines, evaluations included."""
        if len(self.pace) < 2:
            return None
        (first, began), (last, now) = self.pace[0], self.pace[-1]
        if last <= first or now <= began:
            return None
        return (self.info.spec.steps - last) * (now - began) / (last - first)

    def summary(self) -> dict[str, Any]:
        files, spec = self.files, self.info.spec
        # a sweep has hundreds of finished runs
        if self.finished and files.done and not files.diverged:
            return self.finished | {"age": time.time() - self.finished["written"]}
        lines = tuple(line for line in (self.best, self.evaluated, self.last) if line)
        run = Run(files.path, self.info, lines, (), files.done, files.diverged)
        values = asdict(summarize(run))
        running = values["state"] == "running"
        values |= {
            "written": time.time() - values["age"],
            "loss": self.loss,
            "tokens_per_second": self.speed,
            "remaining": self.remaining if running else None,
            "tokens_per_step": spec.tokens_per_step,
            "color": FAMILY.index(spec.optim.name) if spec.optim.name in FAMILY else None,
            "stamp": "-".join(map(str, (*self.metrics.numbers, *self.timing.numbers))),
        }
        self.finished = values if values["state"] == "finished" else {}
        return values


class LiveRuns:
    """What the page shows. Several tabs may ask at the same time."""

    def __init__(self, sources: Sequence[Path]) -> None:
        self.sources = list(dict.fromkeys(source.resolve() for source in sources))
        for source in self.sources:
            run_folders(source)  # raises UserError if it is not a folder
        self.lock = threading.Lock()
        self.runs: dict[Path, LiveRun] = {}
        self.by_id: dict[str, LiveRun] = {}

    def listing(self) -> dict[str, Any]:
        """Return all runs and sweeps, read now."""
        with self.lock:
            warnings: list[str] = []
            self._refresh(warnings)
            runs = [dict(run.summary()) for run in self.runs.values()]
            times = Counter(run["id"] for run in runs)
            for run in runs:  # a name that is unique, and the same when the page is opened again
                run["id"] = run["id"] if times[run["id"]] == 1 else run["folder"]
            self.by_id = {run["id"]: self.runs[Path(run["folder"])] for run in runs}
            return {
                "folders": [str(source) for source in self.sources],
                "runs": runs,
                "sweeps": list(self._sweeps({run["folder"]: run for run in runs}, warnings)),
                "warnings": warnings,
            }

    def series(self, key: str, after: str) -> dict[str, Any]:
        """Return the curves of a run that was listed, after a cursor."""
        if key not in self.by_id:
            self.listing()  # the page was open before this process started
        run = self.by_id.get(key)
        if run is None:
            raise UserError(f"run={key}: there is no such run")
        return read_series(run.files, run.info.spec, Cursor.parse(after))

    def _refresh(self, warnings: list[str]) -> None:
        sources = (source for source in self.sources if source.is_dir())
        folders = dict.fromkeys(folder for source in sources for folder in run_folders(source))
        self.runs = {folder: self.runs.get(folder) or LiveRun(folder) for folder in folders}
        for folder, run in list(self.runs.items()):
            try:
                run.refresh()
            except (UserError, OSError) as error:
                warnings.append(f"{error}: left out")
                del self.runs[folder]

    def _sweeps(
        self, runs: dict[str, dict[str, Any]], warnings: list[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the sweeps of the watched stores, and how many of their runs are finished."""
        stores = dict.fromkeys(x for source in self.sources for x in (source, source.parent))
        for path in (path for store in stores for path in sorted((store / SWEEPS).glob("*.json"))):
            try:
                record = SweepRecord.read(path)
            except (UserError, OSError) as error:
                warnings.append(f"{error}: left out")
                continue
            names = dict.fromkeys(name for trial in record.trials for name in trial.all_runs)
            folders = [str(path.parent.parent / RUNS / name) for name in names]
            listed = [runs[folder] for folder in folders if folder in runs]
            if listed:
                yield {
                    "name": path.stem,
                    "title": record.title,
                    "planned": len(names),
                    "finished": sum(run["state"] == "finished" for run in listed),
                    "running": sum(run["state"] == "running" for run in listed),
                    "runs": [run["id"] for run in listed],
                }
