"""The page and docs/explanation show the numbers and verdicts of results/theory."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from angular_lab.theory.claims import CLAIMS, claims_table
from angular_lab.theory.page import PARTS, make_page
from angular_muown.theory import Alignment

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results" / "theory"
PAGES = [ROOT / "docs" / "explanation" / name for name in ("derivation.md", "theory.md")]
DOCS = "\n".join(path.read_text() for path in PAGES)
FIGURES = ROOT / "docs" / "figures" / "theory"


@pytest.fixture
def results() -> dict[str, Any]:
    return {part: json.loads((RESULTS / f"{part}.json").read_text()) for part in PARTS}


def verdicts(results: dict[str, Any]) -> dict[str, str]:
    return {row["claim"]: row["verdict"].value for row in claims_table(results).rows}


def test_every_measured_case_has_a_claim_and_every_claim_a_section(results) -> None:
    claims = [claim for part in CLAIMS for claim in CLAIMS[part]]
    texts = [claim.text for claim in claims]
    assert list(verdicts(results)) == texts
    cases = [line["name"] for line in results["regimes"]["lines"]]
    cases += [slope["problem"].capitalize() for slope in results["guarantee"]["slopes"]]
    for case in cases:
        assert sum(text.startswith(f"{case}: ") for text in texts) == 1, case
    for claim in claims:
        assert re.search(rf"^##+ {re.escape(claim.source)}$", DOCS, re.MULTILINE), claim


def test_refuted_claims(results) -> None:
    refuted = {text for text, verdict in verdicts(results).items() if verdict == "does not hold"}
    assert refuted == {
        "Rectangular: the proven gap is 1e-3 after 3 steps",
        "Neurons: the mean falls as T^(-1/4), within 0.05",
        "Transporting the momentum lowers the best loss (regression)",
        "Transporting the momentum lowers the best loss (neurons)",
    }


@pytest.mark.parametrize(
    ("claim", "path", "value"),
    [
        ("The solver's gap is at most 1e-6", "solver.cells.8.steps_gap.1", 51),
        ("The solver's gap is at most 1e-6", "solver.cells.8.steps_gap.1", None),
        ("Rectangular: the dual value", "solver.cells.4.steps_dual.0", 4),
        ("The direction is tangent", "solver.cells.4.tangency", 1e-9),
        ("The problems satisfy", "guarantee.assumptions.3.measured.noise", 1.04),
        ("The mean gradient is below", "guarantee.cells.7.mean", 9.0),
        ("So is its dual norm", "guarantee.rank_cells.1.dual_mean", 9.0),
        ("At fixed L and σ", "guarantee.rank_exponents.dual_mean", 0.26),
        ("Alignment: ", "guarantee.slopes.0.slope", -0.19),
        ("weight decay, momentum: ", "regimes.lines.1.late.norm", 3.0),
        ("The angle formula", "geometry.angle_error", 1e-8),
        ("Transporting the momentum lowers the best loss (regression)",
         "geometry.momentum.runs.12.loss", 1e-6),
    ],
)  # fmt: skip
def test_one_number_turns_one_verdict(claim: str, path: str, value: Any, results) -> None:
    before, data = verdicts(results), results
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in parents:
        data = data[key]
    data[last] = value
    (text,) = [text for text, verdict in verdicts(results).items() if verdict != before[text]]
    assert text.startswith(claim)


def test_docs_show_the_measured_tables(results) -> None:
    for part, data in results.items():
        section = PARTS[part].section(part, data)
        for table in [*section.tables, *section.details]:
            for line in table.markdown().splitlines():
                if line.startswith("|"):
                    assert line in DOCS, f"{table.key}: run `make theory` and copy its table"


def test_docs_show_the_measured_curves(tmp_path) -> None:
    """Compare point by point to a tenth of a pixel."""
    names = set(re.findall(r"figures/theory/([\w.-]+\.svg)", DOCS))
    drawn = make_page(RESULTS, tmp_path).parent / "figures"
    assert names == {path.name for path in FIGURES.iterdir()}
    assert names == {path.name for path in drawn.glob("*.svg")}
    for name in names:
        assert curves(FIGURES / name) == curves(drawn / name), f"{name}: run `make theory`"


def curves(path: Path) -> list[list[float]]:
    paths = re.findall(r'<path d="([^"]+)" clip-path', path.read_text())
    return [[round(float(x), 1) for x in re.findall(r"-?[\d.]+", d)] for d in paths]


@pytest.mark.parametrize(("m", "n"), [(4, 16), (8, 8), (16, 4), (1, 32)])
def test_the_constant_of_alignment_is_the_one_in_the_docs(m, n) -> None:
    assert Alignment(m, n, 0.5).constants[0] == pytest.approx(min(1, min(m, n) / m))


def test_the_page_does_not_import_torch() -> None:
    code = "import sys, angular_lab.theory.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
