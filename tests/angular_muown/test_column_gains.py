"""column_gains: W = Diag(g) U Diag(b), with gains b of the columns that learn."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from angular_muown import AngularMuown, Muown
from angular_muown.stages.charts import ColumnGained, Oblique, normalize_rows, tangent_part
from angular_muown.stages.orthogonalize import svd
from angular_muown.stages.radius import Adam, ColumnGains, Fixed
from angular_muown.stages.scale import fan_ratio
from angular_muown.stages.sums import Whole, row_norm
from tests.angular_muown.family import noise, parameter, run

shapes = st.tuples(st.integers(1, 9), st.integers(2, 9))
seeds = st.integers(0, 10**6)
SIGNS = {"betas": (0.0, 0.0), "eps": 0.0, "momentum": 0.0, "orthogonalize": "svd"}  # adam(x) = +-1


def gained(p: nn.Parameter, lr: float, turns: bool = True, **values: Any) -> AngularMuown:
    opt = AngularMuown([p], lr=lr, column_gains=True, **values)
    if not turns:
        opt.kappa = lambda group: 0.0  # type: ignore[method-assign]
    return opt


def gains(opt: AngularMuown, p: nn.Parameter) -> Tensor:
    return opt.state[p]["column_log_gain"].exp()


def with_gains(opt: AngularMuown, p: nn.Parameter, seed: int) -> Tensor:
    """The gains b of a parameter that are in its state from now on; nothing else is there yet."""
    p.grad = torch.zeros_like(p)
    opt.step()
    stored = opt.state[p]["column_log_gain"]
    b = noise(*stored.shape, seed=seed).exp()
    stored.copy_((b / b.square().mean().sqrt()).log())
    return gains(opt, p)


def stepped(opt: AngularMuown, p: nn.Parameter, G: Tensor) -> Tensor:
    p.grad = G.clone()
    opt.step()
    return p.detach()


@given(shape=shapes, seed=seeds)
def test_gradients_of_direction_lengths_and_gains_are_those_of_autograd(shape, seed) -> None:
    m, n = shape
    W, G, log_b = (noise(*size, seed=seed + i) for i, size in enumerate((shape, shape, (1, n))))
    V = W / log_b.exp()
    variables = normalize_rows(V), row_norm(V), log_b
    U, g, log_b = (x.detach().clone().requires_grad_() for x in variables)
    for_U, for_g, for_log_b = torch.autograd.grad((G * g * U * log_b.exp()).sum(), (U, g, log_b))
    rows = {"column_log_gain": log_b.detach()}
    radius = ColumnGains(Adam((0.0, 0.0), 1e-8), (0.0, 0.0), 1e-8)
    for name in radius.rows:
        rows[name] = torch.zeros((1, n) if "column" in name else (m, 1), dtype=W.dtype)
    at = ColumnGained(Oblique()).split(W, G, rows)
    radius(at.g, at.r, rows, 0.0, 1.0)
    wanted = tangent_part(for_U, U.detach()), for_g, for_log_b
    torch.testing.assert_close((at.T, rows["exp_avg"], rows["column_exp_avg"]), wanted)


def test_stages_inside_add_up_over_the_same_ranks() -> None:
    sums = Whole()
    assert ColumnGained(Oblique()).over(sums).inner.sums is sums
    assert ColumnGains(Fixed(), (0.9, 0.95), 1e-8).over(sums).inner.sums is sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "values", [{}, {"exact_angle": True}, {"row_beta": 0.9}, {"orthogonalize": "tangent"}]
)
def test_without_a_rate_it_is_angular_muown_to_the_bit(values, dtype) -> None:
    ends = []
    for on in (True, False):
        p = parameter(8, 12, dtype=dtype)
        opt = AngularMuown([p], lr=0.05, radius_lr=0.0, column_gains=on, **values)
        run(opt, [p], 10)
        ends.append(p.detach())
    assert torch.equal(*ends)
    p = parameter(8, 12, dtype=dtype)
    run(AngularMuown([p], lr=0.05, column_gains=True, **values), [p], 10)
    assert not torch.allclose(p.detach(), ends[0], rtol=0.05), "with one it is not"


@given(shape=shapes, seed=seeds)
def test_a_step_of_the_gains_alone_multiplies_columns(shape, seed) -> None:
    """W_ij exp(-lr sign(f_j)), f_j = sum_i W_ij G_ij: so making the mean square of b one moves
    nothing, and a column without gradient stays."""
    p, lr = parameter(*shape, seed=seed), 0.1
    opt = gained(p, lr, turns=False, radius="fixed", **SIGNS)
    with_gains(opt, p, seed)
    W, G = p.detach().clone(), noise(*shape, seed=seed)
    G[:, 0] = 0
    f = (W * G).sum(dim=0)
    after = stepped(opt, p, G)
    torch.testing.assert_close(after, W * (-lr * f.sign()).exp(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gains(opt, p).square().mean().item(), 1.0, rtol=1e-12, atol=0)


@given(shape=shapes, seed=seeds)
def test_a_small_step_is_the_sum_of_its_three_parts(shape, seed) -> None:
    p, lr = parameter(*shape, seed=seed), 1e-7
    opt = gained(p, lr, decay_degree=0.0, **SIGNS)
    b = with_gains(opt, p, seed)
    W, G = p.detach().clone(), noise(*shape, seed=seed)
    g, U = row_norm(W / b), normalize_rows(W / b)
    r, f = (G * b * U).sum(dim=-1, keepdim=True), (W * G).sum(dim=0)
    Q = tangent_part(svd(g * (G * b - r * U)), U)
    parts = W * f.sign(), r.sign() * U * b, fan_ratio(*shape) * g * Q * b
    change = (stepped(opt, p, G) - W) / -lr
    torch.testing.assert_close(change, sum(parts), rtol=1e-5, atol=1e-5)
    descent = f.abs().sum() + r.abs().sum() + (G * parts[2]).sum()
    torch.testing.assert_close((G * change).sum(), descent, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("radius", ["log_adam", "fixed"])
def test_a_common_factor_of_the_gains_means_nothing(radius) -> None:
    """And it is gone after a step: the lengths have it."""
    ends = []
    for factor in (1.0, 20.0):
        p = parameter(6, 9)
        opt = gained(p, 0.05, radius=radius, **SIGNS)
        with_gains(opt, p, seed=1)
        opt.state[p]["column_log_gain"] += math.log(factor)
        run(opt, [p], 5)
        ends.append((p.detach(), gains(opt, p)))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "values"),
    [((8, 12), {}), ((8, 12), {"blocks": 2}), ((12, 8), {"transposed": True, "column_blocks": 3}),
     ((3, 8, 5), {"view": "stack"})],
)  # fmt: skip
def test_the_gains_of_each_matrix_have_mean_square_one(shape, values) -> None:
    p = parameter(*shape)
    opt = AngularMuown([{"params": [p], **values}], lr=0.05, column_gains=True)
    run(opt, [p], 30)
    blocks = values.get("column_blocks", 1)
    b = gains(opt, p).unflatten(-1, (blocks, -1))
    sizes = b.square().mean(dim=-1)
    torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=1e-12, atol=0)
    assert b.std() > 0.05, "they learned"
    assert 0 < b.min() < b.max() < math.sqrt(b.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gain_that_falls_for_ever_stops_and_can_come_back(dtype) -> None:
    """Without a floor 0 / 0 follows."""
    p, lr, least = parameter(6, 9, dtype=dtype), 0.5, torch.finfo(dtype).eps
    opt = gained(p, lr, turns=False, radius="fixed", eps=0.0)
    start = p.detach()[:, 0].clone()
    for pull, steps, wanted in ((1.0, 2000, least), (-1.0, 300, 3.0)):
        for _ in range(steps):
            G = torch.zeros_like(p)
            G[:, 0] = pull * p.detach()[:, 0]
            stepped(opt, p, G)
        assert p.isfinite().all()
        assert gains(opt, p)[0, 0].item() == pytest.approx(wanted, rel=1e-3)
        column = p.detach()[:, 0]
        torch.testing.assert_close(column / column.norm(), start / start.norm())


@pytest.mark.parametrize("radius", ["adam", "log_adam"])
@pytest.mark.parametrize("lr", [1e-1, 1e-3, 1e-5])
def test_zero_rows_and_columns_leave_zero_continuously(radius, lr) -> None:
    p = parameter(5, 6)
    with torch.no_grad():
        p[2] = 0
        p[:, 3] = 0
    opt = gained(p, lr, radius=radius)
    G = noise(5, 6, seed=3)
    after = stepped(opt, p, G)
    assert 0 < after[2].norm() <= lr * math.exp(lr) * (1 + 1e-6), "in V: one learning rate"
    assert after[2] @ G[2] < 0
    assert 0 < after[:, 3].norm() <= 2 * lr
    run(opt, [p], 20)
    assert p.isfinite().all()


def test_a_row_zeroed_from_outside_leaves_downhill_whatever_its_past() -> None:
    p = parameter(5, 6)
    opt = gained(p, 0.05)
    run(opt, [p], 20)
    with torch.no_grad():
        p[2] = 0
    G = noise(5, 6, seed=9)
    after = stepped(opt, p, G)
    assert 0 < after[2].norm() <= 0.05 * math.exp(0.05) * math.sqrt(6)
    assert after[2] @ G[2] < 0


def test_a_matrix_of_zeros_without_gradient_stays() -> None:
    p = nn.Parameter(torch.zeros(4, 6))
    opt = gained(p, 0.1)
    for _ in range(3):
        assert not stepped(opt, p, torch.zeros(4, 6)).any()
    assert torch.equal(gains(opt, p), torch.ones(1, 6))


def test_a_weight_changed_from_outside_is_read_with_the_gains_that_are_there() -> None:
    """No length and no direction is stored: all that a step knows of the old weight is b."""
    p = parameter(6, 8)
    opt = gained(p, 0.02)
    run(opt, [p], 10)
    b = gains(opt, p).clone()
    outside, G = noise(6, 8, seed=70), noise(6, 8, seed=71)
    with torch.no_grad():
        p.copy_(outside)
    opt.param_groups[0].update(lr=0.0)
    torch.testing.assert_close(stepped(opt, p, G), outside, rtol=1e-13, atol=0)
    torch.testing.assert_close(gains(opt, p), b, rtol=1e-13, atol=0)


def test_the_gains_learn_in_16_bits_as_in_32() -> None:
    """W is rounded at random, and V read off what is left of it."""
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        p = parameter(48, 32, dtype=dtype)
        opt = gained(p, 5e-3)
        for t in range(100):
            wanted = torch.linspace(0.5, 2, 32, dtype=dtype)
            target = noise(48, 32, seed=1, dtype=dtype) * wanted
            stepped(opt, p, p.detach() - target + noise(48, 32, seed=10 + t, dtype=dtype))
        ends.append(gains(opt, p))
    assert ends[0].std() > 0.1
    torch.testing.assert_close(ends[1], ends[0], rtol=0.05, atol=0)


def test_it_can_be_switched_on_and_off_in_the_middle_of_a_run() -> None:
    p = parameter(6, 8)
    opt = AngularMuown([p], lr=0.02)
    for start, on in ((0, False), (3, True), (6, False), (9, True)):
        opt.param_groups[0]["column_gains"] = on
        run(opt, [p], 3, start=start)
        assert ("column_log_gain" in opt.state[p]) == (start > 0)
    assert p.isfinite().all()


def test_others_have_no_column_gains() -> None:
    with pytest.raises(ValueError, match="column_gains=True: Muown has no column_gains"):
        Muown([{"params": [parameter(4, 6)], "column_gains": True}])
