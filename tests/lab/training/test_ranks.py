"""The same loss curve on 1, 2 and 4 ranks, data parallel and sharded; resume across world sizes."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from angular_lab.training.start import train
from tests.lab.runs import LIMIT, free_port, lines, tiny, train_on

STEPS = 50


def spec_of(data, **values):
    every = {"eval_every": 25, "save_every": 25, "angle_every": 0}
    return tiny(data, **{"steps": STEPS, **every, **values})


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    train(spec_of(data), out)
    return _losses(out)


@pytest.fixture(scope="module")
def on_ranks(data, tmp_path_factory):
    """A finished run's folder, by the number of ranks and how they share; each is made once."""

    @cache
    def run(world: int, parallel: str):
        out = tmp_path_factory.mktemp(f"{parallel}{world}") / "run"
        train_on(world, spec_of(data, parallel=parallel), out)
        return out

    return run


def _losses(out, steps: int = STEPS) -> list[float]:
    parsed = [json.loads(line) for line in lines(out)]
    assert [line["step"] for line in parsed] == list(range(1, steps + 1))
    return [line["loss"] for line in parsed] + [x["val_loss"] for x in parsed if "val_loss" in x]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_loss_curve_does_not_depend_on_the_ranks(on_ranks, alone, parallel, world) -> None:
    assert _losses(on_ranks(world, parallel)) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (4, 2)])
def test_resume_at_another_world_size(data, tmp_path, on_ranks, alone, first, second) -> None:
    """The run is cut at its middle checkpoint and goes on with other ranks, sharded."""
    spec, out = spec_of(data, parallel="fsdp"), tmp_path / "run"
    shutil.copytree(on_ranks(first, "fsdp"), out)
    (out / "DONE").unlink()
    _forget_after(out, STEPS // 2)
    train_on(second, spec, out)
    assert _losses(out) == pytest.approx(alone, abs=1e-5)


def _forget_after(out, step: int) -> None:
    for path in (out / "checkpoints").iterdir():
        if int(path.name.split("_")[1]) > step:
            shutil.rmtree(path)


# AdamW turns the rounding of a gradient near zero into a step of full size: a small lr keeps the
# two curves within the tolerance.
@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 1e-3), ("muon", 0.01), ("muown", 0.01)])
def test_other_optimizers_shard_too(data, tmp_path, optimizer, lr) -> None:
    base = spec_of(data, parallel="fsdp", steps=20)
    spec = replace(base, optim=replace(base.optim, name=optimizer, lr=lr))
    train(spec, tmp_path / "alone")
    train_on(2, spec, tmp_path / "sharded")
    ends = [_losses(tmp_path / name, 20) for name in ("sharded", "alone")]
    assert ends[0] == pytest.approx(ends[1], abs=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_uneven_evaluation_angles_and_micro_batches(data, tmp_path, parallel) -> None:
    """Five windows in batches of two on two ranks: one rank has nothing left to evaluate."""
    values = {"steps": 6, "eval_tokens": 160, "eval_every": 3, "angle_every": 2, "micro_batch": 1}
    spec = tiny(data, parallel=parallel, **values)
    train(spec, tmp_path / "alone")
    train_on(2, spec, tmp_path / "two")
    for a, b in zip(lines(tmp_path / "alone"), lines(tmp_path / "two"), strict=True):
        one, two = json.loads(a), json.loads(b)
        assert one.keys() == two.keys()
        assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-3, abs=1e-4)


def test_torchrun(data, tmp_path, alone) -> None:
    """The command of the README, with real torchrun."""
    spec = spec_of(data)
    model = [f"model.{k}={v}" for k, v in vars(spec.model).items() if k in ("sequence", "layers")]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-port", free_port(), "-m", "angular_lab", "train", "nano"),
        *(f"data={data}", f"steps={STEPS}", "batch=4", "eval_every=25", "eval_tokens=256"),
        *("save_every=25", "log_every=1", "angle_every=0", *model, "model.width=32"),
        *("model.heads=2", "model.mlp=64", "schedule.warmup=2", "schedule.decay=0.25"),
        *("--out", str(tmp_path / "run")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=LIMIT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'run'}\n"  # from one rank
    assert _losses(tmp_path / "run") == pytest.approx(alone, abs=1e-5)
