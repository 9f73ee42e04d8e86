"""The monitor and the kernels: no effect on the weights, no copies, the eager path's values."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngleMonitor, AngularMuown, Muon, Muown, NorMuon
from angular_muown.engine import Engine
from angular_muown.monitor import row_angles
from tests.library.family import noise
from tests.library.kernels.test_fused import Member, advance, assert_fused, kernels, weights


def model() -> nn.ModuleDict:
    """Return two weights with matrices of one shape, one of them fused, and another shape."""
    torch.manual_seed(1)
    parts = {"qkv": nn.Linear(144, 384, bias=False), "out": nn.Linear(144, 128, bias=False)}
    return nn.ModuleDict({**parts, "down": nn.Linear(128, 144, bias=False)})


def groups(net: nn.ModuleDict) -> list[dict[str, Any]]:
    return [
        {"params": [net["qkv"].weight], "blocks": 3},
        {"params": [net["out"].weight, net["down"].weight]},
    ]


def give_gradients(net: nn.Module, t: int) -> None:
    for i, p in enumerate(net.parameters()):
        p.grad = noise(*p.shape, seed=10 * t + i).to(p)


def train(
    optimizer: Member, fused: bool, monitored: bool, workspace: float = 0.25
) -> tuple[nn.Module, dict[str, float]]:
    with kernels(fused):
        net = model()
        opt = optimizer(groups(net), lr=0.05, workspace=workspace)
        monitor = AngleMonitor(net, opt) if monitored else None
        for t in range(2):
            give_gradients(net, t)
            opt.step()
    if fused:
        assert_fused(opt)
    return net, monitor.read() if monitor else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "workspace"), [(AngularMuown, 1e-9), (AngularMuown, 10.0), (Muon, 1.0)]
)
def test_monitoring_does_not_change_a_bit(optimizer: Member, workspace: float) -> None:
    plain, _ = train(optimizer, True, False, workspace)
    monitored, values = train(optimizer, True, True, workspace)
    assert all(
        torch.equal(p, q) for p, q in zip(plain.parameters(), monitored.parameters(), strict=True)
    )
    _, eager = train(optimizer, False, True)
    assert values.keys() == eager.keys()
    for key, value in values.items():
        assert value == pytest.approx(eager[key], rel=2e-2, abs=1e-4), key


CROSSING = {"lr": 0.05, "radius_lr": 0.5}  # some lengths pass through zero
SMALL = {"lr": 1e-3}  # below the resolution of 16-bit weights: rounding turns rows further


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "values", "dtype"),
    [
        (AngularMuown, CROSSING, torch.float32),
        (AngularMuown, SMALL, torch.bfloat16),
        (AngularMuown, {"lr": 0.05, "weight_decay": 20.0, "radius": "fixed"}, torch.float32),
        (Muown, CROSSING, torch.float32),
        (Muown, SMALL, torch.bfloat16),
        (Muon, {"lr": 0.01}, torch.float32),
        (Muon, SMALL, torch.bfloat16),
        (NorMuon, {"lr": 1e-4}, torch.float16),
    ],
)
def test_the_kernels_report_the_angles_of_the_stored_weights(
    optimizer: Member, values: dict[str, Any], dtype: torch.dtype
) -> None:
    reported: list[Tensor] = []

    def observe(parts: Sequence[tuple[Any, int]], U: Tensor, Q: Tensor, angles: Any) -> None:
        reported.append(angles)

    crossed = zero = 0
    with kernels(True):
        (p,) = weights([(144, 176)], dtype)  # its row 3 is zero
        opt = optimizer([p], **values)
        opt.observers = (observe,)
        for t in range(2):
            before = p.detach().to(torch.float32, copy=True)
            advance(opt, [p], 1, start=t)
            after = p.detach().float()
            expected = row_angles(before, after)
            torch.testing.assert_close(
                reported.pop(), expected.unsqueeze(0), rtol=1e-3, atol=1e-6, equal_nan=True
            )
            assert expected.isnan()[3] == (t == 0 or "weight_decay" in values)
            crossed += ((before * after).sum(-1) < 0).sum()
            zero += (after.norm(dim=-1) == 0).sum()
    assert_fused(opt)
    assert not reported
    assert crossed or values is not CROSSING
    assert zero or "weight_decay" not in values, "no row became zero"


class MonitoredRun:
    """A model in training, whose monitor is checked at every step."""

    def __init__(self, optimizer: Member = AngularMuown) -> None:
        self.net = model()
        self.net["out"].weight.data[5] = 0.0
        self.opt: Engine = optimizer(groups(self.net), lr=0.05)
        self.opt.register_step_post_hook(lambda *_: self.copies.append([*self.monitor._before]))
        self.monitor = AngleMonitor(self.net, self.opt)
        self.copies: list[list[str]] = []

    def step(self) -> dict[str, float]:
        """Take a step; check the monitor's values against W before and after."""
        names = dict(self.net.named_parameters())
        before = {name: p.detach().clone() for name, p in names.items()}
        self.opt.step()
        values = self.monitor.read()
        angles = {name: row_angles(before[name], p.detach()) for name, p in names.items()}
        angles[""] = torch.cat([*angles.values()])
        for name, turned in angles.items():
            tail = f"/{name}" if name else ""
            assert values[f"angle_mean{tail}"] == pytest.approx(turned.nanmean().item(), rel=1e-4)
            largest = turned.nan_to_num().max().item()
            assert values[f"angle_max{tail}"] == pytest.approx(largest, rel=1e-4)
        return values


@pytest.mark.parametrize("optimizer", [Muown, Muon])
def test_covered_parameters_are_never_copied(optimizer: Member) -> None:
    """A zero row is excluded from the mean."""
    with kernels(True):
        run = MonitoredRun(optimizer)
        for t in range(2):
            give_gradients(run.net, t)
            run.step()
    assert_fused(run.opt)
    assert run.copies == [[], []]


def test_without_kernels_every_updated_matrix_is_copied() -> None:
    with kernels(False):
        run = MonitoredRun()
        give_gradients(run.net, 0)
        run.net["down"].weight.grad = None
        values = run.step()
    assert run.copies == [["qkv.weight", "out.weight"]]
    assert values["angle_mean/down.weight"] == 0


def uncovered(net: nn.ModuleDict, opt: Engine) -> None:
    weight = net["out"].weight
    weight.grad = weight.grad.mT.contiguous().mT


def missing(net: nn.ModuleDict, opt: Engine) -> None:
    net["out"].weight.grad = None


def another_iteration(net: nn.ModuleDict, opt: Engine) -> None:
    opt.param_groups[0]["orthogonalize"] = "svd"


def released(net: nn.ModuleDict, opt: Engine) -> None:
    opt.release()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "copied"),
    [
        (uncovered, ["out.weight"]),
        (missing, []),
        (another_iteration, ["qkv.weight"]),
        (released, []),
    ],
)
def test_a_parameter_that_is_no_longer_covered_is_copied(
    disturb: Callable[[nn.ModuleDict, Engine], None], copied: list[str]
) -> None:
    with kernels(True):
        run = MonitoredRun()
        for t in range(2):
            give_gradients(run.net, t)
            if t == 1:
                disturb(run.net, run.opt)
            values = run.step()
            assert not run.monitor._before
            assert not run.monitor._angles
    assert run.copies == [[], copied]
    assert (values["angle_mean/out.weight"] == 0) == (disturb is missing)


def test_gradients_may_come_from_a_closure() -> None:
    """They do not exist yet when the step begins."""
    with kernels(True):
        net = model()
        opt = AngularMuown(groups(net), lr=0.05)
        monitor = AngleMonitor(net, opt)
        opt.step(lambda: give_gradients(net, 0))
    assert monitor.read()["angle_mean/qkv.weight"] == pytest.approx(0.05, rel=0.2)
    assert_fused(opt)
