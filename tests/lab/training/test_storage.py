"""Runs with 8-bit momentum and bf16 weights: they train, stop and resume as the others do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from angular_lab.cli.main import main
from angular_lab.config.spec import OptimSpec, Spec
from angular_lab.errors import UserError
from angular_lab.run_folder import RunFolder
from angular_lab.training import build, checkpoint
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import train
from angular_lab.training.trainer import Trainer
from tests.lab.runs import tiny


def spec_of(data: Path, steps: int = 12) -> Spec:
    spec = tiny(data, steps=steps, precision="bf16_weights")
    return replace(spec, optim=replace(spec.optim, state_dtype="int8"))


def test_hidden_matrices_take_two_bytes_and_their_momentum_one(data) -> None:
    spec = spec_of(data)
    ranks = Ranks(0, 1, torch.device("cpu"))
    model = build.make_model(spec, ranks)
    optimizer = build.make_optimizer(model, spec)
    matrices = [
        p for g in optimizer.param_groups if g["algorithm"] == "matrix" for p in g["params"]
    ]
    rest = [p for g in optimizer.param_groups if g["algorithm"] == "adamw" for p in g["params"]]
    assert {p.dtype for p in matrices} == {torch.bfloat16}
    assert {p.dtype for p in rest} == {torch.float32}
    plain = build.make_model(replace(spec, precision="bf16"), ranks)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q.to(p.dtype)), "the same initial weights, rounded"
    for p in matrices:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert {optimizer.state[p]["momentum_buffer"].dtype for p in matrices} == {torch.int8}


def test_a_resumed_run_repeats_the_uninterrupted_one(data, tmp_path) -> None:
    whole = train(spec_of(data), tmp_path / "whole", device="cpu")
    part = train(spec_of(data), tmp_path / "part", device="cpu")
    expected = whole.metrics_path.read_bytes()
    assert part.metrics_path.read_bytes() == expected
    train(spec_of(data), tmp_path / "part", True, "cpu", resume_step=8)
    assert RunFolder(tmp_path / "part").metrics_path.read_bytes() == expected


@pytest.mark.parametrize("dtypes", [(None, "int8"), ("int8", None)])
def test_a_checkpoint_loads_into_another_state_dtype(data, tmp_path, dtypes) -> None:
    """As in a branch that changes optim.state_dtype."""
    saved, asked = (tiny(data, optim=OptimSpec(state_dtype=dtype)) for dtype in dtypes)
    run = train(saved, tmp_path / "run", device="cpu")
    ranks = Ranks(0, 1, torch.device("cpu"))
    model = build.make_model(asked, ranks)
    optimizer = build.make_optimizer(model, asked)
    with pytest.warns(UserWarning, match="state_dtype"):
        checkpoint.load(checkpoint.find(run.checkpoints), model, optimizer, ranks)
    wanted = torch.int8 if asked.optim.state_dtype else torch.float32
    source = build.make_model(saved, ranks)
    before = build.make_optimizer(source, saved)
    checkpoint.load(checkpoint.find(run.checkpoints), source, before, ranks)
    matrices = [
        p for g in optimizer.param_groups if g["algorithm"] == "matrix" for p in g["params"]
    ]
    originals = [p for g in before.param_groups if g["algorithm"] == "matrix" for p in g["params"]]
    for p, q in zip(matrices, originals, strict=True):
        assert optimizer.state[p]["momentum_buffer"].dtype == wanted
        M, original = optimizer.momentum(p), before.momentum(q)
        assert (M - original).abs().max() <= original.abs().max() / 60, "by a level at most"


def test_fsdp_does_not_take_weights_of_two_dtypes(data) -> None:
    spec = replace(spec_of(data), parallel="fsdp")
    with pytest.raises(UserError, match=r"precision=bf16_weights with parallel=fsdp.*parallel=ddp"):
        build.make_model(spec, Ranks(0, 2, torch.device("cpu")))


def test_adamw_has_no_stochastic_rounding(data: Path) -> None:
    spec = tiny(data, precision="bf16_weights", optim=OptimSpec(name="adamw", lr=1e-3))
    with pytest.raises(UserError, match=r"precision=bf16_weights with optim.name=adamw"):
        build.make_model(spec, Ranks(0, 1, torch.device("cpu")))


def test_a_branch_trains_with_the_settings_that_it_states(whole, tmp_path, monkeypatch) -> None:
    seen: list[dict[str, object]] = []
    update = Trainer.update

    def watch(self: Trainer) -> None:
        update(self)
        keys = ("betas", "weight_decay", "momentum", "decay_scale")
        matrix, adamw = (
            next(g for g in self.optimizer.param_groups if g["algorithm"] == kind)
            for kind in ("matrix", "adamw")
        )
        seen.append({key: matrix[key] for key in keys} | {"aux_betas": adamw["betas"]})

    monkeypatch.setattr(Trainer, "update", watch)
    changes = ("optim.aux_beta2=0.99", "optim.beta2=0.98", "optim.weight_decay=0.1")
    changes += ("optim.momentum=0.9", "optim.decay_scale=0.01", "optim.state_dtype=bfloat16")
    command = ["branch", str(whole), "--at", "8", "--decay", "4", *changes, "--device", "cpu"]
    with pytest.warns(UserWarning, match="state_dtype='bfloat16'"):
        assert main([*command, "--out", str(tmp_path / "branch")]) == 0
    assert len(seen) == 4
    assert all(values == seen[0] for values in seen)
    assert seen[0] == {
        "betas": (0.9, 0.98), "weight_decay": 0.1, "momentum": 0.9, "decay_scale": 0.01,
        "aux_betas": (0.9, 0.99),
    }  # fmt: skip
