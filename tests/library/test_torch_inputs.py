"""torch's own tests of its optimizers, with torch's own inputs, for the whole family."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from angular_muown.engine import Engine
from tests.library.family import FAMILY, parameter
from tests.library.params.test_loading import assert_equal
from tests.library.params.test_state import save_and_load
from tests.library.torch_inputs import invalid_inputs, valid_arguments

pytestmark = pytest.mark.slow  # test_contract.py has the quick ones
OVER_FAMILY = pytest.mark.parametrize("optimizer", FAMILY)


class Problem:
    """Minimise the square of an affine map of one vector over its weight and bias."""

    def __init__(
        self,
        optimizer: type[Engine],
        arguments: dict[str, Any],
        contiguous: bool = True,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        **bias_options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(10, 5, 2, generator=generator)[..., 0]
        bias = torch.randn(10, 2, generator=generator)[..., 0]
        self.input = torch.randn(5, generator=generator)
        memory_format = torch.contiguous_format if contiguous else torch.preserve_format
        pairs = zip((weight, bias), dtypes, strict=True)
        tensors = [t.to(dtype).clone(memory_format=memory_format) for t, dtype in pairs]
        if not contiguous:
            tensors = [torch.stack((t, t), dim=-1)[..., 0] for t in tensors]
        self.params = [nn.Parameter(t) for t in tensors]
        w, b = self.params
        assert w.is_contiguous() == contiguous
        groups = [{"params": [w]}, {"params": [b], "algorithm": "adamw", **bias_options}]
        self.optimizer = optimizer(groups, **copy.deepcopy(arguments))

    def loss(self) -> Tensor:
        w, b = self.params
        return (w.float().mv(self.input) + b.float()).square().sum()

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.step(self.closure)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]


def problems(optimizer: type[Engine], **options: Any) -> Iterator[Problem]:
    for arguments in valid_arguments(optimizer):
        yield Problem(optimizer, arguments, **options)


@OVER_FAMILY
def test_optimizers_can_be_printed(optimizer) -> None:
    for problem in problems(optimizer):
        first, *totals = repr(problem.optimizer).splitlines()
        assert first.startswith(f"{optimizer.__name__}(lr=")
        assert [line.partition(":")[0] for line in totals] == ["matrix", "adamw"]


@OVER_FAMILY
@pytest.mark.parametrize("contiguous", [True, False])
def test_steps_decrease_the_loss_or_increase_it_with_maximize(optimizer, contiguous) -> None:
    for arguments in valid_arguments(optimizer):
        for maximize in (False, True):
            options = {**arguments, "maximize": maximize}
            problem = Problem(optimizer, options, contiguous=contiguous)
            before = problem.loss().item()
            problem.run(20)
            assert (problem.loss().item() > before) == maximize, options


@OVER_FAMILY
def test_steps_with_schedulers_and_groups_move_the_loss_the_right_way(optimizer) -> None:
    for arguments in valid_arguments(optimizer):
        problem = Problem(optimizer, arguments, lr=1e-3)
        schedulers = [
            StepLR(problem.optimizer, gamma=0.9, step_size=10),
            ReduceLROnPlateau(problem.optimizer),
        ]
        before = problem.loss().item()
        for _ in range(20):
            problem.optimizer.step(problem.closure)
            schedulers[0].step()
            schedulers[1].step(problem.loss().item())
        maximize = problem.optimizer.param_groups[0]["maximize"]
        assert (problem.loss().item() > before) == maximize, arguments


@OVER_FAMILY
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_lr_acts_as_its_number_and_is_not_changed(optimizer, shape) -> None:
    for arguments in valid_arguments(optimizer):
        lr = torch.full(shape, 0.01)
        problem = Problem(optimizer, {**arguments, "lr": lr})
        problem.run(5)
        number = Problem(optimizer, {**arguments, "lr": 0.01})
        number.run(5)
        for p, q in zip(problem.params, number.params, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert torch.equal(lr, torch.full(shape, 0.01))


@OVER_FAMILY
def test_complex_parameters_and_sparse_gradients_are_rejected(optimizer) -> None:
    p = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
    for algorithm in ("matrix", "adamw"):
        with pytest.raises(ValueError, match="complex64"):
            optimizer([{"params": [p], "algorithm": algorithm}])
    for problem in problems(optimizer):
        problem.run(1)
        before = problem.weights()
        for p in problem.params:
            p.grad = torch.ones_like(p).to_sparse()
        with pytest.raises(ValueError, match="sparse"):
            problem.optimizer.step()
        assert_equal(problem.weights(), before)


@OVER_FAMILY
def test_a_step_without_gradients_changes_nothing(optimizer) -> None:
    for problem in problems(optimizer):
        before = problem.weights()
        with pytest.warns(UserWarning, match="no parameter of this optimizer has a gradient"):
            problem.optimizer.step()
        assert_equal(problem.weights(), before)
        assert not problem.optimizer.state


@OVER_FAMILY
def test_a_step_with_zero_gradients_changes_nothing(optimizer) -> None:
    for arguments in valid_arguments(optimizer):
        problem = Problem(optimizer, {**arguments, "weight_decay": 0.0})
        before = problem.weights()
        for _ in range(2):
            for p in problem.params:
                p.grad = torch.zeros_like(p)
            problem.optimizer.step()
        for p, old in zip(problem.params, before, strict=True):
            torch.testing.assert_close(p.detach(), old)


@OVER_FAMILY
def test_every_parameter_has_state_after_a_step(optimizer) -> None:
    for problem in problems(optimizer):
        problem.run(1)
        for p in problem.params:
            assert problem.optimizer.state[p]


@OVER_FAMILY
def test_loading_is_deterministic_and_does_not_change_the_state_dict(optimizer) -> None:
    for arguments in valid_arguments(optimizer):
        a, b = Problem(optimizer, arguments), Problem(optimizer, arguments)
        a.run(5)
        with torch.no_grad():
            for p, q in zip(b.params, a.params, strict=True):
                p.copy_(q)
        saved = copy.deepcopy(a.optimizer.state_dict())
        loaded = copy.deepcopy(saved)
        b.optimizer.load_state_dict(loaded)
        for _ in range(5):
            a.run(1)
            b.run(1)
            assert_equal(a.weights(), b.weights())
        assert_equal(loaded, saved)
        assert_equal(a.optimizer.state_dict(), b.optimizer.state_dict())
        groups = b.optimizer.param_groups
        groups.extend(groups)
        last = [o.state_dict()["param_groups"][-1] for o in (a.optimizer, b.optimizer)]
        assert_equal(*last)


FLAGS = ("maximize", "foreach", "fused", "differentiable", "capturable")


@OVER_FAMILY
def test_older_state_dicts_without_flags_load(optimizer) -> None:
    for problem in problems(optimizer):
        problem.run(3)
        older = copy.deepcopy(problem.optimizer.state_dict())
        for group in older["param_groups"]:
            for flag in FLAGS:
                group.pop(flag, None)
        before = copy.deepcopy(problem.optimizer.state_dict())
        problem.optimizer.load_state_dict(older)
        assert_equal(problem.optimizer.state_dict(), before)
        problem.run(2)


@OVER_FAMILY
@pytest.mark.parametrize("saved_has_names", [False, True])
@pytest.mark.parametrize("target_has_names", [False, True])
def test_names_do_not_matter_to_loading(optimizer, saved_has_names, target_has_names) -> None:
    def make(named: bool) -> tuple[nn.Parameter, Engine]:
        p = parameter(6, 4)
        return p, optimizer([("w", p)] if named else [p])

    (a, opt_a), (b, opt_b) = make(saved_has_names), make(target_has_names)
    a.grad = torch.ones_like(a)
    opt_a.step()
    opt_b.load_state_dict(save_and_load(opt_a.state_dict()))
    assert_equal(opt_b.state[b], opt_a.state[a])
    assert ("param_names" in opt_b.param_groups[0]) == (saved_has_names or target_has_names)
    b.grad = torch.ones_like(b)
    opt_b.step()


@OVER_FAMILY
def test_state_dicts_load_from_files_with_weights_only(optimizer) -> None:
    for arguments in valid_arguments(optimizer):
        a = Problem(optimizer, arguments)
        a.run(3)
        b = Problem(optimizer, arguments)
        b.optimizer.load_state_dict(save_and_load(a.optimizer.state_dict()))
        assert_equal(b.optimizer.state_dict(), a.optimizer.state_dict())


@OVER_FAMILY
def test_saved_counters_may_be_numbers(optimizer) -> None:
    for problem in problems(optimizer):
        problem.run(3)
        saved = copy.deepcopy(problem.optimizer.state_dict())
        for state in saved["state"].values():
            state["step"] = state["step"].item()
        before = copy.deepcopy(problem.optimizer.state_dict())
        problem.optimizer.load_state_dict(saved)
        assert_equal(problem.optimizer.state_dict(), before)
        problem.run(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@OVER_FAMILY
def test_state_moves_to_the_device_of_the_weights(optimizer) -> None:
    for arguments in valid_arguments(optimizer):
        a, b = Problem(optimizer, arguments), Problem(optimizer, arguments)
        a.run(3)
        moved = [nn.Parameter(p.detach().cuda()) for p in a.params]
        for group, p in zip(b.optimizer.param_groups, moved, strict=True):
            group["params"] = [p]
        b.params, b.input = moved, b.input.cuda()
        b.optimizer.load_state_dict(copy.deepcopy(a.optimizer.state_dict()))
        for p in moved:
            for name, value in b.optimizer.state[p].items():
                assert value.device.type == ("cpu" if name == "step" else "cuda"), name
        a.run(2)
        b.run(2)
        for p, q in zip(a.params, moved, strict=True):
            torch.testing.assert_close(p.detach(), q.detach().cpu(), rtol=1e-3, atol=1e-4)


@OVER_FAMILY
def test_copies_have_the_same_public_attributes_and_continue_equally(optimizer) -> None:
    for problem in problems(optimizer):
        problem.run(2)
        public = [
            {name for name in vars(o) if not name.startswith("_")}
            for o in (problem.optimizer, copy.deepcopy(problem.optimizer))
        ]
        assert public[0] == public[1]
        twin = copy.deepcopy(problem)
        problem.run(2)
        twin.run(2)
        assert_equal(problem.weights(), twin.weights())


@OVER_FAMILY
def test_step_hooks_run_in_torchs_order(optimizer) -> None:
    problem = Problem(optimizer, {})
    calls: list[str] = []

    def record(hook: str) -> Callable[..., None]:
        return lambda *_: calls.append(hook)

    handles = [
        register_optimizer_step_pre_hook(record("global pre")),
        register_optimizer_step_post_hook(record("global post")),
        problem.optimizer.register_step_pre_hook(record("pre")),
        problem.optimizer.register_step_post_hook(record("post")),
    ]
    try:
        problem.run(1)
    finally:
        for handle in handles:
            handle.remove()
    problem.run(1)
    assert calls == ["global pre", "pre", "post", "global post"]


@OVER_FAMILY
def test_state_dict_hooks_may_change_state_dicts(optimizer) -> None:
    problem = Problem(optimizer, {})
    problem.run(1)
    opt, calls = problem.optimizer, []
    opt.register_state_dict_pre_hook(lambda o: calls.append("save"))
    opt.register_state_dict_post_hook(lambda o, saved: {**saved, "note": 1})
    saved = opt.state_dict()
    assert calls == ["save"]
    assert saved["note"] == 1

    def halve_lr(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": group["lr"] / 2} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    lr = opt.param_groups[0]["lr"]
    opt.register_load_state_dict_pre_hook(halve_lr)
    opt.register_load_state_dict_pre_hook(lambda *_: calls.append("load"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: calls.append(o.param_groups[0]["lr"]))
    opt.register_load_state_dict_post_hook(lambda o: calls.append(len(o.state)), prepend=True)
    opt.load_state_dict(saved)
    assert calls == ["save", "load", 2, lr / 2]
    assert opt.param_groups[0]["lr"] == lr / 2


@OVER_FAMILY
def test_weight_decay_and_lr_apply_per_group(optimizer) -> None:
    for arguments in valid_arguments(optimizer):
        decayed, plain, fixed = (parameter(5, 5, dtype=torch.float32) for _ in range(3))
        groups = [
            {"params": [decayed], "weight_decay": 0.5, "lr": 0.1},
            {"params": [plain], "weight_decay": 0.0, "lr": 0.1},
            {"params": [fixed], "lr": 0.0},
        ]
        opt = optimizer(groups, **copy.deepcopy({**arguments, "maximize": False}))
        before = fixed.detach().clone()
        for _ in range(5):
            for p in (decayed, plain, fixed):
                p.grad = torch.full_like(p, 1e-3)
            opt.step()
        assert decayed.norm() < plain.norm(), arguments
        torch.testing.assert_close(fixed.detach(), before)


@OVER_FAMILY
@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_adamw_implementations_agree(optimizer, flag) -> None:
    for arguments in valid_arguments(optimizer):
        if isinstance(arguments.get("lr"), Tensor) and flag == "foreach":
            continue  # torch's foreach rejects a tensor lr
        plain = Problem(optimizer, arguments, foreach=False, fused=False)
        other = Problem(optimizer, arguments, **{flag: True})
        plain.run(5)
        other.run(5)
        for p, q in zip(plain.params, other.params, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@OVER_FAMILY
def test_a_tensor_lr_with_foreach_is_rejected_when_the_group_is_added(optimizer) -> None:
    """torch rejects it at the step, when matrices would already have moved."""
    with pytest.raises(ValueError, match=r"lr=tensor\(0.0010\) with foreach=True"):
        Problem(optimizer, {"lr": torch.tensor(0.001)}, foreach=True)
    with pytest.raises(ValueError, match="foreach=True and capturable=True"):
        Problem(optimizer, {"capturable": True}, foreach=True)
    plain = Problem(optimizer, {}, foreach=True)
    saved = plain.optimizer.state_dict()
    saved["param_groups"][1]["lr"] = torch.tensor(0.001)
    with pytest.raises(ValueError, match=r"group 1 .*lr=tensor\(0.0010\) with foreach=True"):
        plain.optimizer.load_state_dict(saved)


@OVER_FAMILY
@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_state_does_not_depend_on_the_default_dtype(optimizer, default) -> None:
    states = []
    for dtype in (torch.get_default_dtype(), default):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            problem = Problem(optimizer, {"lr": 0.01})
            problem.params[0].grad, problem.params[1].grad = (
                torch.ones_like(p) for p in problem.params
            )
            for _ in range(3):
                problem.optimizer.step()
            states.append(problem.optimizer.state_dict()["state"])
        finally:
            torch.set_default_dtype(before)
    for i in states[0]:
        for name, value in states[0][i].items():
            assert states[1][i][name].dtype == value.dtype, name


@OVER_FAMILY
def test_one_optimizer_may_mix_dtypes(optimizer) -> None:
    for dtypes in ((torch.float64, torch.float32), (torch.bfloat16, torch.float64)):
        for problem in problems(optimizer, dtypes=dtypes):
            maximize = problem.optimizer.param_groups[0]["maximize"]
            before = problem.loss().item()
            problem.run(20)
            assert tuple(p.dtype for p in problem.params) == dtypes
            assert (problem.loss().item() > before) == maximize


@OVER_FAMILY
def test_gradients_are_not_written(optimizer) -> None:
    for problem in problems(optimizer):
        for _ in range(3):
            problem.closure()
            versions = [p.grad._version for p in problem.params]
            problem.optimizer.step()
            assert [p.grad._version for p in problem.params] == versions


# Options that only torch's Muon and AdamW have, and an error of torch's foreach.
UNSUPPORTED = ("ns_steps", "ns_coefficients", "adjust_lr_fn", "amsgrad", "foreach")
OTHER_ERRORS = {"RuntimeError": "ValueError"}  # complex parameters: rejected when they are added


@OVER_FAMILY
def test_torchs_bad_inputs_are_rejected(optimizer) -> None:
    checked = 0
    for case in invalid_inputs():
        if any(key in case.arguments for key in UNSUPPORTED):
            continue
        expected = OTHER_ERRORS.get(case.error, case.error)
        params = [parameter(3, 3)] if case.params is None else case.params
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((ValueError, TypeError, UserWarning)) as raised:
                optimizer(params, **case.arguments)
        assert raised.type.__name__ == expected, case.description
        checked += 1
    assert checked >= 10


@OVER_FAMILY
@pytest.mark.parametrize("key", ["ns_steps", "ns_coefficients", "adjust_lr_fn", "amsgrad"])
def test_options_of_other_optimizers_are_rejected_by_name(optimizer, key) -> None:
    with pytest.raises(TypeError, match=key):
        optimizer([parameter(3, 3)], **{key: 1})
