"""The paper's claims as laws, which hold for every weight, gradient and shape."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from angular_muown import AngularMuown, Muown, inverse_polynomial
from angular_muown.engine import Engine
from angular_muown.monitor import row_angles
from angular_muown.params.layout import Layout
from angular_muown.schedules import angle_degrees
from angular_muown.stages.charts import (
    Flat,
    GainedSphere,
    Oblique,
    Sphere,
    WeightNorm,
    normalize_rows,
)
from angular_muown.stages.context import Context
from angular_muown.stages.orthogonalize import polar_express, svd
from angular_muown.stages.reductions import row_norm
from angular_muown.stages.scale import SCALES, fan_ratio
from angular_muown.update import Chart
from tests.library.family import FAMILY, WITH_RADII, direction_only, noise, parameter, run
from tests.reference import Adam

shapes = st.tuples(st.integers(1, 9), st.integers(2, 9))
seeds = st.integers(0, 10**6)
CHARTS = [Flat(), Oblique(), WeightNorm(), Sphere(), GainedSphere()]


def _weight_and_gradient(shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    return noise(*shape, seed=seed), noise(*shape, seed=seed + 1)


def _context(chart: Chart, W: Tensor) -> Context:
    shapes = {name: Layout().vector_shape(W, name) for name in chart.state_names}
    return Context({name: torch.zeros(shape, dtype=W.dtype) for name, shape in shapes.items()})


@pytest.mark.parametrize("chart", CHARTS, ids=lambda c: type(c).__name__)
@given(shape=shapes, seed=seeds)
def test_join_of_split_is_the_identity(chart, shape, seed) -> None:
    W, G = _weight_and_gradient(shape, seed)
    context = _context(chart, W)
    at = chart.split(W, G, context)
    torch.testing.assert_close(chart.join(at, torch.zeros_like(W), at.g, context), W)


@pytest.mark.parametrize("chart", CHARTS[1:3], ids=lambda c: type(c).__name__)
@given(shape=shapes, seed=seeds)
def test_the_tangent_gradient_is_tangent(chart, shape, seed) -> None:
    W, G = _weight_and_gradient(shape, seed)
    at = chart.split(W, G, _context(chart, W))
    inner = (at.U * at.T).sum(-1).abs()
    assert (inner <= 1e-12 * (1 + row_norm(at.T).squeeze(-1))).all()


@given(shape=shapes, seed=seeds)
def test_the_gradient_is_the_sum_of_its_radial_and_tangent_parts(shape, seed) -> None:
    """The chain rule of W = Diag(g) U: G = T / g + r U."""
    W, G = _weight_and_gradient(shape, seed)
    at = Oblique().split(W, G, Context({}))
    torch.testing.assert_close(at.T / at.g + at.r * at.U, G)


@given(shape=shapes, seed=seeds, size=st.floats(1e-6, 1e3))
def test_the_retraction_lands_on_unit_rows(shape, seed, size) -> None:
    W, G = _weight_and_gradient(shape, seed)
    at = Oblique().split(W, G, Context({}))
    joined = Oblique().join(at, size * G, torch.ones_like(at.g), Context({}))
    torch.testing.assert_close(row_norm(joined), torch.ones_like(at.g))


@given(n=st.integers(2, 12), seed=seeds, size=st.floats(1e-8, 0.9))
def test_angle_of_a_retracted_step(n, seed, size) -> None:
    """Proposition: tan(theta) = |xi_perp| / (1 + <xi, U>)."""
    U = normalize_rows(noise(4, n, seed=seed))
    xi = size * normalize_rows(noise(4, n, seed=seed + 1))
    radial = (xi * U).sum(-1, keepdim=True)
    expected = torch.atan2(row_norm(xi - radial * U), 1 + radial).squeeze(-1)
    measured = row_angles(U, normalize_rows(U + xi))
    # The monitor ignores the sign of a direction, so it never reports more than 90 degrees.
    expected = torch.minimum(expected, math.pi - expected)
    torch.testing.assert_close(measured, expected, rtol=1e-6, atol=1e-14)


@given(shape=shapes, seed=seeds, data=st.data())
@settings(max_examples=30)
def test_the_turn_does_not_depend_on_the_gauge(shape, seed, data) -> None:
    """Rescaling W_i -> c_i W_i, G_i -> G_i / c_i does not change U at any step."""
    W = noise(*shape, seed=seed)
    c = torch.tensor(
        data.draw(st.lists(st.floats(0.01, 100), min_size=shape[0], max_size=shape[0])),
        dtype=torch.float64,
    ).unsqueeze(-1)
    directions = []
    for factor in (torch.ones_like(c), c):
        p = nn.Parameter(factor * W)
        # Use the polynomial: the exact polar factor may amplify rounding without bound.
        opt = AngularMuown([p], lr=0.1, radius="fixed")
        for t in range(4):
            p.grad = noise(*shape, seed=seed + 1 + t) / factor
            opt.step()
        directions.append(normalize_rows(p.detach()))
    torch.testing.assert_close(*directions, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("radius", ["fixed", "adam"])
def test_muown_is_a_riemannian_step_divided_by_the_stored_norm(shape, radius) -> None:
    """Muown on R equals the retraction of U - (lr s / rho) Q exactly, where rho follows |R|."""
    p = parameter(*shape)
    opt = Muown([p], lr=0.05, orthogonalize="svd", radius=radius)
    adam = Adam(shape[0])
    W = p.detach().clone()
    g, U = row_norm(W), normalize_rows(W)
    rho, M = g.clone(), torch.zeros_like(W)
    s = SCALES["adam_rms"](*shape)
    for t in range(50):
        G = noise(*shape, seed=t)
        r = (G * U).sum(-1, keepdim=True)
        T = g / rho * (G - r * U)
        M = 0.95 * M + T
        step = U - 0.05 * s / rho * svd(T + 0.95 * M)
        rho, U = rho * row_norm(step), normalize_rows(step)
        if radius == "adam":  # g may become negative, as published
            g = g - 0.05 * torch.tensor(adam.direction(r.squeeze(-1).numpy())).unsqueeze(-1)
        p.grad = G
        opt.step()
    torch.testing.assert_close(p.detach(), g * U, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(opt.state[p]["stored_norm"], rho, rtol=1e-12, atol=0)


def test_angular_muown_with_kappa_one_over_the_stored_norm_is_muown() -> None:
    """Use one row per matrix, so that scaling rows does not change the polar factor."""
    a, b = parameter(1, 8), parameter(1, 8)
    muown = Muown([a], lr=0.01, orthogonalize="svd", radius="fixed", scale="none", momentum=0.0)
    angular = AngularMuown(
        [b], lr=0.01, orthogonalize="svd", radius="fixed", scale="none", momentum=0.0
    )
    for t in range(30):
        a.grad = b.grad = noise(1, 8, seed=t)
        rho = float(muown.state[a]["stored_norm"]) if muown.state else float(row_norm(a.detach()))
        angular.kappa = lambda group, rho=rho: 1 / rho  # type: ignore[method-assign]
        muown.step()
        angular.step()
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (128, 128), (512, 32), (32, 512)])
@pytest.mark.parametrize("polar", [svd, polar_express])
def test_fan_ratio_makes_the_step_of_a_row_independent_of_the_shape(shape, polar) -> None:
    Q = polar(noise(*shape, seed=1))
    typical = (fan_ratio(*shape) * row_norm(Q)).square().mean().sqrt()
    assert 0.85 < typical < 1.15


def _one_step(shape: tuple[int, int], seed: int, lr: float, at_step: int) -> tuple[Tensor, Tensor]:
    p = parameter(*shape, seed=seed)
    opt = AngularMuown([p], lr=lr)
    opt.param_groups[0]["step"] = at_step
    before = p.detach().clone()
    p.grad = noise(*shape, seed=seed)
    opt.step()
    angle = row_angles(before, p.detach())
    return angle, row_norm(p.detach()) - row_norm(before)


@given(shape=shapes, seed=seeds, step=st.integers(1, 10**5))
def test_kappa_acts_on_the_direction_alone_and_lr_on_both(shape, seed, step) -> None:
    """tan(angle) is proportional to lr * kappa, the change of a length to lr alone."""
    lr, factor = 1e-6, 1 / (1 + 1e-3 * step)
    angle, stretch = _one_step(shape, seed, lr, at_step=0)
    by_kappa, stretch_by_kappa = _one_step(shape, seed, lr, at_step=step)
    torch.testing.assert_close(by_kappa, angle * factor, rtol=1e-4, atol=1e-14)
    torch.testing.assert_close(stretch_by_kappa, stretch, rtol=1e-9, atol=1e-15)
    by_lr, stretch_by_lr = _one_step(shape, seed, lr * factor, at_step=0)
    torch.testing.assert_close(by_lr, angle * factor, rtol=1e-4, atol=1e-14)
    torch.testing.assert_close(stretch_by_lr, stretch * factor, rtol=1e-6, atol=1e-15)


def test_radius_lr_follows_the_schedule_of_lr() -> None:
    lengths = []
    for radius_lr, factor in ((0.004, 1.0), (0.004, 0.25), (None, 1.0)):
        p = parameter(5, 7)
        opt = AngularMuown([p], lr=0.02, radius_lr=radius_lr, orthogonalize="svd")
        before = row_norm(p.detach())
        opt.param_groups[0]["lr"] *= factor
        p.grad = noise(5, 7, seed=1)
        opt.step()
        lengths.append((row_norm(p.detach()) - before).abs().mean())
    torch.testing.assert_close(lengths[1], lengths[0] / 4, rtol=1e-6, atol=0)
    torch.testing.assert_close(lengths[2], lengths[0] * 5, rtol=1e-6, atol=0)


@given(step=st.integers(0, 10**6), warmup=st.integers(0, 1000), p=st.floats(0, 3))
def test_kappa_is_one_until_warmup_and_falls_after(step, warmup, p) -> None:
    kappa = inverse_polynomial(step, warmup, 1e-3, p)
    assert 0 < kappa <= 1
    if step <= warmup or p == 0:
        assert kappa == 1
    assert inverse_polynomial(step + 1, warmup, 1e-3, p) <= kappa


def test_the_angle_follows_from_lr_and_kappa() -> None:
    opt = AngularMuown([parameter(4, 4)], lr=0.02)
    group = opt.param_groups[0]
    assert opt.angle(group) == pytest.approx(math.degrees(math.atan(0.02)))
    group["step"] = 1000
    assert opt.kappa(group) == pytest.approx(0.5)
    assert opt.angle(group) == pytest.approx(angle_degrees(0.02, 0.5))


@pytest.mark.parametrize("optimizer", WITH_RADII)
@pytest.mark.parametrize("radius", ["adam", "log_adam"])
@pytest.mark.parametrize("lr", [1e-1, 1e-3, 1e-5])
def test_a_zero_row_leaves_zero_continuously(optimizer: type[Engine], radius, lr) -> None:
    p = parameter(5, 6)
    with torch.no_grad():
        p[2] = 0
    opt = optimizer([p], lr=lr, radius=radius)
    G = noise(5, 6, seed=3)
    p.grad = G.clone()
    opt.step()
    row = p.detach()[2]
    assert 0 < row.norm() <= lr * (1 + 1e-6)
    torch.testing.assert_close(row / row.norm(), -G[2] / G[2].norm())
    run(opt, [p], 20)
    assert p.isfinite().all()
    assert p.detach()[2].norm() <= 21 * lr * (1 + lr) ** 21


@pytest.mark.parametrize("optimizer", WITH_RADII)
@pytest.mark.parametrize("radius", ["adam", "log_adam"])
def test_a_row_zeroed_from_outside_moves_downhill_despite_its_momentum(optimizer, radius) -> None:
    """The first moment of a pruned row's length belongs to a direction that no longer exists."""
    p = parameter(5, 6)
    opt = optimizer([p], lr=0.01, radius=radius)
    for t in range(5):
        p.grad = 1000 * p.detach() + noise(5, 6, seed=t)  # shrinks every row
        opt.step()
    with torch.no_grad():
        p[2] = 0
    p.grad = noise(5, 6, seed=9)
    opt.step()
    assert p.detach()[2] @ p.grad[2] < 0
    assert p.detach()[2].norm() <= 0.01


@pytest.mark.parametrize("optimizer", FAMILY)
def test_zero_rows_without_gradient_stay_zero(optimizer: type[Engine]) -> None:
    p = parameter(5, 6)
    with torch.no_grad():
        p[2] = 0
    opt = optimizer([p], lr=0.1)
    for t in range(5):
        p.grad = noise(5, 6, seed=t)
        p.grad[2] = 0
        opt.step()
    assert p.isfinite().all()
    assert not p[2].any()


@pytest.mark.parametrize("optimizer", FAMILY)
def test_zero_gradients_at_the_first_step_do_not_move_weights(optimizer: type[Engine]) -> None:
    p = parameter(5, 6)
    before = p.detach().clone()
    opt = optimizer([p], lr=0.1, weight_decay=0.0)
    p.grad = torch.zeros_like(p)
    opt.step()
    torch.testing.assert_close(p.detach(), before, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_the_direction_ignores_the_size_of_the_gradient(optimizer: type[Engine], size) -> None:
    """Gradient clipping produces such sizes. An eps in a divisor would change the step there."""
    results = []
    for factor in (1.0, size):
        p = parameter(8, 12, dtype=torch.float32)
        opt = optimizer([p], lr=0.01, **direction_only(optimizer))
        for t in range(3):
            p.grad = noise(8, 12, seed=t, dtype=torch.float32) * factor
            opt.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("size", [1e20, 1e30])
def test_weights_stay_finite_after_a_gradient_spike(optimizer: type[Engine], size) -> None:
    """The square of such a gradient overflows float32."""
    p = parameter(4, 6, dtype=torch.float32)
    opt = optimizer([p], lr=0.01)
    for t in range(6):
        p.grad = noise(4, 6, seed=t, dtype=torch.float32) * (size if t == 1 else 1.0)
        opt.step()
        assert p.isfinite().all()


@pytest.mark.parametrize("optimizer", FAMILY)
def test_zero_eps_does_not_divide_by_a_zero_gradient(optimizer: type[Engine]) -> None:
    p = parameter(4, 6)
    opt = optimizer([p], eps=0.0)
    p.grad = noise(4, 6, seed=1)
    p.grad[2] = 0
    opt.step()
    assert p.isfinite().all()


@pytest.mark.parametrize("factor", [3.0, 0.2])
def test_log_adam_is_scale_invariant(factor) -> None:
    """The relative change of a length does not depend on the units of weights and gradients."""
    results = []
    for c in (1.0, factor):
        p = nn.Parameter(parameter(6, 5).detach() * c)
        opt = AngularMuown([p], lr=0.05, radius="log_adam", orthogonalize="svd", eps=0.0)
        for t in range(10):
            p.grad = noise(6, 5, seed=t) / c
            opt.step()
        results.append(row_norm(p.detach()) / c)
    torch.testing.assert_close(*results)


def test_log_adam_never_changes_the_sign_and_fixed_keeps_the_lengths() -> None:
    for radius in ("log_adam", "fixed"):
        p = parameter(6, 5)
        before = p.detach().clone()
        opt = AngularMuown([p], lr=1e-4, radius=radius, radius_lr=2.0)
        for t in range(20):
            p.grad = before + 0.1 * noise(6, 5, seed=t)  # points away from zero: descent shrinks W
            opt.step()
        assert ((p.detach() * before).sum(-1) > 0).all()
        if radius == "fixed":
            torch.testing.assert_close(row_norm(p.detach()), row_norm(before))
