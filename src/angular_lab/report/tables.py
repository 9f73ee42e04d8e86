"""Tables: rows of plain values, written as text, CSV, Markdown and sortable HTML."""

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from angular_lab.report.plots import short_number

Row = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """A value as it is shown, and what it is: the best of its kind, or from the paper."""

    value: Any
    kind: str = ""  # a CSS class: best, paper, holds, inconclusive, reversed
    text: str = ""  # shown in the value's place

    def __str__(self) -> str:
        return self.text or form(self.value)


@dataclass(frozen=True)
class Table:
    key: str  # its file name
    title: str
    rows: Sequence[Row]
    note: str = ""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def cells(self) -> list[list[Any]]:
        return [[row.get(name) for name in self.columns] for row in self.rows]

    def csv(self) -> str:
        """Full precision: for programs. What the eye needs is left out."""
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

    def html(self) -> str:
        words = [self._is_words(i) for i in range(len(self.columns))]
        head = "".join(
            f'<th scope="col" aria-sort="none"{" class=text" * words[i]}><button type="button">'
            f"{html.escape(name)}</button></th>"
            for i, name in enumerate(self.columns)
        )
        body = "".join(f"<tr>{''.join(map(_cell, cells, words))}</tr>" for cells in self.cells())
        note = f"<p class=note>{html.escape(self.note)}</p>" if self.note else ""
        return (
            f'<div class=tablebox id="{self.key}"><h4>{html.escape(self.title)}</h4>{note}'
            f'<div class=wide tabindex=0 role=region aria-label="{html.escape(self.title)}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></div>"
        )

    def _is_words(self, column: int) -> bool:
        """Words begin at the left, numbers end at the right: the header as the cells below."""
        shown = [_plain(cells[column]) for cells in self.cells()]
        words = sum(isinstance(value, str) for value in shown)
        return 2 * words > sum(value is not None for value in shown)


def form(value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def loss(value: float | None, kind: str = "", suffix: str = "") -> Mark | None:
    """Losses have four decimals: differences of 0.005 decide."""
    return None if value is None else Mark(value, kind, f"{value:.4f}{suffix}")


def tokens_form(tokens: float | None) -> str:
    return "?" if tokens is None else short_number(tokens)


def seeds_form(seeds: Sequence[int]) -> str:
    """How many seeds stand behind a number, and which."""
    if not seeds:
        return "no seed"
    listed = ", ".join(map(str, seeds))
    return f"one seed ({listed})" if len(seeds) == 1 else f"{len(seeds)} seeds ({listed})"


def text_table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    cells = [list(rows[0]), *([form(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Mark) else value


def _bold(value: Any) -> str:
    shown = str(value) if isinstance(value, Mark) else form(value)
    return f"**{shown}**" if isinstance(value, Mark) and "best" in value.kind else shown


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _cell(value: Any, words: bool) -> str:
    plain = _plain(value)
    number = None if isinstance(plain, bool) else _number(plain)
    shown = str(value) if isinstance(value, Mark) else form(value)
    kinds = [value.kind] if isinstance(value, Mark) and value.kind else []
    if number is None and len(shown) > 28:
        kinds.append("long")
    elif words:
        kinds.append("text")
    classes = f' class="{" ".join(kinds)}"' if kinds else ""
    key = f' data-v="{number!r}"' if number is not None else ""
    return f"<td{classes}{key}>{html.escape(shown)}</td>"
