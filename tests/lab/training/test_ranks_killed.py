"""Two ranks are killed while they resume or extend a run: the log is that of an unbroken run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_lab.config.spec import ScheduleSpec, Spec
from angular_lab.run_folder import RunFolder
from angular_lab.training import checkpoint
from angular_lab.training.start import extend, resume, train
from tests.lab.runs import LIMIT, SERVER, free_port, lines, stopped_copy, tiny, wait_all

WORLD, SHORT, LONG = 2, 12, 40
Work = tuple[Callable[..., Any], tuple[Any, ...]]


def constant(data: Path, **values: Any) -> Spec:
    return tiny(data, schedule=ScheduleSpec("constant", warmup=2), **{"steps": LONG, **values})


def _call_all(work: list[Work], environment: dict[str, str]) -> None:
    """In a rank."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    for function, arguments in work:
        function(*arguments)


def start_ranks(*work: Work) -> list[Any]:
    """Let two Gloo ranks do some work, with the environment that torchrun sets."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(WORLD)}
    ranks = []
    for rank in map(str, range(WORLD)):
        environment = {**common, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(SERVER.Process(target=_call_all, args=(list(work), environment)))
        ranks[-1].start()
    return ranks


def steps(out: Path) -> list[int]:
    path = out / "metrics.jsonl"
    texts = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(text)["step"] for text in texts if text.endswith("\n")]


def wait_for_step(out: Path, step: int, is_alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while max(steps(out), default=0) < step:
        assert is_alive() or max(steps(out), default=0) >= step, "it ended before its time"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_at(out: Path, step: int, *work: Work) -> None:
    """Kill both ranks once the run has logged a step."""
    ranks = start_ranks(*work)
    try:
        wait_for_step(out, step, lambda: all(rank.is_alive() for rank in ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert not RunFolder(out).done


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Runs of 40 and of 12 steps on two ranks that were never stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    names = [(parallel, count) for parallel in ("ddp", "fsdp") for count in (LONG, SHORT)]
    folders = {(parallel, n): folder / f"{parallel}-{n}" for parallel, n in names}
    specs = {(parallel, n): constant(data, parallel=parallel, keep=99, steps=n)
             for parallel, n in names}  # fmt: skip
    wait_all(start_ranks(*((train, (specs[x], folders[x], True, "cpu")) for x in names)))
    return folders


def test_kills_during_extend_on_two_ranks(runs, tmp_path) -> None:
    long, short = runs["fsdp", LONG], runs["fsdp", SHORT]
    assert lines(short) == lines(long)[:SHORT]
    out = stopped_copy(short, tmp_path / "run", SHORT)
    before = (out / "metrics.jsonl").read_bytes()
    kill_at(out, SHORT + 6, (extend, (out, LONG, (), "cpu")))
    assert (out / "metrics.jsonl").read_bytes().startswith(before)
    wait_all(start_ranks((resume, (out, (), "cpu"))))
    assert (out / "metrics.jsonl").read_bytes() == (long / "metrics.jsonl").read_bytes()
    assert RunFolder(out).read_spec().steps == LONG


def test_kills_after_changes_of_how_it_is_run_on_two_ranks(runs, tmp_path) -> None:
    """Fewer checkpoints and fewer lines: every line that is due is there once, and as it was."""
    long = runs["ddp", LONG]
    out = stopped_copy(long, tmp_path / "run", 8)
    RunFolder(out).rewind(8)
    changes = (["save_every=7", "log_every=2"], ["save_every=5", "keep=1"], [])
    for step, assignments in zip((16, 22, 28), changes, strict=True):
        kill_at(out, step, (resume, (out, assignments, "cpu")))
    wait_all(start_ranks((resume, (out, [], "cpu"))))
    assert_complete(out, long)
    info = RunFolder(out).info
    assert [(c.key, c.after) for c in info.changes] == [
        ("log_every", "2"), ("save_every", "7"), ("keep", "1"), ("save_every", "5"),
    ]  # fmt: skip
    assert info.changes[0].step == 8
    assert info.changes[2].step in range(14, LONG, 7), "the newest checkpoint before the kill"
    assert checkpoint.steps(out / "checkpoints")[-1] == LONG


def assert_complete(out: Path, whole: Path) -> None:
    """Check that the log has the lines that a run with these settings would have, to the byte."""
    since = {change.key: change.step for change in RunFolder(out).info.changes}["log_every"]
    expected = []
    for text in lines(whole):
        line = json.loads(text)
        is_due = line["step"] % 2 == 0 or "val_loss" in line or "angle_mean" in line
        if line["step"] <= since or is_due:
            expected.append(text)
    assert lines(out) == expected
    assert len(expected) < len(lines(whole))


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)),
        *("--master-port", free_port(), "-m", "angular_lab", *arguments, "--device", "cpu"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def children(parent: int) -> list[int]:
    """Return the processes that a process has started, by /proc."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            stats[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return sorted(child for child, of in stats.items() if of == parent)


@pytest.mark.slow
def test_torchrun_continues_an_extension_that_was_killed(runs, tmp_path) -> None:
    """The commands, with the real torchrun, which ends when one of its ranks is killed."""
    long, short = runs["ddp", LONG], runs["ddp", SHORT]
    out = stopped_copy(short, tmp_path / "run", SHORT)
    first = torchrun("extend", str(out), "--to", str(LONG))
    try:
        wait_for_step(out, SHORT + 6, lambda: first.poll() is None)
        os.kill(children(first.pid)[-1], signal.SIGKILL)
        first.communicate(timeout=LIMIT)
    finally:
        for process in (*children(first.pid), first.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert first.returncode
    assert not RunFolder(out).done
    second = torchrun("resume", str(out))
    printed, errors = second.communicate(timeout=LIMIT)
    assert second.returncode == 0, errors
    assert printed == f"{out}\n"
    assert (out / "metrics.jsonl").read_bytes() == (long / "metrics.jsonl").read_bytes()
