"""Large models as meta tensors, spread over ranks that do not exist.

Parameters have real names and shapes and no values; `fully_shard` and the process group are
torch's own, the group a fake one, whose collectives do nothing. So an optimizer made for such a
model finds the placements that rank 0 would find on a cluster.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


@dataclass(frozen=True)
class Shapes:
    """A decoder with gated MLPs and untied embeddings, as far as its parameters go."""

    vocabulary: int
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    size: int  # of a head
    # latent attention (arXiv 2405.04434), unless 0: widths of the latent q and of k, v together,
    # and how many dimensions more a head of q and the shared k have for the rotary positions
    latent_q: int = 0
    latent_kv: int = 0
    rotary: int = 0
    # a mixture, unless 0
    experts: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    dense_layers: int = 0  # leading layers without experts


MODELS = {
    # Llama 3 (arXiv 2407.21783, table 3)
    "llama-8b": Shapes(128_256, 32, 4096, 14_336, 32, 8, 128),
    "llama-70b": Shapes(128_256, 80, 8192, 28_672, 64, 8, 128),
    # Kimi K2 (arXiv 2507.20534): 1.03T parameters, of which 1.01T are in experts
    "moe-1t": Shapes(
        163_840, 61, 7168, 18_432, 64, 64, 128, latent_q=1536, latent_kv=512, rotary=64,
        experts=384, expert_mlp=2048, shared_mlp=2048, dense_layers=1,
    ),
}  # fmt: skip


class Part(nn.Module):
    """Named modules. It computes nothing."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def _linears(shapes: dict[str, tuple[int, int]]) -> Part:
    """name -> (rows, columns) as layers without biases."""
    return Part(**{k: nn.Linear(n, m, bias=False) for k, (m, n) in shapes.items()})


def _attention(s: Shapes) -> Part:
    kv = s.kv_heads * s.size
    out = {"wo": (s.width, s.heads * s.size)}
    if not s.latent_kv:
        inside = {"wq": (s.heads * s.size, s.width), "wk": (kv, s.width), "wv": (kv, s.width)}
        return _linears({**inside, **out})
    latent = {
        "q_down": (s.latent_q, s.width),
        "q_up": (s.heads * (s.size + s.rotary), s.latent_q),
        "kv_down": (s.latent_kv + s.rotary, s.width),
        "kv_up": (2 * kv, s.latent_kv),
    }
    return _linears({**latent, **out})


def _mlp(width: int, inner: int) -> Part:
    return _linears({"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)})


class Experts(nn.Module):
    """Stacks (experts, rows, columns), the experts divided among ranks, if any."""

    def __init__(self, s: Shapes, mesh: Any = None) -> None:
        super().__init__()
        for name, m, n in (("w1", s.expert_mlp, s.width), ("w3", s.expert_mlp, s.width),
                           ("w2", s.width, s.expert_mlp)):  # fmt: skip
            stack = torch.empty(s.experts, m, n)
            if mesh is not None:
                stack = distribute_tensor(stack, mesh, [Shard(0)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(stack))


def _layer(s: Shapes, index: int, experts_mesh: Any) -> Part:
    norms = {"attn_norm": nn.RMSNorm(s.width), "mlp_norm": nn.RMSNorm(s.width)}
    if not s.experts or index < s.dense_layers:
        return Part(attn=_attention(s), mlp=_mlp(s.width, s.mlp), **norms)
    mixture = Part(
        router=nn.Linear(s.width, s.experts, bias=False),
        experts=Experts(s, experts_mesh),
        shared=_mlp(s.width, s.shared_mlp),
    )
    return Part(attn=_attention(s), mlp=mixture, **norms)


def meta_model(s: Shapes, experts_mesh: Any = None) -> Part:
    with torch.device("meta"):
        return Part(
            embedding=nn.Embedding(s.vocabulary, s.width),
            layers=nn.ModuleList(_layer(s, index, experts_mesh) for index in range(s.layers)),
            norm=nn.RMSNorm(s.width),
            lm_head=nn.Linear(s.width, s.vocabulary, bias=False),
        )


@dataclass(frozen=True)
class Grid:
    """How ranks are used: `replicas` hold the same, `shards` hold parts; of a mixture's shards,
    `experts` divide the experts, and the others what each of them has."""

    ranks: int
    replicas: int = 1
    experts: int = 1

    @staticmethod
    def of(s: Shapes, ranks: int, replicas: int = 1) -> "Grid":
        if ranks % replicas:
            raise ValueError(f"--hsdp {replicas} does not divide {ranks} ranks")
        shards = ranks // replicas
        # As many as divide both: every rank has the same number of whole experts, or of parts.
        experts = gcd(shards, s.experts) if s.experts else 1
        cut = shards // experts
        if s.experts and (s.expert_mlp % cut or s.width % cut):
            raise ValueError(
                f"{ranks} ranks would cut the {s.expert_mlp} and {s.width} rows of experts in "
                f"{cut}: FSDP2 wants parts of equal size; choose another number of ranks"
            )
        return Grid(ranks, replicas, experts)

    @property
    def shards(self) -> int:
        return self.ranks // self.replicas


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """This process as rank 0 of so many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("plan-ranks pretends to be many ranks: run it in one process")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_model(s: Shapes, grid: Grid) -> Part:
    """By FSDP2, layer by layer, with replicas by HSDP; experts divided first. To be called inside
    of `pretended`. Cutting takes `fully_shard` a second per layer where ranks are many, so it cuts
    one layer of each kind; the others are copies."""
    names = ("replicate", "shard", "expert")
    sizes = (grid.replicas, grid.shards // grid.experts, grid.experts)
    experts_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dense_mesh = init_device_mesh("cpu", (grid.replicas, grid.shards), mesh_dim_names=names[:2])
    dims = names[:2] if grid.replicas > 1 else names[1]
    inside, mesh = experts_mesh[dims], dense_mesh[dims]
    kinds = min(s.layers, s.dense_layers + 1)
    model = meta_model(replace(s, layers=kinds), experts_mesh["expert"] if s.experts else None)
    for module in model.modules():
        if isinstance(module, Experts):  # by rows, because the experts are divided already
            fully_shard(module, mesh=inside, shard_placement_fn=lambda _: Shard(1))
    layers = model.get_submodule("layers")
    for module in (*layers.children(), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    last = layers.get_submodule(str(kinds - 1))
    with torch.device("meta"):
        for index in range(kinds, s.layers):
            layers.add_module(str(index), _copy(last, _layer(s, index, None)))
    return model


def _copy(sharded: nn.Module, layer: Part) -> Part:
    """The layer, its parameters spread as those of another one of its kind."""
    for path, module in layer.named_modules():
        for name, p in sharded.get_submodule(path).named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(p.detach()))
    return layer
