"""AngleMonitor: correct measurements for any optimizer, at little cost."""

import math

import pytest
import torch
from torch import nn

from angular_muown import AngleMonitor, AngularMuown, plan
from angular_muown.monitor import orthogonality_error, row_angles
from tests.library.family import FAMILY, noise
from tests.library.models import BLOCKS, loss_of, tiny_lm

TORCH_OPTIMIZERS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        optimizer.step()


@pytest.mark.parametrize("angle", [1e-7, 3e-5, 1e-3, 0.1, 1.0])
def test_small_angles_are_resolved_in_float32(angle) -> None:
    """arccos does not resolve angles below 3e-4."""
    u = torch.tensor([[1.0, 0.0]])
    v = torch.tensor([[math.cos(angle), math.sin(angle)]])
    assert row_angles(u, 5 * v).item() == pytest.approx(angle, rel=1e-3)


def test_a_row_that_crossed_zero_did_not_turn() -> None:
    u = noise(3, 5, seed=1)
    torch.testing.assert_close(row_angles(u, -0.1 * u), torch.zeros(3, dtype=u.dtype))


def test_the_angle_of_a_zero_row_is_nan() -> None:
    u = noise(2, 5, seed=1)
    u[0] = 0
    assert row_angles(u, noise(2, 5, seed=2)).isnan().tolist() == [True, False]


def test_orthogonality_error_is_zero_for_orthonormal_columns() -> None:
    Q = torch.linalg.qr(noise(3, 8, 4, seed=1))[0]
    assert orthogonality_error(Q).max() < 1e-12
    torch.testing.assert_close(orthogonality_error(2 * Q), torch.full((3,), 3.0, dtype=Q.dtype))


@pytest.mark.parametrize("optimizer", FAMILY)
def test_all_measurements_of_the_family_are_finite_and_read_once(optimizer) -> None:
    model = tiny_lm()
    opt = optimizer(plan(model, blocks=BLOCKS), lr=0.01)
    monitor = AngleMonitor(model, opt)
    assert monitor.read() == {}
    train(model, opt)
    values = monitor.read()
    assert monitor.read() == {}
    for key in ("angle_mean", "angle_max", "row_norm_mean", "radial_mean", "orthogonality_error"):
        assert math.isfinite(values[key]), key
        assert math.isfinite(values[f"{key}/layers.0.attn.qkv.weight"])
    assert not any("embedding" in key or "lm_head" in key for key in values)
    assert ("kappa" in values) == issubclass(optimizer, AngularMuown)


def test_the_angle_of_angular_muown_is_lr_times_kappa() -> None:
    model = tiny_lm()
    opt = AngularMuown(plan(model, blocks=BLOCKS), lr=0.003)
    monitor = AngleMonitor(model, opt)
    train(model, opt)
    assert monitor.read()["angle_mean"] == pytest.approx(0.003, rel=0.15)


@pytest.mark.parametrize("optimizer", TORCH_OPTIMIZERS)
def test_angles_of_torch_optimizers_are_measured(optimizer) -> None:
    model = tiny_lm()
    opt = optimizer(model.parameters(), lr=1e-2)
    monitor = AngleMonitor(model, opt)
    before = model.layers[0].up.weight.detach().clone()
    train(model, opt)
    values = monitor.read()
    name = "angle_mean/layers.0.up.weight"
    expected = row_angles(before, model.layers[0].up.weight.detach()).mean().item()
    assert values[name] == pytest.approx(expected, rel=1e-5)
    assert "angle_mean/embedding.weight" not in values
    assert "kappa" not in values


def test_every_measures_each_third_step_and_leaves_no_observers_or_copies() -> None:
    model = tiny_lm()
    opt = AngularMuown(plan(model), lr=0.01)
    monitor = AngleMonitor(model, opt, every=3)
    measured = []
    for _ in range(7):
        train(model, opt)
        measured.append(bool(monitor.read()))
        assert not opt.observers
        assert not monitor._before
    assert measured == [True, False, False, True, False, False, True]
    monitor.close()
    train(model, opt, 3)
    assert monitor.read() == {}


def test_a_parameter_without_a_gradient_has_angle_zero() -> None:
    model = tiny_lm()
    opt = AngularMuown(plan(model), lr=0.01)
    monitor = AngleMonitor(model, opt)
    loss_of(model).backward()
    model.layers[0].up.weight.grad = None
    opt.step()
    values = monitor.read()
    assert values["angle_mean/layers.0.up.weight"] == 0
    assert "radial_mean/layers.0.up.weight" not in values
    assert values["angle_mean"] > 0


def test_means_weight_unequal_blocks_by_their_rows() -> None:
    model = nn.Linear(40, 48, bias=False, dtype=torch.float64)
    opt = AngularMuown([{"params": model.parameters(), "blocks": [32, 12, 4]}], lr=0.01)
    monitor = AngleMonitor(model, opt)
    radial = []
    opt.observers = (lambda parts, U, Q, angles: radial.append((Q * U).sum(-1).abs().flatten()),)
    model.weight.grad = noise(48, 40, seed=1)
    before = model.weight.detach().clone()
    opt.step()
    values = monitor.read()
    assert values["radial_mean"] == pytest.approx(torch.cat(radial).mean().item())
    expected = row_angles(before, model.weight.detach()).mean().item()
    assert values["angle_mean"] == pytest.approx(expected)


def test_a_step_that_raises_leaves_no_measurements_or_observers() -> None:
    model = tiny_lm()
    opt = AngularMuown(plan(model), lr=0.01)
    monitor = AngleMonitor(model, opt)
    loss_of(model).backward()
    model.embedding.weight.grad = model.embedding.weight.grad.to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        opt.step()
    assert monitor.read() == {}
    monitor.close()
    assert not opt.observers


def test_two_monitors_of_one_optimizer_agree() -> None:
    model = tiny_lm()
    opt = AngularMuown(plan(model), lr=0.01)
    monitors = [AngleMonitor(model, opt), AngleMonitor(model, opt)]
    train(model, opt)
    a, b = (monitor.read() for monitor in monitors)
    assert a == b
    assert "radial_mean" in a


def test_a_monitor_does_not_change_training() -> None:
    models = []
    for monitored in (True, False):
        model = tiny_lm()
        opt = AngularMuown(plan(model), lr=0.01)
        if monitored:
            AngleMonitor(model, opt)
        train(model, opt, 4)
        models.append(model)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


def test_a_bad_interval_is_rejected() -> None:
    model = tiny_lm()
    with pytest.raises(ValueError, match="every=0"):
        AngleMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1), every=0)
