"""From figures and tables to files: one page, and every figure and table for itself."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from angular_lab.report.assets import SCRIPT, STYLE
from angular_lab.report.figures import Figure
from angular_lab.report.plots import save
from angular_lab.report.tables import Table


@dataclass
class Section:
    """A part of the page; the order is words, warnings, tables, figures, details, texts."""

    key: str
    title: str
    words: Sequence[str] = ()
    warnings: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    details: Sequence[Table] = ()  # folded
    texts: Sequence[tuple[str, str]] = field(default_factory=tuple)  # (heading, text) as it is


def write_page(
    out: Path, title: str, sections: Sequence[Section], words: Sequence[str] = ()
) -> Path:
    """out/index.html, out/figures and out/tables. A single section needs no heading of its own."""
    for name in ("figures", "tables"):
        (out / name).mkdir(parents=True, exist_ok=True)
    links = "".join(f'<li><a href="#{s.key}">{html.escape(s.title)}</a></li>' for s in sections)
    contents = f"<nav aria-label=Contents><strong>Contents</strong><ul>{links}</ul></nav>"
    several = len(sections) > 1
    page = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="#">',  # or a browser asks a server for one
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(text)}</p>" for text in words),
        contents if several else "",
        *(_section(out, section, heading=several) for section in sections),
        f"<script>{SCRIPT}</script></body></html>\n",
    ]
    target = out / "index.html"
    target.write_text("\n".join(page))
    return target


def _section(out: Path, section: Section, heading: bool) -> str:
    parts = [f'<section id="{section.key}">']
    if heading:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
    parts += [f"<p>{html.escape(text)}</p>" for text in section.words]
    if section.warnings:
        items = "".join(f"<li>{html.escape(text)}</li>" for text in section.warnings)
        count = len(section.warnings)
        opened = " open" if count <= 12 else ""
        summary = f"{count} thing{'s' * (count != 1)} to know about these runs"
        parts.append(
            f'<details class="warnings"{opened}><summary>{summary}</summary><ul>{items}</ul>'
            "</details>"
        )
    parts += [_table(out, table) for table in section.tables]
    if section.figures:
        figures = "".join(_figure(out, figure) for figure in section.figures)
        parts.append(f"<div class=figures>{figures}</div>")
    for table in section.details:
        folded = f"<details><summary>{html.escape(table.title)}</summary>{_table(out, table)}"
        parts.append(f"{folded}</details>")
    for heading_text, text in section.texts:
        parts.append(f"<h3>{html.escape(heading_text)}</h3><pre>{html.escape(text)}</pre>")
    return "\n".join([*parts, "</section>"])


def _table(out: Path, table: Table) -> str:
    (out / "tables" / f"{table.key}.csv").write_text(table.csv())
    (out / "tables" / f"{table.key}.md").write_text(table.markdown())
    return table.html()


def _figure(out: Path, figure: Figure) -> str:
    drawn = save(figure.panel, out / "figures" / figure.key)
    label = html.escape(figure.caption, quote=True)
    drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return (
        f'<figure id="fig-{figure.key}">{drawn}'
        f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>"
    )
