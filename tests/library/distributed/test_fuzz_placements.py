"""Random models in random placements, mostly uneven, give the weights of one process."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from angular_muown.engine import Engine
from tests.library.family import FAMILY, MEMBERS
from tests.library.sharded import Placement, stepped
from tests.ranks import results

WORLDS = (3, 5, 6, 7)
SIDES = (1, 1, 2, 3, 5, 7, 8, 13, 40)


def blocks_of(side: int, pick: random.Random) -> int | tuple[int, ...] | None:
    """Pick no blocks, equal blocks, or two blocks of any size."""
    even = [k for k in range(2, 5) if side % k == 0]
    choices: list[Any] = [None, None]
    if even:
        choices.append(pick.choice(even))
    if side > 1:
        first = pick.randrange(1, side)
        choices.append((first, side - first))
    return pick.choice(choices)


def group_of(pick: random.Random, along_columns: bool) -> dict[str, Any]:
    m, n = pick.choice(SIDES), pick.choice(SIDES)
    view = pick.choice(("matrix", "matrix", "stack", "experts", "conv"))
    transposed = view in ("matrix", "stack") and pick.random() < 0.3
    rows, columns = (n, m) if transposed else (m, n)
    group: dict[str, Any] = {"transposed": transposed, "blocks": blocks_of(rows, pick)}
    # Channels that do not divide evenly among ranks are rejected, see test_agreement.py.
    if view == "conv" and not along_columns:
        kernel = pick.choice((1, 2))
        return {**group, "shapes": [(m, n, kernel)], "view": "conv"}
    group["column_blocks"] = blocks_of(columns, pick)
    if view in ("stack", "experts"):
        first = 1 if view == "stack" else 0  # shard inside the matrices, or by experts
        shape = (pick.choice((1, 2, 5)), m, n)
        return {**group, "shapes": [shape], "view": "stack", "first": first}
    return {**group, "shapes": [(m, n)] * pick.choice((1, 2))}


def placement_of(world: int, pick: random.Random) -> Placement:
    meshes = [((-1,), kinds) for kinds in ((0,), (0,), (1,), (None,))]
    if world == 6:
        pairs = [(0, 1), (1, 0), (None, 0), (None, 1), (0, None), (0, 0)]
        meshes += [((inner, -1), kinds) for inner in (2, 3) for kinds in pairs]
    return pick.choice(meshes)


def case_of(world: int, seed: int) -> tuple[type[Engine], dict[str, Any], Placement, list[Any]]:
    pick = random.Random(f"{world}/{seed}")
    placement = placement_of(world, pick)
    along_columns = 1 in placement[1]
    groups = [group_of(pick, along_columns) for _ in range(pick.randrange(1, 4))]
    member = pick.choice(MEMBERS if pick.random() < 0.5 else FAMILY)
    arguments: dict[str, Any] = {"lr": 0.02, "workspace": pick.choice((0.25, 1e-6))}
    if pick.random() < 0.3:
        arguments["orthogonalize"] = pick.choice(("svd", "gram", "newton_schulz"))
    return member, arguments, placement, groups


def cases(world: int, seeds: range) -> list[list[Tensor]]:
    weights = []
    for seed in seeds:
        member, arguments, placement, groups = case_of(world, seed)
        weights.append(stepped(member, arguments, placement, groups, steps=3))
    return weights


def compare(world: int, seeds: range) -> None:
    ranks = results(world, cases, world, seeds)
    for i, seed in enumerate(seeds):
        member, arguments, placement, groups = case_of(world, seed)
        label = f"seed {seed}: {member.__name__}, {arguments}, {placement}, {groups}"
        expected = stepped(member, arguments, None, groups, steps=3)
        for weights in ranks:
            for p, q in zip(weights[i], expected, strict=True):
                torch.testing.assert_close(
                    p, q, rtol=1e-7, atol=1e-9, msg=lambda m, label=label: f"{label}\n{m}"
                )


@pytest.mark.parametrize("world", WORLDS)
def test_random_placements_give_the_weights_of_one_process(world: int) -> None:
    compare(world, range(5))


@pytest.mark.fuzz
@pytest.mark.parametrize("chunk", range(5))
@pytest.mark.parametrize("world", WORLDS)
def test_many_random_placements_give_the_weights_of_one_process(world: int, chunk: int) -> None:
    compare(world, range(100 + 20 * chunk, 120 + 20 * chunk))
