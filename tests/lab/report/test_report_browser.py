"""The page in a real browser: every figure is visible, sorting works, nothing fails."""

import html
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from angular_lab import run_folder
from angular_lab.report.report import make_report
from tests.lab.report.made import choosing, paper_teaser, spec_of, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip
FRAME = """<iframe src="{}" style="width: {}px; height: 800px"></iframe><script>
addEventListener('message', e => {{ document.documentElement.dataset.selfcheck = e.data; }});
</script>"""
SELF_CHECK = Path(__file__).with_name("self_check.js").read_text()

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is on PATH: apt-get install chromium"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "git_state", dict)
        paper_teaser(folder / "runs" / "teaser-s", (0, 1))
        choosing(folder / "runs" / "small", experiment="aux-lr")
        for name in ("muon", "muown"):
            write_run(folder / "runs" / name, spec_of(name), 3.1)
    return make_report([folder / "runs"], folder / "out")


def browse(tmp_path: Path, page: Path, *options: str) -> str:
    assert BROWSER is not None
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [BROWSER, *QUIET, profile, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def dump(tmp_path: Path, page: Path, *options: str) -> str:
    return browse(tmp_path, page, "--virtual-time-budget=2000", "--dump-dom", *options)


def copy(tmp_path: Path, page: Path, end: str = "", check: bool = True) -> Path:
    """Copy the page, with the self-check in its head and more at its end."""
    script = f"<head><script>{SELF_CHECK}</script>" if check else "<head>"
    target = tmp_path / "copy.html"
    target.write_text(page.read_text().replace("<head>", script, 1) + end)
    return target


def result_in(text: str) -> dict[str, Any]:
    found = re.search(r'data-selfcheck="([^"]*)"', text)
    assert found is not None, text[:500]
    return json.loads(html.unescape(found[1]))


def check(tmp_path: Path, page: Path, *options: str) -> dict[str, Any]:
    """Return what the self-check finds on the page."""
    return result_in(dump(tmp_path, copy(tmp_path, page), *options))


@pytest.mark.parametrize("width", [1280, 500])
def test_figures_tables_and_script(tmp_path: Path, page: Path, width: int) -> None:
    result = check(tmp_path, page, f"--window-size={width},900")
    assert result["errors"] == []
    in_short, sweeps, single_runs = 1, 6 + 7, 4
    assert (result["figures"], result["hidden"]) == (in_short + sweeps + single_runs, 0)
    assert result["clicks"] > 100
    assert result["wrong"] == 0  # every header sorts up, then down
    assert result["overflow"] <= 0  # wide tables scroll inside their own box
    assert (result["repeated"], result["lost"]) == (0, 0)  # ids, links of the contents
    assert result["current"] == "#short"  # the contents mark what is being read
    assert result["folded"] == (width < 900)  # at the side, or a bar at the top
    assert result["cut"] == 0  # the result is readable without scrolling sideways


def test_the_contents_follow_the_reader_and_links_open_tables(tmp_path: Path, page: Path) -> None:
    target = copy(tmp_path, page)
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(f"{target.name}#small-pairs", 1000))
    result = result_in(dump(tmp_path, frame))
    assert result["current"] == "#small-sweep--tables"
    assert result["opened"] == ["small-pairs", "single-runs-1-summary"]


def test_the_order_of_rows_after_clicks(tmp_path: Path, page: Path) -> None:
    """As the document has it, without the self-check."""
    for clicks, expected in (
        ([1], ["muown", "normuon", "adamw"]),  # 1.62, 1.86, 2.15
        ([1, 1], ["adamw", "normuon", "muown"]),
        ([1, 1, 0], ["adamw", "muown", "normuon"]),
    ):
        buttons = "document.querySelectorAll('#teaser-s-speed-up th button')"
        script = f"<script>for (const i of {clicks}) {buttons}[i].click()</script>"
        text = dump(tmp_path, copy(tmp_path, page, script, check=False))
        box = text[text.index('id="teaser-s-speed-up"') :].partition("</table>")[0]
        assert re.findall(r'<tr><td class="text">(\w+)</td>', box) == expected


def test_a_phone(tmp_path: Path, page: Path) -> None:
    """A headless window is at least 500 px wide; a frame can be narrower."""
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(copy(tmp_path, page).name, 390))
    result = result_in(dump(tmp_path, frame))
    assert (result["hidden"], result["overflow"], result["errors"]) == (0, 0, [])
    assert (result["cut"], result["folded"]) == (0, True)
    assert result["letters"] >= 10  # pixels, of the smallest text in a figure


def test_the_check_finds_failures(tmp_path: Path, page: Path) -> None:
    """A script that fails, and a figure without a size."""
    broken = copy(tmp_path, page, "<script>missing()</script>")
    broken.write_text(broken.read_text().replace("<figure", "<figure style='display: none'", 1))
    result = result_in(dump(tmp_path, broken))
    assert result["hidden"] == 1
    assert "missing is not defined" in result["errors"][0]


def test_light_and_dark(tmp_path: Path, page: Path) -> None:
    corners = {}
    for scheme in ("light", "dark"):
        style = f"<style>:root {{ color-scheme: {scheme}; }}</style>"
        screenshot = tmp_path / f"{scheme}.png"
        options = "--window-size=1280,900", f"--screenshot={screenshot}"
        browse(tmp_path, copy(tmp_path, page, style, check=False), *options)
        assert struct.unpack(">II", screenshot.read_bytes()[16:24]) == (1280, 900)
        corners[scheme] = _corner(screenshot)
    assert min(corners["light"]) > 240
    assert max(corners["dark"]) < 50


def _corner(picture: Path) -> list[float]:
    from matplotlib.image import imread

    return [255 * float(x) for x in imread(picture)[2, 2, :3]]
