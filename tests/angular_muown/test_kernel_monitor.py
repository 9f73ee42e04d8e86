"""The monitor beside the kernels: it changes nothing, and sees what it sees of the eager path."""

import pytest
import torch
from torch import nn

from angular_muown import AngleMonitor, AngularMuown
from angular_muown.kernels import chunks
from tests.angular_muown.family import noise
from tests.angular_muown.test_kernels import assert_fused, kernels


def model() -> nn.Module:
    """Matrices of one shape in two parameters, one of them fused, and another shape."""
    torch.manual_seed(1)
    parts = {"qkv": nn.Linear(144, 384, bias=False), "out": nn.Linear(144, 128, bias=False)}
    return nn.ModuleDict({**parts, "down": nn.Linear(128, 144, bias=False)})


def train(
    fused: bool, watched: bool, workspace: float = 0.25
) -> tuple[nn.Module, dict[str, float]]:
    with kernels(fused):
        net = model()
        groups = [
            {"params": [net["qkv"].weight], "blocks": 3},
            {"params": [net["out"].weight, net["down"].weight]},
        ]
        opt = AngularMuown(groups, lr=0.05, workspace=workspace)
        monitor = AngleMonitor(net, opt) if watched else None
        for t in range(2):
            for i, p in enumerate(net.parameters()):
                p.grad = noise(*p.shape, seed=10 * t + i).float()
            opt.step()
    if fused:
        assert_fused(opt)
    return net, monitor.read() if monitor else {}


@pytest.mark.parametrize("workspace", [1e-9, 10.0])
def test_a_watched_step_is_the_same_to_the_bit(
    workspace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "ROW_ELEMENTS", 16384)  # the interpreter pays per program
    plain, _ = train(True, False, workspace)
    watched, values = train(True, True, workspace)
    assert all(
        torch.equal(p, q) for p, q in zip(plain.parameters(), watched.parameters(), strict=True)
    )
    _, eager = train(False, True)
    assert values.keys() == eager.keys()
    for key, value in values.items():
        assert value == pytest.approx(eager[key], rel=2e-2, abs=1e-4), key
