"""The page: figures and tables rendered into one HTML file, and each written to a file of its own.

The page is self-contained: style, script and figures are part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from angular_lab.report.figures.charts import chart_json, chart_script, chart_style
from angular_lab.report.figures.plots import Figure, save
from angular_lab.report.tables import Mark, Table, with_minus

ASSETS = files("angular_lab.report") / "assets"
OUTCOMES = {"holds": "holds", "reversed": "reversed", "missed": "missed", "inconclusive": "open"}


@dataclass
class Section:
    """A part of the page: the result first, then further figures, then tables, folded."""

    key: str
    title: str
    headline: Figure | None = None
    sentences: Sequence[str] = ()  # the result in words
    words: Sequence[str] = ()  # what was run
    overview: Figure | None = None
    warnings: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()  # that few readers need
    opened: Sequence[str] = ()  # keys of tables that are not folded
    texts: Sequence[tuple[str, str]] = ()  # (heading, preformatted text)

    @property
    def all_figures(self) -> list[Figure]:
        first = [figure for figure in (self.headline, self.overview) if figure]
        return [*first, *self.figures]

    @property
    def all_tables(self) -> list[Table]:
        return [*self.tables, *self.details]

    def is_open(self, table: Table) -> bool:
        """True if the table is not folded: it was chosen, or there is no figure in front of it."""
        return table.key in self.opened or not (self.all_figures or table in self.details)

    @property
    def parts(self) -> list[tuple[str, str]]:
        """The headings within the section, as (id, title)."""
        count = len(self.warnings)
        parts = (
            ("differences", "Differences", self.overview),
            ("warnings", f"{count} warning{'s' * (count != 1)}", self.warnings),
            ("figures", "Further figures" if self.headline else "Figures", self.figures),
            ("tables", "Tables", self.all_tables),
            ("texts", "Texts", self.texts),
        )
        return [(f"{self.key}--{name}", title) for name, title, content in parts if content]


def table_summary(table: Table) -> str:
    """Return what a folded table shows: the number of verdicts of each kind, else of rows."""
    verdicts: dict[str, list[str]] = {}
    for row in table.rows:
        for cell in row.values():
            if isinstance(cell, Mark) and cell.kind in OUTCOMES:
                verdicts.setdefault(cell.kind, []).append(str(cell.value))
    if not verdicts:
        return f"{len(table.rows)} row{'s' * (len(table.rows) != 1)}"
    kinds = (kind for kind in OUTCOMES if kind in verdicts)
    return ", ".join(f"{_outcome(kind, verdicts[kind])}: {len(verdicts[kind])}" for kind in kinds)


def _outcome(kind: str, labels: Sequence[str]) -> str:
    """Return what verdicts of a kind are called: as in their cells, if these are alike."""
    return labels[0] if len(set(labels)) == 1 and kind != "inconclusive" else OUTCOMES[kind]


def _typeset(value: Any) -> Any:
    """Give plain text of the page its minus signs; markup stays as it is."""
    return with_minus(value) if type(value) is str else value


def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("angular_lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_typeset,
    )
    templates.filters["summary"] = table_summary
    return templates


def write_page(
    out: Path,
    title: str,
    sections: Sequence[Section],
    words: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Write out/index.html, out/figures and out/tables. A single section has no heading.

    `words` are above the sections; `notes` are below them and say how to read the page.
    """
    for name in ("figures", "tables"):
        (out / name).mkdir(parents=True, exist_ok=True)
    for section in sections:
        for table in section.all_tables:
            (out / "tables" / f"{table.key}.csv").write_text(table.csv())
            (out / "tables" / f"{table.key}.md").write_text(table.markdown())
    drawings = {
        figure.key: Markup(save([figure.panel], out / "figures" / figure.key))
        for section in sections
        for figure in section.all_figures
    }
    page = out / "index.html"
    page.write_text(
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            words=words,
            notes=notes,
            sections=sections,
            drawings=drawings,
            style=Markup((ASSETS / "style.css").read_text()),
            script=Markup((ASSETS / "page.js").read_text()),
            chart_json=chart_json,
            chart_style=chart_style(),
            chart_script=chart_script(),
        )
    )
    return page
