"""A sweep by several processes: the same runs, each once, whichever dies or is told to stop."""

import json
import multiprocessing
import os
import platform
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_lab.log import configure_logging
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps import workers
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.workers import assign_devices, run_in_processes
from angular_lab.training.ranks import start_ranks
from angular_lab.training.signals import Preempted, WorkerDied
from tests.lab.runs import LIMIT, SERVER
from tests.lab.sweeps.small import long, metrics, record, small, sweep

LEFT = r"\d of 6 trials done, \d left; run the same command to continue"
pytestmark = pytest.mark.timeout(2 * LIMIT)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that need not import torch, each with one thread."""
    monkeypatch.setattr(workers, "CONTEXT", SERVER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(workers, "_threads", lambda *_: 1)
    configure_logging()


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tasks of workers that are not started."""
    collected: list[Any] = []
    monkeypatch.setattr(workers, "_watch", lambda tasks, *_: collected.extend(tasks) or [])
    return collected


def two(plan: Any, out: Path, **options: Any) -> None:
    run_in_processes([Sweep(plan, out, device="cpu")], 2, **options)


def pids() -> dict[str, int]:
    children = {child.name: child.pid or 0 for child in multiprocessing.active_children()}
    return {name: pid for name, pid in children.items() if name.startswith("worker ")}


def log(out: Path, number: int) -> str:
    paths = [*out.glob(f"sweeps/workers/*/*/worker{number}.log")]
    return paths[0].read_text() if paths else ""


def at_work(out: Path) -> Callable[[], bool]:
    """Return a condition: both workers are some steps into a run."""

    def steps(number: int) -> int:
        begun = re.findall(r"small-nano: starts (\S+)", log(out, number))
        path = out / "runs" / begun[-1] / "metrics.jsonl" if begun else out / "none"
        return path.read_text().count("\n") if path.exists() else 0

    return lambda: all(steps(number) > 5 for number in (0, 1))


@contextmanager
def once(condition: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Act from another thread once a condition holds; the test's own is busy."""

    def watch() -> None:
        end = time.monotonic() + LIMIT
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The long sweep, by one process."""
    out = tmp_path_factory.mktemp("alone")
    sweep(long(data), out)
    return out


@pytest.mark.usefixtures("fast")
def test_every_run_once_and_the_same(data: Path, tmp_path: Path, alone: Path) -> None:
    two(long(data), tmp_path)
    assert metrics(tmp_path) == metrics(alone)
    assert record(tmp_path) == record(alone)
    lines = [line for n in (0, 1) for line in log(tmp_path, n).splitlines()]
    begun = [line.split(" starts ")[1] for line in lines if "small-nano: starts " in line]
    assert sorted(begun) == sorted(metrics(alone))
    for path in tmp_path.glob("runs/*/timing.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == sorted({*steps}), "no other process wrote there"


@pytest.mark.usefixtures("fast")
def test_ten_kills_lose_nothing_and_repeat_nothing(data: Path, tmp_path: Path, alone: Path) -> None:
    """Workers are killed at random moments, and the command is repeated. A finished run is not
    touched again, and a resumed one writes the bytes of one that ran through."""
    dice, kills, finished = random.Random(0), 0, dict[str, int]()

    def kill() -> None:
        nonlocal kills
        while kills < 10:
            time.sleep(dice.uniform(0.2, 0.8))
            if alive := [*pids().values()]:
                with suppress(ProcessLookupError):
                    os.kill(dice.choice(alive), signal.SIGKILL)
                    kills += 1

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    while kills < 10:
        with suppress(WorkerDied):
            two(long(data), tmp_path)
        done = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/DONE")}
        assert finished.items() <= done.items(), "a finished run was made again"
        finished = done
        assert Sweep(long(data), tmp_path).pending(), f"all is done after {kills} kills"
    killer.join()
    two(long(data), tmp_path)
    assert metrics(tmp_path) == metrics(alone)
    assert record(tmp_path) == record(alone)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("killed", [(1,), (0, 1)])
def test_a_killed_worker_is_reported_and_the_rest_continues(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], killed: tuple[int, ...]
) -> None:
    configure_logging()

    def kill() -> None:
        for number in reversed(killed):  # the message has an order of its own
            os.kill(pids()[f"worker {number}"], signal.SIGKILL)

    left = LEFT if len(killed) == 2 else "every run is done"
    names = ", ".join(rf"worker {number} with exit code -9 \(SIGKILL\)" for number in killed)
    expected = f"{len(killed)} of 2 workers died: {names}; .*{left}"
    with once(at_work(tmp_path), kill), pytest.raises(WorkerDied, match=expected):
        two(long(data), tmp_path)
    printed = capsys.readouterr().err
    for number in killed:
        assert f"worker {number} with exit code -9 (SIGKILL) died. The last lines" in printed
    assert "  step " in printed, "the end of its output"
    assert bool(Sweep(long(data), tmp_path).pending()) == (killed == (0, 1))


@pytest.mark.usefixtures("fast")
def test_a_run_that_fails_costs_one_worker_only(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that holds another run stops the worker that takes it; the other one leaves it."""
    configure_logging()
    plan = small(data, horizons=(4,), seeds=(0,))
    first, *others = Sweep(plan, tmp_path).next_runs()
    broken = RunFolder(first.folder)
    first.folder.mkdir(parents=True)
    broken.write_spec(replace(first.spec, batch=2), {}, first.data)
    broken.append(broken.metrics_path, {"step": 1, "tokens": 1})
    with pytest.raises(WorkerDied, match=r"1 of 2 workers died: worker \d with exit code 1"):
        two(plan, tmp_path)
    assert "was made with batch=2, and this sweep needs 4" in capsys.readouterr().err
    assert [run.finished for run in (first, *others)] == [False] + [True] * 3


@pytest.mark.usefixtures("fast")
def test_the_budget_holds_for_all(data: Path, tmp_path: Path, alone: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Preempted, match=LEFT):
        two(long(data), tmp_path, budget=1.5)
    assert 1.5 < time.monotonic() - began < 60
    assert not pids()
    two(long(data), tmp_path)
    assert metrics(tmp_path) == metrics(alone)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all(data: Path, tmp_path: Path, alone: Path, number: int) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with (
        once(at_work(tmp_path), lambda: os.kill(os.getpid(), number)),
        pytest.raises(Preempted, match=LEFT),
    ):
        two(long(data), tmp_path)
    assert not pids()
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    begun = [path.parent for path in tmp_path.glob("runs/*/metrics.jsonl")]
    assert all(list(folder.glob("checkpoints/step_*")) for folder in begun), "all is saved"
    two(long(data), tmp_path)
    assert metrics(tmp_path) == metrics(alone)


@pytest.mark.usefixtures("fast")
def test_a_second_interrupt_does_not_wait(data: Path, tmp_path: Path) -> None:
    def act() -> None:
        for pid in pids().values():
            os.kill(pid, signal.SIGSTOP)  # it will not react
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    with once(at_work(tmp_path), act), pytest.raises(KeyboardInterrupt):
        two(long(data), tmp_path)
    assert not pids()


def test_workers_do_not_outlive_their_parent(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.lab.sweeps.small", str(tmp_path), str(data)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as parent:
        end = time.monotonic() + LIMIT
        while not at_work(tmp_path)() and time.monotonic() < end:
            time.sleep(0.05)
        parent.kill()
        for number in (0, 1):
            # in a run, which it saves, or between two of them
            while "run the same command to continue" not in log(tmp_path, number):
                assert time.monotonic() < end, log(tmp_path, number)
                time.sleep(0.05)


# -- without starting any ----------------------------------------------------------------------


def test_workers_are_assigned_to_the_gpus_in_turn() -> None:
    assert assign_devices("", 5, 2) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert assign_devices("cuda", 2, 4) == ["cuda:0", "cuda:1"]
    assert assign_devices("cuda:3", 2, 4) == ["cuda:3", "cuda:3"], "as given"
    assert assign_devices("cpu", 2, 4) == ["cpu", "cpu"]
    assert assign_devices("", 3, 1) == [""] * 3


def test_each_worker_gets_its_gpu(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: list[Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Preempted):
        run_in_processes([Sweep(small(data), tmp_path)], 3)
    assert [task.device for task in tasks] == ["cuda:0", "cuda:1", "cuda:0"]
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert start_ranks(tasks[1].device).device == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]


def test_logs_and_marks_belong_to_a_call(data: Path, tmp_path: Path, tasks: list[Any]) -> None:
    """Those of calls that have ended are removed, those of living processes are not."""
    here = tmp_path / "sweeps" / "workers" / platform.node()
    gone = subprocess.Popen(["true"])
    gone.wait()
    with subprocess.Popen(["sleep", "600"]) as alive:
        try:
            for number in (alive.pid, gone.pid, os.getpid()):
                (here / str(number)).mkdir(parents=True)
                (here / str(number) / "adamw.failed").touch()
            with pytest.raises(Preempted):
                run_in_processes([Sweep(small(data), tmp_path)], 2)
        finally:
            alive.kill()
    assert {path.name for path in here.iterdir()} == {str(alive.pid), str(os.getpid())}
    assert list((here / str(alive.pid)).iterdir())
    assert not list((here / str(os.getpid())).iterdir()), "of an earlier call by this process"
    folder = here / str(os.getpid())
    assert [task.log for task in tasks] == [folder / "worker0.log", folder / "worker1.log"]


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [workers._threads(n, "cpu") for n in (1, 2, 4, 9)] == [6, 3, 1, 1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert workers._threads(2, "") is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert workers._threads(2, "cpu") is None, "as set by the user"
