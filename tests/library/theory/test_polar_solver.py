"""The tangent-constrained polar factor is feasible and optimal, and its certificate is valid."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from angular_muown.stages import tangent
from angular_muown.theory import (
    dual_steps,
    feasible,
    polar_solver,
    project,
    radial,
    solver_path,
    tangent_polar,
)
from angular_muown.theory.polar_solver import SmoothPolar
from tests.library.family import noise
from tests.reference import idealized

SPECTRA = ("gaussian", "power law", "clustered")
SHAPES = [(64, 256), (256, 64), (128, 128)]
DUAL_SLACK = 1e-12  # rounding error of a difference between numbers of order 1


def unit(m: int, n: int, seed: int) -> Tensor:
    U = noise(m, n, seed=seed)
    return U / U.norm(dim=-1, keepdim=True)


def spectrum(kind: str, m: int, n: int, seed: int) -> Tensor:
    if kind == "gaussian":
        return noise(m, n, seed=seed)
    r = min(m, n)
    P, V = (torch.linalg.qr(noise(side, r, seed=seed + side))[0] for side in (m, n))
    values = {
        "power law": torch.logspace(0, -3, r, dtype=torch.float64),
        "clustered": torch.where(torch.arange(r) < r // 4, 1.0, 0.01).double(),
    }[kind]
    return (P * values) @ V.mT


def problem(kind: str, m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a tangent M and its U. Projecting M perturbs the requested spectrum slightly."""
    U = unit(m, n, seed + 1000)
    return project(spectrum(kind, m, n, seed), U), U


def operator_norm(D: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(D.double(), ord=2)


def dual_value(M: Tensor, U: Tensor, multiplier: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(M + multiplier.unsqueeze(-1) * U, ord="nuc")


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_solution_is_feasible_and_its_gap_is_certified(kind, shape) -> None:
    M, U = problem(kind, *shape)
    result = tangent_polar(M, U, tolerance=1e-6)
    assert result.gap <= 1e-6
    assert result.tangency <= 1e-10
    assert radial(result.D, U).abs().max() <= 1e-10
    assert operator_norm(result.D) <= 1 + 1e-10
    # recompute the gap from the result alone
    value = dual_value(M, U, result.multiplier)
    assert (value + (M * result.D).sum()) / value == pytest.approx(
        result.gap.item(), abs=DUAL_SLACK
    )


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
def test_rectangular_matrices_converge_in_a_few_steps(kind, shape) -> None:
    """The dual is within 1e-3 after 3 steps, the gap, which also needs a good D, after 5."""
    M, U = problem(kind, *shape)
    best = -(M * tangent_polar(M, U).D).sum()
    for k, result in enumerate(solver_path(M, U)):
        if k == 3:
            assert dual_value(M, U, result.multiplier) / best - 1 < 1e-3
        if k == 5:
            assert result.gap < 1e-3
            break


def test_square_matrices_converge_to_kinks_of_the_nuclear_norm() -> None:
    """Singular values vanish with eps. Without path following, 45 steps would be needed."""
    pairs = [problem(kind, 16, 16, seed=s) for kind in SPECTRA for s in range(5)]
    M, U = (torch.stack(x) for x in zip(*pairs, strict=True))
    result = tangent_polar(M, U, iterations=30, tolerance=1e-7)
    assert result.gap.max() < 1e-6
    S = torch.linalg.svdvals(M + result.multiplier.unsqueeze(-1) * U)
    assert (S[:, -1] < 1e-5 * S[:, 0]).sum() >= 5


@pytest.mark.parametrize("solver", ["CLARABEL", "SCS"])
@pytest.mark.parametrize("shape", [(3, 6), (6, 3), (5, 5), (2, 2), (1, 7)])
def test_the_objective_matches_an_independent_solver(solver, shape) -> None:
    for seed in range(3):
        M, U = problem("gaussian", *shape, seed=seed)
        result = tangent_polar(M, U, iterations=80, tolerance=1e-8)
        reference = idealized.tangent_polar(M.numpy(), U.numpy(), solver)
        value = np.sum(M.numpy() * reference)
        accuracy = {"CLARABEL": 1e-6, "SCS": 1e-4}[solver]
        assert (M * result.D).sum().item() == pytest.approx(value, rel=accuracy)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (9, 9)])
def test_a_batch_equals_a_loop(shape) -> None:
    pairs = [problem(kind, *shape, seed=s) for kind in SPECTRA for s in range(2)]
    M, U = (torch.stack(x) for x in zip(*pairs, strict=True))
    batch = tangent_polar(M.unflatten(0, (3, 2)), U.unflatten(0, (3, 2)), 60, tolerance=1e-7)
    assert batch.gap.shape == batch.tangency.shape == (3, 2)
    assert batch.multiplier.shape == (3, 2, shape[0])
    for i, (M_i, U_i) in enumerate(pairs):
        single = tangent_polar(M_i, U_i, 60, tolerance=1e-7)
        value = (M_i * single.D).sum().item()
        assert (M_i * batch.D.flatten(0, 1)[i]).sum().item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (48, 48)])
def test_float32_is_feasible_and_close_to_float64(shape, device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    M, U = (x.float().to(device) for x in problem("power law", *shape))
    result = tangent_polar(M, U)
    assert result.D.dtype == torch.float32
    assert result.gap <= 1e-4
    assert result.tangency < 1e-6
    assert operator_norm(result.D) < 1 + 1e-5
    exact = tangent_polar(M.double(), project(U.double(), 0 * U) / U.double().norm(dim=-1)[:, None])
    assert (M * result.D).sum().item() == pytest.approx((M * exact.D).sum().item(), rel=2e-4)


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.integers(2, 9),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["full", "low rank", "zero row", "repeated", "radial"]),
    size=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_every_input_gives_a_feasible_direction_with_a_small_gap(m, n, seed, kind, size) -> None:
    U, M = unit(m, n, seed), noise(m, n, seed=seed + 1)
    if kind == "low rank":
        M = M[:, :1] @ M[:1]
    if kind == "zero row":
        M[0] = 0
    if kind == "repeated":
        M[-1], U[-1] = M[0], U[0]
    if kind == "radial":
        M = M[:, :1] * U  # no tangent part: every feasible direction has the objective 0
    result = tangent_polar(size * M, U, iterations=80, tolerance=1e-6)
    assert result.D.isfinite().all()
    assert operator_norm(result.D) <= 1 + 1e-10
    assert result.tangency <= 1e-10
    if kind == "radial":
        assert abs((M * result.D).sum()) < 1e-9
    else:
        # 1e-6 in all but one of 1,500 tiny matrices, which stops at a kink of two singular values
        assert result.gap <= 1e-4
        unscaled = (M * tangent_polar(M, U, 80, tolerance=1e-6).D).sum().item()
        assert (M * result.D).sum().item() == pytest.approx(unscaled, rel=2e-4)


def test_a_zero_matrix_gives_zero_in_a_batch_with_nonzero_ones() -> None:
    M, U = problem("gaussian", 4, 7)
    result = tangent_polar(torch.stack([0 * M, M]), torch.stack([U, U]))
    assert not result.D[0].any()
    assert result.gap[0] == 0
    assert result.gap[1] < 1e-6


def test_the_gap_and_the_dual_value_never_increase() -> None:
    """The result after k steps is never worse than after k - 1."""
    for shape in [(6, 6), (5, 9), (9, 5)]:
        M, U = problem("power law", *shape, seed=3)
        gaps, duals = [], []
        for k, result in enumerate(solver_path(M, U)):
            gaps.append(result.gap.item())
            duals.append(dual_value(M, U, result.multiplier).item())
            if k == 25:
                break
        assert all(b <= a for a, b in pairwise(gaps))
        assert all(b <= a * (1 + 1e-14) for a, b in pairwise(duals))
        assert gaps[-1] < 1e-3 * gaps[0]


def test_a_warm_start_saves_steps() -> None:
    M, U = problem("gaussian", 16, 48)
    first = tangent_polar(M, U)
    cold, warm = (
        next(k for k, x in enumerate(solver_path(M + 1e-3, U, start)) if x.gap < 1e-3)
        for start in (None, first.multiplier)
    )
    assert warm < cold


def test_feasible_returns_a_tangent_direction_of_operator_norm_at_most_one() -> None:
    M, U = problem("gaussian", 7, 9)
    D = feasible(M + 0.3 * U, U)
    assert operator_norm(D) == pytest.approx(1)
    assert radial(D, U).abs().max() < 1e-15
    torch.testing.assert_close(D, -M / operator_norm(M))
    torch.testing.assert_close(feasible(-0.5 * D, U), 0.5 * D)  # its norm is below 1: not rescaled


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (20, 20)])
def test_dual_steps_approach_the_solution_with_a_valid_gap(shape) -> None:
    """To within about a percent, the limit set by their smoothing."""
    M, U = problem("power law", *shape)
    X = M + 0.3 * U  # momentum is not tangent
    results = [dual_steps(X, U, None, k) for k in (0, 1, 3, 30)]
    gaps = [r.gap.item() for r in results]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.02
    best = -(X * tangent_polar(X, U).D).sum().item()
    for r in results:
        assert r.tangency <= 1e-10
        assert operator_norm(r.D) <= 1 + 1e-10
        value, reached = dual_value(X, U, r.multiplier).item(), -(X * r.D).sum().item()
        assert reached <= best * (1 + 1e-6) <= value * (1 + 2e-6)
        assert 1 - reached / value == pytest.approx(r.gap.item(), abs=DUAL_SLACK)


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (8, 8), (3, 3)])
def test_the_smooth_objective_is_close_to_the_nuclear_norm(kind, shape) -> None:
    """<X, Q> never increases in a step, and |X|_* by at most 0.301 SOFTNESS.

    The steps minimize <X, Q>, which is within that fraction of |X|_*.
    """
    pairs = [problem(kind, *shape, seed=seed) for seed in range(10)]
    T, U = (torch.stack(side) for side in zip(*pairs, strict=True))
    start = torch.zeros_like(T[..., :1])
    duals = [tangent.dual_steps(polar_solver._soft_polar, T, U, start, k) for k in range(8)]
    products = [dual.value.squeeze(-1, -2) for dual in duals]
    norms = [torch.linalg.svdvals(dual.X).sum(dim=-1) for dual in duals]
    for product, norm in zip(products, norms, strict=True):
        assert (product < norm).all()
        assert (product > (1 - 0.301 * polar_solver.SOFTNESS) * norm).all()
    for values, rise in ((products, 0), (norms, 0.301 * polar_solver.SOFTNESS)):
        assert all((b <= a / (1 - rise)).all() for a, b in pairwise(values))


def test_dual_steps_resume_from_a_multiplier() -> None:
    """Also from a multiplier of `tangent_polar`, and for any component of M along U."""
    M, U = problem("power law", 12, 40)
    first = dual_steps(M, U, None, 2)
    again = dual_steps(M + 0.2 * U, U, first.multiplier - 0.2, 0)
    torch.testing.assert_close(again.D, first.D)
    torch.testing.assert_close(again.multiplier, first.multiplier - 0.2)
    solved = tangent_polar(M, U)
    resumed = dual_steps(M, U, solved.multiplier, 1)
    assert resumed.gap < 0.8 * first.gap
    assert dual_value(M, U, resumed.multiplier) < dual_value(M, U, first.multiplier)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
@pytest.mark.parametrize("kind", ["full", "low rank"])
def test_derivatives_of_the_smooth_polar_factor_match_finite_differences(shape, kind) -> None:
    """Also for repeated zero singular values."""
    X, Z, eps = noise(*shape, seed=1), noise(*shape, seed=2), torch.tensor([0.3]).double()
    if kind == "low rank":
        X = X[:, :2] @ X[:2]

    def Q_of(X: Tensor, eps: Tensor) -> Tensor:
        return SmoothPolar.of(X, eps).Q

    step = 1e-5
    polar = SmoothPolar.of(X, eps)
    numeric = (Q_of(X + step * Z, eps) - Q_of(X - step * Z, eps)) / (2 * step)
    torch.testing.assert_close(polar.derivative(Z), numeric, rtol=1e-6, atol=1e-7)
    numeric = (Q_of(X, eps + step) - Q_of(X, eps - step)) / (2 * step)
    torch.testing.assert_close(polar.Q_by_eps, numeric, rtol=1e-6, atol=1e-7)
    value = SmoothPolar.of(X + step * Z, eps).value - SmoothPolar.of(X - step * Z, eps).value
    assert (polar.Q * Z).sum().item() == pytest.approx(value.item() / (2 * step), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 7), n=st.integers(1, 7), seed=st.integers(0, 10**6), size=st.floats(-3, 2))
def test_the_majorizer_is_an_upper_bound(m, n, seed, size) -> None:
    X, Z = noise(m, n, seed=seed), 10**size * noise(m, n, seed=seed + 1)
    polar = SmoothPolar.of(X, torch.tensor([0.1]).double())
    upper = polar.value + (polar.Q * Z).sum() + (Z * polar.majorizer(Z)).sum() / 2
    assert SmoothPolar.of(X + Z, polar.eps).value <= upper * (1 + 1e-12)
    U = unit(m, n, seed + 2)
    rows = [(e[:, None] * U * polar.majorizer(e[:, None] * U)).sum() for e in torch.eye(m).double()]
    torch.testing.assert_close(polar.row_curvature(U).squeeze(-1), torch.stack(rows))


def test_errors_name_the_invalid_argument() -> None:
    M, U = problem("gaussian", 3, 5)
    with pytest.raises(ValueError, match=r"M is \(3, 5\) and U is \(2, 5\)"):
        tangent_polar(M, U[:2])
    with pytest.raises(ValueError, match="rows of U have lengths from 2 to 2: they must be 1"):
        tangent_polar(M, 2 * U)
