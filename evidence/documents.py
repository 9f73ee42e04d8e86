"""Marks in documents, which Markdown does not show, and the numbers and tables that follow them.

`<!--=closest.lead.mean:.3f-->0.015`
    The number or word after the mark is the value of this fact in this format: one of Python's, or
    `word` for a small count in letters. A format that begins with - shows the negative.
`<!--?teaser.lowest_on_every_seed-->`
    The sentence is true as long as this fact is.
`<!-- table: average-s-average; rows: 0.1 | 0.2; without: reason | seeds -->`
    The table after the mark is this one: the rows in which a cell matches one of the patterns,
    without these columns and without empty ones. Both options may be left out.
"""

import re
from fnmatch import fnmatchcase
from typing import Any

from evidence.kept import RESULTS, ROOT, Rows
from evidence.measures import Facts

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), RESULTS / "README.md"]
FIGURES = ROOT / "docs" / "figures" / "evidence"
WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
]

NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?"
VALUE = re.compile(rf"(<!--=([^:>]+?)(?::([^>]+?))?-->)(?:{NUMBER}|[A-Za-z]+)?")
CLAIM = re.compile(r"<!--\?([^>]+?)-->")
TABLE = re.compile(r"(<!-- table: ([^;>]+?)((?:; [^;>]+?)*) -->\n\n)(?:(?:\|.*\n)+\n?)?")
FIGURE = re.compile(r"figures/evidence/([\w.-]+\.svg)")
MARK = re.compile(r"<!--(?:=|\?| table:)")
# A comment at the beginning of a block makes the line HTML, in which Markdown means nothing.
BEGINNING = re.compile(r"^[ >]*(?:[-*+] |\d+\. )?<!--[=?].*$", re.MULTILINE)


def figures() -> set[str]:
    """Return the names of the report's figures that documents show."""
    return {name for path in DOCUMENTS for name in FIGURE.findall(path.read_text())}


def names(text: str) -> set[str]:
    """Return the facts that a document uses."""
    return {match[2] for match in VALUE.finditer(text)} | set(CLAIM.findall(text))


def fill(text: str, facts: Facts, tables: dict[str, Rows]) -> str:
    """Return a document with every marked number and table as it is now."""
    if problems := _problems(text, facts, tables):
        raise ValueError("; ".join(problems))
    text = VALUE.sub(lambda mark: mark[1] + formatted(facts[mark[2]], mark[3] or ""), text)
    return TABLE.sub(lambda mark: mark[1] + _selection(tables[mark[2]], mark[3]), text)


def _problems(text: str, facts: Facts, tables: dict[str, Rows]) -> list[str]:
    wanted = names(text) - set(facts) | {mark[2] for mark in TABLE.finditer(text)} - set(tables)
    claims = set(CLAIM.findall(text)) & set(facts)
    marks = sum(len(pattern.findall(text)) for pattern in (VALUE, CLAIM, TABLE))
    broken = [] if marks == len(MARK.findall(text)) else ["a mark that cannot be read"]
    return [
        *broken,
        *(f"a mark begins a line or a list item: {x[:80]}" for x in BEGINNING.findall(text)),
        *(f"a mark names {name!r}, which is not computed" for name in sorted(wanted)),
        *(
            f"{name} is not true: rewrite the text"
            for name in sorted(claims)
            if facts[name] is not True
        ),
    ]


def formatted(value: Any, spec: str) -> str:
    if spec.startswith("-"):
        value, spec = -value, spec[1:]
    return WORDS[value] if spec == "word" else format(value, spec)


def _selection(table: Rows, options: str) -> str:
    """Return rows and columns of a table, in Markdown."""
    chosen = dict(option.split(": ", 1) for option in options.split("; ")[1:])
    patterns = chosen.pop("rows", "*").split(" | ")
    without = chosen.pop("without").split(" | ") if "without" in chosen else []
    head, *body = table
    rows = [row for row in body if any(fnmatchcase(c.strip("*"), p) for c in row for p in patterns)]
    if chosen or not rows or not set(without) <= set(head):
        raise ValueError(f"a table with the columns {', '.join(head)} has no {options.strip('; ')}")
    columns = [
        i
        for i, name in enumerate(head)
        if name not in without and any(row[i] not in ("-", "") for row in rows)
    ]
    lines = [[row[i] for i in columns] for row in (head, ["---"] * len(head), *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"
