"""A sweep's folder with several at work in it: locks, the manifest, and what is read from disk."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.experiments.comparison import experiment
from angular_lab.run_folder import RunDir
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.trials import Entry, run_entry
from angular_lab.training.signals import Preempted
from angular_lab.training.trainer import Trainer
from tests.lab.runs import LIMIT
from tests.lab.sweeps.sweeps import manifest, metrics, small


def test_what_another_process_makes_is_left_to_it_and_waited_for(
    data: Path, tmp_path: Path
) -> None:
    """The test holds the lock of one value. Its line's other seed waits, all else is made."""
    sweep = Sweep(small(data), tmp_path, device="cpu")
    held = sweep.pending()[1]
    lock, waiting = RunDir(held.folder), threading.Event()
    said: list[str] = []
    looks: list[int] = []
    done: list[Path] = []
    look = sweep.pending
    lock.claim()

    def let_go() -> None:
        if waiting.wait(LIMIT):
            done.extend(tmp_path.glob("*/DONE"))
            before = len(looks)
            time.sleep(1.5)
            looks[:] = looks[before:]
        lock.release()

    def say(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            waiting.set()

    sweep.say, sweep.pending = say, lambda: looks.append(1) or look()
    thread = threading.Thread(target=let_go, daemon=True)
    thread.start()
    sweep.run()
    thread.join()
    judge = next(e for e in sweep.entries if e.line.label == "adamw" and e.seed == 1)
    made = {entry.folder.name for entry in sweep.entries}
    assert len(made) == 6
    runs = {path.parent.name.partition("-to")[0] for path in done}
    assert runs == made - {held.folder.name, judge.folder.name}
    assert not look()
    assert sum("waiting" in text for text in said) == 1
    assert len(looks) < 10, "waiting is not working"


def test_whoever_has_a_trunk_makes_its_cool_downs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between trunk and cool-down nobody else gets in."""
    plan = small(data, lines=small(data).lines[1:], seeds=(0,))
    sweep, tries = Sweep(plan, tmp_path, device="cpu"), []
    finish = Trainer.finish

    def look(self: Trainer) -> None:
        finish(self)
        tries.append(Sweep(plan, tmp_path)._claim(sweep.pending() or [entry]))

    (entry,) = sweep.pending()
    monkeypatch.setattr(Trainer, "finish", look)
    sweep.run()
    assert tries == [None, None, None]


def test_the_manifest_is_what_the_folders_say(data: Path, tmp_path: Path) -> None:
    """Not what a process remembers: one that knows nothing writes the same."""
    plan = small(data)
    low = replace(plan.lines[0], values=(1e-5, 2e-5))
    plan = replace(plan, lines=(low, plan.lines[1]), horizons=(8,))
    Sweep(plan, tmp_path, device="cpu").run(extend=1)
    before = (tmp_path / "sweep.json").read_bytes()
    values = [e["value"] for e in manifest(tmp_path)["entries"] if e["seed"] == 0]
    assert values == pytest.approx([1e-5, 2e-5, 4e-5, 0.02]), "with what was added at the edge"
    Sweep(plan, tmp_path, device="cpu").write()
    assert (tmp_path / "sweep.json").read_bytes() == before
    with pytest.raises(Preempted):
        Sweep(plan, tmp_path, device="cpu").run(extend=2, budget=1e-9)
    assert (tmp_path / "sweep.json").read_bytes() == before


def test_many_writers_one_manifest(data: Path, tmp_path: Path) -> None:
    plan = small(data)
    for entry in Sweep(plan, tmp_path).pending():
        entry.folder.mkdir(parents=True)
    Sweep(plan, tmp_path).write()
    whole, stop, wrong = (tmp_path / "sweep.json").read_text(), threading.Event(), []

    def write() -> None:
        try:
            for _ in range(15):
                Sweep(plan, tmp_path).write()
        except BaseException as error:
            wrong.append(error)

    def read() -> None:
        while not stop.is_set():
            if (tmp_path / "sweep.json").read_text() != whole:
                wrong.append("half a manifest")

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write) for _ in range(4)]
    reader.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    assert wrong == []
    assert len(json.loads(whole)["entries"]) == 5
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_begins_when_the_time_is_over(data: Path, tmp_path: Path) -> None:
    with pytest.raises(Preempted, match="0 of 6 runs done, 6 left; the same command goes on"):
        Sweep(small(data), tmp_path, device="cpu").run(budget=1e-9)
    assert not list(tmp_path.glob("*seed*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_the_steps_of_runs_counts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It comes while the second run is being set up: the run takes no step."""
    begin, count = Trainer.__init__, []

    def interrupted(self: Trainer, *arguments: Any) -> None:
        begin(self, *arguments)
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), number)

    plan = small(data, horizons=(8,))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", interrupted)
        with pytest.raises(Preempted, match=r"lr0.002.* is saved"):
            Sweep(plan, tmp_path / "a", device="cpu").run()
    assert sorted(text.count(b"\n") for text in metrics(tmp_path / "a").values()) == [8]
    assert len(list((tmp_path / "a").glob("*/STOPPED"))) == 1
    Sweep(plan, tmp_path / "a", device="cpu").run()
    Sweep(plan, tmp_path / "b", device="cpu").run()
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_a_folder_may_be_named_in_another_way(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off in a cool-down under a relative path, it goes on under the absolute one, and
    after a move."""
    plan = small(data, lines=small(data).lines[1:], seeds=(0,))
    update = Trainer.update

    def stop(self: Trainer) -> None:
        update(self)
        if self.spec.parent and self.spec.steps == 8:
            self.until = 0.0

    monkeypatch.chdir(tmp_path)
    for root in (Path("sweep"), (tmp_path / "sweep").resolve()):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "update", stop)
            with pytest.raises(Preempted):
                Sweep(plan, root, device="cpu").run()
    os.rename("sweep", "moved")
    Sweep(plan, Path("moved"), device="cpu").run()
    Sweep(plan, Path("whole"), device="cpu").run()
    assert metrics(Path("moved")) == metrics(Path("whole"))


def test_a_sweep_is_not_for_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"a sweep under torchrun: .*--processes N"):
        Sweep(experiment("teaser", "nano"), tmp_path)


def test_a_claimed_entry_stays_claimed(data: Path, tmp_path: Path) -> None:
    entry: Entry = Sweep(small(data, horizons=(4,)), tmp_path).pending()[0]
    run = RunDir(entry.folder)
    run.claim()
    run_entry(entry, run, "cpu")
    assert entry.done
    assert not RunDir(entry.folder).try_claim()
    run.release()
    again = RunDir(entry.folder)
    assert again.try_claim()
    again.release()


def test_what_was_finished_since_one_looked_is_not_taken(data: Path, tmp_path: Path) -> None:
    sweep = Sweep(small(data), tmp_path)
    entry = sweep.pending()[0]
    entry.folder.mkdir(parents=True)
    (entry.folder / "DIVERGED").touch()
    assert sweep._claim([entry]) is None
    again = RunDir(entry.folder)
    assert again.try_claim(), "it was let go"
    again.release()
