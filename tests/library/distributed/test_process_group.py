"""The process_group and wire_dtype arguments."""

import copy
import pickle
from typing import Any

import pytest

from angular_muown import AngularMuown
from tests.library.family import parameter


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
