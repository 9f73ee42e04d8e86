"""The progress of a sweep, read from a store that a finished sweep left."""

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.run_folder import DIVERGED, RunFolder
from angular_lab.sweeps.progress import (
    SweepProgress,
    announcement,
    ended_run,
    last_line,
    take_snapshot,
)
from angular_lab.sweeps.sweep import Sweep
from tests.lab.sweeps.small import small, sweep

RUN = "adamw 0.002 seed 0 to 8"


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    plan = small(data)
    sweep(replace(plan, arms=(replace(plan.arms[0], values=(1e-3, 2e-3)),)), out)
    return out


@pytest.fixture
def store(finished: Path, data: Path, tmp_path: Path) -> Sweep:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    plan = small(data)
    arms = (replace(plan.arms[0], values=(1e-3, 2e-3)),)
    return Sweep(replace(plan, arms=arms), tmp_path, device="cpu")


def stop(store: Sweep, steps: int) -> tuple[RunFolder, Callable[[], None]]:
    """Set a cooldown of the first seed back to its first lines, and return how to finish it."""
    labels = take_snapshot([store]).labels
    name = next(name for name, label in labels.items() if label == RUN)
    run = RunFolder(store.runs / name)
    whole = {path: path.read_text() for path in (run.metrics_path, run.timing_path)}
    for path, text in whole.items():
        path.write_text("".join(text.splitlines(keepends=True)[:steps]))
    (run.path / "DONE").unlink()

    def finish() -> None:
        for path, text in whole.items():
            path.write_text(text)
        run.finish()

    return run, finish


def test_a_finished_sweep(store: Sweep) -> None:
    """Two trials and the better one on another seed, each a trunk with two cooldowns."""
    snapshot = take_snapshot([store, store])
    assert (len(snapshot.ended), snapshot.total, snapshot.training) == (9, 9, ())
    lines = sum(len(path.read_text().splitlines()) for path in store.runs.glob("*/metrics.jsonl"))
    per_step = store.experiment.arms[0].spec.tokens_per_step
    assert snapshot.tokens_done == lines * per_step, "every step is logged, a shared one once"
    assert snapshot.tokens_left == 0


def test_what_is_left_includes_trials_that_are_not_chosen_yet(store: Sweep) -> None:
    """Without a cooldown to the last horizon no value is chosen, and so no trial on seed 1."""
    before = take_snapshot([store]).tokens_done
    stop(store, 1)
    snapshot = take_snapshot([store])
    assert (len(snapshot.ended), snapshot.total) == (5, 9)
    assert snapshot.tokens_done + snapshot.tokens_left == before


def test_a_run_at_work_is_shown_with_its_step_loss_and_speed(store: Sweep) -> None:
    run, finish = stop(store, 1)
    assert take_snapshot([store]).training == (), "no process holds it"
    run.claim()
    (training,) = take_snapshot([store]).training
    metrics, timing = last_line(run.metrics_path), last_line(run.timing_path)
    assert metrics
    assert timing
    assert (training.label, training.step, training.steps) == (RUN, metrics["step"], 8)
    assert training.loss == metrics["loss"]
    assert training.speed == timing["tokens_per_second"]
    shown = f"{RUN}  +step +{metrics['step']}/8 +loss {metrics['loss']:.4f} +"
    assert re.fullmatch(shown + r"[\d.]+k? tokens/s", str(training))
    run.metrics_path.unlink()
    run.timing_path.unlink()
    (training,) = take_snapshot([store]).training
    assert str(training).endswith("starting")
    run.release()
    finish()


def test_plain_lines_when_a_run_ends(store: Sweep) -> None:
    """The state once a minute, with an estimate from the tokens since the start."""
    run, finish = stop(store, 1)
    run.claim()
    stream, now = io.StringIO(), 100.0
    progress = SweepProgress([store], stream, lambda: now)
    left = take_snapshot([store]).tokens_left
    progress.update()
    assert stream.getvalue() == ""
    now += 60
    progress.tokens -= int(left)  # as much as is left was done in this minute
    progress.update()
    state, at_work = stream.getvalue().splitlines()
    assert state.startswith("small-nano: 5 of 9 runs done, 1 training; ")
    assert state.endswith("tokens/s; 1:00 elapsed; about 1:00 left")
    assert at_work.startswith(f"  {RUN}")
    finish()
    run.release()
    now += 5
    progress.update()
    ended, *rest, state = stream.getvalue().splitlines()[2:]
    loss = json.loads(run.metrics_path.read_text().splitlines()[-1])["val_loss"]
    assert re.fullmatch(f"run 6 of 9: {RUN} +loss {loss:.4f}  in 0:0[0-9]", ended)
    assert [line.split(": ")[1][:12] for line in rest] == ["adamw 0.002 "] * len(rest)
    assert state.startswith("small-nano: 9 of 9 runs done; ")
    before = stream.getvalue()
    progress.update(last=True)
    assert stream.getvalue() == before


def test_a_terminal_is_redrawn_in_place(store: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    run, finish = stop(store, 1)
    run.claim()
    screen = Screen()
    progress = SweepProgress([store], screen)
    progress.update()
    state, at_work = screen.getvalue().splitlines()
    assert len(state) <= 50
    assert len(at_work) <= 50
    finish()
    run.release()
    progress.update(last=True)
    drawn = screen.getvalue().removeprefix(f"{state}\n{at_work}\n")
    assert drawn.startswith("\033[2A\033[J"), "the block is removed"
    assert drawn.removeprefix("\033[2A\033[J").startswith(f"run 6 of 9: {RUN}")
    assert progress.drawn == 0


def test_divergence_and_failures_are_counted(store: Sweep, tmp_path: Path) -> None:
    run, _ = stop(store, 1)
    store.marks = tmp_path
    (tmp_path / f"{run.path.name}.failed").touch()
    assert take_snapshot([store]).failed == 1
    (run.path / DIVERGED).write_text("the loss is not finite\n")
    snapshot = take_snapshot([store])
    assert (snapshot.diverged, snapshot.failed) == (1, 0)
    assert "diverged  in" in str(ended_run(RUN, run.path))
    text = SweepProgress([store], io.StringIO()).state(snapshot)
    assert "runs done, 1 diverged; " in text


def test_the_time_of_a_run_is_summed_over_its_starts(tmp_path: Path) -> None:
    lines = [(1, 10.0), (2, 20.0), (3, 4.0), (4, 8.0)]
    text = "".join(json.dumps({"step": s, "seconds": t}) + "\n" for s, t in lines)
    (tmp_path / "timing.jsonl").write_text(text + '{"step": 5, "sec')
    assert ended_run("x", tmp_path).seconds == 28.0


def test_one_process_announces_its_runs(store: Sweep) -> None:
    run, _ = stop(store, 1)
    planned = next(run for run in store.next_runs())
    assert announcement([store], planned) == f"run 6 of 9: {RUN} ({run.path.name})"
