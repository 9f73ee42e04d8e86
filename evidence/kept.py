"""The kept runs: unpacked, reported on, and read."""

import json
import re
import tarfile
from functools import cached_property
from pathlib import Path
from typing import Any

from angular_lab.experiments.definition import SCALES
from angular_lab.report.read import SweepResults, collect
from angular_lab.report.report import make_report
from angular_lab.run_folder import RUNS, RunInfo
from angular_lab.theory.page import make_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
ARCHIVES = sorted(path for scale in SCALES for path in (RESULTS / scale).glob("*.tar.xz"))
OURS = "angular_muown"

Rows = list[list[str]]  # a table's cells as they are shown, the header first


def read_json(name: str) -> dict[str, Any]:
    """Return a kept file of results/."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")


class Kept:
    """The store of the kept runs, and the reports on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "kept" / RUNS

    @classmethod
    def unpacked(cls, folder: Path) -> "Kept":
        """Unpack the archives into one store in `folder` and report on it there."""
        for archive in ARCHIVES:
            unpack(archive, folder / "kept")
        make_report([folder / "kept"], folder)
        make_page(RESULTS / "theory", folder / "theory")
        return cls(folder)

    @cached_property
    def sweeps(self) -> dict[str, SweepResults]:
        """All sweeps by experiment; those of another scale than s by experiment and scale."""
        warnings: list[str] = []
        sweeps, _ = collect([self.runs.parent], warnings)
        if warnings:
            raise ValueError(f"the kept runs cannot be read: {'; '.join(warnings)}")
        usual = {sweep.experiment: sweep for sweep in sweeps if sweep.scale == "s"}
        others = (sweep for sweep in sweeps if sweep.scale != "s")
        return usual | {f"{sweep.experiment}-{sweep.scale}": sweep for sweep in others}

    @cached_property
    def infos(self) -> dict[str, RunInfo]:
        """The spec.json of every run, by the name of its folder."""
        return {path.name: RunInfo.read(path) for path in sorted(self.runs.iterdir())}

    @cached_property
    def tables(self) -> dict[str, Rows]:
        """All tables of the report by name; those about the theory begin with "theory/"."""
        files = {path.stem: path for path in (self.folder / "tables").glob("*.md")}
        theory = (self.folder / "theory" / "tables").glob("*.md")
        files |= {f"theory/{path.stem}": path for path in theory}
        return {name: markdown_rows(path.read_text()) for name, path in files.items()}


def markdown_rows(text: str) -> Rows:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    head, _, *rows = [[cell.strip() for cell in line] for line in cells]
    return [head, *rows]
