"""The process_group and wire_dtype arguments, and what ranks that share a step keep."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from angular_muown import AngularMuown, Engine, Group, Recipe
from angular_muown.stages.charts import Oblique
from angular_muown.stages.orthogonalize import svd
from angular_muown.stages.scale import fan_ratio
from tests.library.family import noise, parameter
from tests.ranks import results


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("process_group", [None, False])
def test_a_copy_keeps_the_process_group(duplicate: Any, process_group: Any) -> None:
    optimizer = AngularMuown([parameter(4, 3)], process_group=process_group)
    assert duplicate(optimizer).process_group is process_group


@pytest.mark.parametrize("value", ["world", True, 3, -100])
def test_an_invalid_process_group_is_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"process_group={value!r} is not valid: it must be None"):
        AngularMuown([parameter(4, 3)], process_group=value)


def test_float16_on_the_wire_is_rejected() -> None:
    """It would lose small entries."""
    with pytest.raises(ValueError, match="wire_dtype='float16' is not valid"):
        AngularMuown([parameter(4, 3)], wire_dtype="float16")


def test_an_optimizer_with_a_process_group_cannot_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = AngularMuown([parameter(4, 3)])
    monkeypatch.setattr(optimizer, "process_group", object())
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def kept_between_steps() -> list[bool]:
    """Step a 16-bit weight with a master copy; for each shared parameter, True if it is closed."""
    p = nn.Parameter(parameter(6, 4, dtype=torch.float32).detach().bfloat16())
    p.grad = torch.ones_like(p)
    optimizer = AngularMuown([p], write_back="master")
    optimizer.step()
    members = [one for group in optimizer._session.cached.values() for one in group.members]
    return [member._opened is None and not member.state for member in members]


def test_work_copies_do_not_outlive_their_step() -> None:
    assert results(2, kept_between_steps) == [[True]] * 2


class Unnamed(Engine):
    """Its orthogonalizer has no __name__."""

    def recipe(self, group: Group) -> Recipe:
        return Recipe(Oblique(), partial(svd), fan_ratio)


def stepped_unnamed() -> bool:
    p = nn.Parameter(parameter(6, 4).detach())
    p.grad = noise(6, 4, seed=1)
    Unnamed([p], {"lr": 0.02}).step()
    return bool(p.isfinite().all())


def test_an_orthogonalizer_needs_no_name() -> None:
    assert results(2, stepped_unnamed) == [True] * 2
