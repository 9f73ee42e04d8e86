import tarfile
from pathlib import Path

import pytest

from angular_lab.report.report import make_report
from tests.evidence.kept import ROOT, Losses, cells


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On the kept runs, as `make evidence` makes it."""
    folder = tmp_path_factory.mktemp("evidence")
    for archive in sorted((ROOT / "results" / "s").glob("*.tar.xz")):
        with tarfile.open(archive) as content:
            content.extractall(folder / "runs", filter="data")
    make_report([folder / "runs"], folder)
    return folder


@pytest.fixture(scope="session")
def losses(report: Path) -> Losses:
    """Of the comparison, by line, rate, seed and horizon."""
    return {
        (row["line"], float(row["lr"]), row["seed"], column.replace(" tokens", "")): float(value)
        for row in cells(report, "teaser-s-runs")
        for column, value in row.items()
        if value and "tokens" in column and column != "tokens/s"
    }
