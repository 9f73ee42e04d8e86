"""Hyperball and MagnitudeDirection, which keep the Frobenius norm of every matrix."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import softplus

from angular_muown import Hyperball, MagnitudeDirection
from angular_muown.engine import Engine
from angular_muown.kernels.coverage import knows
from angular_muown.stages import charts
from angular_muown.stages.charts import GAIN_OF_ONE, GainedSphere, gain
from angular_muown.stages.context import Context
from angular_muown.stages.orthogonalize import svd
from angular_muown.stages.radius import Gains
from angular_muown.stages.reductions import frobenius
from tests.library.family import ON_SPHERES, noise, parameter, run


def norm_on_sphere(opt: Engine, p: nn.Parameter) -> float:
    """Return |W|_F, with gains divided out if there are any."""
    W, state = p.detach().to(torch.promote_types(p.dtype, torch.float32)), opt.state[p]
    if isinstance(opt, MagnitudeDirection) and state:
        W = W / (gain(state["row_gain"]) * gain(state["column_gain"]))
    return float(frobenius(W))


@pytest.mark.parametrize("optimizer", ON_SPHERES)
@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (1, 7), (7, 1)])
def test_the_norm_is_kept(optimizer: type[Engine], shape) -> None:
    p = parameter(*shape)
    opt = optimizer([p], lr=0.1)
    before = norm_on_sphere(opt, p)
    run(opt, [p], 50)
    assert norm_on_sphere(opt, p) == pytest.approx(before, rel=1e-13)
    assert float(opt.state[p]["matrix_norm"]) == pytest.approx(before, rel=1e-13)


@given(m=st.integers(2, 9), n=st.integers(2, 9), seed=st.integers(0, 10**6))
def test_lr_is_the_relative_size_of_a_step(m, n, seed) -> None:
    """Flattened to a unit vector, W of any shape turns as if by a step of length lr."""
    p, G, lr = parameter(m, n, seed=seed), noise(m, n, seed=seed), 0.1
    U, Q = (X / frobenius(X) for X in (p.detach().clone(), svd(G)))
    opt = Hyperball([p], lr=lr, orthogonalize="svd")
    p.grad = G
    opt.step()
    along = -lr * (Q * U).sum()
    chord = frobenius(p.detach() / frobenius(p.detach()) - U).squeeze()
    expected = torch.atan2((lr**2 - along**2).sqrt(), 1 + along)
    torch.testing.assert_close(2 * torch.asin(chord / 2), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (6, 6)])
def test_the_aspect_scale_gives_both_members_equal_steps(shape) -> None:
    """Without gains, MagnitudeDirection with the exact polar factor is Hyperball."""
    weights = []
    for optimizer, values in ((Hyperball, {}), (MagnitudeDirection, {"radius_lr": 0.0})):
        p = parameter(*shape)
        run(optimizer([p], lr=0.1, orthogonalize="svd", **values), [p], 20)
        weights.append(p.detach())
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-12)


def test_gradients_of_direction_and_gains_match_autograd() -> None:
    shapes = {"row_gain": (5, 1), "column_gain": (1, 7)}
    state = {name: noise(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    W, G = noise(5, 7, seed=8), noise(5, 7, seed=9)
    x, y = (state[name].clone().requires_grad_() for name in shapes)
    a, b = (softplus(z + GAIN_OF_ONE) for z in (x, y))
    V = (W / (a * b)).detach().requires_grad_()
    expected = torch.autograd.grad((G * (a * V * b)).sum(), (V, x, y))
    state["matrix_norm"] = torch.zeros(1, 1, dtype=W.dtype)
    for name in Gains.state_names:
        state[name] = torch.zeros_like(state["column_gain" if "column" in name else "row_gain"])
    context = Context(state)
    at = GainedSphere().split(W, G, context)
    Gains((0.0, 0.0), 1e-8)(at.g, at.r, context)
    torch.testing.assert_close((at.T, state["exp_avg"], state["column_exp_avg"]), expected)
    torch.testing.assert_close(GainedSphere().join(at, torch.zeros_like(W), at.g, context), W)


@pytest.mark.parametrize("optimizer", ON_SPHERES)
@pytest.mark.parametrize("lr", [1e-1, 1e-3])
def test_a_zero_matrix_grows_to_the_norm_of_unit_rows_and_no_further(
    optimizer: type[Engine], lr
) -> None:
    p = nn.Parameter(torch.zeros(6, 9, dtype=torch.float64))
    opt = optimizer([p], lr=lr, orthogonalize="svd")
    G = noise(6, 9, seed=1)
    p.grad = G.clone()
    opt.step()
    assert 0 < float(frobenius(p.detach())) <= lr * math.sqrt(6) * (1 + 2 * lr)
    assert (p.detach() * G).sum() < 0
    norms = []
    for _ in range(30):
        p.grad = G.clone()
        opt.step()
        norms.append(norm_on_sphere(opt, p))
    if lr == 1e-3:
        assert norms[-1] == pytest.approx(31 * lr * math.sqrt(6), rel=1e-6), (
            "grows in a straight line, as with Muon"
        )
    else:
        assert norms[5] < math.sqrt(6)
        assert norms[-5:] == pytest.approx([math.sqrt(6)] * 5, rel=1e-12)


@pytest.mark.parametrize("optimizer", ON_SPHERES)
def test_a_zero_matrix_without_gradient_stays_zero(optimizer: type[Engine]) -> None:
    p = nn.Parameter(torch.zeros(3, 4))
    opt = optimizer([p], lr=0.1)
    p.grad = torch.zeros_like(p)
    for _ in range(3):
        opt.step()
    assert not p.any()


@pytest.mark.parametrize("optimizer", ON_SPHERES)
def test_a_norm_changed_from_outside_replaces_the_stored_one(optimizer: type[Engine]) -> None:
    """A change that rounding to 16 bits could explain is ignored: the stored norm is restored."""
    p = parameter(6, 8)
    opt = optimizer([p], lr=1e-3)
    run(opt, [p], 3)
    before = norm_on_sphere(opt, p)
    for factor, expected in ((3.0, 3.0), (1.001, 3.0), (0.1, 0.3)):
        with torch.no_grad():
            p *= factor
        run(opt, [p], 2)
        assert norm_on_sphere(opt, p) == pytest.approx(expected * before, rel=1e-9)
    with torch.no_grad():
        p.zero_()
    run(opt, [p], 1)
    assert float(opt.state[p]["matrix_norm"]) == pytest.approx(-math.sqrt(6))
    assert 0 < norm_on_sphere(opt, p) < 2e-3 * math.sqrt(6)


@pytest.mark.parametrize("optimizer", ON_SPHERES)
@pytest.mark.parametrize("stored", [True, False])
def test_rounding_to_16_bits_does_not_erode_the_norm(
    optimizer: type[Engine], stored, monkeypatch
) -> None:
    """The norm is stored because it drifts if it is measured from the weights at every step."""
    if not stored:
        monkeypatch.setattr(charts, "ROUNDING", -1.0)
    p = parameter(48, 64, dtype=torch.bfloat16)
    opt = optimizer([p], lr=1e-3)
    before = norm_on_sphere(opt, p)
    run(opt, [p], 500)
    change = abs(norm_on_sphere(opt, p) / before - 1)
    assert change < 2e-4 if stored else change > 6e-4


@pytest.mark.parametrize("optimizer", ON_SPHERES)
def test_weight_decay_shrinks_the_norm(optimizer: type[Engine]) -> None:
    p = parameter(6, 8)
    opt = optimizer([p], lr=0.01, weight_decay=0.5)
    before = norm_on_sphere(opt, p)
    run(opt, [p], 10)
    assert norm_on_sphere(opt, p) == pytest.approx(before * 0.995**10, rel=1e-12)


@pytest.mark.parametrize("optimizer", ON_SPHERES)
def test_the_kernels_do_not_cover_spheres(optimizer: type[Engine]) -> None:
    opt = optimizer([parameter(4, 6)])
    assert not knows(opt.recipe(opt.param_groups[0]))


def test_hyperball_has_no_scale() -> None:
    with pytest.raises(ValueError, match="Hyperball has no scale"):
        Hyperball([{"params": [parameter(4, 6)], "scale": "rms"}])
