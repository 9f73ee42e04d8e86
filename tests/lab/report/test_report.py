"""The page: complete, self-contained, and made without torch."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from angular_lab.demo import RUNS, run_demo
from angular_lab.report.report import summary, text_table, write_report
from angular_lab.run_folder import RunFolder
from angular_lab.training.start import train
from tests.lab.runs import tiny


def test_the_page_needs_nothing_from_outside(data, tmp_path) -> None:
    train(tiny(data), tmp_path / "run")
    title, texts = "A title & more", [("H", "<b>")]
    page = write_report([tmp_path / "run"], tmp_path / "out", title, texts, ["Above < all"])
    text = page.read_text()
    assert text.index("Above &lt; all") < text.index("<table")
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
        "from pathlib import Path; from angular_lab.report.report import write_report\n"
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


def test_a_run_by_itself(data, tmp_path) -> None:
    """Its rates, its averages, and angles from where the rate stands still."""
    spec = tiny(data, steps=12, average="0.5", angle_every=1)
    spec = replace(spec, schedule=replace(spec.schedule, warmup=2, decay=0.25))
    train(spec, tmp_path / "run")
    lines = RunFolder(tmp_path / "run").read_metrics()
    found = summary(RunFolder(tmp_path / "run"))
    assert found["aux lr"] == (spec.optim.aux_lr or spec.optim.lr)
    assert found["of the average, 0.5"] == lines[-1]["val_loss_averaged_0.5"]
    first, last = (1e3 * lines[step - 1]["angle_mean"] for step in (3, 9))
    assert found["angle at full rate (mrad)"] == f"{first:.2f} - {last:.2f}"
