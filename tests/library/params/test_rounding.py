"""16-bit weights: steps are computed in float32, and small steps are not lost."""

import inspect
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from angular_muown import AngularMuown, plan
from angular_muown.params.rounding import round_stochastically
from tests.library.family import FAMILY, noise, parameter
from tests.library.models import BLOCKS, TinyLM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_picks_a_neighbour_and_is_unbiased(dtype) -> None:
    X = noise(40, 60, seed=1, dtype=torch.float32)
    draws = torch.stack([round_stochastically(X, dtype, seed).float() for seed in range(400)])
    ulp = (X.to(dtype).float() * torch.finfo(dtype).eps).abs()
    assert ((draws - X).abs() <= ulp * 1.01).all()
    # a draw's standard deviation is at most half an ulp: at most 0.025 for the mean of 400
    assert ((draws.mean(0) - X) / ulp).square().mean().sqrt() < 0.03
    exact = X.to(dtype)
    assert torch.equal(round_stochastically(exact.float(), dtype, 7), exact)


@pytest.mark.parametrize("size", [2.3e-8, 3e-7, 4e-5])
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_to_float16_is_unbiased_for_subnormals(size, sign) -> None:
    X = torch.full((60, 60), sign * size)
    mean = round_stochastically(X, torch.float16, 3).float().mean()
    assert mean.item() == pytest.approx(sign * size, rel=0.05)


def test_rounding_depends_on_the_seed_and_not_on_torchs_random_state() -> None:
    X = noise(5, 6, seed=1, dtype=torch.float32)
    state = torch.get_rng_state()
    a = round_stochastically(X, torch.bfloat16, 3)
    assert torch.equal(a, round_stochastically(X, torch.bfloat16, 3))
    assert not torch.equal(a, round_stochastically(X, torch.bfloat16, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_rounding_keeps_inf_and_nan() -> None:
    X = torch.tensor([[float("inf"), float("-inf"), float("nan"), 0.0]])
    rounded = round_stochastically(X, torch.bfloat16, 1)
    torch.testing.assert_close(rounded.float(), X, equal_nan=True)


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("write_back", ["stochastic", "master"])
def test_small_steps_are_not_lost(optimizer, write_back) -> None:
    """Steps of 3e-4 rad are below bf16's resolution.

    After 20 of them the bf16 weight has moved as far along the float32 run's displacement as that
    run, within 5%.
    """
    shape, lr = (128, 192), 3e-4
    start = parameter(*shape, dtype=torch.float32).detach().bfloat16()
    start /= start.float().norm(dim=-1, keepdim=True).bfloat16()  # unit rows: lr is an angle
    displacements = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(start.to(dtype, copy=True))
        values = {"scale": "fan_ratio", "orthogonalize": "polar_express", "weight_decay": 0.0}
        accepted = inspect.signature(optimizer).parameters
        values = {key: value for key, value in values.items() if key in accepted}
        opt = optimizer([p], lr=lr, write_back=write_back, **values)
        for t in range(20):
            p.grad = (noise(*shape, seed=0) + 0.3 * noise(*shape, seed=t + 1)).to(dtype)
            opt.step()
        displacements.append((p.detach().float() - start.float()).flatten())
    expected, actual = displacements
    assert (actual @ expected / expected.square().sum()).item() == pytest.approx(1.0, abs=0.05)


def test_rounding_to_nearest_would_lose_small_steps() -> None:
    """Less than half of a small step survives a plain copy to bf16."""
    W = noise(64, 64, seed=1, dtype=torch.float32).bfloat16()
    step = 3e-4 * W.float().norm(dim=-1, keepdim=True) * torch.sign(noise(64, 64, seed=2)) / 8
    moved = W.float() + step
    nearest = moved.bfloat16().float() - W.float()
    stochastic = round_stochastically(moved.float(), torch.bfloat16, 0).float() - W.float()
    survived = [(x * step).sum() / step.square().sum() for x in (nearest, stochastic)]
    assert survived[0] < 0.5
    assert survived[1] == pytest.approx(1.0, abs=0.15)


def test_the_master_copy_follows_weights_changed_outside_the_optimizer() -> None:
    p = parameter(4, 6, dtype=torch.bfloat16)
    opt = AngularMuown([p], write_back="master", lr=1e-4)
    for t in range(3):
        p.grad = noise(4, 6, seed=t).bfloat16()
        opt.step()
    with torch.no_grad():
        p[1] = 2.0
    p.grad = noise(4, 6, seed=9).bfloat16()
    opt.step()
    torch.testing.assert_close(p.detach()[1], torch.full((6,), 2.0).bfloat16(), rtol=0, atol=0.02)
    assert torch.equal(p.detach(), opt.state[p]["master"].bfloat16())


def _text_batches(steps: int) -> list[torch.Tensor]:
    """Return batches of real text: the bytes of a standard library module, in 20 classes."""
    source = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    data = torch.tensor(list(source.read_bytes()[:60_000])) % 20
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(data) - 33, (steps, 16), generator=generator)
    return [torch.stack([data[s : s + 33] for s in row.tolist()]) for row in starts]


def _train(dtype: torch.dtype, write_back: str, batches: list[torch.Tensor]) -> float:
    """Return the decrease from the mean of the first 3 losses to the mean of the last 20."""
    torch.manual_seed(0)
    model = TinyLM(d=32).to(dtype)
    groups = plan(model, blocks=BLOCKS, aux_lr=0.004)
    opt = AngularMuown(groups, lr=0.02, write_back=write_back)
    losses = []
    for batch in batches:
        logits = model(batch[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return sum(losses[:3]) / 3 - sum(losses[-20:]) / 20


@pytest.mark.slow
@pytest.mark.parametrize("write_back", ["stochastic", "master"])
def test_bf16_weights_learn_as_much_as_float32(write_back) -> None:
    batches = _text_batches(200)
    float32 = _train(torch.float32, write_back, batches)
    bf16 = _train(torch.bfloat16, write_back, batches)
    assert float32 > 0.5, "nothing to compare if the task is not learned"
    assert bf16 == pytest.approx(float32, rel=0.02)
