"""Rules for every page of the documentation."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WORDS = 90  # of a paragraph or a list item
# Words of earlier pages that a native speaker would not write.
UNIDIOMATIC = re.compile(
    r"\b(beside|cool-down|for ever|goes on|nobody|somebody|whoever|whole numbers?|so few|"
    r"lies? over|spread over|a rate apart|(?<!there )is no (?!longer|other|more)\w+)\b",
    re.IGNORECASE,
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _prose(path: Path) -> str:
    """Return the text of a page without code blocks, comments and the addresses of links."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_paragraphs_are_short(page: Path) -> None:
    text = re.sub(r"\$[^$]*\$", "x", _prose(page))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*] |\d+\. )", text):
        if not paragraph.lstrip().startswith(("|", "#", "<")):
            assert len(paragraph.split()) <= WORDS, paragraph


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=_name)
def test_the_english_is_idiomatic(page: Path) -> None:
    assert UNIDIOMATIC.findall(_prose(page)) == []


SOURCES = [path for path in sorted((ROOT / "src").rglob("*.py")) if path.name != "convert.py"]


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_the_english_of_messages_and_docstrings_is_idiomatic(path: Path) -> None:
    """convert.py reads old files, which have old words."""
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert [UNIDIOMATIC.findall(text) for text in texts if UNIDIOMATIC.search(text)] == []


def _tests() -> set[str]:
    """Return the names of all test functions."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_test_that_a_page_names_exists() -> None:
    functions = _tests()
    files = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for page in PAGES:
        for name in re.findall(r"`(?:[\w/.]*(?:/|::))?(test_\w+(?:\.py)?)`", page.read_text()):
            known = files if name.endswith(".py") else functions
            assert name in known, f"{_name(page)}: {name}"


def test_the_method_names_a_test_for_every_line_of_the_algorithm() -> None:
    text = (ROOT / "docs" / "explanation" / "method.md").read_text()
    _, _, rest = text.partition("## Algorithm 1, line by line")
    rows = [line for line in rest.partition("## Notation")[0].splitlines() if "$" in line]
    table = [line for line in rows if line.startswith("| $")]
    assert len(table) == 8  # the lines of the paper's Algorithm 1
    for line in table:
        assert re.search(r"`test_\w+`", line), line
