"""Tests that need a GPU; run them with `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from angular_lab.config.named_runs import named_run
from angular_lab.training import recorded_passes as passes
from angular_lab.training import trainer
from angular_lab.training.build import Models
from angular_lab.training.nonfinite import OnHost
from angular_lab.training.start import train
from angular_muown import AngularMuown
from tests.lab.runs import stopped_copy
from tests.library.family import MEMBERS, noise, parameter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("optimizer", MEMBERS)
@pytest.mark.parametrize("shape", [(64, 192), (192, 64), (128, 128)])
@pytest.mark.parametrize("orthogonalize", ["polar_express", "newton_schulz", "gram"])
def test_bf16_iterations_stay_close_to_float64(optimizer, shape, orthogonalize) -> None:
    assert _error(optimizer, shape, orthogonalize) < 2e-2


@pytest.mark.parametrize("shape", [(64, 192), (192, 64), (128, 128)])
def test_bf16_dual_steps_stay_close_to_float64(shape) -> None:
    """Each step computes two polar factors and keeps a multiplier for the next."""
    assert _error(AngularMuown, shape, "tangent") < 2e-2


def _error(optimizer, shape: tuple[int, int], orthogonalize: str) -> float:
    """Return the relative error of the change in W over ten steps, against float64 on the CPU."""
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


def test_float64_on_the_gpu_matches_the_cpu() -> None:
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


# torch.compile imports deprecated modules
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_two_identical_runs_are_bit_identical(tmp_path, compiled) -> None:
    base = named_run("nano")
    spec = replace(base, steps=20, eval_every=10, precision="bf16", compile=compiled, save_every=10)
    for name in ("a", "b"):
        train(spec, tmp_path / name)
    a, b = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("a", "b"))
    assert a == b


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("micro", [None, 6])  # 16 sequences: all at once; 6, 6 and 4
def test_recorded_passes_are_bit_identical_to_plain_ones(tmp_path, monkeypatch, micro) -> None:
    base = replace(named_run("nano"), steps=24, eval_every=8, precision="bf16", micro_batch=micro)
    base = replace(base, average=(3, 8))  # swapped in and out for evaluations
    model = replace(base.model, width=256, heads=4, mlp=512)  # so that the fused step covers it
    spec = replace(base, save_every=None, angle_every=4, batch=16, compile=True, model=model)
    graphs = []
    record = passes._Recorded
    monkeypatch.setattr(
        passes, "_Recorded", lambda *args: graphs.append(record(*args)) or graphs[-1]
    )
    train(spec, tmp_path / "recorded")
    assert len(graphs) == (2 if micro else 1)
    monkeypatch.setattr(trainer, "can_record", lambda *_: False)
    train(spec, tmp_path / "plain")
    a, b = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("recorded", "plain"))
    assert a == b


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_recorded_passes_are_bit_identical_when_resumed_or_with_a_shared_model(tmp_path) -> None:
    """A run is interrupted and resumed; another reuses the model of a previous run."""
    base = replace(named_run("nano"), steps=24, eval_every=8, save_every=8, precision="bf16")
    spec = replace(base, compile=True, keep=9)
    train(spec, tmp_path / "whole")
    train(spec, stopped_copy(tmp_path / "whole", tmp_path / "resumed", 16), resume=True)
    models = Models()
    train(replace(spec, seed=1), tmp_path / "other", models=models)
    train(spec, tmp_path / "second", models=models)
    whole, *others = (
        (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        for name in ("whole", "resumed", "second")
    )
    for name, other in zip(("resumed", "second"), others, strict=True):
        differences = [pair for pair in zip(whole, other, strict=True) if pair[0] != pair[1]]
        assert not differences, (name, differences[0])
