"""Any number of ranks trains like one process: data parallel, sharded, tensor parallel, resumed.

Losses include those of averages. Ranks train several runs in one session, because starting them
takes longer than a run.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_lab.config.spec import ExtrapolateSpec, Spec
from angular_lab.training.start import train
from tests.lab.runs import LIMIT, SERVER, free_port, lines, stopped_copy, tiny, wait_all

STEPS, MIDDLE = 16, 8
Jobs = dict[str, tuple[Spec, Path]]  # runs by name: settings and folder
# Ways of sharing the work, by the number of ranks.
ON_FOUR: dict[str, dict[str, Any]] = {
    "ddp on 4": {"parallel": "ddp"},
    "fsdp on 4": {"parallel": "fsdp"},
    "fsdp x tensor on 4": {"parallel": "fsdp", "tensor": 2},
}
ON_TWO: dict[str, dict[str, Any]] = {
    "fsdp on 2": {"parallel": "fsdp"},
    "tensor on 2": {"tensor": 2},
}
# AdamW turns the rounding of a gradient near zero into a step of full size: a small learning rate
# keeps the two curves within the tolerance.
OPTIMIZERS = {"adamw": 1e-3, "muon": 0.01, "muown": 0.01}
# Five windows in batches of two on two ranks: the second rank has no batch left in the last round.
UNEVEN = {"steps": 6, "eval_tokens": 160, "eval_every": 3, "save_every": 3, "angle_every": 2,
          "micro_batch": 1}  # fmt: skip


def spec_of(data: Path, **values: Any) -> Spec:
    """Evaluate where nothing is saved: saving would reshard the weights after an evaluation."""
    fixed = {"steps": STEPS, "eval_every": 5, "save_every": MIDDLE, "angle_every": None}
    forms = ("half",) if values.get("tensor", 1) > 1 else ("half", "sphere")
    return tiny(data, **fixed, average=(3, 8), average_forms=forms, **values)


def with_optimizer(data: Path, name: str) -> Spec:
    """Return a run; with Muown, every change of the step that is on trial."""
    tried = name == "muown"
    ahead = ExtrapolateSpec(strength=0.5 * tried)
    base = tiny(data, parallel="fsdp", steps=8, angle_every=None, extrapolate=ahead)
    changes = {"slow_share": 0.5 * tried, "split_heads": tried}
    return replace(base, optim=replace(base.optim, name=name, lr=OPTIMIZERS[name], **changes))


def with_soap(data: Path) -> Spec:
    """SOAP needs whole matrices, so its ranks hold copies: they must equalize gradients alike."""
    base = tiny(data, parallel="ddp", steps=8, angle_every=None)
    return replace(base, optim=replace(base.optim, name="muon", lr=0.01, soap=("*.mlp.*",)))


def _train_all(jobs: list[tuple[Spec, Path]], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    for spec, out in jobs:
        train(spec, out, resume=True, device="cpu")


def train_on(world: int, jobs: Jobs) -> dict[str, Path]:
    """Train runs on one group of Gloo ranks; return their folders."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}
    processes = []
    for rank in map(str, range(world)):
        environment = {**common, "RANK": rank, "LOCAL_RANK": rank}
        arguments = (list(jobs.values()), environment)
        processes.append(SERVER.Process(target=_train_all, args=arguments))
        processes[-1].start()
    wait_all(processes)
    return {name: out for name, (_, out) in jobs.items()}


def set_tensor(out: Path, tensor: int) -> None:
    """One process cannot start a run with tensor > 1, but four may resume what it started."""
    content = json.loads((out / "spec.json").read_text())
    content["spec"]["tensor"] = tensor
    (out / "spec.json").write_text(json.dumps(content))


def metrics(out: Path, *keys: str) -> list[float]:
    parsed = [json.loads(line) for line in lines(out)]
    assert [line["step"] for line in parsed] == list(range(1, len(parsed) + 1))
    return [line[key] for line in parsed for key in (keys or line) if key in line]


def curve(out: Path) -> list[float]:
    """Return losses, validation losses and gradient norms of a run of `spec_of`."""
    names = Spec(average=(3, 8)).averages.values()
    halves = [f"{name}_half" for name in names]
    values = metrics(out, "loss", "grad_norm", "val_loss", *names, *halves)
    assert len(values) == STEPS * 2 + 4 * 5
    return values


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one process."""
    folder = tmp_path_factory.mktemp("alone")
    jobs: Jobs = {
        "plain": (spec_of(data), folder / "plain"),
        "uneven": (tiny(data, **UNEVEN), folder / "uneven"),
        **{name: (with_optimizer(data, name), folder / name) for name in OPTIMIZERS},
        "soap": (with_soap(data), folder / "soap"),
        "fsdp on 1": (spec_of(data, parallel="fsdp"), folder / "fsdp"),
        "uneven fsdp on 1": (tiny(data, parallel="fsdp", **UNEVEN), folder / "uneven_fsdp"),
    }
    for spec, out in jobs.values():
        train(spec, out)
    return {name: out for name, (_, out) in jobs.items()}


@pytest.fixture(scope="module")
def on_four(
    data: Path, alone: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("four")
    jobs: Jobs = {name: (spec_of(data, **way), folder / name) for name, way in ON_FOUR.items()}
    resumed = stopped_copy(alone["uneven fsdp on 1"], folder / "resumed", 3)
    set_tensor(resumed, 2)
    jobs["uneven, from 1 to 4"] = tiny(data, parallel="fsdp", tensor=2, **UNEVEN), resumed
    return train_on(4, jobs)


@pytest.fixture(scope="module")
def on_two(
    data: Path,
    alone: dict[str, Path],
    on_four: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("two")
    jobs: Jobs = {name: (spec_of(data, **way), folder / name) for name, way in ON_TWO.items()}
    for parallel in ("ddp", "fsdp"):
        spec = tiny(data, parallel=parallel, **UNEVEN)
        jobs[f"uneven {parallel}"] = spec, folder / f"uneven_{parallel}"
    for name in OPTIMIZERS:
        jobs[name] = with_optimizer(data, name), folder / name
    jobs["soap"] = with_soap(data), folder / "soap"
    fsdp = spec_of(data, parallel="fsdp")
    jobs["from 4 to 2"] = fsdp, stopped_copy(on_four["fsdp on 4"], folder / "from4", MIDDLE)
    jobs["from 1 to 2"] = fsdp, stopped_copy(alone["fsdp on 1"], folder / "from1", MIDDLE)
    return train_on(2, jobs)


@pytest.fixture(scope="module")
def runs(
    alone: dict[str, Path], on_two: dict[str, Path], on_four: dict[str, Path]
) -> dict[str, Path]:
    return {**alone, **on_two, **on_four}


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR, "from 4 to 2", "from 1 to 2"])
def test_losses_do_not_depend_on_the_ranks(runs: dict[str, Path], name: str) -> None:
    assert max(metrics(runs["plain"], "grad_norm")) > 1, "gradients are clipped"
    assert curve(runs[name]) == pytest.approx(curve(runs["plain"]), abs=1e-5)


@pytest.mark.parametrize("name", ["fsdp on 2", "ddp on 4", "fsdp on 4", "from 4 to 2"])
def test_averages_on_the_sphere_do_not_depend_on_the_ranks(
    runs: dict[str, Path], name: str
) -> None:
    names = [f"{name}_sphere" for name in Spec(average=(3, 8)).averages.values()]
    expected = metrics(runs["plain"], *names)
    assert len(expected) == 4 * 2
    assert metrics(runs[name], *names) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["fsdp on 2", "tensor on 2", "ddp on 4", "fsdp x tensor on 4"])
def test_one_process_resumes_what_ranks_started(
    data: Path, tmp_path: Path, runs: dict[str, Path], name: str
) -> None:
    out = stopped_copy(runs[name], tmp_path / "run", MIDDLE)
    train(spec_of(data, **{**ON_TWO, **ON_FOUR}[name]), out, resume=True)
    assert curve(out) == pytest.approx(curve(runs["plain"]), abs=1e-5)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "soap"])
def test_other_optimizers_train_alike_on_two_ranks(
    alone: dict[str, Path], on_two: dict[str, Path], name: str
) -> None:
    losses = [metrics(folders[name], "loss", "val_loss") for folders in (on_two, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("name", ["uneven ddp", "uneven fsdp", "uneven, from 1 to 4"])
def test_uneven_evaluation_angles_and_micro_batches(runs: dict[str, Path], name: str) -> None:
    for a, b in zip(lines(runs["uneven"]), lines(runs[name]), strict=True):
        assert json.loads(a).keys() == json.loads(b).keys()
    expected = metrics(runs["uneven"])
    assert metrics(runs[name]) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_torchrun_trains_with_ddp(data: Path, tmp_path: Path, alone: dict[str, Path]) -> None:
    """This is the command of the README, with the real torchrun."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-port", free_port(), "-m", "angular_lab", "train", "nano"),
        *(f"data={data}", f"steps={STEPS}", "batch=4", "eval_every=5", "eval_tokens=256"),
        *(f"save_every={MIDDLE}", "log_every=1", "angle_every=none", "average=3,8"),
        "average_forms=half",
        *("model.sequence=32", "model.layers=2", "model.width=32", "model.heads=2", "model.mlp=64"),
        *("schedule.warmup=2", "schedule.decay=0.25", "--out", str(tmp_path / "run")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=LIMIT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'run'}\n"  # from one rank
    assert curve(tmp_path / "run") == pytest.approx(curve(alone["plain"]), abs=1e-5)
