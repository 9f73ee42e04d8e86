"""The evidence pages name sources that exist, and keep to the rules of the documentation."""

import ast
import re
from pathlib import Path

import pytest

from evidence.kept import ROOT

PAGES = sorted((ROOT / "docs" / "evidence").glob("*.md"))
CLAIMS = ROOT / "docs" / "evidence" / "protocol.md"
COMMENT = re.compile(r"<!--.*?-->")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def _claims() -> dict[str, str]:
    """Return the sources of every claim of the README."""
    _, section = CLAIMS.read_text().split("## What the README claims", 1)
    rows = (line.split(" | ", 1) for line in section.splitlines() if line.startswith("| "))
    claims = {claim.removeprefix("| "): sources for claim, sources in rows}
    return {claim: sources for claim, sources in claims.items() if claim not in ("claim", "---")}


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("claim", _claims())
def test_every_claim_has_sources_that_exist(claim: str) -> None:
    sources = re.findall(r"`([^`]+)`", _claims()[claim])
    assert sources, "name a kept result or a test"
    for source in sources:
        file, _, test = source.partition("::")
        path = ROOT / file
        assert path.is_file(), f"{file} does not exist"
        assert test or not file.startswith("tests/"), f"{source}: name the test"
        assert not test or test in _functions(path), f"{file} has no {test}"


def _paragraphs(text: str) -> list[str]:
    """Return paragraphs and list items, without tables, code, comments and the URLs of links."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = LINK.sub(r"\1", COMMENT.sub("", text))
    blocks = re.split(r"\n\s*\n|\n(?=- )", text)
    return [block for block in blocks if not block.lstrip().startswith(("|", "#"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_paragraphs_are_short(page: Path) -> None:
    for paragraph in _paragraphs(page.read_text()):
        assert len(paragraph.split()) <= 90, paragraph


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_measured_numbers_are_in_tables(page: Path) -> None:
    """Prose may quote a few; more than two in a paragraph belong in a table."""
    for paragraph in re.split(r"\n\s*\n", page.read_text()):
        if not paragraph.startswith("|"):
            assert len(re.findall(r"<!--=[^>]+:[^>]*f-->", paragraph)) <= 2, paragraph


def test_the_results_are_one_short_page_that_begins_with_figure_tables_and_goals() -> None:
    lines = (ROOT / "docs" / "evidence" / "results.md").read_text().splitlines()
    assert len(lines) <= 200
    first = [line for line in lines[:60] if line.startswith(("<!-- table", "!["))]
    assert [line.partition(" of every method")[0] for line in first] == [
        "![Validation loss",
        "<!-- table: whole-corpus -->",
        "<!-- table: whole-corpus-pairs -->",
        "<!-- table: goals -->",
    ]


def test_the_page_beyond_the_paper_begins_with_a_figure() -> None:
    lines = (ROOT / "docs" / "evidence" / "beyond.md").read_text().splitlines()
    assert lines[2].startswith("![")


LOSS = "validation loss"


def test_the_speedrun_entry_quotes_its_log() -> None:
    log = (ROOT / "results" / "speedrun_first_100_h200.txt").read_text()
    losses = re.findall(r"step:(\d+)/\d+ val_loss:([\d.]+)", log)
    lines = (ROOT / "examples" / "speedrun" / "README.md").read_text().splitlines()
    rows = [next(x for x in lines if x.startswith(f"| {name} |")) for name in ("step", LOSS)]
    steps, shown = ([cell.strip() for cell in row.split("|")[2:-1]] for row in rows)
    assert [*zip(steps, shown, strict=True)] == [(step, f"{float(x):.3f}") for step, x in losses]
