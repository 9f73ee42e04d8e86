"""Table 1 of the paper: the angle of a step over time, compared with closed forms.

Gradients are white noise and momentum is off, so steps are independent and each row is a random
walk: with steps of length a, its squared norm grows by a^2 per step.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from angular_muown import AngleMonitor, AngularMuown, Muon, Muown
from angular_muown.stages.reductions import row_norm
from tests.library.family import noise

SHAPE = (24, 96)
STEPS = 1200


def measure(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.Tensor:
    """Return the mean angle of the rows in every step."""
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(noise(*SHAPE, seed=10**6))
        model.weight /= row_norm(model.weight)
    optimizer = make(list(model.parameters()))
    monitor = AngleMonitor(model, optimizer)
    angles = []
    for t in range(STEPS):
        model.weight.grad = noise(*SHAPE, seed=t)
        optimizer.step()
        angles.append(monitor.read()["angle_mean"])
    return torch.tensor(angles)


@pytest.mark.slow
def test_the_angle_plateaus_with_weight_decay() -> None:
    """Decay subtracts 2 lr wd |W|^2 and steps add a^2.

    |W| converges to a / sqrt(2 lr wd), and the angle to sqrt(2 lr wd) for every a.
    """
    lr, decay = 0.05, 0.1
    angles = measure(
        lambda p: Muon(p, lr=lr, weight_decay=decay, momentum=0.0, orthogonalize="svd")
    )
    early, late = angles[600:900].mean().item(), angles[900:].mean().item()
    assert late == pytest.approx(early, rel=0.03)
    assert late == pytest.approx((2 * lr * decay) ** 0.5, rel=0.05)


@pytest.mark.slow
def test_the_stored_norm_anneals_the_angle_with_the_square_root_of_time() -> None:
    """rho_t^2 = rho_0^2 + t a^2, so the angle a / rho_t decreases as t^(-1/2)."""
    lr = 0.05
    angles = measure(
        lambda p: Muown(p, lr=lr, momentum=0.0, orthogonalize="svd", scale="none", radius="fixed")
    )
    t = torch.arange(STEPS, dtype=angles.dtype)
    predicted = lr / (1 + t * lr**2).sqrt()
    for window in (slice(0, 100), slice(300, 500), slice(1000, STEPS)):
        assert angles[window].mean().item() == pytest.approx(
            predicted[window].mean().item(), rel=0.03
        )
    assert predicted[-1] < predicted[0] / 1.9, "the run is long enough to show it"


@pytest.mark.slow
@pytest.mark.parametrize("degree", [0.0, 0.5, 1.0])
def test_the_angle_is_lr_times_kappa(degree) -> None:
    lr = 0.02
    angles = measure(
        lambda p: AngularMuown(
            p, lr=lr, momentum=0.0, orthogonalize="svd", decay_degree=degree, warmup_steps=200
        )
    )
    t = torch.arange(STEPS, dtype=angles.dtype)
    kappa = (1 + 1e-3 * (t - 200).clamp(min=0)) ** -degree
    assert (angles / (lr * kappa) - 1).abs().max() < 0.05
