"""The measurements: closed forms against brute force, and runs that are not disturbed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from angular_lab.cli.main import main
from angular_lab.theory.measure import geometry, guarantee, regimes, shortcut
from angular_lab.theory.tables import kind_of
from angular_lab.training.start import train
from angular_muown import AngularMuown
from angular_muown.theory import Alignment, Neurons, bound


def test_closed_forms_of_norms_solve_their_recursions() -> None:
    lr, decay, c, nu2, rho2 = 0.05, 0.1, 3.0, 1.0, 1.0
    for t in range(400):
        assert regimes.decayed_norm(t, lr, decay, c) == pytest.approx(nu2**0.5)
        assert regimes.grown_norm(t, lr, c) == pytest.approx(rho2**0.5)
        nu2, rho2 = (1 - lr * decay) ** 2 * nu2 + c * lr**2, rho2 + c * lr**2


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95])
def test_growth_factor_is_that_of_a_simulated_walk(beta) -> None:
    """Follow one unit gradient through M = beta M + T and X = T + beta M."""
    M, steps = 0.0, []
    for t in range(4000):
        T = float(t == 0)
        M = beta * M + T
        steps.append(T + beta * M)
    for keep in (1.0, 0.98):
        position, squares = 0.0, []
        for x in steps:
            position = keep * position + x
            squares.append(position**2)
        alone = sum(x * x for x in steps)
        # Without decay the last square; with it, the stationary sum times (1 - keep^2).
        grown = squares[-1] if keep == 1 else sum(squares) * (1 - keep**2)
        assert regimes.growth_factor(beta, keep) == pytest.approx(grown / alone)


def test_muown_with_momentum_matches_its_closed_forms() -> None:
    late = regimes.measure_regime(regimes.regimes()[3], 200)["late"]
    assert late["angle"] == pytest.approx(late["angle_predicted"], rel=0.06)
    assert late["norm"] == pytest.approx(late["norm_predicted"], rel=0.06)
    assert late["norm"] > 3, "the stored norm has grown"


@pytest.mark.parametrize("regime", regimes.regimes(), ids=lambda regime: regime.name)
def test_first_step_turns_rows_by_the_predicted_angle(regime) -> None:
    angles, norms = regimes.simulate(regime.make, 1)
    assert norms == [pytest.approx(1.0)]
    # Q has a small random part along the row, which the closed forms neglect.
    assert angles[0] == pytest.approx(regime.angle(0), rel=0.02)


def test_windows_cover_every_step_once() -> None:
    covered = [t for a, b in regimes.windows(500) for t in range(a, b)]
    assert covered == list(range(499))


def test_exponent_of_a_power_law() -> None:
    assert guarantee.exponent([(x, 3 * x**-0.25) for x in (1, 10, 1000)]) == pytest.approx(-0.25)


def test_a_run_of_algorithm_2_stays_below_its_bound() -> None:
    problems = [Alignment(3, 8, 0.4), Neurons(3, 8)]
    cells = guarantee.run(problems, 40, seeds=3)
    assert [c["problem"] for c in cells] == ["alignment", "neurons"]
    for cell, problem in zip(cells, problems, strict=True):
        assert cell["bound"] == bound(problem.constants, 40)
        assert cell["exact"]
        assert cell["direction_gap"] <= 1e-4
        assert 0 < cell["mean"] <= cell["dual_mean"] < 1.05 * 3**0.5 * cell["mean"]
        assert cell["mean"] < cell["bound"]
    start = torch.linalg.matrix_norm(problems[0].gradient(problems[0].U_1)).item()
    assert 0.3 * start < cells[0]["mean"] < 1.5 * start


def test_geometry_at_a_small_size() -> None:
    data = geometry.measure(20, (0.1,))
    assert data["angle_error"] < 1e-9
    runs = {run["variant"]: run for run in data["momentum"]["runs"] if run["problem"] == "neurons"}
    assert runs.keys() == geometry.VARIANTS.keys()
    assert runs["as in the paper"]["radial_share"] > 0.01
    # Transport along great circles keeps the momentum tangent; a retracted step follows them too.
    assert runs["momentum transported"]["radial_share"] < 1e-9


@pytest.fixture
def optimizer() -> AngularMuown:
    """An optimizer of one parameter, three matrices of 4 x 10, with its gradient."""
    random = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(12, 10, generator=random).double())
    p.grad = torch.randn(12, 10, generator=random).double()
    group = {"params": [("qkv.weight", p)], "blocks": 3}
    return AngularMuown([group], lr=0.1, orthogonalize="svd")


def test_lookahead_is_what_the_optimizer_orthogonalizes(optimizer) -> None:
    errors: list[float] = []

    def observe(counts: Any, U: torch.Tensor, Q: torch.Tensor, turned: Any) -> None:
        (p, _), group = counts[0], optimizer.param_groups[0]
        X = shortcut.lookahead(p, U, optimizer.state[p]["momentum_buffer"], group["momentum"])
        P, _, Vh = torch.linalg.svd(X, full_matrices=False)
        errors.append((P @ Vh - Q).abs().max().item())

    optimizer.observers = (observe,)
    for _ in range(3):
        optimizer.step()
    assert len(errors) == 3
    assert max(errors) < 1e-9


def test_a_multiplier_is_followed_from_step_to_step(optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 1e-6  # the same problem at every step
    with shortcut.watch((5,)) as rows:
        for _ in range(6):
            optimizer.step()
    assert [row["matrix"] for row in rows] == [f"qkv.weight[{i}]" for i in range(3)]
    for row in rows:
        assert row["lost_warm"] < 0.5 * row["lost_after"][0]
    assert optimizer.observers == ()


def test_watching_does_not_change_a_run_and_measures_every_matrix(data, tmp_path) -> None:
    spec = shortcut.nano_spec(str(data), quick=True)
    plain = train(spec, tmp_path / "plain", device="cpu")
    with shortcut.watch((2, 6)) as rows:
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


def test_the_command_measures_a_part_and_writes_its_page(tmp_path, capsys) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    command = ["theory", "solver", "--quick", "--results", str(results), "--out", str(out)]
    assert main(command) == 0
    content = json.loads((results / "solver.json").read_text())
    assert content["command"] == "angular-lab theory solver --quick"
    assert len(content["cells"]) == 9
    assert capsys.readouterr().out.strip() == str(out / "index.html")
    page = (out / "index.html").read_text()
    assert '<section id="solver">' in page
    assert "measured with --quick" in page
    assert [path.name for path in results.iterdir()] == ["solver.json"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("sovler", "unknown part 'sovler': choose from solver, guarantee"),
        ("page", "has no results: run `angular-lab theory`"),
    ],
)
def test_bad_input_is_explained(part: str, message: str, tmp_path: Path, capsys) -> None:
    folders = ["--results", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert main(["theory", part, *folders]) == 2
    assert message in capsys.readouterr().err
