"""A run as a report reads it: what is whole is used, what is broken is said.

Training stops at a broken file; a report must not, or one bad line would cost the page.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from angular_lab.config.spec import Spec
from angular_lab.run_folder import DIVERGED, SPEC, SWEEP, RunDir

Lines = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Run:
    """One run folder, read once."""

    folder: Path
    spec: Spec
    data: str  # the fingerprint of its tokens; "": not recorded
    device: str
    made_in: str  # the run of another sweep that it was taken over from; "": made here
    metrics: Lines
    speeds: tuple[float, ...]  # tokens per second, as logged
    done: bool
    diverged: bool

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def comparable(self) -> tuple[str, int]:
        """Losses may be compared where this is the same."""
        return self.data, self.spec.model.vocabulary

    @property
    def status(self) -> str:
        return "diverged" if self.diverged else "done" if self.done else "unfinished"

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Tokens and values, where the value was logged."""
        found = [(line["tokens"], line[key]) for line in self.metrics if key in line]
        return [tokens for tokens, _ in found], [value for _, value in found]

    @property
    def last_evaluation(self) -> tuple[int, float] | None:
        """Tokens and validation loss of the last evaluation, wherever it was."""
        tokens, losses = self.series("val_loss")
        return (int(tokens[-1]), losses[-1]) if losses else None

    @property
    def final(self) -> tuple[int, float] | None:
        """Tokens and loss at the planned end; None where the run did not get there."""
        last = self.last_evaluation
        planned = self.spec.steps * self.spec.tokens_per_step
        if not self.done or self.diverged or last is None or last[0] != planned:
            return None
        return last

    def read_from(self, window: float) -> "Run":
        """As if the loss of this average were that of the weights."""
        name = self.spec.averages.get(window, "")
        lines = [{k: v for k, v in line.items() if k != "val_loss"} for line in self.metrics]
        pairs = zip(lines, self.metrics, strict=True)
        swapped = ({**x, "val_loss": y[name]} if name in y else x for x, y in pairs)
        return replace(self, metrics=tuple(swapped))

    @property
    def speed(self) -> float | None:
        return median(self.speeds) if self.speeds else None


def read_run(folder: Path, warnings: list[str]) -> Run | None:
    """None where the folder holds no readable run; `warnings` says why."""
    try:
        run = RunDir(folder)
        spec, content = run.read_spec(), json.loads((folder / SPEC).read_text())
    except ValueError as error:
        warnings.append(f"{error}: left out")
        return None
    metrics = read_lines(run.metrics_path, warnings, needed=("step", "tokens"))
    if not metrics and not (folder / DIVERGED).exists():
        warnings.append(f"{folder} has no metrics: it has not logged a step yet")
    timing = read_lines(run.timing_path, warnings)
    known = [line for line in timing if line.get("tokens_per_second", 0) > 0]
    result = Run(
        folder=folder,
        spec=spec,
        data=str(content.get("data") or ""),
        device=str(content.get("versions", {}).get("device", "")),
        made_in=str(content.get("made_in", "")),
        metrics=metrics,
        speeds=tuple(line["tokens_per_second"] for line in known),
        done=run.done,
        diverged=(folder / DIVERGED).exists(),
    )
    if result.done and not result.diverged and result.final is None:
        warnings.append(_why_no_final(result))
    return result


def _why_no_final(run: Run) -> str:
    last = run.last_evaluation
    where = f"its last evaluation is at {last[0]:,} tokens" if last else "it has no evaluation"
    planned = run.spec.steps * run.spec.tokens_per_step
    return f"{run.folder} is done, but {where}, not at {planned:,}: its final loss is not used"


def read_lines(path: Path, warnings: list[str], needed: Sequence[str] = ()) -> Lines:
    """The lines that are whole JSON objects with the needed keys."""
    if not path.exists():
        return ()
    found: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(errors="replace").splitlines(True), start=1):
        if not text.endswith("\n"):
            warnings.append(
                f"{path}, line {number} is half-written ({text[:40]!r}): left out; resuming the "
                "run writes it again"
            )
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            warnings.append(f"{path}, line {number} is no JSON ({text[:40]!r}, {error}): left out")
            continue
        values = _numbers(line)
        if values and all(key in values for key in needed):
            found.append(values)
        else:
            lacking = " and ".join(needed) or "values"
            warnings.append(f"{path}, line {number} lacks {lacking} ({text[:40]!r}): left out")
    return tuple(found)


def _numbers(line: Any) -> dict[str, Any]:
    """Finite numbers only: nothing else can be drawn or averaged."""
    if not isinstance(line, dict):
        return {}
    return {k: v for k, v in line.items() if isinstance(v, int | float) and isfinite(v)}


def find_folders(source: Path) -> tuple[list[Path], list[Path]]:
    """Folders with a sweep and folders with a run, at any depth, in a fixed order."""
    sweeps, runs = [], []
    for root, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if name != "checkpoints")
        if SWEEP in files:
            sweeps.append(Path(root))
        if SPEC in files:
            runs.append(Path(root))
    return sweeps, runs
