"""The page: complete, self-contained, and written without torch."""

import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from angular_lab.demo import RUNS, run_demo
from angular_lab.errors import UserError
from angular_lab.report.read import collect
from angular_lab.report.report import _opening, summary, text_table, write_report
from angular_lab.report.tables import Mark
from angular_lab.run_folder import RunFolder
from tests.lab.report.made import choosing, spec_of, write_lines, write_run


@pytest.mark.usefixtures("drawn")
def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run <i>", spec_of(), 3.0), tmp_path / "out"
    page = write_report([run], out, "A title & more", [("H", "<b> -1")], ["Above < all, at -1"])
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.index("Above &lt; all") < text.index("<table")
    assert text.count("<svg") == 4
    assert "A title &amp; more" in text
    assert "<pre>&lt;b&gt; -1</pre>" in text  # a sample stays as it is
    assert "at −1" in text
    assert ">run &lt;i&gt;</td>" in text
    links = set(re.findall(r"(?:src|href)=[\"']?([^\"' >]+)", text))
    assert all(link.startswith("#") for link in links)
    assert (out / "curves.png").stat().st_size > 10_000
    for name in ("style.css", "page.js"):
        assert (files("angular_lab.report") / "assets" / name).read_text() in text


def test_templates_and_assets_are_in_the_package() -> None:
    """They are found next to the modules, which hatchling packs with everything else there."""
    folder = files("angular_lab.report")
    names = {item.name for part in ("assets", "templates") for item in (folder / part).iterdir()}
    scripts = {"chart.css", "chart.js", "page.js", "style.css"}
    assert names == {"page.html", "parts.html", *scripts}


def test_reports_are_written_without_torch(tmp_path: Path) -> None:
    choosing(tmp_path / "runs" / "small")
    run = write_run(tmp_path / "runs" / "muon", spec_of("muon"), 3.1)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from angular_lab.report.report import make_report, write_report\n"
        f"write_report([Path({str(run)!r})], Path({str(tmp_path / 'out')!r}), 'x')\n"
        f"make_report([Path({str(tmp_path / 'runs')!r})], Path({str(tmp_path / 'out')!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_of_write_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs"):
        write_report([], tmp_path, "x")
    with pytest.raises(UserError, match="is not a run folder"):
        write_report([tmp_path], tmp_path, "x")


def test_text_tables_are_aligned() -> None:
    table = text_table(
        [
            {"name": "a", "loss": 1.23456, "steps": 12_000},
            {"name": "longer", "loss": None, "steps": Mark(7, text="7*")},
        ]
    )
    assert table.splitlines() == [
        "name     loss   steps",
        "a       1.235  12,000",
        "longer      -      7*",
    ]


def test_the_demo_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = run_demo(tmp_path / "demo", steps=2)
    assert page.exists()
    printed = capsys.readouterr().out
    assert all(name in printed for name, *_ in RUNS)
    assert "before training" in printed


@pytest.mark.parametrize(
    ("kind", "first", "last"), [("wsd", 3, 9), ("constant", 3, 12), ("cosine", 1, 12)]
)
def test_the_summary_of_a_run(tmp_path: Path, kind: str, first: int, last: int) -> None:
    """Its angles are those of the constant phase, where it has one."""
    spec = spec_of(steps=12, average=(0.5,))
    spec = replace(spec, schedule=replace(spec.schedule, kind=kind, warmup=2, decay=0.25))
    lines = [{"step": step, "loss": 3.0, "angle_mean": 1e-3 * step} for step in range(1, 13)]
    lines[-1] |= {"val_loss": 2.5, "val_loss_averaged_0.5": 2.25}
    write_lines(tmp_path / "run", spec, lines)
    values = summary(RunFolder(tmp_path / "run"))
    assert values["aux lr"] == spec.optim.lr  # not set: as lr
    assert (values["validation loss"], values["of the average, 0.5"]) == (2.5, 2.25)
    assert values["angle at full learning rate (mrad)"] == f"{first:.2f} to {last:.2f}"


def test_the_opening_does_not_count_one_sweep_of_one(tmp_path: Path) -> None:
    sweeps, _ = collect([choosing(tmp_path / "small")], [])
    edge = "best value is at the edge of its grid, so a wider one may change the result: "
    assert f"A {edge}{sweeps[0].experiment}." in _opening(sweeps, []).sentences
    several = _opening([*sweeps, *sweeps], []).sentences
    assert any(text.startswith(f"In 2 of 2 sweeps a {edge}") for text in several)
