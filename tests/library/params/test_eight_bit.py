"""Momentum in 8 bits: its quantizer, its laws, and state that crosses dtypes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngularMuown, Muon
from angular_muown.engine import Engine
from angular_muown.params.eight_bit import LEVELS, SALT, SCALE, SMALLEST, decode, encode
from angular_muown.params.rounding import paired_noise, position_noise
from tests.library.family import MEMBERS, PARITY, noise, parameter, run
from tests.reference import eight_bit


def quantized(M: Tensor, step: int = 0) -> Tensor:
    q, scale = encode(M, step)
    assert q.dtype == torch.int8
    assert q.abs().max() <= LEVELS
    return decode(q.to(M.dtype), scale)


# the quantizer


@pytest.mark.parametrize("seed", range(5))
def test_it_equals_a_plain_float64_simulation(seed: int) -> None:
    M = noise(7, 40, seed=seed) ** 3  # heavy tails
    M[2] = 0
    M[3, 5] = 1e4
    expected = eight_bit.stored(M.numpy(), step=seed)
    np.testing.assert_allclose(quantized(M, seed).numpy(), expected, rtol=1e-9, atol=0)


def test_zero_stays_zero_and_signs_are_kept() -> None:
    M = noise(20, 50, seed=1)
    M[:, ::3] = 0
    for step in range(20):
        Q = quantized(M, step)
        assert (Q[M == 0] == 0).all()
        assert (Q * M >= 0).all()


def test_the_error_is_less_than_one_level_and_its_mean_is_zero() -> None:
    M = noise(4, 200, seed=2, dtype=torch.float32)
    draws = torch.stack([quantized(M, step) for step in range(2000)])
    largest = M.abs().amax(dim=1, keepdim=True)
    level = (2 * (M.abs() / largest).sqrt() + 1 / LEVELS) / LEVELS * largest
    assert ((draws - M).abs() <= level * (1 + 1e-4)).all()
    bias = draws.mean(dim=0) - M
    deviation = level / 2 / 2000**0.5  # at most: a coin with two sides one level apart
    assert (bias.abs() < 5 * deviation).all()


@pytest.mark.parametrize("power", [-112, -20, 20, 100])
def test_powers_of_two_scale_through(power: int) -> None:
    M = noise(5, 30, seed=3, dtype=torch.float32)
    assert torch.equal(quantized(M * 2.0**power), quantized(M) * 2.0**power)


def test_what_is_not_finite_stays_in_its_row() -> None:
    M = noise(4, 10, seed=4)
    expected = quantized(M)
    for bad in (torch.nan, torch.inf, -torch.inf):
        M[1, 3] = bad
        Q = quantized(M)
        assert Q[1].isnan().all()
        assert torch.equal(Q[[0, 2, 3]], expected[[0, 2, 3]])


def test_the_smallest_rows_keep_their_mean() -> None:
    """A row below the smallest scale is stored with that scale: coarsely, but without a bias. In
    float64, because some processors take float32 of that size for zero."""
    M = 1e-40 * noise(4, 50, seed=4)
    draws = torch.stack([quantized(M, step) for step in range(4000)])
    bias = draws.mean(dim=0) - M
    assert ((draws == 0) | (draws.abs() >= 0.99 * SMALLEST / LEVELS**2)).all()
    assert (bias.abs() < 5 * draws.std(dim=0) / 4000**0.5 + 1e-42).all()


@pytest.mark.parametrize("small", [1e-7, 1e-9])
def test_small_entries_of_a_row_keep_their_mean(small: float) -> None:
    """Far below the first level, which few of them reach: each must do so as often as it should."""
    M = torch.full((256, 2048), small)
    M[:, 0] = 1
    steps = 20
    mean = sum(quantized(M, step)[:, 1:].double().mean().item() for step in range(steps)) / steps
    raised = steps * 256 * 2047 * small * LEVELS**2  # to the first level, on average
    assert mean == pytest.approx(small, rel=5 / raised**0.5)


def test_the_noise_equals_that_of_the_simulation_in_all_bits() -> None:
    drawn = paired_noise(torch.empty(5, 8), 3, corner=(2, 5))
    seed = 3 * 0x9E3779B9 + 0x7F4A7C15
    assert drawn.tolist() == [
        [eight_bit.drawn(i, j, seed) for j in range(5, 13)] for i in range(2, 7)
    ]


def test_the_noise_is_uniform_and_independent() -> None:
    """Of its neighbors in the row and in the column, of other steps, and of the weights' noise."""
    X = torch.empty(400, 400)
    steps = torch.stack([paired_noise(X, step + SALT).double() / 2**24 for step in range(3)])
    bins = torch.histc(steps, 64, 0, 1) / (steps.numel() / 64)
    assert (bins - 1).abs().max() < 5 * (64 / steps.numel()) ** 0.5
    u = steps[0]
    others = {
        "next step": steps[1],
        "other half": u.unflatten(1, (-1, 2)).flip(-1).flatten(1),
        **{f"column + {k}": u.roll(k, 1) for k in (1, 2, 3, 16)},
        **{f"row + {k}": u.roll(k, 0) for k in (1, 2)},
        "weights": position_noise(X, 0).double(),
    }
    for name, v in others.items():
        r = torch.corrcoef(torch.stack([u.flatten(), v.flatten()]))[0, 1]
        assert abs(r) < 5 / u.numel() ** 0.5, name


@pytest.mark.parametrize("columns", [slice(None), slice(0, None, 2), slice(1, None, 2)])
def test_distant_columns_are_nearly_independent(columns: slice) -> None:
    """Autocorrelation within rows at every distance, of all columns and of either half of pairs."""
    u = paired_noise(torch.empty(512, 8192), SALT)[:, columns].double() / 2**24 - 0.5
    n = u.shape[1]
    power = torch.fft.rfft(u, 2 * n).abs().square().sum(dim=0)
    products = torch.fft.irfft(power)[1 : n // 2]
    pairs = 512 * (n - torch.arange(1, n // 2))
    assert (12 * products / pairs).abs().max() < 0.025  # 1/12: the variance of uniform noise


# steps


@pytest.mark.parametrize(("optimizer", "reference", "arguments"), PARITY)
@pytest.mark.parametrize(("shape", "blocks"), [((12, 9), None), ((12, 16), 2)])
def test_every_member_equals_its_reference_with_the_same_quantizer(
    optimizer: type[Engine],
    reference: Any,
    arguments: dict[str, Any],
    shape: tuple[int, int],
    blocks: int | None,
) -> None:
    p = parameter(*shape)
    references = [
        reference(W.copy(), **arguments) for W in np.split(p.detach().numpy(), blocks or 1)
    ]
    values = {"params": [p], "blocks": blocks, "state_dtype": "int8"}
    ours = optimizer([values], orthogonalize="svd", **arguments)
    for t in range(15):
        G = noise(*shape, seed=t)
        expected = []
        for ref, part in zip(references, np.split(G.numpy(), blocks or 1), strict=True):
            expected.append(ref.step(part))
            ref.M = eight_bit.stored(ref.M, t)
        p.grad = G
        ours.step()
        np.testing.assert_allclose(p.detach().numpy(), np.concatenate(expected), atol=1e-6)


@pytest.mark.parametrize("optimizer", MEMBERS)
@pytest.mark.parametrize("factor", [1e-30, 1e30, 2.0**-90, 2.0**90])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_the_scale_of_gradients_does_not_matter(
    optimizer: type[Engine], factor: float, size: float
) -> None:
    """Row lengths are excluded: Adam's epsilon has a scale. Gradients of a training run are 1e-4 to
    1e-6."""
    values = {"radius_lr": 0.0} if "radius_lr" in optimizer([parameter(3, 3)]).defaults else {}
    ends = []
    for scale in (size, size * factor):
        p = parameter(16, 24, dtype=torch.float32)
        opt = optimizer([{"params": [p], **values}], state_dtype="int8")
        run(opt, [p], 4, gradient=lambda p, i, t, s=scale: s * noise(16, 24, seed=t, dtype=p.dtype))
        ends.append(p.detach())
    start = parameter(16, 24, dtype=torch.float32).detach()
    moved, again = (W - start for W in ends)
    assert (moved - again).norm() < 0.05 * moved.norm()  # rounding to a level may flip


def test_a_huge_entry_does_not_stop_the_rest_of_its_row() -> None:
    """The mean drift of the momentum is that of a float32 one, although most of its entries are
    below the first level."""
    G = 1e-3 * torch.ones(64, 256)
    G[:, 0] = 1e3
    means = []
    for dtype in ("float32", "int8"):
        p = nn.Parameter(torch.eye(64, 256))
        opt = Muon([p], lr=1e-3, momentum=0.95, state_dtype=dtype)
        for _ in range(100):
            p.grad = G
            opt.step()
        state = opt.state[p]
        M = state["momentum_buffer"].float()
        if dtype == "int8":
            assert (M[:, 1:] == 0).float().mean() > 0.9, "they are below the first level"
            M = decode(M, state[SCALE])
        means.append(M[:, 1:].mean().item())
    exact, mean = means
    assert mean == pytest.approx(exact, rel=0.15)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    p = parameter(8, 12, dtype=torch.float32)
    opt = Muon([p], state_dtype="int8")
    run(opt, [p], 2)
    before = decode(opt.state[p]["momentum_buffer"].float(), opt.state[p][SCALE])
    p.grad = torch.zeros_like(p)
    p.grad[3, 4] = torch.nan
    opt.step()
    after = decode(opt.state[p]["momentum_buffer"].float(), opt.state[p][SCALE])
    rest = [i for i in range(8) if i != 3]
    assert after[3].isnan().all()
    assert after[rest].isfinite().all()
    largest = before[rest].abs().amax(dim=1, keepdim=True)
    assert ((after[rest] - 0.95 * before[rest]).abs() <= 0.02 * largest).all()


@pytest.mark.parametrize("optimizer", MEMBERS)
def test_a_step_is_deterministic_and_resumes_exactly(optimizer: type[Engine]) -> None:
    p, q = (parameter(10, 12, dtype=torch.float32) for _ in range(2))
    one = optimizer([p], state_dtype="int8")
    run(one, [p], 6)
    first = optimizer([q], state_dtype="int8")
    run(first, [q], 3)
    second = optimizer([q], state_dtype="int8")
    second.load_state_dict(first.state_dict())
    run(second, [q], 3, start=3)
    assert torch.equal(p, q)
    for name, value in one.state[p].items():
        assert torch.equal(value, second.state[q][name]), name


# state that crosses dtypes


LAYOUTS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((12, 16), {}),
    ((12, 16), {"blocks": [8, 4]}),
    ((12, 16), {"column_blocks": [10, 6]}),
    ((12, 16), {"transposed": True, "blocks": 2}),
    ((3, 12, 16), {"view": "stack", "column_blocks": 2}),
    ((12, 4, 2, 2), {"view": "conv"}),
    ((12, 16), {"blocks": [8, 4], "interleaved": 2}),
]


def optimizer_of(shape: tuple[int, ...], values: dict[str, Any], dtype: str | None) -> Any:
    p = parameter(*shape, dtype=torch.float32)
    return p, AngularMuown([{"params": [p], **values}], state_dtype=dtype)


@pytest.mark.parametrize(("shape", "values"), LAYOUTS)
def test_float32_state_loads_into_8_bits_and_back(
    shape: tuple[int, ...], values: dict[str, Any]
) -> None:
    p, exact = optimizer_of(shape, values, None)
    run(exact, [p], 3)
    M = exact.state[p]["momentum_buffer"].clone()
    q, eight = optimizer_of(shape, values, "int8")
    q.data.copy_(p.data)
    with pytest.warns(UserWarning, match="saved with state_dtype=None.*'int8': .*127 levels"):
        eight.load_state_dict(exact.state_dict())
    assert eight.param_groups[0]["state_dtype"] == "int8"
    run(eight, [q], 1, start=3)
    assert eight.state[q]["momentum_buffer"].dtype == torch.int8
    run(exact, [p], 1, start=3)
    assert (p - q).norm() < 0.02 * p.norm()
    with pytest.warns(UserWarning, match="'int8', is converted .*=None: nothing is rounded"):
        exact.load_state_dict(eight.state_dict())
    p.data.copy_(q.data)
    for opt, w in ((exact, p), (eight, q)):
        run(opt, [w], 1, start=4)
    assert torch.equal(p, q), "both started from the same numbers"
    assert SCALE not in exact.state[p]
    assert exact.state[p]["momentum_buffer"].dtype == torch.float32
    assert M.shape == exact.state[p]["momentum_buffer"].shape


@pytest.mark.parametrize(("shape", "values"), LAYOUTS)
def test_a_momentum_can_be_read_in_every_dtype(
    shape: tuple[int, ...], values: dict[str, Any]
) -> None:
    p, exact = optimizer_of(shape, values, None)
    run(exact, [p], 1)
    M = exact.momentum(p)
    assert torch.equal(M, exact.state[p]["momentum_buffer"])
    M.zero_()
    assert exact.state[p]["momentum_buffer"].any(), "a copy"
    for dtype, error in (("bfloat16", 0.005), ("int8", 0.05)):
        q, other = optimizer_of(shape, values, dtype)
        run(other, [q], 1)  # the same gradient
        M, expected = other.momentum(q), exact.momentum(p)
        assert M.dtype == torch.float32
        assert M.shape == q.shape
        assert (M - expected).norm() < error * expected.norm()


def test_what_has_no_momentum_is_named() -> None:
    w, gain = parameter(6, 8), nn.Parameter(torch.ones(8))
    opt = AngularMuown(
        [{"params": [("w", w)]}, {"params": [("gain", gain)], "algorithm": "adamw"}],
        state_dtype="int8",
    )
    with pytest.raises(ValueError, match="'w' has no momentum yet: take a step"):
        opt.momentum(w)
    with pytest.raises(ValueError, match="'gain' is stepped by AdamW"):
        opt.momentum(gain)
    with pytest.raises(ValueError, match=r"shape \(6, 8\) is not one of this optimizer's"):
        opt.momentum(parameter(6, 8))
    run(opt, [w, gain], 1)
    assert opt.momentum(w).dtype == torch.float64, "as its weight"


@pytest.mark.parametrize(
    ("before", "after"), [(None, "int8"), ("int8", None), ("int8", "bfloat16")]
)
def test_what_was_converted_is_saved_and_loaded_again(before: str | None, after: str) -> None:
    """Before a step, and for parameters that have no gradient any more."""
    params = [parameter(6, 8, seed=i, dtype=torch.float32) for i in range(2)]
    first = AngularMuown(params, state_dtype=before)
    run(first, params, 2)
    second = AngularMuown(params, state_dtype=after)
    with pytest.warns(UserWarning, match="is converted"):
        second.load_state_dict(first.state_dict())
    expected = {"int8": torch.int8, "bfloat16": torch.bfloat16, None: torch.float32}[after]
    for _ in range(2):
        third = AngularMuown(params, state_dtype=after)
        third.load_state_dict(second.state_dict())  # warnings are errors here
        for p in params:
            assert third.state[p]["momentum_buffer"].dtype == expected
            assert (SCALE in third.state[p]) == (after == "int8")
        run(second, params[:1], 1, start=2)
        params[1].grad = None


def test_a_changed_group_converts_before_it_is_saved() -> None:
    params = [parameter(6, 8, seed=i, dtype=torch.float32) for i in range(2)]
    opt = AngularMuown(params)
    run(opt, params, 1)
    opt.param_groups[0]["state_dtype"] = "int8"
    fresh = AngularMuown(params, state_dtype="int8")
    fresh.load_state_dict(opt.state_dict())
    assert {fresh.state[p]["momentum_buffer"].dtype for p in params} == {torch.int8}


def test_a_group_may_change_its_state_dtype() -> None:
    p, opt = optimizer_of((12, 16), {}, "int8")
    run(opt, [p], 2)
    held = decode(opt.state[p]["momentum_buffer"].float(), opt.state[p][SCALE])
    opt.param_groups[0]["state_dtype"] = "bfloat16"
    p.grad = torch.zeros_like(p)
    opt.step()
    M = opt.state[p]["momentum_buffer"]
    assert M.dtype == torch.bfloat16
    torch.testing.assert_close(M.float(), 0.95 * held, rtol=1e-2, atol=1e-6)
    opt.param_groups[0]["state_dtype"] = "int8"
    run(opt, [p], 1)
    assert opt.state[p]["momentum_buffer"].dtype == torch.int8


BROKEN: list[tuple[str, Any, str]] = [
    ("momentum_buffer", lambda t: t.float(), "momentum_buffer.*float32.*torch.int8.*state_dtype"),
    (SCALE, None, "'w' has no momentum_scale"),
    (SCALE, lambda t: -t, "momentum_scale.*negative"),
    (SCALE, lambda t: t * torch.nan, "momentum_scale.*not finite"),
    (SCALE, lambda t: t[:2], r"momentum_scale.*shape \(2, 1\)"),
]


@pytest.mark.parametrize(("name", "damage", "message"), BROKEN)
def test_damaged_state_is_refused(name: str, damage: Any, message: str) -> None:
    p = parameter(12, 16, dtype=torch.float32)
    opt = AngularMuown([("w", p)], state_dtype="int8")
    run(opt, [p], 1)
    saved = opt.state_dict()
    state = saved["state"][0]
    if damage is None:
        del state[name]
    else:
        state[name] = damage(state[name])
    with pytest.raises((TypeError, ValueError), match=message):
        opt.load_state_dict(saved)


def test_a_plan_shows_the_bytes() -> None:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 10))
    sizes = []
    for dtype in (None, "int8"):
        opt = AngularMuown.for_model(model, lr=0.02, head="2.*", state_dtype=dtype)
        assert opt.plan.state_bytes is not None
        sizes.append(opt.plan.state_bytes["0.weight"])
        assert f"{sizes[-1] / (128 * 64):.2f}" in str(opt.plan), "bytes per element"
    counter = 4
    assert sizes == [128 * 64 * 4 + 128 * 8 + counter, 128 * 64 + 128 * 12 + counter]
