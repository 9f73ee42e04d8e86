"""`angular-lab theory`: predictions against brute force, what is looked at, and the page."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from angular_lab.cli.main import main
from angular_lab.report.plots import Panel, Trace, _legend_columns, draw
from angular_lab.theory import guarantee, regimes, shortcut
from angular_lab.theory.claims import claims
from angular_lab.theory.page import make_page
from angular_lab.theory.tables import kind_of
from angular_muown import AngularMuown
from angular_muown.theory import Alignment, Neurons, bound
from tests.lab.report.test_report_browser import BROWSER, check

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results" / "theory"
PARTS = ("solver", "guarantee", "regimes", "geometry", "shortcut")


def test_the_closed_forms_are_their_recursions() -> None:
    lr, decay, c, nu2, rho2 = 0.05, 0.1, 3.0, 1.0, 1.0
    for t in range(400):
        assert regimes.decayed_norm(t, lr, decay, c) == pytest.approx(nu2**0.5)
        assert regimes.grown_norm(t, lr, c) == pytest.approx(rho2**0.5)
        nu2, rho2 = (1 - lr * decay) ** 2 * nu2 + c * lr**2, rho2 + c * lr**2


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95])
def test_memory_is_how_much_faster_a_correlated_walk_spreads(beta) -> None:
    """By brute force: the gradients' weights in a position after many steps X = T + beta M, with
    M = beta M + T, for one unit gradient; a squared norm is their sum of squares."""
    M, steps = 0.0, []
    for t in range(4000):
        T = float(t == 0)
        M = beta * M + T
        steps.append(T + beta * M)
    for keep in (1.0, 0.98):
        at, growth = 0.0, []
        for x in steps:
            at = keep * at + x
            growth.append(at**2)
        alone = sum(x * x for x in steps)
        # without decay, what a gradient adds in the end; with it, all that is left, by (1 - keep^2)
        grown = growth[-1] if keep == 1 else sum(growth) * (1 - keep**2)
        assert regimes.memory(beta, keep) == pytest.approx(grown / alone)


def test_momentum_only_changes_the_height_and_the_height_is_known() -> None:
    late = regimes.line(regimes.regimes()[3], 1500)["late"]
    assert late["angle"] == pytest.approx(late["angle_predicted"], rel=0.06)
    assert late["norm"] == pytest.approx(late["norm_predicted"], rel=0.06)
    assert late["norm"] > 1.5, "it has grown"


def test_a_regime_s_angle_is_its_step_over_its_norm() -> None:
    """One step of each, by hand: rows of length 1 and gradients whose polar factor is known."""
    for regime in regimes.regimes():
        angles, norms = regimes.simulate(regime.make, 1)
        assert norms == [pytest.approx(1.0)]
        # Q has a part along the row, which the closed forms leave out: it is random and small
        assert angles[0] == pytest.approx(regime.angle(0), rel=0.02)


def test_windows_cover_every_step_once() -> None:
    covered = [t for a, b in regimes.windows(500) for t in range(a, b)]
    assert covered == list(range(499))


def test_slope_of_a_power_law() -> None:
    assert guarantee.slope([(x, 3 * x**-0.25) for x in (1, 10, 1000)]) == pytest.approx(-0.25)


def test_a_cell_is_what_a_plain_loop_gives() -> None:
    problems = [Alignment(3, 8, 0.4), Neurons(3, 8)]
    cells = guarantee.run(problems, 40, seeds=3)
    assert [c["problem"] for c in cells] == ["alignment", "neurons"]
    for cell, problem in zip(cells, problems, strict=True):
        assert cell["bound"] == bound(problem.constants, 40)
        assert cell["exact"]
        assert cell["direction_gap"] <= 1e-4
        assert 0 < cell["mean"] < cell["bound"]
    start = torch.linalg.matrix_norm(problems[0].gradient(problems[0].U_1)).item()
    assert 0.3 * start < cells[0]["mean"] < 1.5 * start


def test_x_is_what_the_optimizer_orthogonalizes() -> None:
    """The engine's Q is the polar factor of the X that the lab reconstructs, blocks included."""
    p = nn.Parameter(torch.randn(12, 10, generator=torch.Generator().manual_seed(0)).double())
    group = {"params": [("qkv.weight", p)], "blocks": 3}
    optimizer = AngularMuown([group], lr=0.1, orthogonalize="svd")
    seen: list[float] = []

    def observe(parts: Any, U: torch.Tensor, Q: torch.Tensor, turned: Any) -> None:
        X = shortcut.lookahead(p, U, optimizer)
        P, _, Vh = torch.linalg.svd(X, full_matrices=False)
        seen.append((P @ Vh - Q).abs().max().item())

    optimizer.observers = (observe,)
    for t in range(3):
        p.grad = torch.randn(12, 10, generator=torch.Generator().manual_seed(t + 1)).double()
        optimizer.step()
    assert len(seen) == 3
    assert max(seen) < 1e-9


def test_looking_changes_nothing_and_sees_every_matrix(data, tmp_path) -> None:
    from angular_lab.training.start import train

    spec = shortcut.tiny_spec(str(data))
    plain = train(spec, tmp_path / "plain", device="cpu")
    rows: list[dict[str, Any]] = []
    with shortcut.watching(rows, looks=(2, 6)):
        watched = train(spec, tmp_path / "watched", device="cpu")
    first, second = (run.path / "metrics.jsonl" for run in (plain, watched))
    assert first.read_bytes() == second.read_bytes()
    kinds = [kind_of(row["matrix"]) for row in rows if row["step"] == 6]
    assert sorted(kinds) == ["down", "gate", "key", "out", "query", "up", "value"]
    assert {row["step"] for row in rows} == {2, 6}
    for row in rows:
        assert row["solver_gap"] <= shortcut.TOLERANCE
        assert row["dual_gap"] >= -1e-9
        assert -1e-5 <= row["lost"] < 1
        assert 0 <= row["angle"] < 90


def test_the_legend_s_columns_are_matplotlib_s() -> None:
    """Four labels in three columns are two, one and one: wider than two and two."""
    labels = ["as in the paper", "momentum projected", "momentum transported", "exponential map"]
    assert _legend_columns(labels) == 2
    assert _legend_columns(["a", "b", "c"]) == 3
    assert _legend_columns(["a" * 60, "b"]) == 1


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page about the kept results."""
    return make_page(RESULTS, tmp_path_factory.mktemp("theory"))


def test_the_page_of_the_kept_results_holds_in_a_browser(page, tmp_path) -> None:
    text = page.read_text()
    for part in PARTS:
        assert f'<section id="{part}">' in text
    figures = list((page.parent / "figures").glob("*.svg"))
    assert len(figures) == 3 + 4 + 2 + 4 + 8
    if BROWSER:
        for width in (1280, 500):
            seen = check(tmp_path, page, f"--window-size={width},900")
            assert seen["errors"] == []
            assert (seen["figures"], seen["hidden"], seen["wrong"]) == (len(figures), 0, 0)
            assert seen["overflow"] <= 0
            assert (seen["repeated"], seen["lost"]) == (0, 0)


def test_claims_say_what_was_measured() -> None:
    """A cell above its bound, a solver that is late: the verdict turns."""
    found = {part: json.loads((RESULTS / f"{part}.json").read_text()) for part in PARTS}

    def verdict(words: str) -> str:
        rows = [row for row in claims(found).rows if words in row["claim"]]
        assert len(rows) == 1
        return rows[0]["verdict"].value

    under = "The mean gradient is under the theorem's bound in every cell"
    sharp = "The solver's gap is at most 1e-6 within 50 steps"
    angle = "weight decay, momentum: late angle and norm"
    assert [verdict(words) for words in (under, sharp, angle)] == ["holds"] * 3
    found["guarantee"]["cells"][7]["mean"] = 1.01 * found["guarantee"]["cells"][7]["bound"]
    found["solver"]["cells"][4]["steps_gap"][1] = None
    found["regimes"]["lines"][1]["late"]["norm"] *= 1.1
    assert [verdict(words) for words in (under, sharp, angle)] == ["does not hold"] * 3


@pytest.mark.parametrize(("m", "n"), [(4, 16), (8, 8), (16, 4), (1, 32)])
def test_the_constant_of_alignment_is_what_the_docs_say(m, n) -> None:
    assert Alignment(m, n, 0.5).constants[0] == pytest.approx(min(1, min(m, n) / m))


def test_the_figures_in_the_docs_are_the_measured_ones(page) -> None:
    """Up to matplotlib's rounding: the same curves, point by point to a tenth of a pixel."""
    docs = (ROOT / "docs" / "theory.md").read_text()
    shown = set(re.findall(r"figures/theory/([\w.-]+\.svg)", docs))
    kept = ROOT / "docs" / "figures" / "theory"
    assert shown == {path.name for path in kept.iterdir()}
    for name in shown:
        here, there = (folder / name for folder in (kept, page.parent / "figures"))
        assert curves(here) == curves(there), f"{name}: run `make theory`"


def curves(path: Path) -> list[list[float]]:
    paths = re.findall(r'<path d="([^"]+)" clip-path', path.read_text())
    return [[round(float(x), 1) for x in re.findall(r"-?[\d.]+", d)] for d in paths]


def test_an_axis_may_begin_at_zero() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    draw(axes, Panel([Trace([1, 2], [5, 6], 0)], "x", "y", y_bottom=0))
    assert axes.get_ylim()[0] == 0


def test_the_page_needs_no_torch() -> None:
    code = "import sys, angular_lab.theory.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_measures_keeps_and_draws(tmp_path, capsys) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    command = ["theory", "solver", "--quick", "--results", str(results), "--out", str(out)]
    assert main(command) == 0
    content = json.loads((results / "solver.json").read_text())
    assert content["command"] == "angular-lab theory solver --quick"
    assert len(content["cells"]) == 9
    assert capsys.readouterr().out.strip() == str(out / "index.html")
    assert "measured with --quick" in (out / "index.html").read_text()
    assert not (results / "regimes.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["theory", "sovler"], "unknown part 'sovler': there are solver, guarantee"),
        (["theory", "page"], "has no results: run `angular-lab theory`"),
    ],
)
def test_slips_of_the_pen(arguments, words, tmp_path, capsys) -> None:
    folders = ["--results", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert main([*arguments, *folders]) == 2
    assert words in capsys.readouterr().err
