"""What README and docs say of our runs is what the kept runs say."""

import csv
import tarfile
from pathlib import Path

import pytest

from angular_lab.report import make_report

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "evidence.md"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the report on the kept runs, as `make evidence` makes it."""
    folder = tmp_path_factory.mktemp("evidence")
    for archive in sorted((ROOT / "results" / "s").glob("*.tar.xz")):
        with tarfile.open(archive) as content:
            content.extractall(folder / "runs", filter="data")
    make_report([folder / "runs"], folder)
    return folder / "tables"


def test_every_table_in_the_docs_is_the_reports(tables: Path) -> None:
    made = {line for path in tables.glob("*.md") for line in path.read_text().splitlines()}
    shown = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    assert shown
    for line in shown:
        assert line in made, "run `make evidence` and copy its table"


def losses(tables: Path, column: str) -> dict[tuple[str, float], float]:
    """By line and rate, on seed 0."""
    rows = csv.DictReader((tables / "teaser-s-runs.csv").read_text().splitlines())
    return {
        (row["line"], float(row["lr"])): float(row[column])
        for row in rows
        if row["seed"] == "0" and row[column]
    }


def test_the_differences_in_the_words_are_those_of_the_runs(tables: Path) -> None:
    late, early = (losses(tables, f"{tokens} tokens") for tokens in ("90M", "22.5M"))
    best = {"angular_muown": 0.02, "normuon": 0.008, "muown": 0.016, "adamw": 0.002}
    late_of = {name: late[name, rate] for name, rate in best.items()}
    early_of = {name: early[name, rate] for name, rate in best.items()}
    below = {name: loss - late_of["angular_muown"] for name, loss in late_of.items()}
    words = (
        f"AngularMuown is {below['normuon']:.3f} below NorMuon, {below['muown']:.3f} below Muown "
        f"and {below['adamw']:.3f} below AdamW on seed 0"
    )
    assert words in DOCS.read_text()
    assert words in (ROOT / "README.md").read_text()
    ahead = {name: early_of["angular_muown"] - loss for name, loss in early_of.items()}
    told = f"Muown is {ahead['muown']:.3f} ahead of AngularMuown, NorMuon {ahead['normuon']:.3f}"
    assert told in DOCS.read_text()

    def cost(name: str, factor: float) -> float:
        return late[name, factor * best[name]] - late_of[name]

    told = (
        f"cost AngularMuown {cost('angular_muown', 0.5):.3f} and "
        f"{cost('angular_muown', 2):.3f}. Muown loses {cost('muown', 0.5):.3f} and "
        f"{cost('muown', 2):.3f}, NorMuon {cost('normuon', 0.5):.3f} and {cost('normuon', 2):.3f}, "
        f"AdamW {cost('adamw', 2):.3f} at twice"
    )
    assert told in DOCS.read_text()


def test_two_ways_to_one_run_end_with_the_same_loss_to_the_bit(tables: Path) -> None:
    """A cool-down off a trunk by recorded passes, and a straight run by plain ones, made on
    another day: the lab's promise, on a GPU."""
    (short,) = (
        float(row["22.5M tokens"])
        for row in csv.DictReader((tables / "aux-lr-s-runs.csv").read_text().splitlines())
        if (row["line"], row["aux_lr"], row["seed"]) == ("adamw", "0.002", "0")
    )
    assert losses(tables, "22.5M tokens")["adamw", 0.002] == short
