"""Compare with torch's own optimizers."""

import pytest
import torch
from torch import nn

from angular_muown import AngularMuown, Muon
from tests.library.family import FAMILY, noise, parameter, run


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_groups_match_torch_adamw_bit_for_bit(optimizer, dtype, flags, weight_decay) -> None:
    shapes = [(7,), (5, 4), ()]
    ours = [parameter(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    values = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    a = optimizer([{"params": ours, "algorithm": "adamw", **flags}], lr=0.01, **values)
    b = torch.optim.AdamW(theirs, lr=0.01, **flags, **values)
    run(a, ours, 20)
    run(b, theirs, 20)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
    for p, q in zip(ours, theirs, strict=True):
        assert a.state[p].keys() == b.state[q].keys()


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (40, 40)])
@pytest.mark.parametrize(
    ("scale", "adjust_lr_fn"), [("fan_ratio", "original"), ("adam_rms", "match_rms_adamw")]
)
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_matches_torch_muon(shape, scale, adjust_lr_fn, nesterov) -> None:
    """Allow for bf16 rounding: on the CPU torch iterates in bf16, this package in float32."""
    a = parameter(*shape, dtype=torch.float32)
    b = nn.Parameter(a.detach().clone())
    start = a.detach().clone()
    run(Muon([a], lr=0.02, weight_decay=0.1, scale=scale, nesterov=nesterov), [a], 10)
    torch_muon = torch.optim.Muon(
        [b], lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn, nesterov=nesterov
    )
    run(torch_muon, [b], 10)
    change, expected = a.detach() - start, b.detach() - start
    assert (change - expected).norm() < 2e-2 * expected.norm()


def test_muon_matches_torch_muon_to_rounding_when_torch_does_not_use_bf16(monkeypatch) -> None:
    """Disable torch's cast to bf16, which is the only difference."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    for shape in ((12, 20), (20, 12)):
        a = parameter(*shape)
        b = nn.Parameter(a.detach().clone())
        run(Muon([a], lr=0.02, weight_decay=0.1), [a], 50)
        run(torch.optim.Muon([b], lr=0.02, weight_decay=0.1), [b], 50)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_mixed_groups_match_two_separate_optimizers() -> None:
    W, bias = parameter(6, 8), parameter(8, seed=1)
    W2, bias2 = nn.Parameter(W.detach().clone()), nn.Parameter(bias.detach().clone())
    mixed = AngularMuown([{"params": [W]}, {"params": [bias], "algorithm": "adamw"}], lr=0.02)
    matrix = AngularMuown([W2], lr=0.02)
    adamw = torch.optim.AdamW([bias2], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)
    for t in range(6):
        W.grad, bias.grad = noise(6, 8, seed=t), noise(8, seed=100 + t)
        W2.grad, bias2.grad = W.grad.clone(), bias.grad.clone()
        for optimizer in (mixed, matrix, adamw):
            optimizer.step()
    assert torch.equal(W, W2)
    assert torch.equal(bias, bias2)
