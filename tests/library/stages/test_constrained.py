"""AngularMuown with orthogonalize="tangent", the paper's Algorithm 2, and removed options."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from angular_muown import AngularMuown, Muon, NorMuon
from angular_muown.kernels.coverage import knows
from angular_muown.params import options
from angular_muown.stages.charts import Oblique, normalize_rows
from angular_muown.stages.normalize import AsIs, RowSecondMoment
from angular_muown.stages.tangent import Free
from angular_muown.update import Recipe
from tests.library.family import parameter, run

SHAPES = [(12, 12), (8, 20), (20, 8)]
TANGENT: dict[str, Any] = {"orthogonalize": "tangent", "tangent_steps": 2}


def recipe(**values: Any) -> Recipe:
    opt = AngularMuown([parameter(4, 6)], **values)
    return opt.recipe(opt.param_groups[0])


def test_the_constraint_is_off_by_default() -> None:
    plain = recipe()
    assert type(plain.chart) is Oblique
    assert type(plain.normalize) is AsIs
    assert type(plain.tangent) is Free
    assert "multiplier" not in plain.state_names


def test_the_kernels_do_not_cover_the_constraint() -> None:
    assert knows(recipe())
    assert not knows(recipe(**TANGENT))
    normalized = replace(recipe(), normalize=RowSecondMoment(0.9))
    assert knows(normalized), "the kernels cover row normalization in every chart"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_constraint_ignores_momentum_along_the_rows(shape) -> None:
    """Such momentum accumulates in training: old gradients are not tangent to new rows."""
    weights: dict[bool, list[Tensor]] = {True: [], False: []}
    for on in (True, False):
        for along in (0.0, 1.0):
            p = parameter(*shape)
            opt = AngularMuown([p], lr=0.05, **(TANGENT if on else {}))
            run(opt, [p], 2)
            buffer = opt.state[p]["momentum_buffer"]
            buffer += along * buffer.norm() * normalize_rows(p.detach())
            run(opt, [p], 1, start=2)
            weights[on].append(p.detach())
    torch.testing.assert_close(*weights[True], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(*weights[False], rtol=1e-3)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tangent_steps", -1), ("tangent_steps", True), ("tangent_steps", 1.5)],
)
def test_invalid_tangent_steps_are_rejected(key, value) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} is not valid"):
        AngularMuown([parameter(4, 6)], **{key: value})


def test_normuon_without_row_beta_is_muon() -> None:
    a, b = parameter(6, 8), parameter(6, 8)
    run(NorMuon([a], lr=0.02, row_beta=None), [a], 3)
    run(Muon([b], lr=0.02, weight_decay=0.0), [b], 3)
    assert torch.equal(a, b)


def test_settings_may_change_during_a_run() -> None:
    """Settings are values of a group. Missing state of a stage starts at zero."""
    p = parameter(6, 8)
    opt = AngularMuown([p], lr=0.02)
    run(opt, [p], 3)
    opt.param_groups[0].update(orthogonalize="tangent")
    run(opt, [p], 3, start=3)
    assert opt.state[p]["multiplier"].all()
    opt.param_groups[0].update(orthogonalize="svd")
    run(opt, [p], 3, start=6)
    assert p.isfinite().all()


REMOVED = {"tangent_momentum": True, "exact_angle": True, "row_beta": 0.9, "column_gains": True}


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_option_is_rejected_unless_it_is_off(key: str) -> None:
    """State dicts of version 0.1 have these keys. They load if every such option was off."""
    assert set(REMOVED) == set(options.REMOVED)
    p = parameter(4, 6)
    with pytest.raises(ValueError, match=f"{key}={REMOVED[key]!r}: this option was removed"):
        AngularMuown([{"params": [p], key: REMOVED[key]}])
    opt = AngularMuown([{"params": [p], key: options.REMOVED[key]}])
    run(opt, [p], 2)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group.update(options.REMOVED)
    opt.load_state_dict(saved)
    saved["param_groups"][0][key] = REMOVED[key]
    with pytest.raises(ValueError, match=f"group 0 of the state dict: {key}=.* was removed"):
        opt.load_state_dict(saved)
