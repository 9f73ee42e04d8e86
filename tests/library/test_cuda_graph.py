"""capturable=True: the same numbers with lr, clock and counters as tensors, and what is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngleMonitor, AngularMuown, cuda_graph
from angular_muown.engine import Engine
from tests.library.family import FAMILY, noise, parameter

STEPS = 6


def make(kind: type[Engine], capturable: bool) -> tuple[list[nn.Parameter], Engine]:
    """Two matrices, one of them in 16 bits, and a vector for AdamW."""
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
def test_the_same_numbers(kind: type[Engine]) -> None:
    """To float32's last bits: lr is one now, and kappa is computed in it."""
    (plain, opt), (params, other) = make(kind, False), make(kind, True)
    train(plain, opt)
    train(params, other)
    for group in other.param_groups:
        assert isinstance(group["lr"], Tensor)
        assert int(group["step"]) == STEPS
    for p, q in zip(plain, params, strict=True):
        tolerance = 1e-6 if p.dtype == torch.float32 else 1e-2  # now and then the other neighbour
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance / 10)


def test_a_scheduler_and_kappa_act_on_the_same_tensors() -> None:
    """What a recorded step reads must be written into, never replaced."""
    params, opt = make(AngularMuown, True)
    opt.param_groups[0].update(decay_scale=1.0)
    lr, clock = opt.param_groups[0]["lr"], opt.param_groups[0]["step"]
    train(params, opt)
    assert opt.param_groups[0]["lr"] is lr
    assert opt.param_groups[0]["step"] is clock
    assert float(lr) == pytest.approx(0.02 / (1 + STEPS))
    assert float(opt.kappa(opt.param_groups[0])) == pytest.approx(1 / (1 + STEPS))
    assert opt.angle(opt.param_groups[0]) > 0


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_state_goes_from_one_to_the_other(here: bool, there: bool) -> None:
    params, opt = make(AngularMuown, here)
    train(params, opt)
    others, other = make(AngularMuown, there)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    saved = copy.deepcopy(opt.state_dict())
    other.load_state_dict(saved)
    assert all(isinstance(g["lr"], Tensor) == there for g in other.param_groups)
    assert all(isinstance(g["step"], Tensor) == there for g in other.param_groups)
    train(params, opt, STEPS)
    train(others, other, STEPS)
    for p, q in zip(params, others, strict=True):
        tolerance = 1e-6 if p.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance / 10)
        assert here != there or torch.equal(p, q)


def test_groups_saved_before_these_keys_existed() -> None:
    params, opt = make(AngularMuown, False)
    train(params, opt)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["capturable"], group["workspace"]
    opt.load_state_dict(saved)
    train(params, opt, STEPS)


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
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
def test_values_are_checked(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} is not valid"):
        AngularMuown([parameter(4, 4)], **{key: value})


def test_every_group_has_its_own_rate() -> None:
    """One tensor for several groups would be scaled by the last one's schedule."""
    params, _ = make(AngularMuown, False)
    given = torch.tensor(0.02)
    groups = [{"params": params[:1]}, {"params": params[2:]}]
    opt = AngularMuown(groups, lr=given, capturable=True)
    torch.optim.lr_scheduler.LambdaLR(opt, [lambda t: 1.0, lambda t: 0.1])
    assert [float(group["lr"]) for group in opt.param_groups] == pytest.approx([0.02, 0.002])
    assert float(given) == pytest.approx(0.02)


def test_a_rate_that_was_replaced_is_refused() -> None:
    params, opt = make(AngularMuown, True)
    train(params, opt, steps=1)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.param_groups[0]["lr"] = 0.01
    with pytest.raises(RuntimeError, match=r"group 0 has lr=0.01 on the host.*fill_"):
        cuda_graph.check(opt.param_groups, opt.state)
