"""Tables: rows of plain values as text, CSV, Markdown and HTML, and how numbers are written."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from angular_lab.text import short_number

Row = dict[str, Any]
HYPHEN = re.compile(r"(?<![\w.)\]-])-(?=\.?\d)")  # before a number, and not within a name


@dataclass(frozen=True)
class Mark:
    """A value, how it is written, and what it is: the best of its kind, or the paper's."""

    value: Any
    kind: str = ""  # a CSS class: best, paper, edge, holds, inconclusive, reversed, missed
    text: str = ""  # "": as other values


class Cell(NamedTuple):
    """A cell of the HTML table."""

    text: str
    classes: str
    number: float | None  # to sort by


@dataclass(frozen=True)
class Table:
    key: str  # its file name and id
    title: str
    rows: Sequence[Row]
    note: str = ""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def cells(self) -> list[list[Any]]:
        return [[row.get(name) for name in self.columns] for row in self.rows]

    def csv(self) -> str:
        """Return the values in full precision, for programs."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_plain(value) for value in cells] for cells in self.cells())
        return buffer.getvalue()

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = line(["---"] * len(self.columns))
        rows = [line([_bold(value) for value in cells]) for cells in self.cells()]
        note = f"\n{self.note}\n" if self.note else ""
        return f"**{self.title}**\n{note}\n" + "\n".join([line(self.columns), rule, *rows]) + "\n"

    def html_cells(self) -> list[list[Cell]]:
        words = [self.is_words(name) for name in self.columns]
        return [list(map(_cell, cells, words)) for cells in self.cells()]

    def is_words(self, column: str) -> bool:
        """True if most of the column is text: then it is aligned left, header included."""
        values = [_plain(row.get(column)) for row in self.rows]
        words = sum(isinstance(value, str) for value in values)
        return 2 * words > sum(value is not None for value in values)


def form(value: Any) -> str:
    """Return a value as a person reads it."""
    if isinstance(value, Mark):
        return value.text or form(value.value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def loss(value: float | None, kind: str = "", suffix: str = "") -> Mark | None:
    """Return a loss with four decimals: differences of 0.005 decide."""
    return None if value is None else Mark(value, kind, f"{value:.4f}{suffix}")


def difference(value: float | None) -> Mark | None:
    """Return a difference of losses, with its sign."""
    return None if value is None else Mark(value, "", f"{value:+.4f}")


def with_minus(text: str) -> str:
    """Return a text for the page, in which negative numbers have a minus sign, not a hyphen."""
    return HYPHEN.sub("−", text)


def token_count(*tokens: float) -> Mark:
    return Mark(tokens[0] if len(tokens) == 1 else None, "", tokens_form(*tokens))


def tokens_form(*tokens: float) -> str:
    """Return "2.05M", "2.05M or 8.19M", "2.05M, 4.1M or 8.19M"; "?" for none."""
    *before, last = map(short_number, tokens) if tokens else "?"
    return f"{', '.join(before)} or {last}" if before else last


def seeds_form(seeds: Sequence[int]) -> str:
    """Return how many seeds a number is based on, and which."""
    if not seeds:
        return "no seed"
    listed = ", ".join(map(str, seeds))
    return f"one seed ({listed})" if len(seeds) == 1 else f"{len(seeds)} seeds ({listed})"


def text_table(rows: Sequence[Row]) -> str:
    """Return the rows as a table for a terminal: words aligned left, numbers right."""
    table = Table("", "", rows)
    lines = [table.columns, *([form(value) for value in cells] for cells in table.cells())]
    columns = []
    for name, column in zip(table.columns, zip(*lines, strict=True), strict=True):
        width = max(map(len, column))
        left = table.is_words(name)
        columns.append([text.ljust(width) if left else text.rjust(width) for text in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Mark) else value


def _bold(value: Any) -> str:
    is_best = isinstance(value, Mark) and "best" in value.kind
    return f"**{form(value)}**" if is_best else form(value)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _cell(value: Any, words: bool) -> Cell:
    text, number = with_minus(form(value)), _number(_plain(value))
    kinds = [value.kind] if isinstance(value, Mark) and value.kind else []
    if number is None and len(text) > 28:
        kinds.append("long")
    elif words:
        kinds.append("text")
    return Cell(text, " ".join(kinds), number)
