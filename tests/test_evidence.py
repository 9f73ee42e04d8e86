"""What README and docs say of our runs is what the kept runs say."""

import csv
import tarfile
from itertools import groupby
from pathlib import Path

import pytest

from angular_lab.report import make_report

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "evidence.md"
AGAIN = "run `make evidence` and copy what it made"
BEST = {"angular_muown": 0.02, "normuon": 0.008, "muown": 0.016, "adamw": 0.002}
OURS = "angular_muown"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On the kept runs, as `make evidence` makes it."""
    folder = tmp_path_factory.mktemp("evidence")
    for archive in sorted((ROOT / "results" / "s").glob("*.tar.xz")):
        with tarfile.open(archive) as content:
            content.extractall(folder / "runs", filter="data")
    make_report([folder / "runs"], folder)
    return folder


def tables_in(text: str) -> list[str]:
    blocks = groupby(text.splitlines(), key=lambda line: line.startswith("|"))
    return ["\n".join(lines) for is_table, lines in blocks if is_table]


def test_tables_and_figures_in_the_docs_are_the_reports(report: Path) -> None:
    files = (report / "tables").glob("*.md")
    made = {table for path in files for table in tables_in(path.read_text())}
    shown = tables_in(DOCS.read_text())
    assert len(shown) >= 6
    for table in shown:
        assert table in made, f"{AGAIN}: {table.splitlines()[0]}"
    for figure in (ROOT / "docs" / "figures" / "evidence").iterdir():
        assert figure.read_bytes() == (report / "figures" / figure.name).read_bytes(), AGAIN


def rows(report: Path, sweep: str) -> list[dict[str, str]]:
    text = (report / "tables" / f"{sweep}-s-runs.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


@pytest.fixture(scope="module")
def losses(report: Path) -> dict[tuple[str, float, str], float]:
    """By line, rate and horizon, on seed 0."""
    return {
        (row["line"], float(row["lr"]), column.removesuffix(" tokens")): float(value)
        for row in rows(report, "teaser")
        for column, value in row.items()
        if row["seed"] == "0" and value and "tokens" in column and column != "tokens/s"
    }


def test_differences_between_lines(losses) -> None:
    def behind(name: str, tokens: str) -> float:
        return losses[name, BEST[name], tokens] - losses[OURS, BEST[OURS], tokens]

    late = {name: behind(name, "90M") for name in BEST}
    words = (
        f"AngularMuown is {late['normuon']:.3f} below NorMuon, {late['muown']:.3f} below Muown and "
        f"{late['adamw']:.3f} below AdamW on seed 0"
    )
    twice = losses[OURS, BEST[OURS], "45M"] - losses["adamw", BEST["adamw"], "90M"]
    missed = f"AngularMuown's loss at 45M tokens is {twice:.3f} above AdamW's at 90M"
    for page in (DOCS, ROOT / "README.md"):
        assert words in page.read_text()
        assert missed in page.read_text()
    early = (
        f"Muown is {-behind('muown', '22.5M'):.3f} ahead of AngularMuown, NorMuon "
        f"{-behind('normuon', '22.5M'):.3f}. At 45M it is {-behind('muown', '45M'):.3f} and "
        f"{-behind('normuon', '45M'):.3f}."
    )
    assert early in DOCS.read_text()


def test_differences_between_rates(losses) -> None:
    def cost(name: str, factor: float) -> str:
        best = BEST[name]
        return f"{losses[name, factor * best, '90M'] - losses[name, best, '90M']:.3f}"

    both = {name: f"{cost(name, 0.5)} and {cost(name, 2)}" for name in (OURS, "muown", "normuon")}
    told = (
        f"cost AngularMuown {both[OURS]}. Muown loses {both['muown']}, NorMuon {both['normuon']}, "
        f"AdamW {cost('adamw', 2)} at twice"
    )
    assert told in DOCS.read_text()


def test_the_other_figures_in_the_words(report: Path) -> None:
    runs = rows(report, "teaser")
    ours = [float(r["90M tokens"]) for r in runs if r["line"] == OURS and float(r["lr"]) == 0.02]
    assert len(ours) == 3
    assert max(ours) - min(ours) < 0.005  # "within 0.005 of each other"
    gains = [
        float(r["90M tokens"]) - float(r["90M tokens, longer cool-down"])
        for r in runs
        if float(r["lr"]) == BEST[r["line"]]
    ]
    assert f"{min(gains):.3f} to {max(gains):.3f} better" in DOCS.read_text()
    aux = {float(r["aux_lr"]): r for r in rows(report, "aux-lr") if r["seed"] == "0"}
    gain = float(aux[0.002]["22.5M tokens"]) - float(aux[0.008]["22.5M tokens"])
    assert f"gains {gain:.3f} at 22.5M tokens" in DOCS.read_text()


def test_two_ways_to_one_run_end_with_the_same_loss_to_the_bit(report: Path, losses) -> None:
    """A cool-down off a trunk by recorded passes, and a straight run by plain ones, made on
    another day: the lab's promise, on a GPU."""
    (short,) = (
        float(row["22.5M tokens"])
        for row in rows(report, "aux-lr")
        if (row["aux_lr"], row["seed"]) == ("0.002", "0")
    )
    assert losses["adamw", 0.002, "22.5M"] == short
