"""A step of a large model on many ranks, planned on one CPU.

The parameters are meta tensors with real names and shapes. torch's own `fully_shard` shards them
across a fake process group, whose collectives do nothing, so the optimizer sees the placements that
rank 0 would see on a cluster. Owners, bytes and memory come from the optimizer's own plan; only
times are estimates (`cost.py`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from angular_lab.cluster.cost import Exchange, RankShare, estimate
from angular_lab.cluster.machine import Machine
from angular_lab.cluster.models import Shapes
from angular_lab.errors import UserError
from angular_lab.models.tensor_parallel import local_part
from angular_muown import AngularMuown, Group, plan
from angular_muown.distributed.assignment import Assignment
from angular_muown.params.state import init_state


@dataclass(frozen=True)
class Grid:
    """How ranks are used: `replicas` hold the same shards; of a mixture's shards, `experts` divide
    the experts, and the rest divide the rows of each expert."""

    ranks: int
    replicas: int = 1
    experts: int = 1

    @staticmethod
    def of(s: Shapes, ranks: int, replicas: int = 1) -> "Grid":
        if ranks % replicas:
            raise UserError(f"--hsdp {replicas} does not divide {ranks} ranks")
        shards = ranks // replicas
        # The most that divide both: every rank has the same number of experts, or of their parts.
        experts = gcd(shards, s.experts) if s.experts else 1
        cut = shards // experts
        if s.experts and (s.expert_mlp % cut or s.width % cut):
            raise UserError(
                f"{ranks} ranks would divide the {s.expert_mlp} and {s.width} rows of experts by "
                f"{cut}: FSDP2 expects parts of equal size; choose another number of ranks"
            )
        return Grid(ranks, replicas, experts)

    @property
    def shards(self) -> int:
        return self.ranks // self.replicas


class Block(nn.Module):
    """Named modules that compute nothing."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def _linears(shapes: dict[str, tuple[int, int]]) -> Block:
    return Block(**{k: nn.Linear(n, m, bias=False) for k, (m, n) in shapes.items()})


def _attention(s: Shapes) -> Block:
    q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    shapes = {"wq": (q, s.width), "wk": (kv, s.width), "wv": (kv, s.width)}
    if s.latent_kv:
        shapes = {
            "q_down": (s.latent_q, s.width),
            "q_up": (s.heads * (s.head_size + s.rotary), s.latent_q),
            "kv_down": (s.latent_kv + s.rotary, s.width),
            "kv_up": (2 * kv, s.latent_kv),
        }
    return _linears({**shapes, "wo": (s.width, q)})


def _mlp(width: int, inner: int) -> Block:
    return _linears({"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)})


class Experts(nn.Module):
    """Stacks (experts, rows, columns); a mesh divides the experts among its ranks."""

    def __init__(self, s: Shapes, mesh: Any = None) -> None:
        super().__init__()
        inner, outer = (s.expert_mlp, s.width), (s.width, s.expert_mlp)
        for name, shape in {"w1": inner, "w3": inner, "w2": outer}.items():
            stack = torch.empty(s.experts, *shape)
            if mesh is not None:
                stack = distribute_tensor(stack, mesh, [Shard(0)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(stack))


def _layer(s: Shapes, index: int, experts_mesh: Any) -> Block:
    norms = {"attn_norm": nn.RMSNorm(s.width), "mlp_norm": nn.RMSNorm(s.width)}
    if not s.experts or index < s.dense_layers:
        return Block(attn=_attention(s), mlp=_mlp(s.width, s.mlp), **norms)
    mixture = Block(
        router=nn.Linear(s.width, s.experts, bias=False),
        experts=Experts(s, experts_mesh),
        shared=_mlp(s.width, s.shared_mlp),
    )
    return Block(attn=_attention(s), mlp=mixture, **norms)


def meta_model(s: Shapes, experts_mesh: Any = None) -> Block:
    with torch.device("meta"):
        return Block(
            embedding=nn.Embedding(s.vocabulary, s.width),
            layers=nn.ModuleList(_layer(s, index, experts_mesh) for index in range(s.layers)),
            norm=nn.RMSNorm(s.width),
            lm_head=nn.Linear(s.width, s.vocabulary, bias=False),
        )


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("plan-ranks simulates the other ranks: run it in one process")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_model(s: Shapes, grid: Grid) -> Block:
    """Shard a model with FSDP2, layer by layer, or HSDP if there are replicas; experts first.

    With many ranks `fully_shard` takes a second per layer, so it shards one layer of each kind and
    the others are copies of its placements.
    """
    names = ("replicate", "shard", "expert")
    sizes = (grid.replicas, grid.shards // grid.experts, grid.experts)
    experts_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dense_mesh = init_device_mesh("cpu", (grid.replicas, grid.shards), mesh_dim_names=names[:2])
    dims = names[:2] if grid.replicas > 1 else names[1]
    kinds = min(s.layers, s.dense_layers + 1)
    model = meta_model(replace(s, layers=kinds), experts_mesh["expert"] if s.experts else None)
    for module in model.modules():
        if isinstance(module, Experts):  # by rows: the experts themselves are divided already
            fully_shard(module, mesh=experts_mesh[dims], shard_placement_fn=lambda _: Shard(1))
    layers = model.get_submodule("layers")
    for module in (*layers.children(), model):
        fully_shard(module, mesh=dense_mesh[dims], reshard_after_forward=False)
    last = layers.get_submodule(str(kinds - 1))
    with torch.device("meta"):
        for index in range(kinds, s.layers):
            layers.add_module(str(index), _placed_like(last, _layer(s, index, None)))
    return model


def _placed_like(sharded: nn.Module, layer: Block) -> Block:
    """Give a layer's parameters the placements of a sharded layer of the same kind."""
    for path, module in layer.named_modules():
        for name, p in sharded.get_submodule(path).named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(p.detach()))
    return layer


@dataclass(frozen=True)
class Simulation:
    """A step on a number of ranks: bytes and seconds of the rank that has the most of each."""

    ranks: int
    replicas: int
    expert_ranks: int  # that divide the experts
    owned_least: int
    owned_most: int
    imbalance: float
    sent: float
    buffers: float
    state: float
    products: float
    wire: float
    rows: float
    total: float
    dominant: list[tuple[str, float]]


def simulate(
    shapes: Shapes, ranks: int, machine: Machine, replicas: int = 1, wire_dtype: str | None = None
) -> Simulation:
    grid = Grid.of(shapes, ranks, replicas)
    with fake_ranks(ranks):
        stacks = ["*.experts.*"] if shapes.experts else []
        groups = plan(sharded_model(shapes, grid), stacks=stacks)
        return _summarize(AngularMuown(groups, wire_dtype=wire_dtype), grid, machine)


def _summarize(optimizer: AngularMuown, grid: Grid, machine: Machine) -> Simulation:
    plans = optimizer.exchange_plan().assignments
    share = rank_share(optimizer, {t.name.rpartition("[")[0] for p in plans for t in p.tasks})
    times = estimate([_exchange(assignment, grid) for assignment in plans], share, machine)
    owned, sent = torch.full((grid.ranks,), float(share.local_matrices)), torch.zeros(grid.ranks)
    for assignment in plans:
        # Ranks with other experts have the same plan at the same time.
        alike = grid.ranks // (assignment.places * assignment.copies)
        counts = Counter(assignment.owners.values())
        each = torch.tensor([counts[rank] for rank in range(len(assignment.loads))])
        owned += each.repeat_interleave(alike)
        sent = sent + assignment.traffic[0].repeat_interleave(alike)
    longest = sum(float(p.loads.max()) for p in plans) + share.local_cost
    mean = sum(float(p.loads.mean()) for p in plans) + share.local_cost
    return Simulation(
        grid.ranks, grid.replicas, grid.experts, int(owned.min()), int(owned.max()),
        longest / mean if mean else 1.0, float(sent.max()),
        max((float(p.peaks.max()) for p in plans), default=0.0), share.state_bytes,
        *times, [p.dominant for p in plans if p.dominant],
    )  # fmt: skip


def _exchange(assignment: Assignment, grid: Grid) -> Exchange:
    """Ranks are numbered with experts innermost, then shards, then replicas."""
    stride = 1 if assignment.places == grid.shards else grid.experts
    return Exchange(assignment, stride, copy_stride=grid.shards)


def rank_share(optimizer: AngularMuown, exchanged: set[str]) -> RankShare:
    """Return the share of rank 0. No rank holds more, because shards are cut by ceil division."""
    total = Counter[str]()
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            entries, is_matrix = local_part(p).numel(), group["algorithm"] == "matrix"
            total["state_bytes"] += _state_bytes(optimizer, p, group)
            total["matrix_entries" if is_matrix else "adamw_entries"] += entries
            if name in exchanged:
                total["exchanged_entries"] += entries
            elif is_matrix:
                (s, long), matrices = sorted(p.shape[-2:]), entries // p.shape[-2:].numel()
                total["local_matrices"] += matrices
                total["local_cost"] += matrices * s * s * (2 * long + s)
    return RankShare(**{field: total[field] for field in RankShare._fields})


def _state_bytes(optimizer: AngularMuown, p: Tensor, group: Group) -> int:
    state: dict[str, Tensor] = {}
    recipe = optimizer.recipe(group) if group["algorithm"] == "matrix" else None
    init_state(p, state, group, recipe)
    return sum(local_part(t).nbytes for t in state.values())
