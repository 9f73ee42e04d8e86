"""A step does not depend on autocast. A closure keeps the autocast state of its caller."""

import pytest
import torch
from torch import nn

from angular_muown.engine import Engine
from tests.library.family import MEMBERS, noise, parameter


def ill_conditioned(seed: int) -> torch.Tensor:
    """Return a gradient whose polar factor is off by several percent if computed in bfloat16."""
    U, _, Vh = torch.linalg.svd(noise(12, 12, seed=seed), full_matrices=False)
    return (U * torch.logspace(0, -3, 12, dtype=U.dtype)) @ Vh


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("member", MEMBERS)
def test_a_step_is_the_same_under_autocast(member: type[Engine], dtype: torch.dtype) -> None:
    results = []
    for enabled in (False, True):
        p = parameter(12, 12, dtype=torch.float32)
        optimizer = member([p], lr=0.1)
        for t in range(3):
            p.grad = ill_conditioned(t).float()
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


def test_the_closure_keeps_the_autocast_of_its_caller() -> None:
    layer = nn.Linear(4, 4, bias=False)
    dtypes = []

    def closure() -> torch.Tensor:
        y = layer(torch.ones(2, 4))
        dtypes.append(y.dtype)
        loss = y.float().square().sum()
        loss.backward()
        return loss

    with torch.autocast("cpu", dtype=torch.bfloat16):
        MEMBERS[0](layer.parameters()).step(closure)
        assert torch.is_autocast_enabled("cpu")
    assert dtypes == [torch.bfloat16]
