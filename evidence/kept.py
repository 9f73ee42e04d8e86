"""The kept runs: the report on them, its tables, and the logs behind these.

The names of the report's tables and columns, and where a run's folder is, are known here alone.
"""

import csv
import json
import re
import tarfile
from functools import cached_property
from pathlib import Path
from typing import Any

from angular_lab.report.report import make_report
from angular_lab.theory.page import make_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"

# Columns of the table of every run: the method is the first one.
VALUES = ("aux_lr", "radius_lr", "lr")  # what a sweep varies is the first that is not empty
HORIZON = re.compile(r"([\d.]+M) tokens(, longer .*)?")
LONGER = "longer"  # here the name of the last horizon after the longer cooldown
OURS = "angular_muown"

Trial = tuple[str, float, int]  # method, value and seed
Losses = dict[Trial, dict[str, float]]  # by horizon
BySeed = dict[int, float]
Rows = list[list[str]]  # a table's cells as they are shown, the header first


def read_json(name: str) -> dict[str, Any]:
    """Return a kept file of results/."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")


class Kept:
    """The kept runs, unpacked into a folder, and the reports on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def unpacked(cls, folder: Path) -> "Kept":
        """Unpack the archives into `folder` and report on them there."""
        for archive in sorted((RESULTS / "s").glob("*.tar.xz")):
            unpack(archive, folder / "runs")
        make_report([folder / "runs"], folder)
        make_page(RESULTS / "theory", folder / "theory")
        return cls(folder)

    @cached_property
    def tables(self) -> dict[str, Rows]:
        """All tables of the report by name; those about the theory begin with "theory/"."""
        files = {path.stem: path for path in (self.folder / "tables").glob("*.md")}
        theory = (self.folder / "theory" / "tables").glob("*.md")
        files |= {f"theory/{path.stem}": path for path in theory}
        return {name: markdown_rows(path.read_text()) for name, path in files.items()}

    def losses(self, sweep: str) -> Losses:
        """Return every trial's validation loss by horizon: "22.5M", ..., "longer"."""
        path = self.folder / "tables" / f"{sweep}-s-runs.csv"
        losses: Losses = {}
        for row in csv.DictReader(path.read_text().splitlines()):
            method = next(iter(row.values()))
            value = next(float(row[name]) for name in VALUES if row.get(name))
            losses[method, value, int(row["seed"])] = {
                LONGER if found[2] else found[1]: float(cell)
                for column, cell in row.items()
                if (found := HORIZON.fullmatch(column)) and cell
            }
        return losses

    def log(self, sweep: str, trial: Trial, end: int | str = "") -> list[dict[str, Any]]:
        """Return what a trial logged: to its last horizon, to another one in steps, to the last
        after the longer cooldown ("longer"), or without any cooldown ("trunk")."""
        root = self.folder / "runs" / f"{sweep}-s"
        entries = json.loads((root / "sweep.json").read_text())["entries"]
        [entry] = [e for e in entries if (e["label"], e["value"], e["seed"]) == trial]
        folders = entry["folders"]
        name = folders[str(end)] if isinstance(end, int) else list(folders.values())[-1]
        if end == LONGER:
            name = entry["longer"]
        elif end == "trunk":
            name = re.sub(r"-to\d+$", "", name)
        return read_log(root / name / "metrics.jsonl")

    def specs(self) -> list[dict[str, Any]]:
        """Return the spec.json of every run."""
        paths = sorted((self.folder / "runs").rglob("spec.json"))
        return [json.loads(path.read_text()) for path in paths]


def markdown_rows(text: str) -> Rows:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    head, _, *rows = [[cell.strip() for cell in line] for line in cells]
    return [head, *rows]


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
