"""orthogonalize="tangent": dual steps converge to the polar factor that is tangent to the rows."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngularMuown, Hyperball, Muon, Muown, NorMuon
from angular_muown.stages import tangent
from angular_muown.stages.charts import normalize_rows, project
from angular_muown.stages.context import Context
from angular_muown.stages.orthogonalize import polar_express, svd, unit
from angular_muown.stages.tangent import Constrained, Dual, Polar, dual_steps
from tests.library.family import TangentPolar, noise, parameter, run
from tests.library.sharded import GROUPS, PLACEMENTS, stepped
from tests.ranks import results

CASES = list(product((3, 13, 23), ("gaussian", "falling"), [(48, 48), (32, 80), (80, 32)]))


def _matrices(shape: tuple[int, int], seed: int, spectrum: str) -> tuple[Tensor, Tensor]:
    """Return X and unit rows U.

    X is Gaussian, or its singular values fall to a thousandth of the largest one.
    """
    X, U = noise(*shape, seed=seed), normalize_rows(noise(*shape, seed=seed + 1))
    if spectrum == "falling":
        A, S, Vh = torch.linalg.svd(X, full_matrices=False)
        X = 100 * A @ torch.diag(torch.logspace(0, -3, len(S), dtype=X.dtype)) @ Vh
    return X, U


def constrained(polar: Polar, X: Tensor, U: Tensor, steps: int) -> Tensor:
    return steps_of(polar, X, U, torch.zeros_like(X[..., :1]), steps).Q


def steps_of(polar: Polar, X: Tensor, U: Tensor, multiplier: Tensor, steps: int) -> Dual:
    """Take dual steps from the tangent part of X, scaled to norm 1 as in the stage."""
    return dual_steps(polar, unit(project(X, U), 1.0), U, multiplier, steps)


def mean_radial(Q: Tensor, U: Tensor) -> float:
    """Return the mean of |<Q_i, U_i>|, which is 0 for a tangent Q."""
    return float((Q * U).sum(-1).abs().mean())


@pytest.mark.parametrize("shape", [(48, 48), (32, 80), (80, 32)])
@pytest.mark.parametrize("spectrum", ["gaussian", "falling"])
def test_dual_iterations_approach_the_tangent_space(shape, spectrum) -> None:
    """<Q_i, U_i> goes to 0 and the dual value, a nuclear norm, falls.

    The dual value bounds <X, Q> from above for every tangent Q of spectral norm 1.
    """
    X, U = _matrices(shape, 3, spectrum)
    before, *after = (mean_radial(constrained(svd, X, U, k), U) for k in (0, 2, 4, 12))
    assert after[0] < 0.6 * before
    assert after[2] < 0.2 * before
    Q = constrained(svd, X, U, 2)
    assert torch.linalg.matrix_norm(Q, 2) <= 1 + 1e-12
    Q = project(Q, U)
    Q /= torch.linalg.matrix_norm(Q, 2)
    values = [float(torch.linalg.svdvals(_dual_point(X, U, k)).sum()) for k in range(5)]
    assert values == sorted(values, reverse=True)
    assert (Q * X / project(X, U).norm()).sum() <= values[-1] * (1 + 1e-12)


def _dual_point(X: Tensor, U: Tensor, steps: int) -> Tensor:
    """Return X + Diag(l) U after the given number of dual steps."""
    return steps_of(svd, X, U, torch.zeros_like(X[:, :1]), steps).X


def test_the_ridge_is_neither_too_small_nor_too_large(monkeypatch) -> None:
    """Compare the fraction of the dual gap that remains after two steps, in the worst case."""
    worst = {}
    for ridge in (0.001, tangent.RIDGE, 0.2):
        monkeypatch.setattr(tangent, "RIDGE", ridge)
        remaining = []
        for seed, spectrum, shape in CASES:
            X, U = _matrices(shape, seed, spectrum)
            f = [float(torch.linalg.svdvals(_dual_point(X, U, k)).sum()) for k in (0, 2, 40)]
            remaining.append((f[1] - f[2]) / (f[0] - f[2]))
        worst[ridge] = max(remaining)
    small, chosen, large = worst.values()
    assert chosen < 0.25
    assert min(small, large) > 0.4


@pytest.mark.parametrize("shape", [(48, 48), (32, 80), (80, 32)])
def test_dual_iterations_work_with_an_approximate_polar_factor(shape) -> None:
    X, U = (Y.float() for Y in _matrices(shape, 3, "falling"))
    before, after = (mean_radial(constrained(polar_express, X, U, k), U) for k in (0, 2))
    assert after < 0.6 * before


@pytest.mark.parametrize("size", [1e-30, 1e36])
def test_dual_iterations_ignore_the_size_of_x(size) -> None:
    """Sums over an X of such a size are out of the range of float32."""
    X, U = (Y.float() for Y in _matrices((32, 80), 3, "falling"))
    outputs = [constrained(polar_express, factor * X, U, 2) for factor in (1.0, size)]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


def test_each_matrix_of_a_stack_takes_the_steps_it_takes_alone() -> None:
    pairs = [_matrices((10, 16), seed, s) for seed in (1, 5) for s in ("gaussian", "falling")]
    X, U = (torch.stack(side) for side in zip(*pairs, strict=True))
    together = constrained(svd, X, U, 3)
    for Q, (x, u) in zip(together, pairs, strict=True):
        torch.testing.assert_close(Q, constrained(svd, x, u, 3), rtol=1e-9, atol=1e-12)


def test_tangent_is_selected_by_name() -> None:
    """Expect Polar Express, the given number of dual steps, and a stored multiplier."""
    for values, steps in (({"tangent_steps": 3}, 3), ({}, 1)):
        opt = AngularMuown([parameter(4, 6)], orthogonalize="tangent", **values)
        recipe = opt.recipe(opt.param_groups[0])
        assert recipe.tangent == Constrained(steps)
        assert recipe.orthogonalize is polar_express
        assert "multiplier" in recipe.state_names


@pytest.mark.parametrize("member", [Muon, Muown, NorMuon, Hyperball])
def test_members_without_the_constraint_reject_it(member) -> None:
    with pytest.raises(ValueError, match=r"orthogonalize='tangent' is for AngularMuown only"):
        member([parameter(4, 6)], orthogonalize="tangent")


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (32, 32)])
def test_a_warm_start_saves_a_dual_step(shape) -> None:
    """Start one dual step from the last multiplier, and another from zero.

    If X drifts like momentum, the first nearly always reaches a lower dual value.
    """
    X, U = _matrices(shape, 3, "falling")
    multiplier, better = torch.zeros_like(X[:, :1]), 0
    for t in range(20):
        X = 0.95 * X + 0.05 * X.norm() * noise(*shape, seed=50 + t) / (shape[0] * shape[1]) ** 0.5
        warm = steps_of(svd, X, U, multiplier, 1)
        cold = steps_of(svd, X, U, torch.zeros_like(multiplier), 1)
        better += int(warm.value < cold.value)
        multiplier = warm.multiplier
    assert better >= 18


def test_a_row_without_a_gradient_keeps_its_direction() -> None:
    """A multiplier of earlier steps must not turn the row. It is reset to zero."""
    X, U = _matrices((6, 9), 3, "gaussian")
    X[2] = 0
    for polar, factor in ((svd, 1.0), (polar_express, 0.0)):
        stage, context = Constrained(2), Context({"multiplier": torch.ones_like(X[:, :1])})
        Q = stage.receive(stage(polar, stage.send(factor * X, U, context), U), U, context)
        assert not Q[2].any()
        assert context.state["multiplier"][2] == 0
        assert Q.any() == bool(factor)


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (32, 32)])
def test_x_and_q_carry_the_multiplier(shape) -> None:
    """The stage updates the multiplier as the dual steps do, and returns a tangent Q."""
    X, U = _matrices(shape, 3, "falling")
    context = Context({"multiplier": 0.01 * noise(shape[0], 1, seed=9)})
    expected = steps_of(svd, X, U, context.state["multiplier"], 2)
    stage = Constrained(2)
    Q = stage.receive(stage(svd, stage.send(X, U, context), U), U, context)
    torch.testing.assert_close(
        context.state["multiplier"], expected.multiplier, rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(Q, project(expected.Q, U), rtol=1e-9, atol=1e-12)


def test_the_multiplier_is_saved_and_does_not_depend_on_signs_of_rows() -> None:
    """U_i and M_i change sign when a row crosses zero. The multiplier does not."""
    X, U = _matrices((8, 12), 3, "falling")
    signs = torch.tensor([1.0, -1.0] * 4, dtype=X.dtype).unsqueeze(-1)
    plain, flipped = (
        steps_of(svd, s * X, s * U, torch.full_like(signs, 0.01), 2)
        for s in (torch.ones_like(signs), signs)
    )
    torch.testing.assert_close(flipped.multiplier, plain.multiplier)
    torch.testing.assert_close(flipped.Q, signs * plain.Q)
    p = parameter(6, 8)
    opt = AngularMuown([p], lr=0.02, orthogonalize="tangent")
    run(opt, [p], 3)
    saved, q = opt.state[p]["multiplier"].clone(), nn.Parameter(p.detach().clone())
    other = AngularMuown([q], lr=0.02, orthogonalize="tangent")
    other.load_state_dict(opt.state_dict())
    assert torch.equal(other.state[q]["multiplier"], saved)
    run(opt, [p], 2, start=3)
    run(other, [q], 2, start=3)
    assert torch.equal(p, q)
    assert not torch.equal(opt.state[p]["multiplier"], saved)


def _sharded_weights() -> list[list[Tensor]]:
    values = {"lr": 0.05, "orthogonalize": "svd", "tangent_steps": 2}
    placements = (PLACEMENTS["rows"], PLACEMENTS["columns"])
    return [stepped(TangentPolar, values, p, GROUPS[:2], steps=6) for p in placements]


def test_sharded_steps_follow_the_multipliers_of_one_process() -> None:
    """A rank holds some rows, or parts of rows. X carries multipliers to the owner, Q back."""
    values = {"lr": 0.05, "orthogonalize": "svd", "tangent_steps": 2}
    unsharded = stepped(TangentPolar, values, None, GROUPS[:2], steps=6)
    for outcome in results(2, _sharded_weights):
        for weights in outcome:
            torch.testing.assert_close(weights, unsharded, rtol=1e-9, atol=1e-12)
