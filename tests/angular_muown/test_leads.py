"""Settings of AngularMuown beyond the paper: what each of them promises."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from angular_muown import AngleMonitor, AngularMuown, Muon, NorMuon
from angular_muown.kernels.dispatch import knows
from angular_muown.monitor import row_angles
from angular_muown.recipe import Recipe
from angular_muown.stages import tangent
from angular_muown.stages.charts import Oblique, normalize_rows, tangent_part
from angular_muown.stages.normalize import AsIs, UnitTangents
from angular_muown.stages.orthogonalize import polar_express, svd
from angular_muown.stages.tangent import constrained, free
from tests.angular_muown.family import noise, parameter, run

SHAPES = [(12, 12), (8, 20), (20, 8)]
CASES = list(product((3, 13, 23), ("gaussian", "falling"), [(48, 48), (32, 80), (80, 32)]))
TANGENT: list[dict[str, Any]] = [{"tangent_momentum": True}, {"tangent_polar": 2}]


def recipe(**values: Any) -> Recipe:
    opt = AngularMuown([parameter(4, 6)], **values)
    return opt.recipe(opt.param_groups[0])


def test_by_default_all_of_it_is_off() -> None:
    plain = recipe()
    assert type(plain.chart) is Oblique
    assert type(plain.normalize) is AsIs
    assert plain.tangent is free


@pytest.mark.parametrize(
    "values",
    [*TANGENT, {"exact_angle": True}, {"exact_angle": True, "tangent_momentum": True}],
)
def test_what_the_kernels_do_not_compute_takes_the_eager_path(values) -> None:
    assert knows(recipe())
    assert not knows(recipe(**values))
    assert not knows(recipe(row_beta=0.9, **TANGENT[0]))


def test_the_kernels_compute_normalised_rows_in_every_chart() -> None:
    """Held to the float64 step in test_kernels.py."""
    assert knows(recipe(row_beta=0.9))


@pytest.mark.parametrize("values", TANGENT)
@pytest.mark.parametrize("shape", SHAPES)
def test_momentum_along_the_rows_does_not_matter(values, shape) -> None:
    """It adds up in training, as old gradients are not tangent to new rows."""
    ends: dict[bool, list[Tensor]] = {True: [], False: []}
    for on in (True, False):
        for along in (0.0, 1.0):
            p = parameter(*shape)
            opt = AngularMuown([p], lr=0.05, **(values if on else {}))
            run(opt, [p], 2)
            buffer = opt.state[p]["momentum_buffer"]
            buffer += along * buffer.norm() * normalize_rows(p.detach())
            run(opt, [p], 1, start=2)
            ends[on].append(p.detach())
    torch.testing.assert_close(*ends[True], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(*ends[False], rtol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_tangent_momentum_changes_nothing_while_the_momentum_is_tangent(shape) -> None:
    ends = []
    for values in ({}, TANGENT[0]):
        p = parameter(*shape)
        run(AngularMuown([p], lr=0.05, **values), [p], 1)
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


def _matrices(shape: tuple[int, int], seed: int, spectrum: str) -> tuple[Tensor, Tensor]:
    """X with singular values of a Gaussian matrix, or falling to a thousandth, and unit rows U."""
    X, U = noise(*shape, seed=seed), normalize_rows(noise(*shape, seed=seed + 1))
    if spectrum == "falling":
        A, S, Vh = torch.linalg.svd(X, full_matrices=False)
        X = 100 * A @ torch.diag(torch.logspace(0, -3, len(S), dtype=X.dtype)) @ Vh
    return X, U


def radial(Q: Tensor, U: Tensor) -> float:
    return float((Q * U).sum(-1).abs().mean())


@pytest.mark.parametrize("shape", [(48, 48), (32, 80), (80, 32)])
@pytest.mark.parametrize("spectrum", ["gaussian", "falling"])
def test_dual_iterations_close_in_on_the_tangent_space(shape, spectrum) -> None:
    """<Q_i, U_i> goes to 0 while the dual value, a nuclear norm, falls and stays above whatever a
    tangent matrix of spectral norm 1 can reach."""
    X, U = _matrices(shape, 3, spectrum)
    before, *after = (radial(constrained(svd, X, U, k), U) for k in (0, 2, 4, 12))
    assert after[0] < 0.6 * before
    assert after[2] < 0.2 * before
    Q = constrained(svd, X, U, 2)
    assert torch.linalg.matrix_norm(Q, 2) <= 1 + 1e-12
    Q = tangent_part(Q, U)
    Q /= torch.linalg.matrix_norm(Q, 2)
    values = [float(torch.linalg.svdvals(_dual_point(X, U, k)).sum()) for k in range(5)]
    assert values == sorted(values, reverse=True)
    assert (Q * X / X.norm()).sum() <= values[-1] * (1 + 1e-12)


def _dual_point(X: Tensor, U: Tensor, iterations: int) -> Tensor:
    """X + Diag(l) U after so many iterations: what the last accepted polar factor was taken of."""
    seen: list[tuple[float, Tensor]] = []

    def polar(Y: Tensor) -> Tensor:
        seen.append((float(torch.linalg.svdvals(Y).sum()), Y))
        return svd(Y)

    constrained(polar, X, U, iterations)
    return min(seen, key=lambda pair: pair[0])[1]


def test_the_ridge_is_neither_too_small_nor_too_large(monkeypatch) -> None:
    """What two iterations leave of the dual gap, in the worst of these cases."""
    worst = {}
    for ridge in (0.001, tangent.RIDGE, 0.2):
        monkeypatch.setattr(tangent, "RIDGE", ridge)
        left = []
        for seed, spectrum, shape in CASES:
            X, U = _matrices(shape, seed, spectrum)
            f = [float(torch.linalg.svdvals(_dual_point(X, U, k)).sum()) for k in (0, 2, 40)]
            left.append((f[1] - f[2]) / (f[0] - f[2]))
        worst[ridge] = max(left)
    small, chosen, large = worst.values()
    assert chosen < 0.25
    assert min(small, large) > 0.4


@pytest.mark.parametrize("shape", [(48, 48), (32, 80), (80, 32)])
def test_dual_iterations_work_with_an_approximate_polar_factor(shape) -> None:
    X, U = (Y.float() for Y in _matrices(shape, 3, "falling"))
    before, after = (radial(constrained(polar_express, X, U, k), U) for k in (0, 2))
    assert after < 0.6 * before


@pytest.mark.parametrize("size", [1e-30, 1e36])
def test_dual_iterations_ignore_the_size_of_x(size) -> None:
    """A sum over X of such a size would leave the range of float32."""
    X, U = (Y.float() for Y in _matrices((32, 80), 3, "falling"))
    ends = [constrained(polar_express, factor * X, U, 2) for factor in (1.0, size)]
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_each_matrix_of_a_stack_accepts_its_own_steps() -> None:
    pairs = [_matrices((10, 16), seed, s) for seed in (1, 5) for s in ("gaussian", "falling")]
    X, U = (torch.stack(side) for side in zip(*pairs, strict=True))
    together = constrained(svd, X, U, 3)
    for Q, (x, u) in zip(together, pairs, strict=True):
        torch.testing.assert_close(Q, constrained(svd, x, u, 3), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [*SHAPES, (1, 5), (5, 2)])
@pytest.mark.parametrize("orthogonalize", ["polar_express", "newton_schulz", "svd"])
@pytest.mark.parametrize("scale", ["fan_ratio", "none"])
def test_the_exact_angle_is_lr_times_kappa_for_every_row(shape, orthogonalize, scale) -> None:
    model = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64)
    values = {"orthogonalize": orthogonalize, "scale": scale, "decay_scale": 0.1}
    opt = AngularMuown(model.parameters(), lr=0.03, exact_angle=True, **values)
    monitor = AngleMonitor(model, opt)
    for t in range(10):
        model.weight.grad = noise(*shape, seed=t)
        wanted = 0.03 / (1 + 0.1 * t)
        assert math.radians(opt.angle(opt.param_groups[0])) == pytest.approx(wanted, rel=1e-12)
        opt.step()
        read = monitor.read()
        assert read["angle_mean"] == pytest.approx(wanted, rel=1e-9)
        assert read["angle_max"] == pytest.approx(wanted, rel=1e-9)


def test_the_exact_angle_in_float32_and_rows_that_have_nowhere_to_go() -> None:
    p = parameter(6, 9, dtype=torch.float32)
    with torch.no_grad():
        p[4] = 0
    before = p.detach().clone()
    opt = AngularMuown([p], lr=1e-3, exact_angle=True)
    p.grad = noise(6, 9, seed=1, dtype=torch.float32)
    p.grad[2] = 0
    p.grad[4] = 0
    opt.step()
    angles = row_angles(before, p.detach())
    assert angles[4].isnan()
    assert angles[2] < 1e-6
    torch.testing.assert_close(angles[[0, 1, 3, 5]], torch.full((4,), 1e-3), rtol=1e-3, atol=0)


@given(m=st.integers(1, 6), n=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_unit_tangents_are_tangent_and_of_unit_length(m, n, seed) -> None:
    Q, U = noise(m, n, seed=seed), normalize_rows(noise(m, n, seed=seed + 1))
    D = UnitTangents()(Q, U, {})
    torch.testing.assert_close(D.norm(dim=-1), torch.ones(m, dtype=D.dtype))
    assert (D * U).sum(-1).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("key", "value"), [("scale", "adam_rms"), ("scale", "rms"), ("row_beta", 0.9)]
)
def test_what_an_exact_angle_would_ignore_is_refused(key, value) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} with exact_angle=True.*{key} at its"):
        AngularMuown([parameter(4, 6)], exact_angle=True, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("tangent_momentum", 1), ("exact_angle", None), ("tangent_polar", -1),
     ("tangent_polar", True), ("tangent_polar", 1.5), ("row_beta", 1.0), ("row_beta", "a")],
)  # fmt: skip
def test_values_are_checked(key, value) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} is not valid"):
        AngularMuown([parameter(4, 6)], **{key: value})


def test_row_beta_evens_out_the_rows_of_a_step() -> None:
    """A tall matrix whose rows have gradients of very different size."""
    spread = []
    for row_beta in (None, 0.9):
        p = parameter(40, 8)
        opt = AngularMuown([p], lr=1e-3, row_beta=row_beta, decay_degree=0.0)
        sizes = torch.logspace(0, -2, 40, dtype=p.dtype).unsqueeze(-1)
        for t in range(30):
            before = p.detach().clone()
            p.grad = sizes * noise(40, 8, seed=t)
            opt.step()
        angles = row_angles(before, p.detach())
        spread.append(float(angles.max() / angles.median()))
    assert spread[1] < 0.5 * spread[0]


def test_without_row_beta_normuon_is_muon() -> None:
    a, b = parameter(6, 8), parameter(6, 8)
    run(NorMuon([a], lr=0.02, row_beta=None), [a], 3)
    run(Muon([b], lr=0.02, weight_decay=0.0), [b], 3)
    assert torch.equal(a, b)


def test_a_lead_can_be_followed_from_a_checkpoint_on() -> None:
    """Settings are values of a group: state that a stage lacks starts at zero."""
    p = parameter(6, 8)
    opt = AngularMuown([p], lr=0.02)
    run(opt, [p], 3)
    opt.param_groups[0].update(row_beta=0.9, tangent_polar=1)
    run(opt, [p], 3, start=3)
    assert opt.state[p]["row_second_moment"].all()
    opt.param_groups[0].update(row_beta=None, exact_angle=True)
    run(opt, [p], 3, start=6)
    assert p.isfinite().all()
