"""The pictures of the how-to pages are drawn by evidence/pictures.py, and all of them are shown."""

from pathlib import Path
from xml.etree import ElementTree

from evidence.pictures import FOLDER, draw


def test_the_committed_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    drawn = draw(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in FOLDER.glob("*.svg")}
    for path in drawn:
        assert _size(path) == _size(FOLDER / path.name)


def _size(path: Path) -> tuple[str | None, str | None]:
    root = ElementTree.parse(path).getroot()
    return root.get("width"), root.get("height")


def test_every_picture_is_shown_on_a_page() -> None:
    pages = "".join(path.read_text() for path in FOLDER.parents[1].rglob("*.md"))
    for path in FOLDER.glob("*.svg"):
        assert f"figures/howto/{path.name}" in pages, path.name
