"""The documentation site builds without a warning, and its reference is complete."""

import inspect
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import angular_muown
from angular_lab.config.spec import Spec, keys
from angular_lab.experiments.comparison import EXPERIMENTS
from angular_muown.params.options import RULES
from site_hooks.links import rewritten
from site_hooks.references import commands, described, filled
from tests.lab.report.test_report_browser import BROWSER, NAMES, browse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def api(site: Path) -> str:
    return (site / "reference" / "api.html").read_text()


def section(page: str, name: str) -> str:
    """Return the part of the API page about one public name."""
    start = page.index(f'id="angular_muown.{name}"')
    end = re.search(r'<h[234] id="', page[start:])
    return unescape(page[start : start + end.start()] if end else page[start:])


def arguments(part: str) -> dict[str, str]:
    """Return the arguments that a part of the API page describes."""
    item = r'<tr class="doc-section-item">\s*<td>\s*<code>\**(\w+)</code>\s*</td>'
    text = r'<div class="doc-md-description">\s*(.*?)\s*</div>'
    return dict(re.findall(f"{item}.*?{text}", part, re.DOTALL))


def test_every_public_name_has_an_anchor(api: str) -> None:
    for name in angular_muown.__all__:
        assert f'id="angular_muown.{name}"' in api, name


@pytest.mark.parametrize("name", angular_muown.__all__)
def test_every_argument_is_described(api: str, name: str) -> None:
    value = getattr(angular_muown, name)
    if name == "Group":  # a TypedDict: its keys are in groups-and-state.md
        return
    shown = arguments(section(api, name))
    for argument in inspect.signature(value).parameters:
        assert shown.get(argument), argument


def test_for_model_lists_the_arguments_of_the_plan_and_of_the_constructor(api: str) -> None:
    shown = arguments(section(api, "AngularMuown.for_model"))
    for argument in inspect.signature(angular_muown.AngularMuown.for_model).parameters:
        assert shown.get(argument), argument


def test_every_command_is_listed_and_every_option_described(site: Path) -> None:
    page = unescape((site / "reference" / "cli.html").read_text())
    for name, parser in commands().items():
        assert f'id="{name}"' in page, name
        for action in parser._actions:
            assert action.help, f"{name} {action.dest}"
            for option in action.option_strings:
                assert option in page, f"{name} {option}"


def test_every_key_of_a_run_is_described(site: Path) -> None:
    page = (site / "reference" / "run-spec.html").read_text()
    rows = dict(re.findall(r"<td><code>([\w.]+)</code></td>(.*?)</tr>", page, re.DOTALL))
    for key in keys(Spec()):
        assert re.search(r"<td>[^<].*</td>\s*$", rows[key]), key


def test_every_experiment_is_listed_with_its_hours(site: Path) -> None:
    page = (site / "reference" / "experiments.html").read_text()
    page = page[page.index('id="experiments"') :]
    rows = re.findall(r"<td><code>([\w-]+)</code></td>(.*?)</tr>", page, re.DOTALL)
    for name in EXPERIMENTS:
        assert sum(row == name for row, _ in rows) == 2, name
    teaser = [cells for row, cells in rows if row == "teaser"]
    hours = [float(re.findall(r"<td>([^<]*)</td>", cells)[-1]) for cells in teaser]
    assert hours == pytest.approx([0.53, 121], rel=0.05)  # scale s, paper


def test_every_group_key_is_listed(site: Path) -> None:
    page = (site / "reference" / "groups-and-state.html").read_text()
    for key in RULES:
        assert f"<code>{key}</code>" in page, key


def test_the_site_requests_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|link)\b[^>]*>", path.read_text())
        for tag in tags:
            source = re.search(r'\b(?:src|href)="(https?:)?//', tag)
            assert not source or 'rel="canonical"' in tag, f"{path.name}: {tag}"


def test_a_link_out_of_docs_leads_to_a_page_with_the_file(site: Path) -> None:
    page = (site / "explanation" / "method.html").read_text()
    (link,) = set(re.findall(r'href="(\.\./source/src/angular_muown/update\.py\.html)"', page))
    shown = unescape(re.sub(r"<[^>]+>", "", (site / "explanation" / link).read_text()))
    assert "def update(" in shown


def test_links_are_rewritten_for_the_site_but_not_in_code() -> None:
    text = "[a](../../src/x.py#L1) [b](theory.md) [c](https://x.org) `[d](../../src/y.py)`"
    assert rewritten(text, "docs/explanation/method.md", "explanation/method.md") == (
        "[a](../source/src/x.py.md#L1) [b](theory.md) [c](https://x.org) `[d](../../src/y.py)`"
    )


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        filled("<!-- generate: nonsense -->")


def test_descriptions_are_read_from_docstrings() -> None:
    assert described("Do.\n\nArgs:\n    x: a number\n        of things.\n")["x"] == (
        "a number of things."
    )


def test_no_formula_is_left_as_text(site: Path) -> None:
    for path in site.rglob("*.html"):
        if "source" not in path.relative_to(site).parts:
            body = path.read_text().partition("<article")[2].partition("</article>")[0]
            text = re.sub(r"<(code|pre|script)\b.*?</\1>", "", body, flags=re.DOTALL)
            assert "$" not in text, f"{path.name}: {text[max(0, text.find('$') - 60) :][:120]}"


@pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is on PATH: apt-get install chromium"
)
@pytest.mark.parametrize("page", ["explanation/method", "explanation/theory"])
def test_formulas_are_rendered(site: Path, tmp_path: Path, page: str) -> None:
    shown = browse(tmp_path, site / f"{page}.html", "--dump-dom", "--virtual-time-budget=5000")
    assert shown.count('class="katex"') == shown.count('class="arithmatex"') > 50
    assert "katex-error" not in shown
