"""Fused steps inside a user's CUDA graph, with a mock recording: on the CPU, what would be recorded
simply runs, which is all that these tests need."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from angular_muown import AngularMuown
from angular_muown.kernels import fused as fused_step
from angular_muown.params import rounding
from tests.library.family import noise, parameter
from tests.library.kernels.test_fused import kernels


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with kernels(True):
        yield


@contextmanager
def recording(opt: AngularMuown) -> Iterator[None]:
    assert opt._fused is not None
    _, fused, _ = opt._fused.steps[0]
    if fused is not None:
        fused.spares = [
            torch.empty_like(fused.table.relative, pin_memory=torch.cuda.is_available())
        ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_step, "is_recording", lambda: True)
        yield


def start() -> tuple[nn.Parameter, AngularMuown]:
    p = parameter(128, 144, dtype=torch.float32)
    opt = AngularMuown([p], capturable=True)
    p.grad = noise(128, 144, seed=0).float()
    opt.step()
    return p, opt


def test_steps_after_a_replay_use_their_own_gradients() -> None:
    p, opt = start()
    graphs_gradient = noise(128, 144, seed=1).float()
    gradient = p.grad
    with recording(opt):
        p.grad = graphs_gradient
        opt.step()
    assert opt._fused is not None
    _, fused, _ = opt._fused.steps[0]
    assert fused is not None
    p.grad = gradient
    opt.step()
    fused.entries.copy_(fused.recorded[-1])  # what a replay does
    before = p.detach().clone()
    state = {key: value.clone() for key, value in opt.state[p].items()}
    opt.step()
    q = nn.Parameter(before)
    other = AngularMuown([q], capturable=True)
    q.grad = gradient
    other.state[q].update(state)
    other.param_groups[0]["step"].copy_(opt.param_groups[0]["step"] - 1)
    other.step()
    assert torch.equal(p, q)


def test_counters_remain_the_recorded_tensors() -> None:
    p, opt = start()
    counter = opt.state[p]["step"]
    p.data = p.data.clone()  # the fused step is built again
    opt.step()
    assert opt.state[p]["step"] is counter
    assert counter == 2


def test_a_recorded_fused_step_stays_alive() -> None:
    p, opt = start()
    with recording(opt):
        opt.step()
    assert opt._fused is not None
    _, fused, _ = opt._fused.steps[0]
    p.data = p.data.clone()
    opt.step()
    assert opt._fused.steps[0][1] is not fused
    assert fused in opt._fused.retained


@pytest.mark.parametrize("recorded", [False, True])
def test_a_replaced_buffer_stays_alive_only_for_graphs(recorded: bool) -> None:
    p, opt = start()
    assert opt._fused is not None
    if recorded:
        with recording(opt):
            opt.step()
    fused, (before,) = opt._fused, opt._fused.work.values()
    larger = parameter(256, 272, dtype=torch.float32)
    larger.grad = noise(256, 272, seed=2).float()
    opt.add_param_group({"params": [larger]})
    opt._fused = fused  # what the new group would have released
    opt.step()
    assert fused.work[p.device] is not before
    assert any(retained is before for retained in fused.retained) == recorded


def test_recording_new_settings_is_rejected_before_anything_changes() -> None:
    p, opt = start()
    weight, counter = p.detach().clone(), float(opt.state[p]["step"])
    with recording(opt):
        opt.param_groups[0]["nesterov"] = False
        with pytest.raises(RuntimeError, match="take a step before recording"):
            opt.step()
    assert torch.equal(p, weight)
    assert float(opt.state[p]["step"]) == counter
    opt.step()  # training continues


def test_too_many_recordings_in_a_row_are_rejected() -> None:
    _, opt = start()
    with recording(opt):
        opt.step()
        with pytest.raises(RuntimeError, match="graphs were recorded since the last step"):
            opt.step()


@pytest.mark.parametrize("change", ["transposed", "bfloat16"])
def test_a_gradient_may_change_layout_or_dtype_at_the_same_address(change: str) -> None:
    ends = []
    for fused in (True, False):
        p = parameter(128, 128, dtype=torch.float32)
        opt = AngularMuown([p], lr=0.05)
        storage = noise(128, 128, seed=0).float()
        with kernels(fused):
            p.grad = storage
            opt.step()
            if change == "transposed":
                p.grad = storage.t()
            else:
                p = _as_bfloat16(p, storage)
            opt.step()
        ends.append(p.detach().clone())
    assert (ends[0] - ends[1]).norm() < 5e-3 * ends[1].norm()


def _as_bfloat16(p: nn.Parameter, storage: torch.Tensor) -> nn.Parameter:
    """Give `p` a 16-bit gradient in the memory of the 32-bit one."""
    values = noise(128, 128, seed=1).bfloat16()
    view = storage.view(torch.bfloat16).flatten()[: values.numel()].view(128, 128)
    p.grad = None
    p.grad_dtype = None  # allows any dtype
    p.grad = view.copy_(values)
    return p


def test_row_state_in_another_dtype_takes_the_eager_path() -> None:
    p, opt = start()
    opt.state[p]["exp_avg"] = opt.state[p]["exp_avg"].bfloat16()
    opt.step()
    assert opt._fused is not None
    _, fused, rest = opt._fused.steps[0]
    assert fused is None
    assert rest == [p]


def test_noise_wraps_at_32_bits() -> None:
    """With a seed near 2^32, row + seed overflows, in the kernel and on the eager path."""
    word = 2**32
    seed = (word - 64 - rounding.hash_seed(0)) * pow(0x9E3779B9, -1, word) % word
    assert rounding.hash_seed(seed) == word - 64
    ends = []
    for fused in (True, False):
        p = nn.Parameter(parameter(128, 128).detach().bfloat16())
        opt = AngularMuown([p], lr=2e-3, radius="fixed", decay_degree=0.0)
        opt.param_groups[0]["step"] = seed
        p.grad = noise(128, 128, seed=0).bfloat16()
        with kernels(fused):
            opt.step()
        ends.append(p.detach().float())
    assert (ends[0] != ends[1]).float().mean() < 0.02
