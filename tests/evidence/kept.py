"""The kept runs' tables, and the documents that quote them."""

import csv
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from angular_lab.run_folder import RunFolder

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs" / "evidence.md"
OURS = "angular_muown"
Losses = dict[tuple[str, float, str, str], float]  # by line, rate, seed and horizon


def tables_in(text: str) -> list[str]:
    blocks = groupby(text.splitlines(), key=lambda line: line.startswith("|"))
    return ["\n".join(lines) for is_table, lines in blocks if is_table]


Rows = list[dict[str, str]]


def rows_of(table: str) -> Rows:
    """Of a table in Markdown."""
    head, _, *lines = (line.strip("| ").split(" | ") for line in table.splitlines())
    names, *lines = ([cell.strip() for cell in line] for line in (head, *lines))
    return [dict(zip(names, line, strict=True)) for line in lines]


def is_part_of(shown: Rows, made: Rows) -> bool:
    """Rows of it, in their order, in all columns or some."""
    left = iter(made)
    return all(any(row.items() <= whole.items() for whole in left) for row in shown)


def cells(report: Path, table: str) -> list[dict[str, str]]:
    text = (report / "tables" / f"{table}.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def words() -> str:
    return DOCS.read_text()


def readme() -> str:
    return (ROOT / "README.md").read_text()


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def trained(folder: Path) -> float:
    """Mean training loss over the last 140 steps, of which every tenth is logged."""
    lines = RunFolder(folder).read_metrics()[-14:]
    assert lines[-1]["step"] - lines[0]["step"] < 140
    return mean(line["loss"] for line in lines)
