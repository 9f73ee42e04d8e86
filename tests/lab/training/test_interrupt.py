"""Ctrl-C and SIGTERM: the commands that train save, leave a record and exit without a traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.run_folder import RunFolder
from angular_lab.training import checkpoint
from angular_lab.training import start as runs
from angular_lab.training.signals import Sigterm
from angular_lab.training.trainer import Trainer
from tests.lab.runs import LIMIT, SMALL, free_port

LONG = ("steps=100000", "save_every=none", "log_every=1")
STOPPED = "stopped: saved at step"

# The save after the first Ctrl-C takes longer than the test.
SLOW_SAVE = """
import sys, time
from angular_lab.cli.main import main
from angular_lab.training.trainer import Trainer
def save(self):
    print("saving", flush=True)
    time.sleep(600)
Trainer.save = save
sys.exit(main(sys.argv[1:]))
"""


def _start(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def _wait_for_steps(process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _command(name: str, data: Path, tmp_path: Path) -> tuple[list[str], Path]:
    """Return the arguments of a run that does not end by itself, and the folder that it writes."""
    out = tmp_path / "run"
    common = [f"data={data}", *SMALL]
    if name == "train":
        return ["train", "nano", *common, *LONG, "--out", str(out)], out
    if name == "trunk":
        ends = ["--horizons", "100000", "--decay", "0.5"]
        return ["trunk", "nano", *common, *LONG, *ends, "--out", str(out)], out
    parent = tmp_path / "parent"
    assert main(["train", "nano", *common, "--out", str(parent)]) == 0
    cooldown = ["--at", "3", "--decay", "100000"]
    return ["branch", str(parent), *cooldown, "save_every=none", "--out", str(out)], out


@pytest.mark.parametrize("name", ["train", "branch", "trunk"])
def test_ctrl_c_saves_and_exits_with_75(name, data, tmp_path) -> None:
    arguments, out = _command(name, data, tmp_path)
    process = _start("-m", "angular_lab", *arguments)
    _wait_for_steps(process, out)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, error
    assert error.count(STOPPED) == 1
    assert "Traceback" not in error
    (step,) = checkpoint.steps(out / "checkpoints")
    assert json.loads((out / "STOPPED").read_text()) == {"exit_code": 75, "step": step}


def test_a_second_ctrl_c_exits_at_once(data, tmp_path) -> None:
    arguments, out = _command("train", data, tmp_path)
    process = _start("-c", SLOW_SAVE, *arguments)
    _wait_for_steps(process, out)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, error
    assert "press Ctrl-C again" in error
    assert "\ninterrupted: " in error
    assert "Traceback" not in error
    assert not (out / "STOPPED").exists(), "nothing was saved"


def test_a_second_ctrl_c_interrupts_a_checkpoint_that_is_being_written(
    data, tmp_path, monkeypatch, capsys
) -> None:
    """torch wraps whatever a save raises, KeyboardInterrupt included."""
    write = checkpoint.dcp.FileSystemWriter.write_data

    def interrupt(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return write(self, *arguments)

    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", interrupt)
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(tmp_path / "run")]
    assert main(command) == 130
    assert "\ninterrupted: " in capsys.readouterr().err


def test_ctrl_c_before_the_first_step_does_not_block_the_same_command(
    data, tmp_path, monkeypatch, capsys
) -> None:
    restore = runs._restore

    def interrupt(*arguments):
        signal.raise_signal(signal.SIGINT)
        return restore(*arguments)

    out = tmp_path / "run"
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_restore", interrupt)
        patch.setattr(Trainer, "forward_backward", lambda *_: pytest.fail("it took a step"))
        assert main(command) == 75
    assert "before step 1" in capsys.readouterr().err
    assert json.loads((out / "STOPPED").read_text()) == {"exit_code": 75, "step": 0}
    assert main(command) == 0


def test_a_run_that_continues_removes_the_record(data, tmp_path, monkeypatch) -> None:
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(tmp_path / "run")]
    update = Trainer.update

    def interrupt(self):
        update(self)
        if self.step == 1:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", interrupt)
        assert main(command) == 75
    assert (tmp_path / "run" / "STOPPED").exists()
    assert main([*command, "--resume", "auto"]) == 0
    assert RunFolder(tmp_path / "run").done
    assert not (tmp_path / "run" / "STOPPED").exists()


def test_ctrl_c_during_a_command_that_does_not_train_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr("angular_lab.show.describe", lambda _: signal.raise_signal(signal.SIGINT))
    assert main(["show", "nano"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_under_torchrun(data, tmp_path) -> None:
    """torchrun forwards SIGINT to the ranks, prints a traceback of its own and exits with 1."""
    arguments, out = _command("train", data, tmp_path)
    ranks = ["--nproc-per-node", "2", "--master-port", free_port(), "-m", "angular_lab"]
    process = _start("-m", "torch.distributed.run", *ranks, *arguments)
    _wait_for_steps(process, out)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, error
    assert error.count(STOPPED) == 1
    assert error.count("press Ctrl-C again") == 1
    assert "/angular_lab/" not in error, "no traceback of the lab"
    (step,) = checkpoint.steps(out / "checkpoints")
    assert json.loads((out / "STOPPED").read_text()) == {"exit_code": 75, "step": step}


def test_the_second_signal_of_torchrun_after_ctrl_c_exits_at_once(monkeypatch) -> None:
    """torchrun forwards the first Ctrl-C as SIGINT and the second as SIGTERM."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with Sigterm(signal.SIGINT), Sigterm() as inner:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert inner.received
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_after_ctrl_c_waits_for_the_save_outside_torchrun(monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with Sigterm(signal.SIGINT) as context:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert context.received
