"""Ranks that disagree or fail in a step by kernels end it on all ranks, in time."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from angular_muown import AngularMuown
from tests.library.family import noise
from tests.library.sharded import PLACEMENTS, place
from tests.ranks import DIED, RankError, on_ranks

pytest.importorskip("triton")

from angular_muown.kernels import sharded
from tests.library.kernels.interpreter import interpret
from tests.library.kernels.test_sharded import fused_members

ROWS = PLACEMENTS["rows"]


def fail(how: str) -> None:
    """Take a step that works, then one in which rank 1 differs."""
    interpret()
    differs = dist.get_rank() == 1
    dtype = torch.bfloat16 if differs and how == "dtype" else torch.float32
    params = [
        nn.Parameter(place(0.1 * noise(128, 144, seed=i, dtype=dtype), ROWS)) for i in range(2)
    ]
    optimizer = AngularMuown([{"params": [(f"w{i}", p) for i, p in enumerate(params)]}], lr=0.02)
    for p in params:
        p.grad = place(noise(128, 144, seed=5, dtype=dtype), ROWS)
    optimizer.step()
    assert fused_members(optimizer) == 2, "the kernels step them"
    if differs and how == "gradient":
        params[1].grad = None
    if differs and how == "plan":
        optimizer.param_groups[0]["workspace"] = 0.5
    if differs and how == "setting":
        optimizer.param_groups[0]["lr"] = 0.3
    if differs and how == "error":
        sharded.return_kernel = _Broken()
    if differs and how == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()


class _Broken:
    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("gradient", "parameter 'w1' has a gradient on ranks [0] and none on ranks [1]"),
        ("plan", "workspace 0.25, by kernels on rank 0 and w0"),
        ("setting", "group 0 has lr=0.02 on rank 0 and lr=0.3 on rank 1"),
        ("dtype", "entry 0 of the plan is w0 (128, 144) torch.float32"),
        ("error", "out of memory"),
    ],
)
def test_the_error_reaches_every_rank(how: str, message: str) -> None:
    began = time.monotonic()
    for outcome in on_ranks(2, fail, how):
        assert isinstance(outcome, RankError)
        assert message in str(outcome)
    assert time.monotonic() - began < 30, "no rank waited for a timeout"


def test_other_ranks_fail_soon_after_a_rank_is_killed() -> None:
    began = time.monotonic()
    survivor, killed = on_ranks(2, fail, "death")
    assert DIED in str(killed)
    assert isinstance(survivor, RankError)
    assert time.monotonic() - began < 30
