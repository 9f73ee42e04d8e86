"""Compare every member with its float64 reference: over many steps, and in every storage layout."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from angular_muown.engine import Engine
from tests.library.family import PARITY, noise, parameter

STEPS = {"tall": 200, "wide": 200, "square": 200}
LAYOUT_STEPS = 60  # a layout that is read or written wrongly differs from the first step on

# Name, shape of the parameter, group values, and a function that returns the matrices in an array
# of that shape as views.
STORED: list[tuple[str, tuple[int, ...], dict[str, Any], Callable[[np.ndarray], list[np.ndarray]]]]
STORED = [
    ("tall", (24, 10), {}, lambda a: [a]),
    ("wide", (10, 24), {}, lambda a: [a]),
    ("square", (12, 12), {}, lambda a: [a]),
    ("equal blocks", (30, 8), {"blocks": 3}, lambda a: [a[:10], a[10:20], a[20:]]),
    ("unequal blocks", (16, 12), {"blocks": [8, 4, 4]}, lambda a: [a[:8], a[8:12], a[12:]]),
    ("column blocks", (12, 16), {"column_blocks": 2}, lambda a: [a[:, :8], a[:, 8:]]),
    ("stack", (3, 12, 7), {"view": "stack"}, lambda a: list(a)),
    (
        "stack with blocks",
        (2, 8, 9),
        {"view": "stack", "blocks": 2},
        lambda a: [m for e in a for m in (e[:4], e[4:])],
    ),
    ("conv", (10, 3, 2, 2), {"view": "conv"}, lambda a: [a.reshape(10, 12)]),
    ("transposed", (9, 14), {"transposed": True}, lambda a: [a.T]),
]


@pytest.mark.parametrize(("optimizer", "reference", "arguments"), PARITY)
@pytest.mark.parametrize(
    ("name", "shape", "values", "matrices"), STORED, ids=[s[0] for s in STORED]
)
def test_parity(
    optimizer: type[Engine],
    reference: Any,
    arguments: dict[str, Any],
    name: str,
    shape: tuple[int, ...],
    values: dict[str, Any],
    matrices: Callable[[np.ndarray], list[np.ndarray]],
) -> None:
    p = parameter(*shape)
    expected = p.detach().numpy().copy()
    parts = matrices(expected)
    references = [reference(part.copy(), **arguments) for part in parts]
    ours = optimizer([{"params": [p], **values}], orthogonalize="svd", **arguments)
    crossings = 0
    for t in range(STEPS.get(name, LAYOUT_STEPS)):
        G = noise(*shape, seed=t)
        for part, ref, grad in zip(parts, references, matrices(G.numpy()), strict=True):
            part[...] = ref.step(grad)
            crossings += int((getattr(ref, "g", np.ones(1)) < 0).sum())
        p.grad = G
        ours.step()
    error = np.linalg.norm(p.detach().numpy() - expected) / np.linalg.norm(expected)
    assert error <= 1e-12
    if hasattr(references[0], "g"):
        assert crossings > 0, "no length crossed zero, so the signed form was not tested"


def test_references_stay_short() -> None:
    """Allow at most 50 lines each, so that a reader can compare them with the paper."""
    from pathlib import Path

    for path in (Path(__file__).parents[1] / "reference").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 50, path.name


def test_views_share_storage_with_the_array() -> None:
    """The parity test writes through these views. With copies it would compare nothing."""
    for name, shape, _, matrices in STORED:
        a = np.zeros(shape)
        for part in matrices(a):
            part += 1
        assert a.all(), name


def test_a_parameter_without_gradient_gets_no_step_and_no_state() -> None:
    a, b = parameter(6, 4), parameter(6, 4, seed=1)
    for optimizer, _, arguments in PARITY:
        opt = optimizer([nn.Parameter(a.detach().clone()), b], **arguments)
        before = b.detach().clone()
        opt.param_groups[0]["params"][0].grad = noise(6, 4, seed=3)
        opt.step()
        assert torch.equal(b, before)
        assert b not in opt.state
