"""The page: complete, self-contained, and made without torch."""

import re
import subprocess
import sys

import pytest

from angular_lab.demo import RUNS, run_demo
from angular_lab.report import text_table, write_report
from angular_lab.runs import train
from tests.angular_lab.runs import tiny


def test_the_page_needs_nothing_from_outside(data, tmp_path) -> None:
    train(tiny(data), tmp_path / "run")
    page = write_report([tmp_path / "run"], tmp_path / "out", "A title & more", [("H", "<b>")])
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "A title &amp; more" in text
    assert "<pre>&lt;b&gt;</pre>" in text
    assert "angular_muown" in text
    links = set(re.findall(r"(?:src|href)=[\"']?([^\"' >]+)", text))
    assert all(link.startswith("#") for link in links)
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000


def test_reports_do_without_torch(data, tmp_path) -> None:
    train(tiny(data), tmp_path / "run")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from angular_lab.report import write_report\n"
        f"write_report([Path({str(tmp_path / 'run')!r})], Path({str(tmp_path / 'out')!r}), 'x')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_input(tmp_path) -> None:
    with pytest.raises(ValueError, match="no runs"):
        write_report([], tmp_path, "x")
    with pytest.raises(ValueError, match="no run folder"):
        write_report([tmp_path], tmp_path, "x")


def test_tables_line_up() -> None:
    table = text_table([{"name": "a", "loss": 1.23456}, {"name": "longer", "loss": None}])
    assert table.splitlines() == ["name    loss", "a       1.235", "longer  -"]


def test_the_demo_in_miniature(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    page = run_demo(tmp_path / "demo", steps=2)
    assert page.exists()
    shown = capsys.readouterr().out
    assert all(name in shown for name, *_ in RUNS)
    assert "before training" in shown
