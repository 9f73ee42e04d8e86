"""Whether copies share their work: the cost model, and the ranks that it is asked for."""

import os
from itertools import accumulate

import pytest
import torch.distributed as dist

from angular_muown.distributed import copies
from angular_muown.distributed.copies import NETWORK, NVLINK, bandwidth, node_of_world, sharing_pays
from angular_muown.distributed.mesh import RankGroup
from angular_muown.stages.orthogonalize import polar_express
from tests.ranks import results

GPT124 = [(768, 768)] * 48 + [(2048, 768)] * 36
NODE = RankGroup(tuple(range(8)), 0)
ACROSS = RankGroup((0, 8, 16, 24), 0)  # one rank of each node
ALL = RankGroup(tuple(range(32)), 0)


@pytest.fixture(autouse=True)
def nodes_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "ranks_per_node", lambda: 8)


def test_ranks_of_a_node_use_their_network_links_together() -> None:
    assert bandwidth(NODE) == NVLINK
    assert bandwidth(ACROSS) == NETWORK
    assert NETWORK < bandwidth(ALL) <= NVLINK


def test_unknown_nodes_are_connected_by_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "ranks_per_node", lambda: 1)
    assert bandwidth(NODE) == NETWORK


def test_sharing_pays_by_fast_links_and_for_enough_work() -> None:
    assert sharing_pays(GPT124, polar_express, NODE, 1)
    assert not sharing_pays(GPT124, polar_express, ACROSS, 1), "bytes take as long as products"
    assert not sharing_pays(GPT124[:2], polar_express, NODE, 1), "less than the latency"
    assert not sharing_pays(GPT124, polar_express, NODE, 64), "each part has less to save"


@pytest.mark.parametrize("matrices", [GPT124, [(4096, 4096)] * 8])
def test_it_never_pays_where_bytes_take_longer_than_products(
    matrices: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "NVLINK", 1.0)
    assert not sharing_pays(matrices, polar_express, NODE, 1)


def ranks_of_nodes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return this node's ranks, with torchrun's variables for nodes of these sizes."""
    ends = list(accumulate(sizes))
    node = next(i for i, end in enumerate(ends) if dist.get_rank() < end)
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[node])
    os.environ["GROUP_WORLD_SIZE"] = str(len(sizes))
    first, again = node_of_world(), node_of_world()
    assert first.group is again.group, "process groups are made once"
    assert dist.get_process_group_ranks(first.group) == list(first.ranks)
    dist.barrier()  # another rank may still be connecting
    return first.ranks


def test_copies_share_within_their_node() -> None:
    assert results(4, ranks_of_nodes, (2, 2)) == [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize("sizes", [(2, 1), (3,)])
def test_uneven_nodes_and_a_single_node_are_one_group(sizes: tuple[int, ...]) -> None:
    assert results(3, ranks_of_nodes, sizes) == [(0, 1, 2)] * 3
