"""The page in a real browser: every figure is seen, sorting works, nothing fails."""

import html
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from angular_lab.report.report import make_report
from tests.lab.report.test_report_sweeps import (
    choosing,
    no_git,  # noqa: F401  (a fixture)
    paper_teaser,
    spec_of,
    write_run,
)

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is on PATH: apt-get install chromium"
)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    paper_teaser(tmp_path / "runs" / "teaser-s", (0, 1))
    choosing(tmp_path / "runs" / "small", experiment="aux-lr")
    for name in ("muon", "muown"):
        write_run(tmp_path / "runs" / name, spec_of(name), 3.1)
    return make_report([tmp_path / "runs"], tmp_path / "out")


def browse(tmp_path: Path, address: str, *options: str) -> str:
    assert BROWSER is not None
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [BROWSER, *QUIET, profile, *options, address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def check(tmp_path: Path, page: Path, *options: str) -> dict[str, Any]:
    """What the page finds when it looks at itself."""
    address = f"{page.as_uri()}#selfcheck"
    text = browse(tmp_path, address, "--virtual-time-budget=2000", "--dump-dom", *options)
    found = re.search(r'data-selfcheck="([^"]*)"', text)
    assert found is not None, text[:500]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("width", [1280, 500])
def test_figures_tables_and_script(tmp_path: Path, page: Path, width: int) -> None:
    result = check(tmp_path, page, f"--window-size={width},900")
    assert result["errors"] == []
    assert (result["figures"], result["hidden"]) == (5 + 6 + 4, 0)
    assert result["clicks"] > 100
    assert result["wrong"] == 0  # every header sorts up, then down
    assert result["overflow"] <= 0  # wide tables scroll inside their own box
    assert (result["repeated"], result["lost"]) == (0, 0)  # ids, links of the contents


def test_sorting_by_the_eye_of_python(tmp_path: Path, page: Path) -> None:
    """The order after clicks, read from the document: not the page's own judgement."""
    clicked = page.with_name("clicked.html")
    clicks = "<script>for (const i of [1, 1, 0]) document.querySelectorAll("
    clicks += "'#teaser-s-speed-up th button')[i].click()</script>"
    for script, expected in (
        (clicks.replace("[1, 1, 0]", "[1]"), ["muown", "normuon", "adamw"]),  # 1.62, 1.86, 2.15
        (clicks.replace("[1, 1, 0]", "[1, 1]"), ["adamw", "normuon", "muown"]),
        (clicks, ["adamw", "muown", "normuon"]),
    ):
        clicked.write_text(page.read_text() + script)
        text = browse(tmp_path, clicked.as_uri(), "--virtual-time-budget=2000", "--dump-dom")
        box = text[text.index('id="teaser-s-speed-up"') :].partition("</table>")[0]
        assert re.findall(r'<tr><td class="text">(\w+)</td>', box) == expected


def test_a_phone(tmp_path: Path, page: Path) -> None:
    """A headless window is never narrower than 500 px; a frame can be."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="{page.as_uri()}#selfcheck" style="width: 390px; height: 800px"></iframe>'
        "<script>addEventListener('message', e => document.body.dataset.found = e.data)</script>"
    )
    reporting = page.with_name("reporting.html")
    reporting.write_text(
        page.read_text()
        + "<script>addEventListener('load', () => parent.postMessage("
        + "document.documentElement.dataset.selfcheck, '*'))</script>"
    )
    frame.write_text(frame.read_text().replace("index.html", "reporting.html"))
    text = browse(tmp_path, frame.as_uri(), "--virtual-time-budget=2000", "--dump-dom")
    found = re.search(r'data-found="([^"]*)"', text)
    assert found is not None, text[-500:]
    result = json.loads(html.unescape(found[1]))
    assert (result["hidden"], result["overflow"], result["errors"]) == (0, 0, [])


def test_a_failure_would_be_seen(tmp_path: Path, page: Path) -> None:
    """The check itself: a script that fails, and a figure of no size."""
    broken = page.with_name("broken.html")
    text = page.read_text().replace("<figure", "<figure style='display: none'", 1)
    broken.write_text(text + "<script>missing()</script>")
    result = check(tmp_path, broken)
    assert result["hidden"] == 1
    assert "missing is not defined" in result["errors"][0]


def test_light_and_dark(tmp_path: Path, page: Path) -> None:
    corners = {}
    for theme in ("light", "dark"):
        themed = page.with_name(f"{theme}.html")
        themed.write_text(page.read_text().replace("<html", f'<html data-theme="{theme}"', 1))
        shot = tmp_path / f"{theme}.png"
        browse(tmp_path, themed.as_uri(), "--window-size=1280,900", f"--screenshot={shot}")
        assert struct.unpack(">II", shot.read_bytes()[16:24]) == (1280, 900)
        corners[theme] = _corner(shot)
    assert min(corners["light"]) > 240
    assert max(corners["dark"]) < 50


def _corner(picture: Path) -> list[float]:
    from matplotlib.image import imread

    return [255 * float(x) for x in imread(picture)[2, 2, :3]]
