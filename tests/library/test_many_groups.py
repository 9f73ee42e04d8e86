"""Groups that differ only in their parameters are stepped as one."""

from typing import Any

import pytest
import torch

from angular_muown import engine
from angular_muown.engine import Engine
from angular_muown.params.options import equal_groups
from tests.library.family import MEMBERS, parameter, pull, run


def weights(member: type[Engine], values: list[dict[str, Any]]) -> list[Any]:
    """Return the weights after four steps with a group per parameter."""
    params = [parameter(6, 5, seed=i, dtype=torch.float32) for i in range(len(values))]
    groups = [{"params": [p], **options} for p, options in zip(params, values, strict=True)]
    run(member(groups), params, steps=4)
    return [p.detach() for p in params]


@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
@pytest.mark.parametrize("member", MEMBERS)
def test_a_group_per_parameter_changes_no_bit(member: type[Engine], algorithm: str) -> None:
    values = [{"algorithm": algorithm}] * 4
    params = [parameter(6, 5, seed=i, dtype=torch.float32) for i in range(4)]
    together = member([{"params": params, "algorithm": algorithm}])
    run(together, params, steps=4)
    for p, q in zip(params, weights(member, values), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("member", MEMBERS)
def test_groups_with_different_values_keep_their_own(member: type[Engine]) -> None:
    values = [{"lr": 0.02}, {"lr": 0.05}, {"lr": 0.02}, {"lr": 0.02, "weight_decay": 0.5}]
    grouped = weights(member, values)
    for i, options in enumerate(values):
        p = parameter(6, 5, seed=i, dtype=torch.float32)
        run(member([p], **options), [p], steps=4, gradient=lambda p, _, t, i=i: pull(p, i, t))
        assert torch.equal(p, grouped[i])


def test_equal_groups_make_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    stack_sizes: list[int] = []
    step = engine.update_alone

    def spy(stack: Any, *args: Any) -> None:
        stack_sizes.append(len(stack.views))
        step(stack, *args)

    monkeypatch.setattr(engine, "update_alone", spy)
    params = [parameter(6, 5, seed=i) for i in range(50)]
    optimizer = MEMBERS[0]([{"params": [p]} for p in params])
    run(optimizer, params, steps=1)
    optimizer.param_groups[7]["lr"] = 0.5
    run(optimizer, params, steps=1)
    assert stack_sizes == [50, 49, 1]
    assert [group["step"] for group in optimizer.param_groups] == [2] * 50


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ({"lr": 0.1}, {"lr": 0.1}, True),
        ({"lr": 0.1}, {"lr": 0.2}, False),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, True),
        ({"blocks": [1, 2]}, {"blocks": (1, 2)}, True),
        ({"x": {}}, {"x": {}}, False),  # a framework's value, not hashable
        ({"x": [["a"]]}, {"x": [["b"]]}, False),
        ({"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.1)}, False),
        ({}, {"lr": 0.1}, False),
    ],
)
def test_groups_are_equal_if_all_other_values_are(a: Any, b: Any, equal: bool) -> None:
    groups = [{"params": [1], **a}, {"params": [2], "param_names": ["w"], **b}]
    assert [indices for _, indices in equal_groups(groups)] == ([[0, 1]] if equal else [[0], [1]])
