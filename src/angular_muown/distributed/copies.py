"""Copies: whether ranks that hold the same matrices share their polar factors, by a cost model.

With k copies, a rank saves 1 - 1/k of the products that it would compute alone, and receives
1 - 1/k of the bytes of its part of Q instead. The rates are an H200's;
docs/explanation/distributed.md has the times that they give. Only kernels are modelled.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from angular_muown.distributed.mesh import RankGroup, rank_group_of
from angular_muown.kernels.polar_chain import chain_for, modelled_microseconds
from angular_muown.stages.orthogonalize import Iteration

NVLINK = 450e3  # bytes per microsecond that a rank receives from its node
NETWORK = 50e3  # and from other nodes: 400 Gb/s
LATENCY = 500.0  # microseconds allowed for the checks and collectives of a shared step
WORD = 2  # bytes of an entry of Q


def sharing_pays(
    matrices: Iterable[tuple[int, int]], iteration: Iteration, rank_group: RankGroup, parts: int
) -> bool:
    """True if a step is faster if the ranks that hold copies share it.

    Args:
        matrices: rows and columns of each.
        rank_group: the ranks that hold copies of the same part.
        parts: into how many parts each copy is sharded. Their ranks have owners of their own.
    """
    products, wire = modelled_times(matrices, iteration, rank_group)
    return (1 - 1 / rank_group.size) * (products - wire) / parts > LATENCY


def modelled_times(
    matrices: Iterable[tuple[int, int]], iteration: Iteration, rank_group: RankGroup
) -> tuple[float, float]:
    """Return the microseconds of all products, and those in which all of Q is received."""
    products, entries = 0.0, 0
    for m, n in matrices:
        products += modelled_microseconds(m, n, chain_for(m, n, iteration))
        entries += m * n
    return products, WORD * entries / bandwidth(rank_group)


def ranks_per_node() -> int:
    """Return what torchrun says; 1 if nodes are unknown or uneven, on all ranks alike."""
    size, nodes = (int(os.environ.get(f"{name}_WORLD_SIZE", 1)) for name in ("LOCAL", "GROUP"))
    return size if size * nodes == dist.get_world_size() else 1


_nodes: dict[Any, RankGroup] = {}  # this node's ranks, by the process group of all ranks


def node_of_world() -> RankGroup:
    """Return the ranks of this node, or all ranks if nodes are unknown or uneven.

    All ranks must call it: the first call makes process groups.
    """
    world, size = dist.group.WORLD, ranks_per_node()
    if size in (1, dist.get_world_size()):
        return rank_group_of(world)
    if world not in _nodes:
        _nodes.clear()  # of a process group that was destroyed
        _nodes[world] = rank_group_of(dist.new_subgroups(size)[0])
    return _nodes[world]


def bandwidth(rank_group: RankGroup) -> float:
    """Return the bytes per microsecond at which a rank receives what the others have.

    Ranks of one node use its network links together, so that each gets what all of them receive.
    """
    size = ranks_per_node()
    nodes = {rank // size for rank in rank_group.ranks}
    if len(nodes) == 1:
        return NVLINK
    return min(NVLINK, NETWORK * len(rank_group.ranks) / len(nodes))
