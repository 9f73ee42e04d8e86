"""What only a GPU can show; run with `pytest -m gpu` on a machine that has one."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from angular_lab import checkpoint, passes, trainer
from angular_lab.build import Models
from angular_lab.health import OnHost
from angular_lab.recipes import recipe
from angular_lab.runs import train
from angular_muown import AngularMuown
from tests.library.family import MEMBERS, noise, parameter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("optimizer", MEMBERS)
@pytest.mark.parametrize("shape", [(64, 192), (192, 64), (128, 128)])
@pytest.mark.parametrize("orthogonalize", ["polar_express", "newton_schulz", "gram"])
def test_bf16_iterations_stay_near_the_float64_step(optimizer, shape, orthogonalize) -> None:
    assert _error(optimizer, shape, orthogonalize) < 2e-2


@pytest.mark.parametrize("shape", [(64, 192), (192, 64), (128, 128)])
def test_bf16_dual_steps_stay_near_the_float64_step(shape) -> None:
    """Two polar factors for a step, and a multiplier from step to step."""
    assert _error(AngularMuown, shape, "tangent") < 2e-2


def _error(optimizer, shape: tuple[int, int], orthogonalize: str) -> float:
    """The relative error of W's change over ten steps, against the CPU in float64."""
    moved = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        p = nn.Parameter(parameter(*shape).detach().to(device, dtype))
        start = p.detach().clone()
        opt = optimizer([p], lr=0.01, orthogonalize=orthogonalize)
        for t in range(10):
            p.grad = noise(*shape, seed=t).to(device, dtype)
            opt.step()
        moved.append((p.detach() - start).double().cpu())
    return float((moved[1] - moved[0]).norm() / moved[0].norm())


def test_float64_on_the_gpu_is_float64_on_the_cpu() -> None:
    ends = []
    for device in ("cpu", "cuda"):
        p = nn.Parameter(parameter(24, 40).detach().to(device))
        opt = AngularMuown([p], lr=0.02)
        for t in range(20):
            p.grad = noise(24, 40, seed=t).to(device)
            opt.step()
        ends.append(p.detach().cpu())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


def test_the_loss_reaches_the_host() -> None:
    loss = torch.tensor(2.5, device="cuda")
    assert OnHost(loss).value() == 2.5


# torch's compiler imports deprecated parts of torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_same_run_twice_is_the_same_to_the_bit(tmp_path, compiled) -> None:
    base = recipe("nano")
    spec = replace(base, steps=20, eval_every=10, precision="bf16", compile=compiled, save_every=10)
    for name in ("a", "b"):
        train(spec, tmp_path / name)
    a, b = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("a", "b"))
    assert a == b


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("micro", [0, 6])  # 16 sequences: all at once; 6, 6 and 4
def test_recorded_passes_are_plain_ones_to_the_bit(tmp_path, monkeypatch, micro) -> None:
    base = replace(recipe("nano"), steps=16, eval_every=8, precision="bf16", micro_batch=micro)
    base = replace(base, average="3,8")  # whose weights are swapped in and out for evaluations
    model = replace(base.model, width=256, heads=4, mlp=512)  # so that the fused step covers it
    spec = replace(base, save_every=0, angle_every=4, batch=16, compile=True, model=model)
    made = []
    recorded = passes._Recorded
    monkeypatch.setattr(passes, "_Recorded", lambda *args: made.append(recorded(*args)) or made[-1])
    train(spec, tmp_path / "recorded")
    assert len(made) == (2 if micro else 1)
    monkeypatch.setattr(trainer, "can_record", lambda *_: False)
    train(spec, tmp_path / "plain")
    a, b = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("recorded", "plain"))
    assert a == b


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_recorded_passes_resume_and_share_a_model_to_the_bit(tmp_path) -> None:
    """Stopped half-way and resumed; and after another run, by the model that this one leaves."""
    base = replace(recipe("nano"), steps=16, eval_every=8, save_every=8, precision="bf16")
    spec = replace(base, compile=True, keep=9)
    train(spec, tmp_path / "whole")
    train(spec, tmp_path / "cut")
    shutil.rmtree(checkpoint.step_folder(tmp_path / "cut" / "checkpoints", 16))
    (tmp_path / "cut" / "DONE").unlink()
    train(spec, tmp_path / "cut", resume=True)
    models = Models()
    train(replace(spec, seed=1), tmp_path / "other", models=models)
    train(spec, tmp_path / "second", models=models)
    whole, *others = (
        (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        for name in ("whole", "cut", "second")
    )
    for name, other in zip(("cut", "second"), others, strict=True):
        differing = [pair for pair in zip(whole, other, strict=True) if pair[0] != pair[1]]
        assert not differing, (name, differing[0])
