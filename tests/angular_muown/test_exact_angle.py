"""exact_angle: rows that have nowhere to turn stay, although rounding would point somewhere."""

import numpy as np
import pytest
import torch
from torch import Tensor

from angular_muown import AngularMuown
from angular_muown.monitor import row_angles
from angular_muown.stages.charts import Geodesic, normalize_rows
from angular_muown.stages.normalize import UnitTangents
from angular_muown.stages.orthogonalize import svd
from tests.angular_muown.family import TangentMomentum, TangentPolar, noise, parameter
from tests.reference import angular_muown

LR = 0.02
SHAPES = [(12, 12), (8, 40), (40, 8), (1, 9), (64, 300)]
STILL = {torch.float32: 1e-6, torch.float64: 1e-14}  # radians that writing a row may turn it by

orthogonalizers = pytest.mark.parametrize(
    "orthogonalize", ["polar_express", "newton_schulz", "gram", "svd"]
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
shapes = pytest.mark.parametrize("shape", SHAPES)
leads = pytest.mark.parametrize("optimizer", [AngularMuown, TangentMomentum, TangentPolar])


def turned(
    W: Tensor, G: Tensor, optimizer: type[AngularMuown] = AngularMuown, **values: object
) -> tuple[Tensor, Tensor]:
    """The weight after one step, and the radians that its rows turned by."""
    p = torch.nn.Parameter(W.clone())
    p.grad = G.clone()
    optimizer([p], lr=LR, exact_angle=True, **values).step()
    return p.detach(), row_angles(W, p.detach())


def case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return parameter(*shape, dtype=dtype).detach(), noise(*shape, seed=1, dtype=dtype)


def assert_still(angles: Tensor, at: slice, dtype: torch.dtype) -> None:
    assert angles[at].max() <= STILL[dtype]
    others = torch.cat([angles[: at.start], angles[at.stop :]])
    torch.testing.assert_close(others, torch.full_like(others, LR), rtol=1e-3, atol=0)


@dtypes
@shapes
@leads
@orthogonalizers
def test_rows_without_a_gradient_stay(orthogonalize, optimizer, shape, dtype) -> None:
    W, G = case(shape, dtype)
    G[:3] = 0
    angles = turned(W, G, optimizer, orthogonalize=orthogonalize)[1]
    assert_still(angles, slice(0, 3), dtype)


@dtypes
@shapes
@leads
@pytest.mark.parametrize("factor", [0.3, -7.1])
@orthogonalizers
def test_rows_whose_gradient_is_along_them_stay(
    orthogonalize, factor, optimizer, shape, dtype
) -> None:
    """Their tangent gradient is rounding, which a polar factor may make a thousand times longer."""
    W, G = case(shape, dtype)
    G[:3] = factor * W[:3]
    angles = turned(W, G, optimizer, orthogonalize=orthogonalize)[1]
    assert_still(angles, slice(0, 3), dtype)


@dtypes
@shapes
@orthogonalizers
def test_rows_at_zero_leave_along_their_gradient(orthogonalize, shape, dtype) -> None:
    W, G = case(shape, dtype)
    W[0] = 0
    after, _ = turned(W, G, orthogonalize=orthogonalize)
    assert row_angles(-G, after)[0] <= STILL[dtype]
    assert after[0].norm() > 0


@dtypes
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_a_gradient_makes_no_noise_of_it(size, dtype) -> None:
    """A length of 1e30, squared, would leave the range of float32."""
    W, G = case((8, 20), dtype)
    G[:2] = W[:2]
    assert_still(turned(W, size * G)[1], slice(0, 2), dtype)


@dtypes
def test_a_small_tangent_part_is_no_noise(dtype) -> None:
    """A thousandth of a gradient that is along its row otherwise."""
    W, G = case((8, 20), dtype)
    G = 1e-3 * G / G.norm() + W / W.norm()
    angles = turned(W, G)[1]
    torch.testing.assert_close(angles, torch.full_like(angles, LR), rtol=1e-3, atol=0)


@dtypes
@pytest.mark.parametrize("shape", [(6, 2), (4, 30), (2, 4096)])
def test_rows_of_q_along_u_have_no_tangent_part(shape, dtype) -> None:
    U = normalize_rows(noise(*shape, seed=3, dtype=dtype))
    Q = 0.37 * U
    Q[1:] += 0.01 * noise(shape[0] - 1, shape[1], seed=4, dtype=dtype)
    lengths = UnitTangents()(Q, U, {}).norm(dim=-1)
    assert lengths[0] == 0
    torch.testing.assert_close(lengths[1:], torch.ones_like(lengths[1:]))


def test_what_is_no_number_is_no_rounding() -> None:
    """A gradient that broke shall be seen."""
    W, G = case((3, 5), torch.float32)
    G[1, 2] = torch.nan
    assert Geodesic().split(W, G, {}).T[1].isnan().any()
    assert UnitTangents()(G, normalize_rows(W), {})[1].isnan().any()


@dtypes
@shapes
def test_the_exact_polar_factor_keeps_empty_rows_and_columns_empty(shape, dtype) -> None:
    """Rows that rounding of the largest singular value hides are as good as empty."""
    X = noise(*shape, seed=1, dtype=dtype)
    X[:, 1] = 0
    X[0] *= torch.finfo(dtype).eps / 100 if shape[0] > 1 else 1
    X[1:2] = 0
    Q = svd(X)
    assert not Q[:, 1].any()
    assert not Q[1:2].any()
    assert Q[0].any() == (shape[0] == 1)


@pytest.mark.parametrize("shape", [(10, 24), (24, 10), (12, 12)])
@pytest.mark.parametrize("tangent_momentum", [False, True])
def test_the_reference_agrees_about_rows_that_stay(shape, tangent_momentum) -> None:
    """Rows 0 and 1 never have a tangent gradient, row 2 has none from the fifth step on."""
    p = parameter(*shape)
    values = {"lr": LR, "exact_angle": True, "tangent_momentum": tangent_momentum}
    start = p.detach().clone()
    reference = angular_muown.AngularMuown(start.numpy().copy(), **values)
    ours = AngularMuown([p], orthogonalize="svd", **values)
    for t in range(20):
        p.grad = noise(*shape, seed=t)
        p.grad[0] = 0
        p.grad[1] = 0.3 * p.detach()[1]
        if t >= 5:
            p.grad[2] = 0
        wanted = reference.step(p.grad.numpy())
        ours.step()
        assert np.linalg.norm(p.detach().numpy() - wanted) <= 1e-12 * np.linalg.norm(wanted)
    assert (start[:2] * p.detach()[:2]).sum(-1).abs() / start[:2].norm(dim=-1) == pytest.approx(
        p.detach()[:2].norm(dim=-1), rel=1e-12
    )
