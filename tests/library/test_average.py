"""Averages of recent weights: their values, reading them, and no effect on steps."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import comb, prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngularMuown, averaging, cuda_graph, plan
from angular_muown.engine import Engine
from tests.library.family import FAMILY, noise, parameter, run
from tests.library.models import BLOCKS, loss_of, tiny_lm
from tests.library.sharded import GROUPS, make_groups, noisy_gradient

WINDOWS = [0.1, 0.3, 2, 7, 100]


def coefficients(window: float, steps: int) -> list[float]:
    """Return the coefficient of each step's weights in the average after `steps` steps."""
    shares = [
        min(1.0, 1 / (window * k)) if window < 1 else max(1 / window, 1 / k)
        for k in range(1, steps + 1)
    ]
    return [share * prod(1 - s for s in shares[k + 1 :]) for k, share in enumerate(shares)]


def by_hand(history: list[Tensor], window: float) -> Tensor:
    pairs = zip(coefficients(window, len(history)), history, strict=True)
    return sum((c * w.double() for c, w in pairs), torch.zeros((), dtype=torch.float64))


def assert_average(
    average: Tensor, history: list[Tensor], window: float, tolerance: float = 1e-6
) -> None:
    expected = by_hand(history, window)
    torch.testing.assert_close(average.double(), expected, rtol=tolerance, atol=tolerance)


def by_recurrence(window: float, steps: int) -> list[float]:
    """Return the same from the recurrence, with weights that are 1 at one step and 0 at others.

    The initial value of 99 must not matter.
    """
    averages = []
    for one in range(1, steps + 1):
        a = 99.0
        for k in range(1, steps + 1):
            a += (float(k == one) - a) * averaging(window)(k)
        averages.append(a)
    return averages


@pytest.mark.parametrize("window", WINDOWS)
def test_shares_give_the_expected_coefficients(window: float) -> None:
    actual = by_recurrence(window, 40)
    assert actual == pytest.approx(coefficients(window, 40), abs=1e-14)
    assert sum(actual) == pytest.approx(1.0), "the average of constant weights is the weights"
    assert all(0 < averaging(window)(k) <= 1 for k in range(1, 1000))


@pytest.mark.parametrize("degree", [1, 3, 9])
def test_a_window_below_one_gives_polynomial_coefficients(degree: int) -> None:
    """For shares c/k they are C(k - 1, c - 1) / C(n, c), a polynomial in k of degree c - 1."""
    c, n = degree + 1, 60
    expected = [comb(k - 1, c - 1) / comb(n, c) for k in range(1, n + 1)]
    assert by_recurrence(1 / c, n) == pytest.approx(expected, abs=1e-13)
    age = sum((n - k) * coefficient for k, coefficient in enumerate(expected, start=1))
    assert age == pytest.approx(n / (1 + c), abs=1.0), "the mean age in averaging's docstring"


@pytest.mark.parametrize("window", [2, 7, 40])
def test_a_window_in_steps_starts_as_the_plain_mean(window: int) -> None:
    assert by_recurrence(window, window) == pytest.approx([1 / window] * window)
    after = averaging(window)(window + 5)
    assert after == averaging(window)(10**6) == 1 / window, "then exponential"


@pytest.mark.parametrize("window", WINDOWS)
def test_a_clock_on_the_device_gives_the_same_shares(window: float) -> None:
    for k in (1, 2, 3, 9, 10, 11, 29, 1000, 10**6 + 3):
        share = averaging(window)(torch.tensor(k))
        assert isinstance(share, Tensor)
        assert share.item() == averaging(window)(k)


BAD = [0, 1, 1.0, -0.1, -3, 2.5, float("nan"), float("inf"), True, "0.1"]


@pytest.mark.parametrize("window", BAD)
def test_invalid_windows_are_rejected(window: Any) -> None:
    with pytest.raises(ValueError, match=rf"window={re.escape(repr(window))} .*integer number"):
        averaging(window)
    with pytest.raises(ValueError, match=rf"average={re.escape(repr(window))} .*None, a fraction"):
        AngularMuown([parameter(4, 6)], average=window)
    with pytest.raises(ValueError, match=rf"average={re.escape(repr(window))}"):
        AngularMuown([{"params": [parameter(4)], "algorithm": "adamw", "average": window}])


def make(window: float | None, dtype: torch.dtype = torch.float32, **values: Any) -> Any:
    model = tiny_lm(dtype)
    return model, AngularMuown(plan(model, blocks=BLOCKS), lr=0.01, average=window, **values)


def train(model: nn.Module, optimizer: Engine, steps: range) -> dict[str, list[Tensor]]:
    history: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, seed=t).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            history[name].append(p.detach().clone())
    return history


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", [0.3, 3])
def test_the_average_is_that_of_the_weights(window: float, dtype: torch.dtype) -> None:
    """Also for AdamW's parameters."""
    model, optimizer = make(window, dtype)
    history = train(model, optimizer, range(9))
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    for name, p in model.named_parameters():
        average = optimizer.state[p]["average"]
        assert average.dtype == torch.promote_types(dtype, torch.float32)
        assert_average(average, history[name], window, tolerance)
        assert not torch.equal(average, p.to(average.dtype)), name


def test_the_chunk_size_does_not_change_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element is averaged exactly once."""
    ends = []
    for elements in (1, 700, 2**24):
        monkeypatch.setattr("angular_muown.average.CHUNK_ELEMENTS", elements)
        model, optimizer = make(3, torch.bfloat16)
        train(model, optimizer, range(4))
        ends.append([optimizer.state[p]["average"] for p in model.parameters()])
    for one, several, whole in zip(*ends, strict=True):
        assert torch.equal(one, whole)
        assert torch.equal(several, whole)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_averaging_does_not_change_steps(optimizer: type[Engine]) -> None:
    ends = []
    for window in (None, 0.5):
        params = [parameter(6, 8, dtype=torch.bfloat16), parameter(5, dtype=torch.float32)]
        groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
        opt = optimizer(groups, lr=0.02, average=window)
        run(opt, params, 4)
        assert all(("average" in s) == (window is not None) for s in opt.state.values())
        ends.append((params, [{**s, "average": None} for s in opt.state.values()]))
    (plain, before), (params, after) = ends
    assert all(torch.equal(p, q) for p, q in zip(plain, params, strict=True))
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"average"}:
            assert torch.equal(one[key], other[key]), key


def test_averages_for_every_layout() -> None:
    groups, params = make_groups(GROUPS, None, torch.float64)
    optimizer = AngularMuown(groups, lr=0.02, average=0.4)
    history: list[list[Tensor]] = [[] for _ in params]
    for t in range(5):
        for i, (p, _) in enumerate(params):
            p.grad = noisy_gradient(p.detach(), 1000 * t + i)
        optimizer.step()
        for seen, (p, _) in zip(history, params, strict=True):
            seen.append(p.detach().clone())
    for seen, (p, _) in zip(history, params, strict=True):
        assert_average(optimizer.state[p]["average"], seen, 0.4, 1e-13)


def test_a_master_copy_is_averaged_instead_of_the_weight() -> None:
    p = parameter(6, 8, dtype=torch.bfloat16)
    optimizer = AngularMuown([p], lr=1e-4, write_back="master", average=3)
    masters = []
    for t in range(5):
        run(optimizer, [p], 1, start=t)
        masters.append(optimizer.state[p]["master"].clone())
    assert_average(optimizer.state[p]["average"], masters, 3)
    with optimizer.averaged():
        assert torch.equal(p, optimizer.state[p]["average"].bfloat16())
    assert torch.equal(p, masters[-1].bfloat16())


@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize("window", [0.3, 4])
def test_gradients_may_come_late_or_never(window: float, probed: bool) -> None:
    """Weights without a gradient are averaged too, at every step."""
    early, late, never = params = [parameter(4, 6, seed=i) for i in range(3)]
    optimizer = AngularMuown(params, lr=0.05, average=window)
    if probed:  # as torch does to create a fresh optimizer's state
        optimizer.param_groups[0]["lr"] = 0.0
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.05
        assert all(torch.equal(optimizer.state[p]["average"], p) for p in params)
        assert optimizer.param_groups[0]["step"] == 0
    history: list[list[Tensor]] = [[], [], []]
    for t in range(8):
        early.grad = None if t in (3, 4) else noise(4, 6, seed=t)
        late.grad = noise(4, 6, seed=100 + t) if t in (3, 4, 6) else None
        never.grad = None
        optimizer.step()
        for seen, p in zip(history, params, strict=True):
            seen.append(p.detach().clone())
    for p, seen in zip((early, late), history, strict=False):
        assert_average(optimizer.state[p]["average"], seen, window, 1e-13)
    before = never.detach().clone()
    with optimizer.averaged():
        assert torch.equal(never, before)
        assert_average(late.detach(), history[1], window, 1e-13)


def test_groups_may_have_different_windows() -> None:
    params = [parameter(4, 6, seed=i) for i in range(3)]
    windows = (2, None, 0.9)
    groups = [{"params": [p], "average": w} for p, w in zip(params, windows, strict=True)]
    optimizer = AngularMuown(groups, lr=0.05)
    history: list[list[Tensor]] = [[], [], []]
    for t in range(5):
        run(optimizer, params, 1, start=t)
        for seen, p in zip(history, params, strict=True):
            seen.append(p.detach().clone())
    assert ["average" in optimizer.state[p] for p in params] == [True, False, True]
    with optimizer.averaged():
        assert_average(params[0].detach(), history[0], 2, 1e-13)
        assert torch.equal(params[1], history[1][-1])
        assert_average(params[2].detach(), history[2], 0.9, 1e-13)
    optimizer.param_groups[2]["average"] = None  # the average is dropped
    run(optimizer, params, 1, start=5)
    last = params[2].detach().clone()
    with optimizer.averaged():
        assert torch.equal(params[2], last)
    optimizer.param_groups[2]["average"] = 5
    seen = []
    for t in (6, 7):  # a new average
        run(optimizer, params, 1, start=t)
        seen.append(params[2].detach().clone())
    assert_average(optimizer.state[params[2]]["average"], seen, 5, 1e-13)


def test_a_frozen_group_is_averaged_at_every_step() -> None:
    """Its weights do not change, but they are the model's weights at that step."""
    frozen, moving = parameter(4, 6, seed=1), parameter(4, 6, seed=2)
    optimizer = AngularMuown([{"params": [frozen]}, {"params": [moving]}], lr=0.05, average=0.3)
    history = []
    for t in range(12):
        frozen.grad = noise(4, 6, seed=t) if t < 5 else None
        moving.grad = noise(4, 6, seed=50 + t)
        optimizer.step()
        history.append(frozen.detach().clone())
    assert optimizer.param_groups[0]["step"] == 5, "kappa's clock stops"
    assert_average(optimizer.state[frozen]["average"], history, 0.3, 1e-13)
    for p in (frozen, moving):
        p.grad = None
    before = optimizer.state[moving]["average"].clone()
    optimizer.step()  # no gradients: not a step
    assert torch.equal(optimizer.state[moving]["average"], before)


def test_a_non_finite_average_is_discarded_while_the_share_is_one() -> None:
    """The user restores good weights and moments after a step with a non-finite gradient."""
    p = parameter(4, 6)
    optimizer = AngularMuown([p], lr=0.05, average=0.3)
    good = p.detach().clone()
    p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    average = optimizer.state[p]["average"]
    assert average.isnan().any()
    optimizer.state[p].clear()
    optimizer.state[p]["average"] = average
    with torch.no_grad():
        p.copy_(good)
    run(optimizer, [p], 1, start=1)
    assert optimizer.state[p]["average"] is average
    assert averaging(0.3)(optimizer.param_groups[0]["averaged"]) == 1
    assert torch.equal(average, p)


def test_a_weight_edited_by_the_user_overrides_its_master() -> None:
    """As it does in a step."""
    edited, other = (parameter(4, 6, seed=i, dtype=torch.bfloat16) for i in range(2))
    optimizer = AngularMuown([edited, other], lr=0.02, write_back="master", average=2)
    run(optimizer, [edited, other], 2)
    with torch.no_grad():
        edited.fill_(1.0)
    edited.grad = None
    for t in range(40):
        other.grad = noise(4, 6, seed=t).bfloat16()
        optimizer.step()
    torch.testing.assert_close(optimizer.state[edited]["average"], torch.ones(4, 6))


def test_a_model_may_be_cast_inside_averaged() -> None:
    """For example to save it. It keeps the new dtype and gets its weights back."""
    model, optimizer = make(3)
    train(model, optimizer, range(3))
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.averaged():
        model.double()
    for p, weight in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, weight.double())


@pytest.mark.parametrize("window", [0.3, 3])
def test_capturable_averages_follow_the_clock_on_the_device(window: float) -> None:
    params = [parameter(4, 6, dtype=torch.float32), parameter(5, dtype=torch.float32)]
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
    optimizer = AngularMuown(groups, lr=0.05, average=window, capturable=True)
    copies = [p.detach().clone() for p in params]
    addresses = []
    for t in range(7):
        run(optimizer, params, 1, start=t)
        for a, p in zip(copies, params, strict=True):
            a.lerp_(p.detach(), averaging(window)(t + 1))
            assert torch.equal(optimizer.state[p]["average"], a)
        addresses.append([optimizer.state[p]["average"].data_ptr() for p in params])
    assert all(a == addresses[0] for a in addresses), "a recorded step writes to this address"
    cuda_graph.check(optimizer.param_groups, optimizer.state)
    del optimizer.state[params[0]]["average"]
    with pytest.raises(RuntimeError, match=r"no average yet, .*take a step before recording"):
        cuda_graph.check(optimizer.param_groups, optimizer.state)


@contextmanager
def untouched(params: list[nn.Parameter]) -> Iterator[None]:
    before = [(p.data_ptr(), p.detach().clone().view(torch.uint8)) for p in params]
    yield
    for p, (address, bits) in zip(params, before, strict=True):
        assert p.data_ptr() == address
        assert torch.equal(p.detach().view(torch.uint8), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_restored_bit_for_bit_even_after_an_error(dtype: torch.dtype) -> None:
    model, optimizer = make(3, dtype)
    train(model, optimizer, range(4))
    params = list(model.parameters())
    with torch.no_grad():
        params[0].view(-1)[:4] = torch.tensor([-0.0, 1e-40, torch.nan, torch.inf]).to(dtype)
    averages = [optimizer.state[p]["average"].clone() for p in params]
    addresses = [p.data_ptr() for p in params]

    def fail() -> None:
        for p, a, address in zip(params, averages, addresses, strict=True):
            assert torch.equal(p, a.to(dtype))
            assert p.data_ptr() == address
            assert p.requires_grad
        raise OSError("no tokens")

    with untouched(params):
        with pytest.raises(OSError, match="no tokens"), optimizer.averaged():
            fail()
        with optimizer.averaged():  # a second time, with a backward pass
            loss_of(model).backward()
    assert all(
        torch.equal(optimizer.state[p]["average"], a) for p, a in zip(params, averages, strict=True)
    )
    train(model, optimizer, range(4, 5))


def test_steps_and_loading_are_rejected_inside_averaged() -> None:
    model, optimizer = make(3)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    called = []
    with untouched(list(model.parameters())), optimizer.averaged():
        with pytest.raises(
            RuntimeError, match=r"step\(\) was called inside averaged.*leave the with"
        ):
            optimizer.step(lambda: called.append(1))
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) was called inside averaged"):
            optimizer.load_state_dict(saved)
        nested = optimizer.averaged()
        with pytest.raises(RuntimeError, match=r"averaged\(\) was called inside averaged"), nested:
            called.append(2)
    assert not called
    optimizer.step()


def test_without_an_average_the_error_says_what_to_do() -> None:
    for window, steps, message in ((None, 2, r"with average=0\.1"), (0.1, 0, "take a step first")):
        model, optimizer = make(window)
        train(model, optimizer, range(steps))
        with pytest.raises(RuntimeError, match=message), optimizer.averaged():
            pass
        train(model, optimizer, range(1))
