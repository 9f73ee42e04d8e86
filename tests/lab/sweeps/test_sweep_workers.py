"""A sweep by several processes: the same runs, each once, whoever dies or is told to stop."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.run_folder import RunDir
from angular_lab.sweeps import workers as sweep_workers
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.workers import run_in_processes
from angular_lab.training.signals import Preempted, WorkerDied
from tests.lab.runs import LIMIT, SERVER
from tests.lab.sweeps.sweeps import long, manifest, metrics, small

LEFT = r"\d of 6 runs done, \d left; the same command goes on"
pytestmark = pytest.mark.timeout(LIMIT)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that need not import torch, each with one thread."""
    monkeypatch.setattr(sweep_workers, "CONTEXT", SERVER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sweep_workers, "_threads", lambda *_: 1)


def two(plan: Any, root: Path, **options: Any) -> None:
    run_in_processes([Sweep(plan, root, device="cpu")], 2, **options)


def workers() -> dict[str, int]:
    found = {child.name: child.pid or 0 for child in multiprocessing.active_children()}
    return {name: pid for name, pid in found.items() if name.startswith("worker ")}


def log(root: Path, number: int) -> str:
    (path,) = root.glob(f"workers/*/*/worker{number}.log") or [None]
    return path.read_text() if path else ""


def taken(root: Path, number: int) -> list[str]:
    """The runs that a worker took, in order."""
    lines = (line for line in log(root, number).splitlines() if "-seed" in line)
    return [line.removeprefix(f"{root.name}/") for line in lines if " " not in line]


def at_work(root: Path, *numbers: int) -> Callable[[], bool]:
    """Whether each of these workers is some steps into its first run."""

    def check() -> bool:
        if len(list(root.glob("workers/*/*/worker*.log"))) < 2:
            return False
        return all(log(root, number).count("\nstep ") > 5 for number in numbers)

    return check


@contextmanager
def once(condition: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Do something from another thread when it is time; the test's own is busy."""

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
    root = tmp_path_factory.mktemp("alone")
    Sweep(long(data), root, device="cpu").run()
    return root


@pytest.mark.usefixtures("fast")
def test_every_run_once_and_the_same(data: Path, tmp_path: Path) -> None:
    plan = small(data)
    Sweep(plan, tmp_path / "one", device="cpu").run()
    two(plan, tmp_path / "two")
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    assert manifest(tmp_path / "two") == manifest(tmp_path / "one")
    runs = taken(tmp_path / "two", 0) + taken(tmp_path / "two", 1)
    trunks = {name for name in metrics(tmp_path / "one") if "-to" not in name}
    assert sorted(runs) == sorted(trunks), "each was begun once"
    for path in (tmp_path / "two").glob("*/timing.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == sorted(set(steps)), "nobody else wrote there"


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("killed", [(1,), (0, 1)])
def test_a_killed_worker_is_told_of_and_the_rest_goes_on(
    data: Path, tmp_path: Path, alone: Path, capsys: pytest.CaptureFixture[str], killed: Any
) -> None:
    def kill() -> None:
        for number in reversed(killed):  # the message has an order of its own
            os.kill(workers()[f"worker {number}"], signal.SIGKILL)

    left = LEFT if len(killed) == 2 else "every run is done"
    names = ", ".join(rf"worker {number} with exit code -9 \(SIGKILL\)" for number in killed)
    expected = f"{len(killed)} of 2 workers died: {names}; .*{left}"
    with once(at_work(tmp_path, 0, 1), kill), pytest.raises(WorkerDied, match=expected):
        two(long(data), tmp_path)
    shown = capsys.readouterr().err
    for number in killed:
        assert f"worker {number} with exit code -9 (SIGKILL) died. The last lines" in shown
    assert "  step " in shown, "the end of its output"
    left = Sweep(long(data), tmp_path).pending()
    assert bool(left) == (killed == (0, 1)), "the other one makes its run too"
    two(long(data), tmp_path)
    assert metrics(tmp_path) == metrics(alone)
    assert manifest(tmp_path) == manifest(alone)


@pytest.mark.usefixtures("fast")
def test_a_run_that_fails_costs_one_worker_only(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that holds something else ends who takes it; the other does not try it again."""
    plan = small(data, horizons=(4,), seeds=(0,))
    broken, *good = Sweep(plan, tmp_path).pending()
    broken.folder.mkdir(parents=True)
    RunDir(broken.folder).write_spec(replace(broken.spec, batch=2), {})
    RunDir(broken.folder).append(RunDir(broken.folder).metrics_path, {"step": 1})
    with pytest.raises(WorkerDied, match=r"1 of 2 workers died: worker \d with exit code 1"):
        two(plan, tmp_path)
    assert "was made with batch=2, and this sweep wants 4" in capsys.readouterr().err
    assert [entry.done for entry in (broken, *good)] == [False] + [True] * 3
    with pytest.raises(WorkerDied):  # another call tries again
        two(plan, tmp_path)


@pytest.mark.usefixtures("fast")
def test_the_budget_holds_for_all(data: Path, tmp_path: Path, alone: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Preempted, match=LEFT):
        two(long(data), tmp_path, budget=1.5)
    assert 1.5 < time.monotonic() - began < 30
    assert not workers()
    saved = [log(tmp_path, number).splitlines()[-1] for number in (0, 1)]
    assert all("the same command goes on" in line for line in saved), saved
    two(long(data), tmp_path)
    assert metrics(tmp_path) == metrics(alone)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all(data: Path, tmp_path: Path, alone: Path, number: int) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with (
        once(at_work(tmp_path, 0, 1), lambda: os.kill(os.getpid(), number)),
        pytest.raises(Preempted, match=LEFT),
    ):
        two(long(data), tmp_path)
    assert not workers()
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    begun = [entry.folder for entry in Sweep(long(data), tmp_path).entries]
    assert all(list(folder.glob("checkpoints/step_*")) for folder in begun), "all is saved"
    two(long(data), tmp_path)
    assert metrics(tmp_path) == metrics(alone)


@pytest.mark.usefixtures("fast")
def test_a_second_interrupt_waits_for_nobody(data: Path, tmp_path: Path) -> None:
    def act() -> None:
        for pid in workers().values():
            os.kill(pid, signal.SIGSTOP)  # it will not listen
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    with once(at_work(tmp_path, 0, 1), act), pytest.raises(KeyboardInterrupt):
        two(long(data), tmp_path)
    assert not workers()


def test_workers_do_not_outlive_their_parent(data: Path, tmp_path: Path) -> None:
    """Killed itself, it can tell nobody anything: they save and leave."""
    command = [sys.executable, "-m", "tests.lab.sweeps.sweeps", str(tmp_path), str(data)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as parent:
        end = time.monotonic() + LIMIT / 2
        while not at_work(tmp_path, 0, 1)() and time.monotonic() < end:
            time.sleep(0.05)
        parent.kill()
        for number in (0, 1):
            while "is saved; the same command goes on" not in log(tmp_path, number):
                assert time.monotonic() < end, log(tmp_path, number)
                time.sleep(0.05)
    for entry in Sweep(long(data), tmp_path).entries:
        run = RunDir(entry.folder)
        while not run.try_claim():
            assert time.monotonic() < end, "somebody still has it"
            time.sleep(0.05)
        run.release()
