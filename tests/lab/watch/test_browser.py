"""The page of `angular-lab watch` and a report, used in a real browser as a person uses them."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import cos, sqrt
from pathlib import Path
from statistics import stdev
from typing import Any
from urllib.parse import urlsplit

import pytest

from angular_lab import run_folder
from angular_lab.report.report import make_report
from angular_lab.watch.server import make_server
from tests.browser import Page, launch, needs_browser
from tests.lab.report.made import spec_of, write_lines, write_sweep
from tests.lab.runs import SMALL

pytestmark = needs_browser
RUNS = ("muon", "adamw", "angular_muown")
PLOT = "[data-chart=loss] .chart-plot svg"
ALT = 1
ENDLESS = ("steps=1000000", "eval_every=none", "save_every=none", "angle_every=none")


def lines_of(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose losses differ and wiggle."""
    root = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "git_state", dict)
        for i, name in enumerate(RUNS):
            spec, every = spec_of(name), 10 if name != "adamw" else 20
            steps = range(every, spec.steps + 1, every)
            lines = [
                {"step": s, "loss": 3 + i + 100 / s + 0.1 * cos(s * (i + 1)), "lr": 0.02,
                 "grad_norm": 1 / s, "angle_mean": 0.1 / s, "row_norm_mean": s**0.5}
                for s in steps
            ]  # fmt: skip
            write_lines(root / name, spec, lines, speed=1000.0 * (i + 1))
    return root


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "git_state", dict)
        # With one learning rate each, all seeds judge: -0.06, -0.08 and -0.10 after 200 steps.
        ours = {0.02: {s: {100: 3.1, 200: 3.0 + 0.01 * s} for s in range(3)}}
        theirs = {0.002: {s: {100: 3.2, 200: 3.06 + 0.03 * s} for s in range(3)}}
        methods = {"adamw": ("adamw", theirs), "angular_muown": ("angular_muown", ours)}
        write_sweep(folder / "small", methods)
    return make_report([folder / "small"], folder / "out")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with launch(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with make_server([folder], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def url(store: Path) -> Iterator[str]:
    with serving(store) as url:
        yield url


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """A window of usual size. Nothing may fail in it, and no request may leave the machine."""
    browser.resize(1280, 900)
    browser.errors.clear()
    browser.requests.clear()
    yield browser
    assert browser.errors == []
    assert browser.overflow <= 0
    hosts = {urlsplit(request).hostname for request in browser.requests}
    assert hosts <= {None, "", "localhost", "127.0.0.1"}


def watch(page: Page, url: str, hash: str = "") -> None:
    """Open the page and wait for its curves."""
    page.open(f"{url}{hash}")
    page.wait_for(f"document.querySelector('{PLOT} .curve')")
    page.settle()


def tooltip(page: Page, chart: str) -> tuple[str, dict[str, float]]:
    """Return the heading of the tooltip, and the values by name in the order shown."""
    tip = f"document.querySelector({json.dumps(chart)}).querySelector('.chart-tip')"
    assert page(f"getComputedStyle({tip}).display") != "none"
    rows = page(
        f"Array.from({tip}.querySelectorAll('.row'), row => "
        "[row.querySelector('.name').textContent, Number(row.querySelector('b').dataset.value)])"
    )
    return page(f"{tip}.querySelector('.chart-x').textContent"), dict(rows)


def drawn(page: Page, chart: str = "[data-chart=loss]") -> list[str]:
    selector = json.dumps(f"{chart} .series")
    return page(f"Array.from(document.querySelectorAll({selector}), x => x.dataset.series)")


def ticks(page: Page, chart: str) -> list[str]:
    selector = json.dumps(f"{chart} .ticks text")
    return page(f"Array.from(document.querySelectorAll({selector}), x => x.textContent)")


def address(page: Page) -> str:
    """Return what follows the #, once it follows the view."""
    page("new Promise(done => setTimeout(done, 200))")
    return page("location.hash")


def zoom_of(address: str) -> tuple[float, float]:
    ((low, high),) = re.findall(r"zoom=([\d.]+?)\.\.([\d.]+)", address)
    return float(low), float(high)


# -- watch ------------------------------------------------------------------------------------


def test_hover_shows_all_values_as_logged(page: Page, url: str, store: Path) -> None:
    watch(page, url)
    page.hover(PLOT, 0.53)
    heading, values = tooltip(page, "[data-chart=loss]")
    step = int(heading.replace(",", "").split()[0])
    assert heading == f"{step:,} steps"
    logged = {name: lines_of(store / name) for name in RUNS}
    for name in RUNS:
        (value,) = (x for label, x in values.items() if label.startswith(f"{name} "))
        if step in logged[name]:
            assert value == pytest.approx(logged[name][step]["loss"], rel=1e-6)
        else:  # adamw logged every other step: between its points
            near = (logged[name][step + side]["loss"] for side in (-10, 10))
            assert value == pytest.approx(sum(near) / 2, rel=1e-6)
    assert list(values.values()) == sorted(values.values(), reverse=True)
    tip = "document.querySelector('[data-chart=loss] .chart-tip').textContent"
    assert page(tip).count("≈") == sum(step not in logged[name] for name in RUNS)
    assert page("document.querySelectorAll('[data-chart=lr] .cross').length") == 1  # together


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run, three that ended after a few steps, and one that diverged there."""
    root = tmp_path_factory.mktemp("unequal")
    runs = {"long": (1700, -1.0), "a": (4, -1.0), "b": (20, -1.0), "c": (30, -1.0), "d": (20, 3.0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "git_state", dict)
        for name, (steps, power) in runs.items():
            every = 10 if name == "long" else 1
            lines = [
                {"step": s, "loss": 3 + 8 * (s + 1 if power > 0 else 1 + s / 50) ** power}
                for s in range(every, steps + 1, every)
            ]
            write_lines(root / name, spec_of(steps=steps), lines)
    return root


def test_short_runs_are_visible(page: Page, unequal: Path) -> None:
    """Next to a long run they end in the first tenth, above its losses, and take a few pixels."""
    with serving(unequal) as url:
        watch(page, url)
        page.wait_for(f"document.querySelectorAll('{PLOT} .series').length === 5")
        ends = page(f"""(() => {{
          const {{box}} = charts.get('loss'), plot = document.querySelector('{PLOT}');
          return Array.from(plot.querySelectorAll('.series'), series => {{
            const marks = Array.from(series.querySelectorAll('.mark'), mark => mark.getCTM().f);
            return [series.dataset.series, marks.some(y => y >= box.top && y <= box.bottom)];
          }});
        }})()""")
        assert {name.split(", ")[-1]: seen for name, seen in ends} == {
            "long": False, "a": True, "b": True, "c": True, "d": True,
        }  # fmt: skip
        assert page("charts.get('loss').sy.invert(charts.get('loss').box.top)") < 100


def test_runs_with_equal_titles_show_what_differs(page: Page, tmp_path: Path) -> None:
    """A store's digest, the folder's name, or its path where two folders have the same name."""
    folders = ("muon-lr0.02-seed0-0123abcd", "again", "one/twin", "two/twin")
    for name in folders:
        write_lines(tmp_path / name, spec_of("muon"), [{"step": 10, "loss": 3.0}])
    write_lines(tmp_path / "other", spec_of("adamw"), [{"step": 10, "loss": 3.0}])
    with serving(tmp_path) as url:
        watch(page, url)
        shown = page("Array.from(document.querySelectorAll('#runs .which'), x => x.innerText)")
    assert sorted(shown) == ["", "0123abcd", "again", "one/twin", "two/twin"]


def test_keys_move_the_crosshair(page: Page, url: str, store: Path) -> None:
    watch(page, url)
    page(f"document.querySelector('{PLOT}').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    heading, values = tooltip(page, "[data-chart=loss]")
    assert heading == "30 steps"
    assert min(values.values()) == pytest.approx(lines_of(store / "muon")[30]["loss"], rel=1e-6)


def test_selection_and_its_address(page: Page, url: str) -> None:
    watch(page, url)
    assert len(drawn(page)) == 3
    page.click("[data-run=muon] input")
    assert len(drawn(page)) == 2
    assert not any(name.startswith("muon") for name in drawn(page))
    page.click("[data-run=adamw] label", modifiers=ALT)
    assert [name.split()[0] for name in drawn(page)] == ["adamw"]
    assert address(page) == "#runs=adamw"
    page.set_value("#sort", "name")
    listed = page("Array.from(document.querySelectorAll('#runs li'), x => x.dataset.run)")
    assert listed == ["adamw", "angular_muown", "muon"]
    page.set_value("#filter", "0.02 angular")
    assert page("document.querySelectorAll('#runs li').length") == 1
    watch(page, url, address(page))
    assert [name.split()[0] for name in drawn(page)] == ["adamw"]
    assert page("document.querySelectorAll('#runs li').length") == 1


def test_zoom_is_that_of_all_charts_and_of_the_address(page: Page, url: str) -> None:
    watch(page, url)
    before = {chart: ticks(page, f"[data-chart={chart}]") for chart in ("loss", "lr")}
    page.drag(PLOT, 0.5, 0.75)
    zoomed = {chart: ticks(page, f"[data-chart={chart}]") for chart in ("loss", "lr")}
    low, high = zoom_of(address(page))
    assert 150 < low < 230 < 270 < high < 330
    assert all(zoomed[chart] != before[chart] for chart in before)
    watch(page, url, address(page))
    assert ticks(page, "[data-chart=loss]") == zoomed["loss"]
    page.hover(PLOT, 0.99)
    heading, _ = tooltip(page, "[data-chart=loss]")
    assert low < int(heading.split()[0]) < high
    page.click(PLOT, count=2)
    assert ticks(page, "[data-chart=loss]") == before["loss"]
    assert address(page) == ""


def test_smoothing_and_axes(page: Page, url: str, store: Path) -> None:
    watch(page, url, "#runs=muon")
    page.set_value("#smooth", 0.8)
    assert "smooth=0.8" in address(page)
    assert page("document.querySelectorAll('[data-chart=loss] .raw').length") == 1
    assert page("document.querySelectorAll('[data-chart=lr] .raw').length") == 0  # not noisy
    page.hover(PLOT, 0.6)
    heading, values = tooltip(page, "[data-chart=loss]")
    step = int(heading.split()[0])
    losses = [line["loss"] for at, line in lines_of(store / "muon").items() if at <= step]
    weights = [0.8**i for i in range(len(losses))]
    mean = sum(w * x for w, x in zip(weights, reversed(losses), strict=True)) / sum(weights)
    assert values["muon 0.02"] == pytest.approx(mean, rel=1e-5)
    page.click("#axis [value=tokens]")
    page.hover(PLOT, 0.6)
    assert tooltip(page, "[data-chart=loss]")[0] == f"{step * 1000:,} tokens"
    page.click("#logx")
    assert "tokens, log" in ticks(page, "[data-chart=loss]")
    page.click("[data-chart=loss] [data-tool=logY]")
    assert page("document.querySelector('[data-chart=loss] .chart-head').textContent").endswith(
        "log"
    )
    view = address(page)
    assert view == "#runs=muon&x=tokens&smooth=0.8&logx=1&logy=loss:1"
    shown = ticks(page, "[data-chart=loss]")
    watch(page, url, view)
    assert ticks(page, "[data-chart=loss]") == shown


def test_a_phone(page: Page, url: str) -> None:
    page.resize(400, 800, mobile=True)
    watch(page, url)
    assert page.overflow <= 0
    assert page("document.querySelector('#side').open") is False
    left, _, width, _ = page.box("[data-chart=loss]")
    assert left < 20
    assert width > 370
    page.tap(PLOT, 0.5)
    _, values = tooltip(page, "[data-chart=loss]")
    assert len(values) == 3
    assert page.overflow <= 0
    page.tap("#zoomin")
    assert "zoom=" in address(page)
    page.tap("#reset")
    assert address(page) == ""
    page.pinch(PLOT, (0.4, 0.6), (0.2, 0.8))
    low, high = zoom_of(address(page))
    assert 100 < low < 150 < 250 < high < 300
    page("document.querySelector('#side').open = true")
    page.tap("[data-run=muon]", hold=0.6)
    assert [name.split()[0] for name in drawn(page)] == ["muon"]


@contextmanager
def training(out: Path, data: Path) -> Iterator[None]:
    """Train until the end of the block."""
    command = [sys.executable, "-m", "angular_lab", "train", "nano", *SMALL, *ENDLESS]
    command += [f"data={data}", "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        try:
            yield
        finally:
            run.terminate()


def test_a_run_that_trains(page: Page, tmp_path: Path, data: Path) -> None:
    """Its points appear without a reload, each of them is sent once, and its end is noticed."""
    count = "curves.get('live')?.series.loss?.[0].length"
    state = "document.querySelector('[data-run=live] .state').textContent"
    with serving(tmp_path) as url:
        page.open(url)
        page.wait_for("!document.querySelector('#message').hidden")
        assert "No runs below" in page("document.querySelector('#message').textContent")
        page("window.isTheSamePage = true")
        with training(tmp_path / "live", data):
            first = page.wait_for(f"{count} > 2 && {count}")
            assert page(state) == "running"
            then = page.wait_for(f"{count} > {first} && {count}")
            assert page("curves.get('live').series.loss[0]") == list(range(1, then + 1))
        page.wait_for(f"{state} === 'stopped'")
        logged = lines_of(tmp_path / "live")
        page.wait_for(f"{count} === {len(logged)}")
        values = page("curves.get('live').series.loss[1]")
        assert values == pytest.approx([line["loss"] for line in logged.values()], rel=1e-6)
        assert page("window.isTheSamePage")
        asked = [x for x in page.requests if "/api/metrics" in x]
        assert [x.endswith("after=0") for x in asked] == [True] + [False] * (len(asked) - 1)
        page.open("about:blank")


def test_a_server_that_ended(page: Page, url: str) -> None:
    watch(page, url)
    page("fetch = () => Promise.reject(new Error('refused'))")
    page("poll()")
    assert "is angular-lab watch still running?" in page("byId('live').textContent")
    assert len(drawn(page)) == 3  # what was seen stays


# -- a report ---------------------------------------------------------------------------------

CURVES = "#fig-small-angles"


def opened(page: Page, report: Path, hash: str = "") -> None:
    page.open(f"{report.as_uri()}{hash}")
    page.wait_for(f"document.querySelector('{CURVES} .chart .curve')")
    page.settle()


def is_visible(page: Page, selector: str) -> bool:
    """True if an element is shown and takes room."""
    element = f"document.querySelector({json.dumps(selector)})"
    style, height = f"getComputedStyle({element})", f"{element}.offsetHeight"
    return page(f"{style}.visibility === 'visible' && {height} > 50")


def test_a_figure_of_a_report(page: Page, report: Path) -> None:
    opened(page, report)
    ours = next((report.parent.parent / "small" / "runs").glob("angular-muown-lr0.02-seed0"))
    assert not is_visible(page, f"{CURVES} .picture")
    page.hover(f"{CURVES} .chart-plot svg", 0.5)
    heading, values = tooltip(page, CURVES)
    step = int(heading.replace(",", "").split()[0]) // 1000
    assert heading == f"{step * 1000:,} tokens"
    expected = lines_of(ours)[step]["angle_mean"]
    assert values["angular_muown"] == pytest.approx(expected, rel=1e-6)
    names = drawn(page, CURVES)
    page.click(f"{CURVES} .chart-legend [data-series=adamw]")
    assert drawn(page, CURVES) == [name for name in names if name != "adamw"]
    page.click(f"{CURVES} .chart-legend [data-series=adamw]", modifiers=ALT)
    assert drawn(page, CURVES) == ["adamw"]
    page.drag(f"{CURVES} .chart-plot svg", 0.4, 0.8)
    page.set_value(f"{CURVES} .chart-tools input", 0.5)
    page.click(f"{CURVES} [data-tool=logY]")  # off: the angle's axis is logarithmic
    view, shown = address(page), ticks(page, CURVES)
    assert view.startswith(f"{CURVES}?hide=angular_muown&smooth=0.5&logy=0&zoom=")
    opened(page, report, view)
    assert drawn(page, CURVES) == ["adamw"]
    assert ticks(page, CURVES) == shown
    page.click(f"{CURVES} [data-tool=reset]")
    assert drawn(page, CURVES) == names
    assert address(page) == ""


def test_runs_and_their_mean_share_a_row(page: Page, report: Path) -> None:
    opened(page, report)
    figure = "#fig-small-horizons"
    page.hover(f"{figure} .chart-plot svg", 0.75)  # the last horizon
    heading, values = tooltip(page, figure)
    assert heading == "200,000 tokens"
    assert values == pytest.approx({"adamw": 3.09, "angular_muown": 3.01})
    runs = f"document.querySelector('{figure} .chart-tip i').textContent"
    assert page(runs) == "3.0600 3.0900 3.1200"


def test_the_intervals_of_a_report(page: Page, report: Path) -> None:
    opened(page, report)
    figure = "#fig-small-differences"
    page.hover(f"{figure} .chart-plot svg", 0.5, 0.6)  # the second of two rows
    name, _ = tooltip(page, figure)
    assert re.fullmatch(r"(against )?adamw, 200k", name)
    text = page(f"document.querySelector('{figure} .chart-tip b').textContent")
    half = 4.3027 * stdev([-0.06, -0.08, -0.10]) / sqrt(3)  # Student's, two degrees of freedom
    assert text == f"−0.0800 [−{0.08 + half:.4f}, −{0.08 - half:.4f}]"


def test_headings_of_rows_are_not_on_the_band(page: Page, report: Path) -> None:
    opened(page, report)
    heading, band = page("""['.heading', '.band'].map(name => {
      const drawn = document.querySelector(`#fig-small-differences ${name}`);
      const {top, bottom} = drawn.getBoundingClientRect();
      return [top, bottom];
    })""")
    assert heading[1] < band[0] + 2  # pixels, of the room below the letters
    assert band[1] - band[0] > 40  # two rows


def test_a_report_on_a_phone_on_paper_and_without_a_script(page: Page, report: Path) -> None:
    page.resize(400, 800, mobile=True)
    opened(page, report)
    page.tap(f"{CURVES} .chart-plot svg")
    assert tooltip(page, CURVES)[1]
    assert page.overflow <= 0
    page.resize(1280, 900)
    page.send("Emulation.setEmulatedMedia", media="print")
    assert is_visible(page, f"{CURVES} .picture")
    assert not is_visible(page, f"{CURVES} div.chart")
    page.send("Emulation.setEmulatedMedia", media="")
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(report.as_uri())
        assert is_visible(page, f"{CURVES} .picture")
        assert page("document.querySelectorAll('div.chart').length") == 0
    finally:
        page.send("Emulation.setScriptExecutionDisabled", value=False)
