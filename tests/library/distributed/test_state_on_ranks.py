"""State is sharded like its parameter, and loads on any number of ranks in any placement."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from angular_muown import (
    AngleMonitor,
    AngularMuown,
    MagnitudeDirection,
    Muon,
    NorMuown,
    plan,
)
from angular_muown.integrations.checkpoint import MomentumLoadPlanner
from tests.library.family import noise, parameter
from tests.library.sharded import PLACEMENTS, place, whole
from tests.ranks import results

EIGHT_BIT = partial(AngularMuown, state_dtype="int8")
WAYS = ("ddp", "fsdp", "fsdp by columns", "hsdp", "tp", "fsdp x tp")
WIDTH, ROWS = 12, 20  # tensor parallelism in torch requires even splits


class Net(nn.Module):
    """Two layers, a stack of experts, and a head with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, ROWS)
        self.down = nn.Linear(ROWS, WIDTH, bias=False)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 3)
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        experts = self.experts
        if isinstance(experts, DTensor):
            experts = experts.full_tensor()
        return self.head(x + (x @ experts.mean(dim=0)).relu())


def parallelize(net: nn.Module, way: str) -> nn.Module:
    world = dist.get_world_size() if way != "alone" else 1
    if way == "ddp":
        return DistributedDataParallel(net)
    if way in ("tp", "fsdp x tp"):
        size = world if way == "tp" else world // 2
        mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "tp"))
        layers = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], layers)
        if way == "fsdp x tp":
            fully_shard(net, mesh=mesh["dp"])
    elif way == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "parts"))
        fully_shard(net, mesh=mesh)
    elif way.startswith("fsdp"):

        def choose(p: Tensor) -> Shard | None:  # torch requires an even split
            even = p.ndim > 1 and p.shape[1] % world == 0
            return Shard(1) if way == "fsdp by columns" and even else None

        fully_shard(net, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=choose)
    return net


def planned(net: nn.Module) -> Any:
    """Plan with blocks, so that the order of rows matters."""
    return plan(net, stacks=["experts"], blocks={"up.weight": 2}, aux_lr=0.01)


def built(way: str, member: Any = AngularMuown) -> tuple[nn.Module, nn.Module, Any]:
    net = Net()
    model = parallelize(net, way)
    return net, model, member(planned(net), lr=0.05)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Train with the same batch on every rank: the mean gradient is that of one process."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, WIDTH, dtype=torch.float64, generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in net.named_parameters()}


def trained(way: str, member: Any = AngularMuown, steps: int = 4) -> dict[str, Tensor]:
    net, model, optimizer = built(way, member)
    train(model, optimizer, range(steps))
    return weights(net)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-9, msg=name)


def ways(names: tuple[str, ...], member: Any) -> list[dict[str, Tensor]]:
    return [trained(name, member) for name in names]


@pytest.mark.parametrize("member", [AngularMuown, EIGHT_BIT], ids=["float64", "int8"])
def test_every_parallelism_of_torch_gives_the_weights_of_one_process(member: Any) -> None:
    alone = trained("alone", member)
    for rank in results(4, ways, WAYS, member):
        for weights_of_way in rank:
            assert_same(weights_of_way, alone)


def sizes(way: str) -> dict[str, tuple[int, int]]:
    """Return the local and global number of entries of each state tensor."""
    net, model, optimizer = built(way, NorMuown)
    train(model, optimizer, range(1))
    counts = {}
    for name, p in net.named_parameters():
        for key, value in optimizer.state[p].items():
            part = value.to_local() if isinstance(value, DTensor) else value
            counts[f"{name}.{key}"] = (part.numel(), value.numel())
    return counts


def test_state_is_sharded_like_its_parameter() -> None:
    ranks = results(4, sizes, "fsdp")
    for key, (_, total) in ranks[0].items():
        parts = [rank[key][0] for rank in ranks]
        assert sum(parts) == (4 if key.endswith(".step") else total), key
    assert any("row_second_moment" in key for key in ranks[0])


def saved(way: str, folder: str, member: Any) -> dict[str, Tensor]:
    net, model, optimizer = built(way, member)
    train(model, optimizer, range(2))
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    train(model, optimizer, range(2, 4))
    return weights(net)


def loaded(way: str, folder: str, member: Any) -> tuple[dict[str, Tensor], list[str]]:
    net, model, optimizer = built(way, member)
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    keys = sorted(states["optimizer"]["state"])
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        net, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    train(model, optimizer, range(2, 4))
    return weights(net), keys


ROUTES = [
    (AngularMuown, 4, "fsdp", 2, "fsdp"),
    (AngularMuown, 2, "ddp", 4, "fsdp x tp"),
    (AngularMuown, 4, "hsdp", 2, "ddp"),
    (AngularMuown, 2, "tp", 4, "hsdp"),
    (AngularMuown, 1, "alone", 4, "fsdp"),
    (AngularMuown, 4, "fsdp x tp", 1, "alone"),
    (MagnitudeDirection, 2, "fsdp by columns", 4, "fsdp x tp"),
    (EIGHT_BIT, 4, "fsdp x tp", 2, "fsdp"),
    (EIGHT_BIT, 2, "fsdp by columns", 1, "alone"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("member", "before", "first", "after", "second"), ROUTES)
def test_a_checkpoint_loads_on_another_number_of_ranks(
    tmp_path: Path, member: Any, before: int, first: str, after: int, second: str
) -> None:
    expected = results(before, saved, first, str(tmp_path), member)[0]
    ranks = results(after, loaded, second, str(tmp_path), member)
    for resumed, keys in ranks:
        assert_same(resumed, expected)
        assert keys == ranks[0][1], "a distributed checkpoint hangs if a rank lacks a key"


def crossed(way: str, folder: str, member: Any) -> dict[str, Tensor]:
    """Load with the planner that converts, without a step, and return the momenta."""
    net, _, optimizer = built(way, member)
    state = {"optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder, planner=MomentumLoadPlanner())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
    return momenta(net, optimizer)


def momenta(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    matrices = {id(p) for g in planned(net) if g["algorithm"] == "matrix" for _, p in g["params"]}
    named = {name: p for name, p in net.named_parameters() if id(p) in matrices}
    return {name: whole(optimizer.momentum(p)) for name, p in named.items()}


def saved_momenta(way: str, folder: str, member: Any) -> dict[str, Tensor]:
    net, model, optimizer = built(way, member)
    train(model, optimizer, range(2))
    dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)
    return momenta(net, optimizer)


@pytest.mark.parametrize(
    ("member", "first", "other", "second"),
    [(EIGHT_BIT, "fsdp x tp", AngularMuown, "fsdp"), (AngularMuown, "fsdp", EIGHT_BIT, "tp")],
    ids=["from int8", "to int8"],
)
def test_a_distributed_checkpoint_crosses_state_dtypes(
    tmp_path: Path, member: Any, first: str, other: Any, second: str
) -> None:
    expected = results(4, saved_momenta, first, str(tmp_path), member)[0]
    assert expected
    for actual in results(2, crossed, second, str(tmp_path), other):
        assert actual.keys() == expected.keys()
        for name, M in expected.items():
            error = 1e-12 if member is EIGHT_BIT else 0.05
            assert (actual[name] - M).norm() <= error * M.norm(), name


def reload_whole_state(way: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of continued training, without and with reloading the state."""
    net, model, optimizer = built(way)
    train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(net, optimizer, options=options)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    state_dict = optimizer.state_dict()
    state = {i: {k: whole(v) for k, v in s.items()} for i, s in state_dict["state"].items()}
    train(model, optimizer, range(2, 4))
    expected = weights(net)

    assert not any(isinstance(v, DTensor) for s in full["state"].values() for v in s.values())
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(start[name])
    fresh = AngularMuown(planned(net), lr=0.05)
    fresh.load_state_dict(
        {"state": copy.deepcopy(state), "param_groups": state_dict["param_groups"]}
    )
    for values in fresh.state.values():
        for value in values.values():
            if isinstance(value, DTensor):
                part = value.to_local()
                assert part.untyped_storage().nbytes() == part.nbytes, (
                    "the part must not keep the whole tensor alive"
                )
    train(model, fresh, range(2, 4))
    return expected, weights(net)


def test_a_state_dict_of_whole_tensors_is_sharded_when_loaded() -> None:
    for expected, actual in results(2, reload_whole_state, "fsdp"):
        assert_same(actual, expected)


def change_state_dtype(way: str) -> list[dict[str, Tensor]]:
    """Return the weights after loading float64 state into 8 bits, and after going back."""
    net, model, optimizer = built(way)
    train(model, optimizer, range(2))
    ends = []
    for member, steps in ((EIGHT_BIT, range(2, 4)), (AngularMuown, range(4, 6))):
        saved_state = optimizer.state_dict()
        optimizer = member(planned(net), lr=0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.load_state_dict(saved_state)
        train(model, optimizer, steps)
        ends.append(weights(net))
    return ends


def test_the_state_dtype_changes_on_ranks_as_in_one_process() -> None:
    alone = change_state_dtype("alone")
    for rank in results(4, change_state_dtype, "fsdp x tp"):
        for actual, expected in zip(rank, alone, strict=True):
            assert_same(actual, expected)


def scale_of_a_nan_row(column: int) -> tuple[float, bool]:
    """Return the scale of a row with NaN in one column, and whether the other rows are finite."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p = nn.Parameter(distribute_tensor(noise(8, 12, seed=0), mesh, [Shard(1)]))
    optimizer = Muon([p], state_dtype="int8")
    G = noise(8, 12, seed=1)
    G[3, column] = torch.nan
    p.grad = distribute_tensor(G, mesh, [Shard(1)])
    optimizer.step()
    scale = whole(optimizer.state[p]["momentum_scale"]).flatten()
    return scale[3].item(), bool(scale[[0, 1, 2, 4, 5, 6, 7]].isfinite().all())


@pytest.mark.parametrize("column", [1, 10])
def test_nan_on_any_rank_spoils_its_row_and_no_other(column: int) -> None:
    """A maximum over ranks drops NaN, depending on their order."""
    assert results(2, scale_of_a_nan_row, column) == [(torch.inf, True)] * 2


def missing_gradients() -> list[list[str]]:
    """Step without gradients for rank 0's experts, which received no tokens."""
    net, model, optimizer = built("fsdp")
    train(model, optimizer, range(1))
    optimizer = AngularMuown(planned(net), lr=0.05)
    for name, p in net.named_parameters():
        absent = dist.get_rank() == 0 and name in ("experts", "head.bias")
        p.grad = None if absent else torch.zeros_like(p)
    optimizer.step()
    keys = [sorted(optimizer.state[p]) for p in net.parameters()]
    return [*keys, [str(group["step"]) for group in optimizer.param_groups]]


def test_state_keys_and_step_counts_do_not_depend_on_a_ranks_gradients() -> None:
    first, second = results(2, missing_gradients)
    assert first == second
    assert all(first)


def step_counts(sharded: bool, missing: dict[int, tuple[int, ...]]) -> list[int]:
    """Step two stacks of experts, sharded by experts, and a matrix, in a group each.

    `missing` lists the groups without a gradient, by rank.
    """
    shapes = [(4, 6, 5), (4, 6, 5), (6, 5)]
    groups: list[dict[str, Any]] = []
    for i, shape in enumerate(shapes):
        W = parameter(*shape, seed=i).detach()
        p = nn.Parameter(place(W, PLACEMENTS["rows"]) if sharded else W)
        groups.append({"params": [p], "view": "stack" if len(shape) == 3 else "matrix"})
    optimizer = AngularMuown(groups)
    for t in range(2):
        for i, group in enumerate(groups):
            G = noise(*shapes[i], seed=10 * t + i)
            absent = i in missing.get(dist.get_rank() if sharded else 0, ())
            G = place(G, PLACEMENTS["rows"]) if sharded else G
            group["params"][0].grad = None if absent else G
        optimizer.step()
    return [group["step"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({0: (1,), 1: (1,)}, [2, 0, 2]),  # missing on every rank
        ({0: (1, 2), 1: (1, 2)}, [2, 0, 0]),
        ({0: (0, 1), 1: (1,)}, [2, 0, 2]),  # rank 0's experts received no tokens
        ({0: (0,), 1: (1,)}, [2, 2, 2]),
        ({0: (0, 1, 2), 1: (0, 2)}, [0, 2, 0]),
    ],
)
def test_a_step_counts_if_any_rank_has_a_gradient(
    missing: dict[int, tuple[int, ...]], expected: list[int]
) -> None:
    assert results(2, step_counts, True, missing) == [expected, expected]
    alone = {0: tuple(i for i in range(3) if all(i in absent for absent in missing.values()))}
    assert step_counts(False, alone) == expected


def read_fresh_state(way: str) -> bool:
    net, model, optimizer = built(way)
    before = weights(net)
    get_optimizer_state_dict(net, optimizer)
    assert all(group["step"] == 0 for group in optimizer.param_groups)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), weights(net).values(), strict=True)
    )
    train(model, optimizer, range(4))
    assert_same(weights(net), trained(way))
    return True


def test_reading_the_state_of_a_fresh_optimizer_changes_nothing() -> None:
    assert results(2, read_fresh_state, "fsdp") == [True, True]


def monitored(names: tuple[str, ...]) -> list[dict[str, float]]:
    readings = []
    for way in names:
        net, model, optimizer = built(way)
        monitor = AngleMonitor(net, optimizer, every=2)
        train(model, optimizer, range(3))
        readings.append(monitor.read())
    return readings


@pytest.mark.slow
def test_the_monitor_observes_whole_matrices() -> None:
    [alone] = monitored(("alone",))
    assert {"angle_mean", "radial_mean", "orthogonality_error", "kappa"} <= alone.keys()
    for rank in results(4, monitored, WAYS):
        for reading in rank:
            assert reading == pytest.approx(alone, rel=1e-9)
