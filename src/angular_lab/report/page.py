"""The page: figures and tables rendered into one HTML file, and each written to a file of its own.

The page is self-contained: style, script and figures are part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from angular_lab.report.charts import chart_json, chart_script, chart_style
from angular_lab.report.plots import Figure, save
from angular_lab.report.tables import Table

ASSETS = files("angular_lab.report") / "assets"


@dataclass
class Section:
    """A part of the page, in the order of its fields."""

    key: str
    title: str
    words: Sequence[str] = ()
    headline: Figure | None = None
    warnings: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    details: Sequence[Table] = ()  # folded
    texts: Sequence[tuple[str, str]] = ()  # (heading, preformatted text)

    @property
    def all_figures(self) -> list[Figure]:
        return [*([self.headline] if self.headline else []), *self.figures]


def write_page(
    out: Path, title: str, sections: Sequence[Section], words: Sequence[str] = ()
) -> Path:
    """Write out/index.html, out/figures and out/tables. A single section has no heading."""
    for name in ("figures", "tables"):
        (out / name).mkdir(parents=True, exist_ok=True)
    for section in sections:
        for table in [*section.tables, *section.details]:
            (out / "tables" / f"{table.key}.csv").write_text(table.csv())
            (out / "tables" / f"{table.key}.md").write_text(table.markdown())
    drawings = {
        figure.key: Markup(save([figure.panel], out / "figures" / figure.key))
        for section in sections
        for figure in section.all_figures
    }
    templates = Environment(
        loader=PackageLoader("angular_lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = out / "index.html"
    page.write_text(
        templates.get_template("page.html").render(
            title=title,
            words=words,
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
