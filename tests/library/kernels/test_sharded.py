"""The kernels on sharded rows equal the kernels on whole matrices, in Triton's interpreter."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from angular_muown import AngularMuown, Muon, Muown, NorMuon, engine
from angular_muown.distributed import session
from angular_muown.distributed.mesh import local
from angular_muown.kernels import coverage
from angular_muown.params.layout import Layout, Slice2D
from tests.library.family import noise, parameter
from tests.ranks import results

pytest.importorskip("triton")

from angular_muown.kernels import launch

MEMBERS = {"AngularMuown": AngularMuown, "Muown": Muown, "Muon": Muon}
# A fused weight whose blocks end in the middle of shards, a wide and a tall matrix.
GROUPS: list[dict[str, Any]] = [
    {"shapes": [(416, 128)], "blocks": [144, 144, 128]},
    {"shapes": [(128, 144), (144, 128), (128, 144)]},
]
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "two rounds": {"workspace": 0.02},
    "bf16 weights": {"dtype": torch.bfloat16},
    "bf16 momentum": {"state_dtype": "bfloat16"},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}


def stepped(member: str, case: str, sharded: bool, steps: int = 2) -> tuple[list[Tensor], bool]:
    """Weights and state after some steps, and whether the exchange was fused."""
    options = dict(CASES[case])
    session.LEAST_FUSED_ROUND = 0 if "workspace" in options else 2**25
    dtype = options.pop("dtype", torch.float32)
    launch.ROW_ELEMENTS = 16384  # the interpreter pays per program
    coverage.runs_on = engine.runs_on = session.runs_on = lambda device: True
    groups, params = make_groups(dtype, sharded)
    optimizer = MEMBERS[member](
        groups, lr=0.02, process_group=None if sharded else False, **options
    )
    for step in range(steps):
        for i, p in enumerate(params):
            G = noise(*p.shape, seed=10 * step + i, dtype=dtype)
            skipped = i == len(params) - 1 and step == 1
            p.grad = None if skipped else _placed(G, sharded)
        optimizer.step()
    fused = optimizer._session is not None and any(
        group.fused is not None for group in optimizer._session.groups.values()
    )
    tensors = [*params, *(t for p in params for t in optimizer.state[p].values())]
    return [_whole(t.detach()) for t in tensors], fused


def make_groups(dtype: torch.dtype, sharded: bool) -> tuple[list[dict[str, Any]], list[Tensor]]:
    groups, params = [], []
    for number, group in enumerate(GROUPS):
        own = [
            nn.Parameter(_placed(_weight(shape, 100 * number + i).to(dtype), sharded))
            for i, shape in enumerate(group["shapes"])
        ]
        groups.append({**{k: v for k, v in group.items() if k != "shapes"}, "params": own})
        params += own
    return groups, params


def _weight(shape: tuple[int, int], seed: int) -> Tensor:
    """The fourth row is zero."""
    W = parameter(*shape, seed=seed, dtype=torch.float32).detach()
    W[3] = 0.0
    return W


def _placed(t: Tensor, sharded: bool) -> Tensor:
    if not sharded:
        return t
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return distribute_tensor(t, mesh, [Shard(0)])


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


@pytest.mark.parametrize(
    ("world", "member", "case"),
    [
        *((2, member, "float32") for member in MEMBERS),
        *((2, "AngularMuown", case) for case in CASES if case != "float32"),
        (3, "AngularMuown", "float32"),
        (5, "AngularMuown", "two rounds"),
        (7, "Muown", "bf16 weights"),
    ],
)
def test_sharded_rows_equal_whole_matrices(world: int, member: str, case: str) -> None:
    for sharded, fused in results(world, stepped, member, case, True):
        assert fused, "the kernels cover these parameters"
        for a, b in zip(sharded, _alone(member, case), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@cache
def _alone(member: str, case: str) -> list[Tensor]:
    """Return what one process computes, whatever the rounds."""
    return results(1, stepped, member, "float32" if case == "two rounds" else case, False)[0][0]


def loaded(member: str, sharded: bool) -> list[Tensor]:
    """Two steps, with a state in other dtypes in between, as `load_state_dict` may leave it."""
    launch.ROW_ELEMENTS = 16384
    coverage.runs_on = engine.runs_on = session.runs_on = lambda device: sharded
    p = nn.Parameter(_placed(_weight((128, 144), 7), sharded))
    optimizer = MEMBERS[member]([p], lr=0.02, process_group=None if sharded else False)
    for step in range(2):
        p.grad = _placed(noise(128, 144, seed=step, dtype=torch.float32), sharded)
        optimizer.step()
        state = optimizer.state[p]
        state["momentum_buffer"] = state["momentum_buffer"].double()
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].bfloat16()
    return [_whole(p.detach())]


def stepped_experts(sharded: bool) -> tuple[list[Tensor], bool]:
    """Four experts, each with two matrices in blocks; whether the kernels stepped them."""
    launch.ROW_ELEMENTS = 16384
    coverage.runs_on = engine.runs_on = session.runs_on = lambda device: True
    p = nn.Parameter(_placed(0.1 * noise(4, 256, 144, seed=3, dtype=torch.float32), sharded))
    groups = [{"params": [p], "view": "stack", "blocks": 2}]
    optimizer = AngularMuown(groups, lr=0.02, process_group=None if sharded else False)
    for step in range(3):
        p.grad = _placed(noise(4, 256, 144, seed=10 + step, dtype=torch.float32), sharded)
        optimizer.step()
    fused = optimizer._fused is not None and optimizer._fused.steps[0][1] is not None
    assert not sharded or local(p).grad is None, "the part is a parameter for the step alone"
    assert float(optimizer.state[p]["step"]) == 3
    return [_whole(t.detach()) for t in (p, *optimizer.state[p].values())], fused


@pytest.mark.parametrize("world", [1, 2])
def test_whole_experts_on_a_rank_run_by_kernels_without_an_exchange(world: int) -> None:
    whole, _ = results(1, stepped_experts, False)[0]
    for sharded, fused in results(world, stepped_experts, True):
        assert fused
        for a, b in zip(sharded, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_state_in_other_dtypes_is_read_correctly() -> None:
    (whole,) = results(1, loaded, "AngularMuown", False)[0]
    for (sharded,) in results(2, loaded, "AngularMuown", True):
        torch.testing.assert_close(sharded, whole, rtol=1e-2, atol=1e-3)


def test_another_wire_dtype_leaves_the_kernels() -> None:
    """They send float16 rows with an exponent each, nothing else."""
    windows = [Slice2D((0, 64), (0, 128), 128, 128), Slice2D((64, 128), (0, 128), 128, 128)]
    p = nn.Parameter(torch.ones(128, 128))
    for wire_dtype in (None, "float32", "bfloat16"):
        group = AngularMuown([p], wire_dtype=wire_dtype).param_groups[0]
        assert coverage.covers_shards(p, windows, Layout(), group) == (wire_dtype is None)


def test_row_sums_over_a_matrix_leave_the_kernels() -> None:
    """NorMuon restores the norm of whole matrices, which no rank has."""
    recipe = NorMuon([nn.Parameter(torch.ones(2, 2))]).recipe
    group = NorMuon([nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    assert coverage.knows(recipe(group))
    assert not coverage.knows_shards(recipe(group))
