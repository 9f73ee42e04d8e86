"""The kernels on sharded matrices equal the kernels on whole ones, in Triton's interpreter."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngularMuown, Muon, Muown, NorMuon, NorMuown, engine
from angular_muown.distributed import session
from angular_muown.distributed.mesh import local
from angular_muown.kernels import coverage
from angular_muown.params.layout import Layout, Slice2D
from tests.library.family import noise, parameter
from tests.library.sharded import PLACEMENTS, Placement, place, whole
from tests.ranks import results

pytest.importorskip("triton")

from tests.library.kernels.interpreter import interpret

MEMBERS: dict[str, Any] = {
    member.__name__: member for member in (AngularMuown, Muown, Muon, NorMuon, NorMuown)
}
ROWS: Placement = ((-1,), (0,))
PLACES: dict[str, Placement | None] = {
    **PLACEMENTS,
    "rows x rows": ((2, -1), (0, 0)),
    "plain": None,  # copies, as under DDP
}
# A fused weight whose blocks end in the middle of shards, a wide and a tall matrix.
FUSED: list[dict[str, Any]] = [
    {"shapes": [(416, 128)], "blocks": [144, 144, 128]},
    {"shapes": [(128, 144), (144, 128), (128, 144)]},
]
# `first` is the dimension of the parameter that a placement counts from.
LAYOUTS: list[dict[str, Any]] = [
    {"shapes": [(288, 128)], "blocks": 2},
    {"shapes": [(128, 256)], "column_blocks": 2},
    {"shapes": [(128, 16, 3, 3)], "view": "conv"},
    {"shapes": [(2, 128, 144)], "view": "stack", "first": 1},
    {"shapes": [(144, 128)], "transposed": True},
]
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "two rounds": {"workspace": 0.02},
    "bf16 weights": {"dtype": torch.bfloat16},
    "bf16 momentum": {"state_dtype": "bfloat16"},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "8-bit momentum": {"state_dtype": "int8"},
}


def stepped(
    member: str,
    case: str,
    groups: list[dict[str, Any]],
    placement: str | None,
    process_group: Any = None,
) -> tuple[list[Tensor], int]:
    """Return weights and state after two steps, and the number of parameters stepped by kernels."""
    options = dict(CASES[case])
    session.LEAST_FUSED_ROUND = 0 if "workspace" in options else 2**25
    dtype = options.pop("dtype", torch.float32)
    interpret()
    places = None if placement is None else PLACES[placement]
    param_groups, params = make_groups(groups, dtype, places)
    optimizer = MEMBERS[member](param_groups, lr=0.02, process_group=process_group, **options)
    for step in range(2):
        for i, (p, first) in enumerate(params):
            G = noise(*p.shape, seed=10 * step + i, dtype=dtype)
            skipped = len(params) > 3 and i == len(params) - 1 and step == 1
            p.grad = None if skipped else place(G, places, first)
        optimizer.step()
    tensors = [t for p, _ in params for t in (p, *optimizer.state[p].values())]
    return [whole(t) for t in tensors], fused_members(optimizer)


def fused_members(optimizer: Any) -> int:
    groups = optimizer._session.groups.values() if optimizer._session else ()
    return sum(len(group.key) for group in groups if group.fused is not None)


def make_groups(
    groups: list[dict[str, Any]], dtype: torch.dtype, placement: Placement | None
) -> tuple[list[dict[str, Any]], list[tuple[nn.Parameter, int]]]:
    param_groups, params = [], []
    for group in groups:
        first = group.get("first", 0)
        placed = []
        for shape in group["shapes"]:
            W = _weight(shape, len(params) + len(placed)).to(dtype)
            placed.append(nn.Parameter(place(W, placement, first)))
        params += [(p, first) for p in placed]
        values = {k: v for k, v in group.items() if k not in ("shapes", "first")}
        param_groups.append({**values, "params": placed})
    return param_groups, params


def _weight(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return a weight whose matrices have a fourth row of zeros."""
    W = 0.3 * noise(*shape, seed=100 + seed, dtype=torch.float32)
    W[(slice(None), 3) if len(shape) == 3 else 3] = 0.0
    return W


# Each member, each case and each number of ranks at least once.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "member", "case"),
    [
        (2, "AngularMuown", "float32"),
        (2, "AngularMuown", "maximize"),
        (2, "Muon", "bf16 momentum"),
        (2, "NorMuon", "float32"),
        (3, "NorMuown", "float32"),
        (5, "AngularMuown", "two rounds"),
        (7, "Muown", "bf16 weights"),
        (3, "AngularMuown", "8-bit momentum"),
    ],
)
def test_sharded_rows_equal_whole_matrices(world: int, member: str, case: str) -> None:
    for sharded, fused in results(world, stepped, member, case, FUSED, "rows"):
        assert fused == 4, "the kernels cover these parameters"
        for a, b in zip(sharded, _alone(member, case, "fused"), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@cache
def _alone(member: str, case: str, model: str) -> list[Tensor]:
    """Return what one process computes, whatever the rounds."""
    case = "float32" if case == "two rounds" else case
    return results(1, stepped, member, case, MODELS[model], None, False)[0][0]


MANY: list[dict[str, Any]] = [{"shapes": [(128, 128)] * 10}]
MODELS = {"fused": FUSED, "layouts": LAYOUTS, "many": MANY}


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["rows", "columns", "plain"])
def test_buffers_are_used_again_by_later_rounds(placement: str) -> None:
    """Each of two owners has five matrices, one per round; three rounds are in transit."""
    for sharded, fused in results(2, stepped, "NorMuown", "two rounds", MANY, placement):
        assert fused == 10
        for a, b in zip(sharded, _alone("NorMuown", "float32", "many"), strict=True):
            tolerance = 1e-3 if placement == "columns" else 0.0
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# With the number of parameters that the kernels step: they read no transposed matrix, no columns of
# a block that ranks share, and, on four ranks, none of the convolution's 36 columns per rank.
# Each placement once, and each member by columns, whose sums over ranks depend on the chart.
RUNS: list[tuple[int, str, str, int]] = [
    (2, "rows", "NorMuown", 4),
    (2, "columns", "Muown", 3),
    (2, "columns", "Muon", 3),
    (2, "columns", "NorMuon", 3),
    (2, "copies", "AngularMuown", 4),
    (2, "plain", "NorMuown", 4),
    (4, "hsdp", "NorMuown", 4),
    (4, "rows x columns", "AngularMuown", 3),
    (4, "columns x rows", "NorMuown", 3),
    (4, "copies of columns", "AngularMuown", 3),
    (4, "rows x rows", "Muown", 4),
    (8, "rows x columns", "Muown", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "placement", "member", "covered"), RUNS)
def test_every_placement_gives_the_weights_of_one_process(
    world: int, placement: str, member: str, covered: int
) -> None:
    first = None
    for sharded, fused in results(world, stepped, member, "float32", LAYOUTS, placement):
        assert fused == covered
        summed = "columns" in placement  # whose sums over ranks round differently
        tolerance = {"rtol": 2e-3, "atol": 2e-4} if summed else {"rtol": 1e-6, "atol": 1e-6}
        for a, b in zip(sharded, _alone(member, "float32", "layouts"), strict=True):
            torch.testing.assert_close(a, b, **tolerance)
        first = first or sharded
        assert all(map(torch.equal, sharded, first)), "ranks would drift apart"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "placement", "member", "covered"),
    [(2, "columns", "Muon", 3), (4, "rows x columns", "AngularMuown", 3), (2, "plain", "Muown", 4)],
)
def test_ranks_share_the_scales_of_an_eight_bit_momentum(
    world: int, placement: str, member: str, covered: int
) -> None:
    """A row whose columns are on several ranks has one scale, that of its largest entry."""
    first = None
    for sharded, fused in results(world, stepped, member, "8-bit momentum", LAYOUTS, placement):
        assert fused == covered
        for a, b in zip(sharded, _alone(member, "8-bit momentum", "layouts"), strict=True):
            if a.dtype == torch.int8:  # sums over ranks round differently, and so may this
                apart = (a.int() - b.int()).abs()
                assert apart.max() <= 1
                assert apart.float().mean() < 1e-3
            else:
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)
        first = first or sharded
        assert all(map(torch.equal, sharded, first)), "ranks would drift apart"


def scales_of_a_nan_row(member: str, column: int) -> tuple[list[int], int]:
    """Return the rows with an infinite scale after NaN in one column of row 3, and the number of
    parameters stepped by kernels."""
    interpret()
    columns = PLACES["columns"]
    p = nn.Parameter(place(_weight((128, 144), 0), columns))
    optimizer = MEMBERS[member]([p], state_dtype="int8")
    G = noise(128, 144, seed=1, dtype=torch.float32)
    G[3, column] = torch.nan
    p.grad = place(G, columns)
    with warnings.catch_warnings(action="ignore"):  # NumPy's, of NaN
        optimizer.step()
    scale = whole(optimizer.state[p]["momentum_scale"]).flatten()
    return scale.isfinite().logical_not().nonzero().flatten().tolist(), fused_members(optimizer)


@pytest.mark.parametrize("column", [1, 140])
@pytest.mark.parametrize("member", ["Muon", "AngularMuown"])
def test_nan_on_any_rank_spoils_its_row_and_no_other(member: str, column: int) -> None:
    """Only with Muon, whose rows are not summed, does a rank not see the NaN of another."""
    assert results(2, scales_of_a_nan_row, member, column) == [([3], 1)] * 2


def _placed(t: Tensor, sharded: bool) -> Tensor:
    return place(t, ROWS if sharded else None)


def loaded(member: str, sharded: bool) -> list[Tensor]:
    """Take two steps, in between with state in other dtypes, as `load_state_dict` may leave it."""
    interpret()
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
    return [whole(p)]


def stepped_experts(sharded: bool) -> tuple[list[Tensor], bool]:
    """Step two experts, each with two matrices in blocks; True if the kernels stepped them."""
    interpret()
    p = nn.Parameter(_placed(0.1 * noise(2, 256, 144, seed=3, dtype=torch.float32), sharded))
    groups = [{"params": [p], "view": "stack", "blocks": 2}]
    optimizer = AngularMuown(groups, lr=0.02, process_group=None if sharded else False)
    for step in range(2):
        p.grad = _placed(noise(2, 256, 144, seed=10 + step, dtype=torch.float32), sharded)
        optimizer.step()
    fused = optimizer._fused is not None and optimizer._fused.steps[0][1] is not None
    assert not sharded or local(p).grad is None, "the part is a parameter for the step alone"
    assert float(optimizer.state[p]["step"]) == 2
    return [whole(t) for t in (p, *optimizer.state[p].values())], fused


@pytest.mark.slow
def test_whole_experts_on_a_rank_run_by_kernels_without_an_exchange() -> None:
    [(alone, _)] = results(1, stepped_experts, False)
    for sharded, fused in (
        rank for world in (1, 2) for rank in results(world, stepped_experts, True)
    ):
        assert fused
        for a, b in zip(sharded, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def convert_experts() -> list[str]:
    """Convert the momenta of experts while one of them has none yet; return its entries."""
    interpret()
    params = [nn.Parameter(_placed(_weight((1, 128, 144), i), True)) for i in range(2)]
    optimizer = Muon([{"params": params, "view": "stack"}], state_dtype="int8")
    for dtype, active in (("int8", params[:1]), (None, params[:1]), (None, params)):
        optimizer.param_groups[0]["state_dtype"] = dtype
        for p in params:
            p.grad = _placed(noise(1, 128, 144, seed=3, dtype=torch.float32), True)
        for p in params[len(active) :]:
            p.grad = None
        optimizer.step()
    return sorted(optimizer.state[params[1]])


def test_the_kernels_forget_the_scales_of_a_converted_momentum() -> None:
    assert results(1, convert_experts) == [["momentum_buffer", "step"]]


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


def test_interleaved_blocks_leave_the_kernels() -> None:
    """The rows of a matrix have no common stride."""
    windows = [Slice2D((0, 128), (0, 128), 256, 128), Slice2D((128, 256), (0, 128), 256, 128)]
    p = nn.Parameter(torch.ones(256, 128))
    group = AngularMuown([p]).param_groups[0]
    for units in (1, 2):
        layout = Layout(blocks=2, interleaved=units)
        assert coverage.covers_shards(p, windows, layout, group) == (units == 1)
        assert coverage.fits(p.shape, layout) == (units == 1)


def step_copies_alone() -> bool:
    """Step plain copies where sharing does not pay; True if nothing was exchanged."""
    interpret(shares=False)
    p = parameter(128, 144, dtype=torch.float32)
    p.grad = noise(128, 144, seed=1, dtype=torch.float32)
    optimizer = AngularMuown([p])
    optimizer.step()
    return optimizer._session is None or not optimizer._session.groups


def test_copies_are_stepped_alone_where_sharing_does_not_pay() -> None:
    assert results(2, step_copies_alone) == [True, True]
