"""Weights and gradients near the limits of their dtypes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngularMuown, Muown, NorMuown
from angular_muown.engine import Engine
from angular_muown.stages.orthogonalize import svd
from angular_muown.stages.reductions import LOCAL, row_norm
from tests.library.family import MEMBERS, ON_SPHERES, noise, parameter

SIZES = [1e-30, 1e-22, 1e-15, 1.0, 1e15, 4e18, 1e25, 1e37]


def one_step(member: type[Engine], size: float, dtype: torch.dtype, **values: Any) -> Tensor:
    """Return a weight of the given size after one step, divided by that size.

    The gradient is proportional to 1 / size, so that T = g (G - r U) stays in range.
    """
    W = parameter(6, 5, seed=1, dtype=torch.float64).detach() * size
    p = nn.Parameter(W.to(dtype))
    p.grad = (noise(6, 5, seed=2) / max(size, 1e-28)).to(dtype)
    optimizer = member([p], lr=0.1, **values)
    optimizer.step()
    return p.detach().double() / size


@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((size, torch.float32) for size in SIZES), (1e-200, torch.float64), (1e300, torch.float64)],
)
def test_norms_neither_overflow_nor_underflow(size: float, dtype: torch.dtype) -> None:
    X = noise(4, 7, seed=3)
    scaled = (X * size).to(dtype)
    for norm in (row_norm, LOCAL.row_norm, LOCAL.frobenius):
        torch.testing.assert_close(norm(scaled).double() / size, norm(X), rtol=1e-6, atol=0)


def test_scaling_some_rows_does_not_change_the_norms_of_others() -> None:
    """Scaling by powers of two is exact: rows that need no scaling keep the same bits."""
    X = noise(3, 64, seed=4, dtype=torch.float32)
    mixed = torch.cat([X, 1e-30 * X])
    assert torch.equal(row_norm(mixed)[:3], torch.linalg.vector_norm(X, dim=-1, keepdim=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_rows_stay_nonfinite_and_do_not_affect_others(value: float) -> None:
    X = noise(3, 5, seed=5, dtype=torch.float32)
    bad = X.clone()
    bad[1, 2] = value
    norm = row_norm(bad)
    assert not norm[1].isfinite().any()
    assert torch.equal(norm[[0, 2]], row_norm(X)[[0, 2]])


@pytest.mark.parametrize("size", SIZES)
def test_a_step_turns_rows_of_any_length_by_the_same_angle(size: float) -> None:
    arguments = {"radius": "fixed", "orthogonalize": "svd"}
    result = one_step(AngularMuown, size, torch.float32, **arguments)
    expected = one_step(AngularMuown, 1.0, torch.float64, **arguments)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("member", [Muown, NorMuown])
def test_stored_norms_of_any_size_stay_finite(member: type[Engine], size: float) -> None:
    assert one_step(member, size, torch.float32, radius="fixed").isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e-24, 1e20, 1e30])
@pytest.mark.parametrize("member", ON_SPHERES)
def test_members_on_spheres_keep_a_norm_of_any_size(member: type[Engine], size: float) -> None:
    """A tiny norm must not count as zero: a zero matrix would grow to the norm of unit rows."""
    result = one_step(member, size, torch.float32, orthogonalize="svd")
    expected = one_step(member, 1.0, torch.float64, orthogonalize="svd")
    torch.testing.assert_close(result.norm(), expected.norm(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_gradient_with_nan_affects_only_its_own_matrix_under_svd(member: type[Engine]) -> None:
    params = [parameter(6, 4, seed=i) for i in range(3)]
    clean = [parameter(6, 4, seed=i) for i in range(3)]
    for weights, has_nan in ((params, True), (clean, False)):
        optimizer = member(weights, orthogonalize="svd")
        for i, p in enumerate(weights):
            p.grad = noise(6, 4, seed=i)
            if has_nan and i == 1:
                p.grad[2, 3] = float("nan")
        optimizer.step()
    assert params[1].isnan().any()
    for i in (0, 2):
        assert torch.equal(params[i], clean[i])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_svd_of_a_nonfinite_matrix_is_nan_and_does_not_affect_others(value: float) -> None:
    X = noise(3, 4, 6, seed=7)
    bad = X.clone()
    bad[1, 2, 3] = value
    Q, expected = svd(bad), svd(X)
    assert Q[1].isnan().all()
    assert torch.equal(Q[[0, 2]], expected[[0, 2]])
