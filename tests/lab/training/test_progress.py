"""What a person sees of a run, on a terminal and in a log file, and where its time goes."""

import fcntl
import json
import logging
import os
import pty
import re
import shlex
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from angular_lab.cli.main import main
from angular_lab.config.spec import Spec
from angular_lab.log import configure_logging
from angular_lab.run_folder import RunFolder
from angular_lab.status import clock, screen
from angular_lab.status.clock import Clock, evaluations_left, samples_left, saves_left
from angular_lab.status.screen import CLEAR, Screen, Smoothed, Status
from angular_lab.training.start import resume, train
from angular_lab.training.trainer import Trainer
from tests.lab.runs import stopped_copy, tiny

SLOW = 0.15  # seconds


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Iterator[Callable[[], str]]:
    """Put standard error on a terminal of this width; yield a function that returns its output."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    received: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 4096):
                received.append(data)
        except OSError:  # the other side was closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    file = os.fdopen(slave, "w", encoding="utf-8")

    def output() -> str:
        file.close()
        reader.join()
        return b"".join(received).decode().replace("\r\n", "\n")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        patch.setenv("TERM", "xterm")
        yield output
    os.close(master)


def lines_left(output: str) -> list[str]:
    """Return what stays on the screen: a carriage return with an erasure removes a line."""
    return [line.rsplit(CLEAR, 1)[-1] for line in output.split("\n")]


def timing(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_a_terminal_has_a_header_one_status_line_and_a_summary(
    data: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(screen, "REDRAW", 0.0)
    with terminal(monkeypatch, columns) as output:
        train(tiny(data), tmp_path / "run", device="cpu", shown="all")
        text = output()
    drawn = [part for line in text.split("\n") for part in line.split(CLEAR)]
    folder = str(tmp_path / "run")
    assert all(len(x) < columns for x in drawn if folder not in x and str(data) not in x)
    assert not set(re.findall(r"[\x00-\x1f\x7f]", text.replace(CLEAR, ""))) - {"\n"}
    bars = [x for x in drawn if re.match(r" *\d+/12 ", x)]
    assert {int(x.split("/")[0]) for x in bars} == {*range(1, 13)}, "drawn after every step"
    assert all(any(phase in x for x in bars) for phase in ("evaluating", "saving"))
    if columns == 140:
        last = next(x for x in bars if x.startswith("11/12"))
        for part in ("█", "░", " 92%", "loss ", "val ", "best ", "angle ", "lr ", "kappa ",
                     "tokens/s", "after ", "left"):  # fmt: skip
            assert part in last
    stays = [x for x in lines_left(text) if x]
    assert [x.split()[1] for x in stays if x.startswith("step ")] == ["4/12", "8/12", "12/12"]
    names = [x.split()[0] for x in stays if not x.startswith(" ")]
    header = ["run", "model", "optimizer", "data", "device", "length"]
    assert names == [*header, *["step"] * 3, "done", "validation", "speed", "folder", "next"]
    assert text.endswith("\n")
    run = RunFolder(tmp_path / "run")
    assert run.metrics_path.read_bytes() == RunFolder(whole).metrics_path.read_bytes()


def test_without_a_terminal_every_line_is_plain(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps() -> list[int]:
        text = capsys.readouterr().err
        assert not re.findall(r"[\x00-\x09\x0b-\x1f\x7f]", text)
        return [int(x) for x in re.findall(r"^step (\d+)/12 ", text, re.M)]

    monkeypatch.setattr(screen, "QUIET", 1e6)
    train(tiny(data), tmp_path / "rare", device="cpu", shown="all")
    assert steps() == [1, 4, 8, 12], "the first line and the evaluations"
    train(tiny(data, log_every=3, eval_every=None), tmp_path / "first", device="cpu", shown="all")
    assert steps() == [3, 12], "the first logged step and the last one"
    monkeypatch.setattr(screen, "QUIET", 0.0)
    train(tiny(data, eval_every=None), tmp_path / "often", device="cpu")
    assert steps() == [*range(1, 13)]


def test_header_and_summary_say_what_was_trained_and_what_is_next(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, run = tiny(data), tmp_path / "run"
    optim = replace(spec.optim, aux_lr=0.004, decay_scale=0.5)
    train(replace(spec, optim=optim), run, device="cpu", shown="all")
    text = capsys.readouterr().err
    rows = dict(re.findall(r"^(\w+) {2,}(.+)$", text, re.M))
    assert rows["run"] == f"nano in {run}"
    assert rows["model"] == "dense, 2 layers, width 32, 28.9k parameters"
    # kappa of the last of 12 steps, after 2 of warmup: 1 / (1 + 0.5 * 9)
    assert rows["optimizer"] == (
        "angular_muown, lr 0.02, aux lr 0.004; wsd, 2 steps of warmup, 3 of cooldown, kappa to 0.18"
    )
    assert rows["data"].startswith(f"{data}, <0.01 passes over ")
    assert rows["device"].startswith("cpu, 1 thread")
    assert rows["length"] == "12 steps of 128 tokens: 1.54k tokens; evaluates every 4"
    assert re.fullmatch(r"\d\.\d{4} at the end; best \d\.\d{4} at step \d+", rows["validation"])
    assert re.match(r"12 steps, 1.54k tokens in \d+\.\d s: training \d", rows["done"])
    for command in ("sample", "export", "report", "branch"):
        assert f"angular-lab {command} {run}" in text
    assert f"angular-lab branch {run} --at 9" in text
    assert "angular-lab extend" not in text, "its learning rate falls"


def test_the_commands_of_the_summary_work(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = tiny(data, angle_every=None)
    constant = replace(spec, schedule=replace(spec.schedule, kind="constant"))
    train(constant, tmp_path / "my run", device="cpu", shown="all")
    text = capsys.readouterr().err
    commands = re.findall(r"angular-lab (.+)$", text, re.M)
    names = [command.split()[0] for command in commands]
    assert names == ["sample", "watch", "report", "export", "branch", "extend"]
    for command in commands:
        if command.startswith("watch"):  # it runs until it is stopped: tests/lab/watch
            continue
        words = shlex.split(command.replace("FOLDER", "out"))
        assert main([*words, "--length", "2"] if words[0] == "sample" else words) == 0


def test_a_resumed_run_says_after_which_step_it_continues(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stopped_copy(whole, tmp_path / "run", 8)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    best = min(line["val_loss"] for line in metrics if "val_loss" in line)
    resume(out, device="cpu", shown="all")
    text = capsys.readouterr().err
    assert re.search(r"^resumes +continues after step 8$", text, re.M)
    assert f"best {best:.4f} at step" in text, "evaluations before the stop count"
    assert "step 9/12" in text
    assert "step 8/12" not in text


def test_a_quiet_run_prints_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny(data), tmp_path / "run", device="cpu", shown="end")
    pattern = r"run: done, val \d\.\d{4}, [\d.]+k? tokens/s, \d+\.\d s\n"
    assert re.fullmatch(pattern, capsys.readouterr().err)
    with terminal(monkeypatch, 80) as output:
        train(tiny(data), tmp_path / "again", device="cpu", shown="end")
        assert re.fullmatch(pattern.replace("run", "again", 1), output())


def test_times_of_evaluations_and_checkpoints_are_not_those_of_training(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slow evaluations and checkpoints tokens/s stays that of the steps."""
    validate, save = Trainer.validate, Trainer._save

    def slow_validate(self: Trainer) -> dict[str, float]:
        time.sleep(SLOW)
        return validate(self)

    def slow_save(self: Trainer) -> None:
        time.sleep(2 * SLOW)
        save(self)

    monkeypatch.setattr(Trainer, "validate", slow_validate)
    monkeypatch.setattr(Trainer, "_save", slow_save)
    train(tiny(data), tmp_path / "run", device="cpu")
    lines = timing(tmp_path / "run")
    assert [line["step"] for line in lines] == [*range(1, 13)]
    assert [x["step"] for x in lines if x.get("evaluating", 0) >= SLOW] == [4, 8, 12]
    # step 9 is the pinned start of the cooldown; the last checkpoint is in the last line
    assert [x["step"] for x in lines if x.get("saving", 0) >= 2 * SLOW] == [4, 8, 9, 12]
    assert not any("compiling" in line for line in lines)
    training = sum(128 / line["tokens_per_second"] for line in lines)
    inside = sum(x.get("evaluating", 0) + x.get("saving", 0) for x in lines[:-1])
    inside += lines[-1]["evaluating"]
    assert training == pytest.approx(lines[-1]["seconds"] - inside, abs=0.02)
    assert all(x["seconds"] < y["seconds"] for x, y in pairwise(lines))


def test_the_first_step_of_a_compiled_run_is_not_timed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.compile is replaced: what counts here is where its time goes."""
    monkeypatch.setattr("torch.nn.Module.compile", lambda self: None)
    forward_backward = Trainer.forward_backward

    def slow_at_first(self: Trainer, *batch: Any) -> Any:
        time.sleep(0 if self.step else SLOW)
        return forward_backward(self, *batch)

    monkeypatch.setattr(Trainer, "forward_backward", slow_at_first)
    train(tiny(data, compile=True), tmp_path / "run", device="cpu", shown="all")
    first, *others = timing(tmp_path / "run")
    assert first["compiling"] >= SLOW
    assert "tokens_per_second" not in first
    assert all("tokens_per_second" in x and "compiling" not in x for x in others)
    text = capsys.readouterr().err
    assert "\ncompiling: the first steps take longer\n" in text
    assert re.search(r"^done .*compiling 0\.\d s", text, re.M)


def test_a_message_does_not_land_in_the_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "REDRAW", 0.0)
    with terminal(monkeypatch, 80) as output:
        configure_logging()
        shown = Screen("all")
        shown.open()
        shown.draw(Status(3, 12))
        logging.getLogger("angular_lab.training").warning("the disk is slow")
        shown.draw(Status(4, 12))
        shown.close(keep=True)
        text = output()
    configure_logging()
    kept = lines_left(text)
    assert kept[0] == "the disk is slow"
    assert kept[1].startswith(" 4/12 "), "where an error stopped it stays"
    assert kept[2:] == [""]


def test_an_interrupted_run_ends_its_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Trainer) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Trainer, "_save", fail)
    with terminal(monkeypatch, 80) as output:
        with pytest.raises(OSError, match="disk full"):
            train(tiny(data), tmp_path / "run", device="cpu", shown="all")
        text = output()
    assert re.match(r" ?4/12 .*saving", lines_left(text)[-2])
    assert "done" not in text
    assert len(timing(tmp_path / "run")) == 4, "what was measured is written"


@pytest.mark.parametrize("width", [5, 12, 30, 39, 40, 79, 139])
def test_a_status_never_wraps(width: int) -> None:
    full = Status(
        99_000, 100_000, "evaluating", 2.5, True, 2.6, 2.55, {"0.1": 2.5}, 0.01, 0.02, 0.5, 12345.0,
        0.41, 70.1, 99_999.0, 1111.0,
    )  # fmt: skip
    for status in (full, Status(), replace(full, phase="", finite=False)):
        assert len(status.bar(width)) <= width
        assert len(status.line(width)) <= width
    assert ("loss not finite" in replace(full, finite=False).line(139)) == (width > 0)


def test_a_terminal_without_unicode_gets_a_bar_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    Screen("all", stream).draw(Status(6, 12))
    assert "#####" in stream.getvalue()
    assert stream.getvalue().isascii()
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen("all", Terminal()).terminal


def test_the_smoothed_loss_starts_without_a_bias() -> None:
    mean = Smoothed(1000)
    assert mean.value is None
    mean.add(3.0)
    assert mean.value == pytest.approx(3.0)
    for _ in range(200):
        mean.add(1.0)
    assert mean.value == pytest.approx(1.0, abs=1e-3)
    assert Smoothed(60).decay == pytest.approx(0.8)
    assert Smoothed(10**6).decay == pytest.approx(0.99)


class Time:
    """A clock that tests move."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "time", time)
    return time


def test_remaining_time_includes_evaluations_and_checkpoints(moved: Time) -> None:
    spec = Spec(steps=100, batch=1, eval_every=25, eval_tokens=3072, save_every=50)
    assert spec.pinned == (90,)
    times = Clock(spec)
    times.start(0)
    assert times.remaining(0) is None
    moved.now += 10.0
    assert times.lap(10) == pytest.approx(1024.0)
    # 90 steps of a second; 4 evaluations of 3 tokens' worth of steps, a third of the time each
    assert times.remaining(10) == pytest.approx(90 + 4 * 1.0)
    with times.phase("evaluating"):
        moved.now += 7.0
    with times.phase("saving"):
        moved.now += 2.0
    moved.now += 40.0
    assert times.lap(50) == pytest.approx(1024.0), "phases are not training"
    assert times.remaining(50) == pytest.approx(50 + 2 * 7.0 + 2 * 2.0)
    assert times.elapsed == pytest.approx(59.0)
    assert times.training == pytest.approx(50.0)
    assert times.speed == pytest.approx(1024.0)


def test_remaining_time_includes_samples_apart_from_evaluations(moved: Time) -> None:
    spec = Spec(steps=100, batch=1, eval_every=50, sample_every=30, save_every=None, pins=())
    times = Clock(spec)
    times.start(0)
    moved.now += 60.0
    for name, seconds in (("evaluating", 7.0), ("sampling", 2.0), ("sampling", 4.0)):
        with times.phase(name):
            moved.now += seconds
    times.lap(60)
    # 40 steps of a second; evaluations at 100; samples of 3 seconds on average at 90 and 100
    assert times.remaining(60) == pytest.approx(40 + 7.0 + 2 * 3.0)


def test_steps_inside_a_phase_are_not_timed(moved: Time) -> None:
    times, waits = Clock(Spec(batch=1)), []
    times.synchronize = lambda: waits.append(moved.now)
    times.start(5)
    with times.phase("compiling", steps=1):
        moved.now += 60.0
    assert times.lap(6) is None
    moved.now += 4.0
    assert times.lap(8) == pytest.approx(512.0)
    assert times.phases["compiling"] == pytest.approx(60.0)
    assert waits == [100.0, 160.0], "the device is waited for around a phase, and nowhere else"


@pytest.mark.parametrize("steps", [1, 7, 12])
@pytest.mark.parametrize("every", [None, 1, 3, 4, 100])
@pytest.mark.parametrize("pins", [(), (2, 6)])
def test_evaluations_and_checkpoints_are_counted_as_the_trainer_makes_them(
    steps: int, every: int | None, pins: tuple[int, ...]
) -> None:
    spec = Spec(steps=steps, eval_every=every, save_every=every, sample_every=every, pins=pins)
    for step in range(steps + 1):
        later = range(step + 1, steps + 1)
        due = [x for x in later if every and (x % every == 0 or x == steps)]
        saved = {*due, *(x for x in later if x in spec.pinned or x == steps)}
        assert evaluations_left(spec, step) == samples_left(spec, step) == len(due)
        assert saves_left(spec, step) == len(saved)
