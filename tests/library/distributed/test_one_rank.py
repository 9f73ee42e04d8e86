"""One rank runs the whole exchange with itself, which tests it on a single GPU.

torch raises if the host waits for the device during a step.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from angular_muown import AngularMuown, NorMuon
from angular_muown.distributed import session
from angular_muown.distributed.mesh import RankGroup, Sharding
from angular_muown.params.layout import Slice2D
from tests.library.family import noise, parameter
from tests.ranks import results

SHAPES = [(192, 256), (256, 192), (192, 256)]


def sharding_with_itself(p: Any, layout: Any, copies: Any, name: str) -> Sharding:
    rank_group = RankGroup((0,), 0, dist.group.WORLD)
    m, n = layout.sides(p.shape)
    return Sharding(
        rank_group,
        RankGroup((0,), 0),
        rank_group,
        (Slice2D((0, m), (0, n), m, n),),
        (rank_group,),
        (rank_group,),
    )


def stepped(member: Any, device: str, exchanged: bool) -> list[torch.Tensor]:
    params = [
        nn.Parameter(parameter(*s, seed=i, dtype=torch.float32).detach().to(device))
        for i, s in enumerate(SHAPES)
    ]
    optimizer = member(params, lr=0.02, process_group=None if exchanged else False)
    originals = session.sharding_of, session.holders_of_copies
    if exchanged:
        session.sharding_of = sharding_with_itself
        session.holders_of_copies = lambda group: RankGroup((0,), 0)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = noise(*p.shape, seed=10 * step + i, dtype=p.dtype).to(device)
        if device == "cuda" and step > 1:  # the first steps make the plan and initialize libraries
            torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    session.sharding_of, session.holders_of_copies = originals
    assert bool(optimizer._session and optimizer._session.groups) == exchanged
    return [p.detach().cpu() for p in params]


def both(device: str) -> list[Any]:
    if device == "cuda":
        dist.destroy_process_group()
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29561", rank=0, world_size=1)
    return [
        (stepped(member, device, True), stepped(member, device, False))
        for member in (AngularMuown, NorMuon)
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_rank_that_exchanges_with_itself_takes_the_same_step(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tolerance = 1e-5 if device == "cpu" else 1e-3  # bf16 iterations, with and without kernels
    for exchanged, alone in results(1, both, device)[0]:
        for a, b in zip(exchanged, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
