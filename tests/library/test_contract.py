"""The torch.optim contract, for the whole family, with AdamW groups in the same optimizer."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from angular_muown import AngularMuown, Engine, Group, Recipe, plan
from angular_muown.stages.charts import Oblique
from angular_muown.stages.context import Context
from angular_muown.stages.orthogonalize import polar_express, svd
from angular_muown.stages.scale import fan_ratio
from tests.library.family import FAMILY, noise, parameter, run
from tests.library.models import BLOCKS, TinyLM, loss_of, tiny_lm


def make(optimizer: type[Engine], **values) -> tuple[TinyLM, Engine]:
    model = tiny_lm()
    return model, optimizer(plan(model, blocks=BLOCKS), lr=values.pop("lr", 0.01), **values)


def train(model: nn.Module, opt: Engine, steps: int, start: int = 0) -> float:
    loss = torch.zeros(())
    for t in range(start, start + steps):
        opt.zero_grad()
        loss = loss_of(model, seed=t)
        loss.backward()
        opt.step()
    return loss.item()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("optimizer", FAMILY)
def test_training_reduces_the_loss(optimizer) -> None:
    model, opt = make(optimizer)
    before = loss_of(model).item()
    train(model, opt, 60)
    assert loss_of(model).item() < 0.5 * before


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_step_with_a_closure_equals_a_plain_step(optimizer) -> None:
    (a, opt_a), (b, opt_b) = make(optimizer), make(optimizer)

    def closure() -> torch.Tensor:
        opt_a.zero_grad()
        assert torch.is_grad_enabled()
        loss = loss_of(a)
        loss.backward()
        return loss

    loss = opt_a.step(closure)
    assert loss.item() == train(b, opt_b, 1)
    assert_same(a, b)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_step_does_not_change_gradients(optimizer) -> None:
    model, opt = make(optimizer)
    loss_of(model).backward()
    before = [p.grad.clone() for p in model.parameters()]
    opt.step()
    for p, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_parameter_without_a_gradient_keeps_its_weight_and_state(optimizer) -> None:
    model, opt = make(optimizer)
    train(model, opt, 2)
    frozen = model.layers[0].up.weight
    state = {k: v.clone() for k, v in opt.state[frozen].items()}
    before = frozen.detach().clone()
    opt.zero_grad()
    loss_of(model).backward()
    frozen.grad = None
    opt.step()
    assert torch.equal(frozen, before)
    for key, value in opt.state[frozen].items():
        assert torch.equal(value, state[key]), key
    matrices = next(g for g in opt.param_groups if any(p is frozen for p in g["params"]))
    assert matrices["step"] == 3, "kappa counts the group's steps"


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_group_without_any_gradient_does_not_count_a_step(optimizer) -> None:
    _, opt = make(optimizer)
    with pytest.warns(UserWarning, match="no parameter of this optimizer has a gradient"):
        opt.step()
    assert [g["step"] for g in opt.param_groups] == [0] * len(opt.param_groups)
    assert not opt.state


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_continue_like_the_original(optimizer, through) -> None:
    model, opt = make(optimizer)
    train(model, opt, 3)
    pair = (model, opt)
    model2, opt2 = (
        copy.deepcopy(pair) if through == "deepcopy" else pickle.loads(pickle.dumps(pair))
    )
    assert train(model, opt, 3, start=3) == train(model2, opt2, 3, start=3)
    assert_same(model, model2)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_groups_can_be_added_during_training(optimizer) -> None:
    a, b = parameter(6, 4), parameter(4, 6, seed=1)
    opt = optimizer([a], lr=0.01)
    run(opt, [a], 3)
    opt.add_param_group({"params": [b], "lr": 0.5})
    bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    opt.add_param_group({"params": [bias], "algorithm": "adamw"})
    run(opt, [a, b, bias], 3, start=3)
    assert [g["step"] for g in opt.param_groups] == [6, 3, 3]
    assert opt.param_groups[1]["lr"] == 0.5
    assert bias.any()


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize(
    "lr", [torch.tensor(0.01), torch.tensor([0.01]), torch.tensor(0.01, dtype=torch.float64)]
)
def test_a_tensor_learning_rate_acts_as_its_number(optimizer, lr) -> None:
    (a, opt_a), (b, opt_b) = make(optimizer), make(optimizer, lr=lr)
    train(a, opt_a, 3)
    train(b, opt_b, 3)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=8, cycle_momentum=True),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", FAMILY)
def test_schedulers_change_lr_but_not_kappa(optimizer, name) -> None:
    model, opt = make(optimizer)
    scheduler = SCHEDULERS[name](opt)
    learning_rates = set()
    for t in range(6):
        loss = train(model, opt, 1, start=t)
        scheduler.step(*([loss + 10 * t] if name == "ReduceLROnPlateau" else []))
        learning_rates.add(round(opt.param_groups[0]["lr"], 9))
    assert len(learning_rates) > 1
    assert all(torch.isfinite(p).all() for p in model.parameters())
    if isinstance(opt, AngularMuown):
        assert opt.kappa(opt.param_groups[0]) == pytest.approx(1 / 1.006)


def test_every_torch_scheduler_is_covered_or_excluded_for_a_reason() -> None:
    excluded = {"LRScheduler": "the base class", "SWALR": "belongs to torch.optim.swa_utils"}
    public = set(lr_scheduler.__all__)
    assert public == set(SCHEDULERS) | (set(excluded) & public)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_grad_scaler_unscales_gradients_and_skips_infinite_ones(optimizer) -> None:
    (a, opt_a), (b, opt_b) = make(optimizer), make(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(a)).backward()
    scaler.step(opt_a)
    scaler.update()
    train(b, opt_b, 1)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    before = weights(a)
    opt_a.zero_grad()
    scaler.scale(loss_of(a) * float("inf")).backward()
    scaler.step(opt_a)
    scaler.update()
    assert [g["step"] for g in opt_a.param_groups] == [1] * len(opt_a.param_groups)
    for p, old in zip(a.parameters(), before, strict=True):
        assert torch.equal(p, old)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_accumulated_gradients_equal_one_large_batch(optimizer) -> None:
    (a, opt_a), (b, opt_b) = make(optimizer), make(optimizer)
    for seed in (0, 1):
        (loss_of(a, seed) / 2).backward()
    ((loss_of(b, 0) + loss_of(b, 1)) / 2).backward()
    opt_a.step()
    opt_b.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_frozen_parameters_do_not_move(optimizer) -> None:
    model = tiny_lm()
    model.layers[0].requires_grad_(False)
    groups = plan(model, blocks={"layers.1.attn.qkv.weight": 3})
    opt = optimizer(groups, lr=0.01)
    before = [p.clone() for p in model.layers[0].parameters()]
    train(model, opt, 2)
    for p, old in zip(model.layers[0].parameters(), before, strict=True):
        assert torch.equal(p, old)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_step_starts_from_weights_changed_outside_the_optimizer(optimizer) -> None:
    """Row lengths are not stored, so a row keeps its new length up to one Adam step."""
    p = parameter(6, 8)
    opt = optimizer([p], lr=0.01)
    run(opt, [p], 5)
    with torch.no_grad():
        p.copy_(noise(6, 8, seed=77) * 20)
    replaced = p.detach().clone()
    run(opt, [p], 1, start=5)
    assert (p.detach() - replaced).norm(dim=-1).max() < 0.1 * replaced.norm(dim=-1).min()


@pytest.mark.parametrize("optimizer", FAMILY)
def test_step_hooks_and_zero_grad_work(optimizer) -> None:
    model, opt = make(optimizer)
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, opt, 1)
    assert calls == ["before", "after"]
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_step_moves_parameters_swapped_into_a_group(optimizer) -> None:
    """accelerate swaps parameters after construction."""
    old, new = parameter(6, 4), parameter(6, 4, seed=5)
    opt = optimizer([old], lr=0.01)
    opt.param_groups[0]["params"] = [new]
    before = new.detach().clone()
    run(opt, [new], 1)
    assert not torch.equal(new, before)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_maximize_equals_descent_on_the_negative_gradient(optimizer) -> None:
    a, b = parameter(6, 4), parameter(6, 4)
    up = optimizer([a], lr=0.01, maximize=True)
    down = optimizer([b], lr=0.01)
    run(up, [a], 5, gradient=lambda p, i, t: -noise(6, 4, seed=t))
    run(down, [b], 5, gradient=lambda p, i, t: noise(6, 4, seed=t))
    assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_plain_and_named_parameter_lists_give_the_same_weights(optimizer) -> None:
    results = []
    for wrap in (lambda ps: ps, lambda ps: [(f"w{i}", p) for i, p in enumerate(ps)]):
        params = [parameter(6, 4), parameter(4, 6, seed=1)]
        opt = optimizer(wrap(params), lr=0.01)
        run(opt, params, 3)
        results.append(params)
    assert opt.param_groups[0]["param_names"] == ["w0", "w1"]
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


# torch's tracer itself reads .grad of non-leaf tensors
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_compiled_training_step_gives_the_same_weights(optimizer) -> None:
    (a, opt_a), (b, opt_b) = make(optimizer), make(optimizer)

    @torch.compile(backend="aot_eager")
    def step(seed_loss: torch.Tensor) -> torch.Tensor:
        opt_a.zero_grad()
        loss = loss_of(a) * seed_loss
        loss.backward()
        opt_a.step()
        return loss

    for t in range(4):
        opt_a.param_groups[0]["lr"] = opt_b.param_groups[0]["lr"] = 0.01 / (t + 1)
        step(torch.ones(()))
        opt_b.zero_grad()
        loss_of(b).backward()
        opt_b.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_torchs_averaged_model_works(optimizer) -> None:
    """swa_utils.AveragedModel holds the exponential average and does not affect training.

    Training resumes from the average after it is copied back.
    """
    (model, opt), (alone, opt_alone) = make(optimizer), make(optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    expected: list[torch.Tensor] = []
    for t in range(6):
        train(model, opt, 1, start=t)
        average.update_parameters(model)
        current = weights(model)
        expected = [0.8 * w + 0.2 * p for w, p in zip(expected or current, current, strict=True)]
    train(alone, opt_alone, 6)
    assert_same(model, alone)
    for p, w in zip(average.module.parameters(), expected, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-5, atol=1e-6)
    assert loss_of(average).isfinite()
    model.load_state_dict(average.module.state_dict())
    train(model, opt, 1, start=6)
    for p, w in zip(model.parameters(), expected, strict=True):
        assert 0 < (p - w).norm() < 0.3 * w.norm() + 0.1


def test_a_parameter_listed_twice_in_a_group_is_stepped() -> None:
    """torch only warns about it when the group is added."""
    weight = torch.nn.Parameter(torch.randn(8, 4))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AngularMuown([{"params": [weight, weight]}], lr=0.02)
    before = weight.detach().clone()
    weight.grad = torch.randn(8, 4)
    optimizer.step()
    assert not torch.equal(weight, before)


class Turning(Engine):
    """A user's own optimizer with an option of its own: see docs/explanation/family.md."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "angle": 1.0, **options})

    def recipe(self, group: dict[str, Any]) -> Recipe:
        return Recipe(Oblique(), svd, fan_ratio, kappa=group["angle"])


def test_a_users_optimizer_steps_saves_and_loads() -> None:
    """Turning equals AngularMuown with fixed row lengths and a constant angle."""
    a, b = (parameter(6, 4) for _ in range(2))
    values = {"radius": "fixed", "decay_degree": 0.0, "orthogonalize": "svd"}
    turning, angular = Turning([a], angle=0.5), AngularMuown([b], lr=0.01, **values)
    for optimizer, p in ((turning, a), (angular, b)):
        run(optimizer, [p], 5)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    loaded = Turning([a])
    loaded.load_state_dict(turning.state_dict())
    assert loaded.param_groups[0]["angle"] == 0.5
    with pytest.raises(ValueError, match="saved by Turning, not by AngularMuown"):
        angular.load_state_dict(loaded.state_dict())


def test_a_radius_rule_without_adams_state_may_cross_zero() -> None:
    class Falling:
        state_names = ()
        signed = True

        def __call__(self, g: Tensor, r: Tensor, context: Context) -> Tensor:
            return g - 10

    class Member(Engine):
        def recipe(self, group: Group) -> Recipe:
            return Recipe(Oblique(), polar_express, fan_ratio, radius=Falling())

    p = nn.Parameter(torch.randn(4, 3))
    p.grad = torch.randn(4, 3)
    Member([p], {"lr": 0.02}).step()
    assert p.isfinite().all()


def test_a_member_without_a_default_lr_is_rejected_and_defaults_are_not_modified() -> None:
    defaults = {"lr": 0.1, "process_group": False}
    Engine([nn.Parameter(torch.ones(2, 2))], defaults)
    assert defaults == {"lr": 0.1, "process_group": False}
    with pytest.raises(TypeError, match="Engine has no default lr: add it to its defaults"):
        Engine([nn.Parameter(torch.ones(2, 2))], {})


def test_a_removed_option_at_its_default_does_not_stay_in_the_group() -> None:
    group = {"params": [nn.Parameter(torch.ones(2, 2))], "exact_angle": False}
    assert "exact_angle" not in AngularMuown([group]).param_groups[0]
