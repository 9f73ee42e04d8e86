"""Training is exact: repeated, resumed, branched and killed runs write the same bytes."""

import json
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from angular_lab.config.branches import trunk_spec
from angular_lab.run_folder import RunFolder
from angular_lab.training import build, checkpoint
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import branch_spec, train
from angular_lab.training.trainer import Trainer
from tests.lab.runs import LIMIT, lines, start, stopped_copy, tiny

KILLS = 10


def test_the_same_spec_gives_the_same_bytes(data, tmp_path, whole) -> None:
    train(tiny(data), tmp_path / "again")
    assert lines(tmp_path / "again") == lines(whole)
    steps = [json.loads(line)["step"] for line in lines(whole)]
    assert steps == list(range(1, 13))
    train(tiny(data, seed=1), tmp_path / "other")
    assert lines(tmp_path / "other") != lines(whole)


def test_a_line_has_the_keys_that_scripts_rely_on(whole) -> None:
    parsed = [json.loads(line) for line in lines(whole)]
    assert all({"step", "tokens", "loss", "lr"} <= line.keys() for line in parsed)
    assert [line["step"] for line in parsed if "val_loss" in line] == [4, 8, 12]
    assert [line["step"] for line in parsed if "angle_mean" in line] == [3, 6, 9, 12]
    assert parsed[-1]["tokens"] == 12 * 4 * 32
    last = parsed[-1]
    assert {"val_perplexity", "val_bits_per_byte"} <= last.keys()
    timing = [json.loads(x) for x in (whole / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timing] == [line["step"] for line in parsed]


@pytest.mark.parametrize(
    "optimizer", ["adamw", "muon", "normuown", "angular_muown", "hyperball", "magnitude_direction"]
)
def test_a_killed_run_continues_bit_for_bit(data, tmp_path, optimizer) -> None:
    base = tiny(data)
    spec = replace(base, optim=replace(base.optim, name=optimizer, lr=0.01))
    train(spec, tmp_path / "whole")
    half = tmp_path / "half"
    process = start(spec, half)
    _wait_for(lambda: len(checkpoint.steps(half / "checkpoints")) > 0, process)
    process.kill()
    process.join()
    train(spec, half, resume=True)
    assert lines(half) == lines(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("adamw", {"radius_lr": 0.1}),
        ("angular_muown", {"row_beta": 0.9}),
        ("normuon", {"radius": "fixed"}),
        ("muown", {"tangent_steps": 2}),
        ("magnitude_direction", {"radius": "fixed"}),
        ("angular_muown", {"tangent_steps": 2}),
    ],
)
def test_a_setting_without_meaning_is_rejected(data, name, setting) -> None:
    spec = tiny(data)
    model = build.make_model(spec, Ranks(0, 1, torch.device("cpu")))
    build.make_optimizer(model, replace(spec, optim=replace(spec.optim, name=name)))
    with pytest.raises(ValueError, match=f"optim.{next(iter(setting))}=.* has no meaning for "):
        build.make_optimizer(model, replace(spec, optim=replace(spec.optim, name=name, **setting)))


@pytest.mark.parametrize("name", ["adamw", "angular_muown"])
def test_a_learning_rate_of_zero_reaches_the_optimizer(data, name) -> None:
    spec = tiny(data)
    model = build.make_model(spec, Ranks(0, 1, torch.device("cpu")))
    optim = replace(spec.optim, name=name, lr=0.5, aux_lr=0.0)
    if name == "angular_muown":
        optim = replace(optim, radius_lr=0.0)
    groups = build.make_optimizer(model, replace(spec, optim=optim)).param_groups
    assert {group["lr"] for group in groups} == {0.0, 0.5}
    assert {group.get("radius_lr", 0.0) for group in groups} == {0.0}
    optim = replace(optim, lr=0.0, aux_lr=None, radius_lr=None)
    groups = build.make_optimizer(model, replace(spec, optim=optim)).param_groups
    assert {group["lr"] for group in groups} == {0.0}


def test_settings_that_the_paper_does_not_have_reach_the_optimizer(data) -> None:
    spec = tiny(data)
    model = build.make_model(spec, Ranks(0, 1, torch.device("cpu")))
    wanted = {"orthogonalize": "tangent", "tangent_steps": 2, "radius": "log_adam"}
    made = build.make_optimizer(model, replace(spec, optim=replace(spec.optim, **wanted)))
    group = next(g for g in made.param_groups if g["algorithm"] == "matrix")
    assert {key: group[key] for key in wanted} == wanted


def test_ten_kills_at_random_times_leave_no_trace(data, tmp_path) -> None:
    """SIGKILL ten times, every other time while a checkpoint is being written."""
    spec = tiny(data, steps=60, save_every=3, eval_every=20)
    train(spec, tmp_path / "whole")
    out, chance, during_save = tmp_path / "killed", random.Random(0), 0
    for kill in range(KILLS):
        process = start(spec, out)
        before = _progress(out)
        if kill % 2:
            _wait_for(lambda n=before: _is_saving(out) or _progress(out) > n + 6, process)
            during_save += _is_saving(out)
        else:
            _wait_for(lambda n=before: _progress(out) > n, process)
            time.sleep(chance.random() * 0.05)
        process.kill()
        process.join()
    assert not RunFolder(out).done, "ten kills must fit into the run"
    assert during_save >= 1
    train(spec, out, resume=True)
    assert lines(out) == lines(tmp_path / "whole")
    assert not list((out / "checkpoints").glob(".saving-*"))


def _is_saving(out: Path) -> bool:
    return any((out / "checkpoints").glob(".saving-*"))


def _progress(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _wait_for(condition, process) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.is_alive() or condition(), "the process ended before its time"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_unfinished_last_line_is_dropped(data, tmp_path, whole) -> None:
    out = stopped_copy(whole, tmp_path / "run", 9)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "lo')
    train(tiny(data, keep=9), out, resume=True)
    assert lines(out) == lines(whole)


def test_a_branch_at_the_end_of_the_trunk_is_the_straight_run(data, tmp_path) -> None:
    straight = tiny(data, steps=16)
    train(straight, tmp_path / "straight")
    train(trunk_spec(straight, [6, 12]), tmp_path / "trunk")
    for at, length in ((6, 2), (12, 4)):
        spec = branch_spec(RunFolder(tmp_path / "trunk"), at, length)
        train(spec, tmp_path / f"to{at + length}")
    assert lines(tmp_path / "trunk") + lines(tmp_path / "to16") == lines(tmp_path / "straight")
    assert RunFolder(tmp_path / "to8").read_spec().parent == str(tmp_path / "trunk")
    short = tiny(data, steps=8)
    train(short, tmp_path / "short")
    assert lines(tmp_path / "trunk")[:6] + lines(tmp_path / "to8") == lines(tmp_path / "short")


def test_the_learning_rate_warms_up_stays_and_cools_down(whole) -> None:
    """Two steps of warmup and a quarter of the run to zero: by hand."""
    rates = [json.loads(line)["lr"] / 0.02 for line in lines(whole)]
    assert rates == pytest.approx([1 / 3, 2 / 3, *[1.0] * 7, 3 / 4, 2 / 4, 1 / 4])


def test_the_optimizer_gets_the_logged_learning_rate(data, tmp_path, monkeypatch) -> None:
    seen = []
    update = Trainer.update

    def watch(self):
        update(self)
        seen.append(self.optimizer.param_groups[-1]["lr"])

    monkeypatch.setattr(Trainer, "update", watch)
    train(tiny(data), tmp_path / "run")
    assert seen == [json.loads(line)["lr"] for line in lines(tmp_path / "run")]


def test_a_branch_is_resumable_and_its_parent_may_move(data, tmp_path) -> None:
    train(trunk_spec(tiny(data, steps=16), [8]), tmp_path / "runs" / "trunk")
    spec = branch_spec(RunFolder(tmp_path / "runs" / "trunk"), 8, 8)
    train(spec, tmp_path / "runs" / "first")
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    train(spec, tmp_path / "elsewhere" / "second")
    assert lines(tmp_path / "elsewhere" / "first") == lines(tmp_path / "elsewhere" / "second")


def test_the_newest_and_the_pinned_checkpoints_stay(data, tmp_path) -> None:
    train(tiny(data, save_every=2, keep=2, pins=(4, 5)), tmp_path / "run")
    # the cooldown starts at 9: a branch point
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [4, 5, 9, 10, 12]


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_accumulated_micro_batches_equal_the_batch(data, tmp_path, micro_batch, whole) -> None:
    train(tiny(data, micro_batch=micro_batch), tmp_path / "parts")
    for a, b in zip(lines(whole), lines(tmp_path / "parts"), strict=True):
        assert json.loads(a)["loss"] == pytest.approx(json.loads(b)["loss"], abs=1e-5)


def test_sigterm_saves_the_current_step(data, tmp_path) -> None:
    spec = tiny(data, steps=60, save_every=None, eval_every=None)
    out = tmp_path / "run"
    process = start(spec, out)
    _wait_for(lambda: _progress(out) > 3, process)
    process.terminate()
    process.join(LIMIT)
    assert process.exitcode not in (0, -signal.SIGTERM)
    (step,) = checkpoint.steps(out / "checkpoints")
    assert step == _progress(out)
    train(spec, out, resume=True)
    train(spec, tmp_path / "whole")
    assert lines(out) == lines(tmp_path / "whole")
