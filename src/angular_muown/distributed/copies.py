"""Copies: whether ranks that hold the same matrices share their polar factors, by a cost model.

A rank of k saves (1 - 1/k) of the products and receives (1 - 1/k) of the bytes of Q instead. The
rates are an H200's; docs/distributed.md has the times that they give. Only kernels are modelled:
the eager step takes so much longer that sharing always pays.
"""

import os
from collections.abc import Iterable

from angular_muown.distributed.mesh import RankGroup
from angular_muown.kernels.polar_chain import chain_for, modelled_microseconds
from angular_muown.stages.orthogonalize import Iteration

NVLINK = 450e3  # bytes per microsecond that a rank receives from its node
NETWORK = 50e3  # and from other nodes: 400 Gb/s
LATENCY = 500.0  # microseconds of a shared step on the host: checks and collectives
WORD = 2  # bytes of an entry of Q


def sharing_pays(
    matrices: Iterable[tuple[int, int]], iteration: Iteration, rank_group: RankGroup
) -> bool:
    """True if a step of these matrices, (m, n) each, is faster if the ranks share it."""
    products, entries = 0.0, 0
    for m, n in matrices:
        products += modelled_microseconds(m, n, chain_for(m, n, iteration))
        entries += m * n
    wire = WORD * entries / bandwidth(rank_group)
    return (1 - 1 / rank_group.size) * (products - wire) > LATENCY


def bandwidth(rank_group: RankGroup) -> float:
    """Return the bytes per microsecond at which a rank receives what the others have.

    torchrun sets the number of ranks of a node; without it, each rank is a node of its own. Ranks
    of one node use its network links together, so that each gets what all of them receive.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nodes = {rank // per_node for rank in rank_group.ranks}
    if len(nodes) == 1:
        return NVLINK
    return min(NVLINK, NETWORK * len(rank_group.ranks) / len(nodes))
