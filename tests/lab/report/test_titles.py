"""What a report calls itself: the runs of its own folder, not the paper."""

import re
from pathlib import Path

from angular_lab.report.report import make_report
from tests.lab.report.made import choosing, spec_of, write_run


def heading(page: Path) -> str:
    text = page.read_text()
    title = re.search(r"<title>(.*?)</title>", text)
    first = re.search(r"<h1>(.*?)</h1>", text)
    assert title
    assert first
    assert title[1] == first[1]
    return title[1]


def test_a_page_about_runs_names_their_optimizers(tmp_path: Path) -> None:
    for name in ("adamw", "muon"):
        write_run(tmp_path / "runs" / name, spec_of(name), 3.0)
    page = make_report([tmp_path / "runs"], tmp_path / "out")
    assert heading(page) == "2 runs: adamw, muon"
    text = page.read_text()
    assert "These runs belong to no sweep" in text
    assert "AngularMuown paper" not in text
    assert "holds if" not in text, "nothing is judged"
    one = make_report([tmp_path / "runs" / "muon"], tmp_path / "one")
    assert heading(one) == "1 run: muon"


def test_a_page_about_a_sweep_asks_its_question(tmp_path: Path) -> None:
    page = make_report([choosing(tmp_path / "a")], tmp_path / "out")
    assert heading(page) == "A sweep for a test"
    choosing(tmp_path / "b", experiment="width")
    both = make_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert heading(both) == "2 sweeps: teaser, width"
    assert "These runs belong to no sweep" not in both.read_text()
