"""The oblique manifold: properties of the retraction, the exponential map and the transport."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from angular_muown.theory import exponential, project, radial, retract, transport
from tests.library.family import noise


def unit(m: int, n: int, seed: int) -> Tensor:
    U = noise(m, n, seed=seed)
    return U / U.norm(dim=-1, keepdim=True)


def angle(U: Tensor, V: Tensor) -> Tensor:
    """Return the angles between rows, from 0 to pi."""
    chord, opposite_chord = (V - U).norm(dim=-1), (V + U).norm(dim=-1)
    return 2 * torch.atan2(chord, opposite_chord)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 5),
    n=st.integers(2, 7),
    seed=st.integers(0, 10**6),
    size=st.floats(-4, 3),
    stretch=st.floats(-5, 5),
)
def test_angle_formula_for_steps_of_any_size(m, n, seed, size, stretch) -> None:
    """tan theta = |xi_perp| / (1 + <xi, U>), also for rotations by more than 90 degrees."""
    U = unit(m, n, seed)
    tangent = 10**size * project(noise(m, n, seed=seed + 1), U)
    theta = torch.atan2(tangent.norm(dim=-1), torch.full((m,), 1 + stretch).double())
    torch.testing.assert_close(angle(U, retract(U, tangent + stretch * U)), theta)


@pytest.mark.parametrize("move", [retract, exponential])
def test_a_move_stays_on_the_manifold_and_is_first_order_accurate(move) -> None:
    U = unit(5, 8, 0)
    V = project(noise(5, 8, seed=1), U)
    for size in (0.0, 1e-9, 1e-3, 1.0, 30.0):
        lengths = move(U, size * V).norm(dim=-1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))
    torch.testing.assert_close(move(U, 0 * V), U)
    first_order = (move(U, 1e-6 * V) - U) / 1e-6
    torch.testing.assert_close(first_order, V, rtol=1e-5, atol=1e-5)


def test_retraction_and_exponential_differ_in_third_order() -> None:
    """arctan x = x - x^3 / 3 + ...: the retraction lags behind the great circle by x^3 / 3."""
    U = unit(1, 6, 0)
    V = project(noise(1, 6, seed=1), U)
    V = V / V.norm()
    for size in (0.01, 0.02, 0.05):
        lag = angle(retract(U, size * V), exponential(U, size * V)).item()
        assert lag == pytest.approx(size**3 / 3, rel=2 * size)
    torch.testing.assert_close(exponential(U, math.pi / 2 * V), V)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 5), n=st.integers(2, 7), seed=st.integers(0, 10**6), size=st.floats(-3, 1))
def test_transport_is_an_isometry_of_tangent_spaces(m, n, seed, size) -> None:
    U = unit(m, n, seed)
    V = retract(U, 10**size * project(noise(m, n, seed=seed + 1), U))
    A, B = (project(noise(m, n, seed=seed + i), U) for i in (2, 3))
    A_V, B_V = transport(A, U, V), transport(B, U, V)
    assert radial(A_V, V).abs().max() < 1e-12 * (1 + A.norm())
    torch.testing.assert_close(radial(A_V, B_V), radial(A, B))
    torch.testing.assert_close(transport(A_V, V, U), A)  # and back


def test_transport_along_a_great_circle_carries_its_velocity() -> None:
    U = unit(4, 6, 0)
    V = project(noise(4, 6, seed=1), U)
    end = exponential(U, 0.7 * V)
    velocity = (exponential(U, (0.7 + 1e-6) * V) - exponential(U, (0.7 - 1e-6) * V)) / 2e-6
    torch.testing.assert_close(transport(V, U, end), velocity, rtol=1e-6, atol=1e-6)
