"""Presets of AngularMuown: names for what its arguments are where they are left alone."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngularMuown, plan
from angular_muown.engine import Engine
from angular_muown.optimizers import PRESETS
from tests.angular_muown.family import parameter
from tests.angular_muown.models import BLOCKS, tiny_lm
from tests.angular_muown.test_averaging import train
from tests.angular_muown.test_averaging_state import assert_equal, averages
from tests.angular_muown.test_state import through_a_file

V2 = 0.1  # the average that is v2
STEPS = range(14)  # a tenth of ten steps is one: from the eleventh on the average is another


def make(dtype: torch.dtype = torch.float32, **values: Any) -> tuple[nn.Module, Engine]:
    model = tiny_lm(dtype)
    return model, AngularMuown(plan(model, blocks=BLOCKS), lr=0.01, **values)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def kept(optimizer: Engine) -> list[float | None]:
    return [group["average"] for group in optimizer.param_groups]


def defaults(**values: Any) -> dict[str, Any]:
    return AngularMuown([parameter(4, 6)], **values).defaults


def test_paper_is_the_default_and_adds_nothing_to_the_arguments() -> None:
    """All comparisons with the reference are of it."""
    arguments = inspect.signature(AngularMuown).parameters.values()
    no_values = ("params", "preset", "process_group")
    wanted = {a.name: a.default for a in arguments if a.name not in no_values}
    found = defaults(preset="paper")
    assert found == defaults()
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_paper_but_for_what_it_names(name: str) -> None:
    """And a user's None means "left alone" for all of that: no other default could be told."""
    assert defaults(preset=name) == {**defaults(), **PRESETS[name]}
    arguments = inspect.signature(AngularMuown).parameters
    assert all(arguments[key].default is None for key in PRESETS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_v2_takes_the_papers_steps_and_keeps_an_average(dtype: torch.dtype) -> None:
    settings: list[dict[str, Any]] = [{}, {"preset": "v2"}, {"average": V2}]
    (paper, _), (model, v2), (_, by_hand) = pairs = [make(dtype, **values) for values in settings]
    for pair in pairs:
        train(*pair, STEPS)
    assert_equal(weights(model), weights(paper))
    assert_equal(averages(v2), averages(by_hand))
    with v2.averaged():
        assert all(not torch.equal(p, weights(paper)[name]) for name, p in model.named_parameters())
    assert_equal(weights(model), weights(paper))


@pytest.mark.parametrize("average", [0.2, V2, 50])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_given_goes_before_the_preset(preset: str, average: float) -> None:
    assert set(kept(make(preset=preset, average=average)[1])) == {average}
    given = {"params": [parameter(4, 6)], "average": average}
    groups = [given, {"params": [parameter(4, 6)], "average": None}, {"params": [parameter(4, 6)]}]
    own = PRESETS[preset].get("average")
    assert kept(AngularMuown(groups, preset=preset)) == [average, None, own]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("V2", "'v2'"), ("Papers", "'paper'"), ("fast", ""), (None, ""), (2, "'v2'"), (["v2"], "")],
)
def test_an_unknown_preset_comes_with_the_known_ones(name: Any, hint: str) -> None:
    known = ", ".join(map(repr, PRESETS))
    end = f": did you mean {hint}?" if hint else ""
    words = re.escape(f"preset={name!r} is not valid: it must be one of {known}{end}") + "$"
    with pytest.raises(ValueError, match=words):
        AngularMuown([parameter(4, 6)], preset=name)


def by_deepcopy(model: nn.Module, optimizer: Engine) -> tuple[nn.Module, Engine]:
    return copy.deepcopy((model, optimizer))


def by_pickle(model: nn.Module, optimizer: Engine) -> tuple[nn.Module, Engine]:
    return pickle.loads(pickle.dumps((model, optimizer)))


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_copy_has_the_preset_for_groups_that_come_later_too(
    copied: Callable[..., tuple[nn.Module, Engine]], preset: str
) -> None:
    model, optimizer = make(preset=preset)
    train(model, optimizer, STEPS[:7])
    other, again = copied(model, optimizer)
    for pair in ((model, optimizer), (other, again)):
        train(*pair, STEPS[7:])
    assert_equal(weights(other), weights(model))
    if preset == "v2":
        assert_equal(averages(again), averages(optimizer))
    again.add_param_group({"params": [("late", parameter(4, 6))]})
    assert set(kept(again)) == {PRESETS[preset].get("average")}


def test_a_state_dict_does_not_name_the_preset() -> None:
    pairs = [make(preset="v2"), make(average=V2)]
    for pair in pairs:
        train(*pair, STEPS[:2])
    named, by_hand = (through_a_file(optimizer.state_dict()) for _, optimizer in pairs)
    assert named["param_groups"] == by_hand["param_groups"]
    assert all("preset" not in group for group in named["param_groups"])


def moved(model: nn.Module, optimizer: Engine, preset: str) -> tuple[nn.Module, Engine]:
    other, fresh = make(preset=preset)
    other.load_state_dict(through_a_file(model.state_dict()))
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    return other, fresh


@pytest.mark.parametrize("before", PRESETS)
@pytest.mark.parametrize("after", PRESETS)
@pytest.mark.filterwarnings("ignore:.*averages of the weights, which are left out")
def test_a_run_may_change_its_preset_and_takes_the_same_steps(before: str, after: str) -> None:
    """Whether there is an average is up to the constructor, not to the state dict."""
    model, optimizer = make(preset=before)
    train(model, optimizer, STEPS[:7])
    other, fresh = moved(model, optimizer, after)
    train(model, optimizer, STEPS[7:])
    train(other, fresh, STEPS[7:])
    assert_equal(weights(other), weights(model))
    assert set(kept(fresh)) == {PRESETS[after].get("average")}
    assert all(("average" in state) == (after == "v2") for state in fresh.state.values())
    if before == after == "v2":
        assert_equal(averages(fresh), averages(optimizer))


def test_v2_after_paper_begins_its_averages_with_the_next_step() -> None:
    model, optimizer = make()
    train(model, optimizer, STEPS)
    other, fresh = moved(model, optimizer, "v2")
    train(other, fresh, range(20, 21))
    assert_equal(averages(fresh), weights(other))


def test_paper_after_v2_says_what_it_leaves_out() -> None:
    model, optimizer = make(preset="v2")
    train(model, optimizer, STEPS[:2])
    with pytest.warns(UserWarning, match=rf"averages .* left out, .*set average={V2}"):
        moved(model, optimizer, "paper")
