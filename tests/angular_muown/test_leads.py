"""Settings of AngularMuown beyond the paper: what each of them promises."""

import math
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
from angular_muown.stages.charts import Oblique, normalize_rows
from angular_muown.stages.normalize import AsIs, UnitTangents
from angular_muown.stages.tangent import Free
from tests.angular_muown.family import noise, parameter, run

SHAPES = [(12, 12), (8, 20), (20, 8)]
TANGENT: list[dict[str, Any]] = [
    {"tangent_momentum": True},
    {"orthogonalize": "tangent", "tangent_steps": 2},
]


def recipe(**values: Any) -> Recipe:
    opt = AngularMuown([parameter(4, 6)], **values)
    return opt.recipe(opt.param_groups[0])


def test_by_default_all_of_it_is_off() -> None:
    plain = recipe()
    assert type(plain.chart) is Oblique
    assert type(plain.normalize) is AsIs
    assert type(plain.tangent) is Free
    assert "multiplier" not in plain.rows


@pytest.mark.parametrize(
    "values",
    [
        *TANGENT,
        {"exact_angle": True},
        {"exact_angle": True, "tangent_momentum": True},
        {"column_gains": True},
    ],
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


@pytest.mark.parametrize("shape", [*SHAPES, (1, 5), (5, 2)])
@pytest.mark.parametrize("orthogonalize", ["polar_express", "newton_schulz", "svd", "tangent"])
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
    [("tangent_momentum", 1), ("exact_angle", None), ("column_gains", 1), ("tangent_steps", -1),
     ("tangent_steps", True), ("tangent_steps", 1.5), ("row_beta", 1.0), ("row_beta", "a")],
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
    opt.param_groups[0].update(row_beta=0.9, orthogonalize="tangent")
    run(opt, [p], 3, start=3)
    assert opt.state[p]["row_second_moment"].all()
    assert opt.state[p]["multiplier"].all()
    opt.param_groups[0].update(row_beta=None, exact_angle=True, orthogonalize="svd")
    run(opt, [p], 3, start=6)
    assert p.isfinite().all()
