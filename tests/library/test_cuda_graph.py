"""capturable=True: the same weights with lr, clocks and counters as tensors; refusals."""

import copy

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngleMonitor, AngularMuown, cuda_graph
from angular_muown.engine import Engine
from tests.library.family import FAMILY, noise, parameter

STEPS = 6


def make(kind: type[Engine], capturable: bool) -> tuple[list[nn.Parameter], Engine]:
    """Return two matrices, one of them in 16 bits, a vector for AdamW, and their optimizer."""
    params = [parameter(24, 40, dtype=torch.float32), nn.Parameter(torch.ones(40))]
    params.append(nn.Parameter(parameter(24, 40, seed=1).detach().bfloat16()))
    groups = [
        {"params": [params[0], params[2]]},
        {"params": [params[1]], "algorithm": "adamw", "lr": 0.01},
    ]
    return params, kind(groups, lr=0.02, capturable=capturable)


def train(params: list[nn.Parameter], opt: Engine, start: int = 0, steps: int = STEPS) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t + start))
    for t in range(start, start + steps):
        for i, p in enumerate(params):
            shape = p.shape if p.ndim == 2 else (1, *p.shape)
            p.grad = noise(*shape, seed=10 * t + i).to(p.dtype).reshape(p.shape)
        opt.step()
        schedule.step()


@pytest.mark.parametrize("kind", FAMILY)
def test_capturable_steps_match_plain_ones(kind: type[Engine]) -> None:
    """Up to float32 rounding, in which lr is stored and kappa computed."""
    (plain, opt), (params, other) = make(kind, False), make(kind, True)
    train(plain, opt)
    train(params, other)
    for group in other.param_groups:
        assert isinstance(group["lr"], Tensor)
        assert int(group["step"]) == STEPS
    for p, q in zip(plain, params, strict=True):
        tolerance = 1e-6 if p.dtype == torch.float32 else 1e-2  # a few are rounded the other way
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance / 10)


def test_lr_and_step_remain_the_same_tensors() -> None:
    """A recorded step reads these tensors, so they must be updated in place."""
    params, opt = make(AngularMuown, True)
    opt.param_groups[0].update(decay_scale=1.0)
    lr, clock = opt.param_groups[0]["lr"], opt.param_groups[0]["step"]
    train(params, opt)
    assert opt.param_groups[0]["lr"] is lr
    assert opt.param_groups[0]["step"] is clock
    assert float(lr) == pytest.approx(0.02 / (1 + STEPS))
    assert float(opt.kappa(opt.param_groups[0])) == pytest.approx(1 / (1 + STEPS))
    assert opt.angle(opt.param_groups[0]) > 0


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_state_dicts_load_with_and_without_capturable(saved: bool, loaded: bool) -> None:
    params, opt = make(AngularMuown, saved)
    train(params, opt)
    others, other = make(AngularMuown, loaded)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert all(isinstance(g["lr"], Tensor) == loaded for g in other.param_groups)
    assert all(isinstance(g["step"], Tensor) == loaded for g in other.param_groups)
    train(params, opt, STEPS)
    train(others, other, STEPS)
    for p, q in zip(params, others, strict=True):
        tolerance = 1e-6 if p.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance / 10)
        assert saved != loaded or torch.equal(p, q)


def test_groups_without_these_keys_still_load() -> None:
    params, opt = make(AngularMuown, False)
    train(params, opt)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["capturable"], group["workspace"]
    opt.load_state_dict(saved)
    train(params, opt, STEPS)


def test_errors_name_what_cannot_be_recorded() -> None:
    _, plain = make(AngularMuown, False)
    with pytest.raises(RuntimeError, match=r"group 0 has capturable=False.*capturable=True"):
        cuda_graph.check(plain.param_groups, plain.state)
    params, opt = make(AngularMuown, True)
    with pytest.raises(RuntimeError, match=r"\[0\]\['params'\]\[0\]\" has no gradient"):
        cuda_graph.check(opt.param_groups, opt.state)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="no state yet: take a step"):
        cuda_graph.check(opt.param_groups, opt.state)
    opt.step()
    cuda_graph.check(opt.param_groups, opt.state)


def test_the_monitor_reads_kappa() -> None:
    model = nn.Linear(40, 24, bias=False)
    opt = AngularMuown([model.weight], capturable=True, decay_scale=1.0)
    monitor = AngleMonitor(model, opt)
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        opt.step()
    assert monitor.read()["kappa"] == 0.5


@pytest.mark.parametrize(
    ("key", "value"), [("capturable", 1), ("workspace", 0), ("workspace", "a")]
)
def test_invalid_values_are_rejected(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} is not valid"):
        AngularMuown([parameter(4, 4)], **{key: value})


def test_every_group_has_its_own_learning_rate() -> None:
    """A tensor shared by several groups would be scaled by the last group's schedule."""
    params, _ = make(AngularMuown, False)
    shared = torch.tensor(0.02)
    groups = [{"params": params[:1]}, {"params": params[2:]}]
    opt = AngularMuown(groups, lr=shared, capturable=True)
    torch.optim.lr_scheduler.LambdaLR(opt, [lambda t: 1.0, lambda t: 0.1])
    assert [float(group["lr"]) for group in opt.param_groups] == pytest.approx([0.02, 0.002])
    assert float(shared) == pytest.approx(0.02)


def test_a_replaced_learning_rate_is_rejected() -> None:
    params, opt = make(AngularMuown, True)
    train(params, opt, steps=1)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.param_groups[0]["lr"] = 0.01
    with pytest.raises(RuntimeError, match=r"group 0 has lr=0.01 on the host.*fill_"):
        cuda_graph.check(opt.param_groups, opt.state)
