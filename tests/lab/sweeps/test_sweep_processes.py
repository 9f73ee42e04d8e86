"""`sweep --processes N`: what a user types and sees, and where workers are put."""

import os
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_lab.cli.main import main
from angular_lab.experiments.comparison import EXPERIMENTS
from angular_lab.sweeps import workers as sweep_workers
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.workers import run_in_processes, spread
from angular_lab.training.ranks import start_ranks
from angular_lab.training.signals import Preempted
from tests.lab.runs import LIMIT
from tests.lab.sweeps.sweeps import small


@pytest.mark.timeout(LIMIT)
def test_the_command(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With processes as a user gets them, for two experiments."""
    plan = small(data, horizons=(4,))
    plans = {"small": plan, "other": replace(plan, name="other", lines=plan.lines[1:], seeds=(7,))}
    for name, value in plans.items():
        monkeypatch.setitem(EXPERIMENTS, name, lambda _, value=value: value)
    monkeypatch.chdir(tmp_path)
    words = ["sweep", *plans, "--device", "cpu"]
    assert main([*words, "--processes", "2"]) == 0
    shown = capfd.readouterr()
    assert "2 workers; what they print is in" in shown.err
    roots = {name: Path("runs") / f"{name}-nano" for name in plans}
    entries = [entry for name in plans for entry in Sweep(plans[name], roots[name]).entries]
    assert len(entries) == 7
    for entry in entries:
        assert entry.done
        assert shown.err.count(f": {entry.folder.parent.name}/{entry.folder.name}\n") == 1
    assert "worker 0: " in shown.err
    assert main([*words, "--processes", "2"]) == 0, "nothing is left"
    shutil.rmtree(roots["other"])  # the first is done: the second is made all the same
    assert main([*words, "--processes", "2", "--budget", "0.001s"]) == 75
    assert (
        f"{roots['other']}: 0 of 1 runs done, 1 left; the same command goes on"
        in capfd.readouterr().err
    )
    told = [line for line in shown.out.splitlines() if line.startswith("runs/")]
    assert told == list(map(str, roots.values()))
    assert "adamw                     best 0.004" in shown.out
    assert main([*words, "--processes", "0"]) == 2
    assert "--processes 0: it must be at least 1" in capfd.readouterr().err


def test_the_command_says_that_a_worker_died(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: small(data))
    monkeypatch.setattr(sweep_workers, "_watch", lambda *_: ["worker 1 with exit code -9"])
    assert main(["sweep", "small", "--out", str(tmp_path), "--processes", "2"]) == 4
    assert "1 of 2 workers died: worker 1 with exit code -9" in capsys.readouterr().err


def test_workers_are_spread_over_the_gpus() -> None:
    assert spread("", 5, 2) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert spread("cuda", 2, 4) == ["cuda:0", "cuda:1"]
    assert spread("cuda:3", 2, 4) == ["cuda:3", "cuda:3"], "as told"
    assert spread("cpu", 2, 4) == ["cpu", "cpu"]
    assert spread("", 3, 1) == [""] * 3
    assert spread("", 2, 0) == ["", ""]


def test_each_worker_gets_its_gpu(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Any] = []
    monkeypatch.setattr(sweep_workers, "_watch", lambda found, _: tasks.extend(found) or [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Preempted):
        run_in_processes([Sweep(small(data), tmp_path)], 3)
    assert [task.device for task in tasks] == ["cuda:0", "cuda:1", "cuda:0"]
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert start_ranks(tasks[1].device).device == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]


def test_a_second_call_leaves_the_first_ones_logs_and_marks(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of calls that are over go."""
    monkeypatch.setattr(sweep_workers, "_watch", lambda *_: [])
    here = tmp_path / "workers" / platform.node()
    gone = subprocess.Popen(["true"])
    gone.wait()
    with subprocess.Popen(["sleep", "600"]) as alive:
        try:
            for number in (alive.pid, gone.pid, os.getpid()):
                (here / str(number)).mkdir(parents=True)
                (here / str(number) / "worker0.log").write_text("step 1")
                (here / str(number) / "adamw.failed").touch()
            with pytest.raises(Preempted):
                run_in_processes([Sweep(small(data), tmp_path)], 2)
        finally:
            alive.kill()
    assert {path.name for path in here.iterdir()} == {str(alive.pid), str(os.getpid())}
    kept = {path.name for path in (here / str(alive.pid)).iterdir()}
    assert kept == {"worker0.log", "adamw.failed"}
    assert not list((here / str(os.getpid())).iterdir()), "a call before, by this process"


def test_the_logs_of_a_call_are_its_own(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Any] = []
    monkeypatch.setattr(sweep_workers, "_watch", lambda found, _: tasks.extend(found) or [])
    with pytest.raises(Preempted):
        run_in_processes([Sweep(small(data), tmp_path)], 2)
    folder = tmp_path / "workers" / platform.node() / str(os.getpid())
    assert [task.log for task in tasks] == [folder / "worker0.log", folder / "worker1.log"]


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_workers, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [sweep_workers._threads(n, "cpu") for n in (1, 2, 4, 9)] == [6, 3, 1, 1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sweep_workers._threads(2, "") == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert sweep_workers._threads(2, "cpu") == 0, "as told"
