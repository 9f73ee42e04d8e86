"""Whom an optimizer shares its work with, as an argument."""

import copy
import pickle
from typing import Any

import pytest

from angular_muown import AngularMuown
from tests.library.family import parameter


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("process_group", [None, False])
def test_a_copy_shares_with_the_same_ranks(again: Any, process_group: Any) -> None:
    optimizer = AngularMuown([parameter(4, 3)], process_group=process_group)
    assert again(optimizer).process_group is process_group


@pytest.mark.parametrize("wrong", ["world", True, 3, -100])
def test_what_is_no_group_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"process_group={wrong!r} is not valid: it must be None"):
        AngularMuown([parameter(4, 3)], process_group=wrong)


def test_a_wire_that_would_lose_small_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="wire_dtype='float16' is not valid"):
        AngularMuown([parameter(4, 3)], wire_dtype="float16")


def test_a_group_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = AngularMuown([parameter(4, 3)])
    monkeypatch.setattr(optimizer, "process_group", object())
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
