"""Tiny runs for the tests, in processes that start fast."""

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import ModelSpec, Spec
from angular_lab.training import checkpoint
from angular_lab.training.start import train
from tests.ranks import CONTEXT as SERVER

LIMIT = 120  # seconds that a test waits for its processes

# Settings of a tiny run for the command line.
SMALL = (
    "steps=6", "batch=2", "eval_every=3", "eval_tokens=64", "save_every=3", "log_every=1",
    "model.sequence=32", "model.layers=1", "model.width=16", "model.heads=2", "model.mlp=32",
    "schedule.warmup=1",
)  # fmt: skip


def tiny(data: Path, **values: Any) -> Spec:
    base = named_run("nano")
    settings = {
        "data": str(data), "steps": 12, "batch": 4, "eval_every": 4, "eval_tokens": 256,
        "save_every": 4, "log_every": 1, "angle_every": 3,
        "model": ModelSpec(vocabulary=257, sequence=32, layers=2, width=32, heads=2, mlp=64),
        "schedule": replace(base.schedule, warmup=2, decay=0.25),
    }  # fmt: skip
    return replace(base, **{**settings, **values})


def work(spec: Spec, out: Path, environment: dict[str, str]) -> None:
    """In a child process."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    train(spec, out, resume=True, device="cpu")


def start(spec: Spec, out: Path, **environment: str) -> Any:
    process = SERVER.Process(target=work, args=(spec, out, environment))
    process.start()
    return process


def call(function: Any, *arguments: Any) -> None:
    """In a child process."""
    torch.set_num_threads(1)
    function(*arguments)


def start_function(function: Any, *arguments: Any) -> Any:
    process = SERVER.Process(target=call, args=(function, *arguments))
    process.start()
    return process


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def train_on(world: int, spec: Spec, out: Path) -> None:
    """Train with `world` gloo ranks on loopback."""
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    processes = [
        start(spec, out, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(world)
    ]
    wait_all(processes)


def wait_all(processes: list[Any]) -> None:
    try:
        for process in processes:
            process.join(LIMIT)
            assert process.exitcode == 0, f"a rank left with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()


def stopped_copy(finished: Path, out: Path, step: int) -> Path:
    """Copy a finished run as if it had been killed after its checkpoint at `step`."""
    shutil.copytree(finished, out)
    (out / "DONE").unlink()
    checkpoint.drop_after(out / "checkpoints", step)
    assert step in checkpoint.steps(out / "checkpoints")
    return out


def lines(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()
