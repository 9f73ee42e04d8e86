"""A trunk grows: what it has logged stays, and what follows is what a longer run would log."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.cli.main import main
from angular_lab.config.branches import extended_spec, trunk_spec
from angular_lab.config.spec import ScheduleSpec, Spec
from angular_lab.run_folder import Change, RunFolder
from angular_lab.training import checkpoint
from angular_lab.training.start import extend, resume, train
from angular_lab.trunks import trunk_folder
from tests.lab.runs import SMALL, lines, start_function, tiny
from tests.lab.training.test_resume import logged, wait_for


def constant(data: Path, **values: Any) -> Spec:
    return tiny(data, schedule=ScheduleSpec("constant", warmup=2, decay=0.25), **values)


@pytest.fixture(scope="module")
def long(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk that had 24 steps from the start."""
    out = tmp_path_factory.mktemp("long") / "run"
    train(constant(data, steps=24), out, device="cpu")
    return out


@pytest.mark.parametrize("optimizer", ["angular_muown", "adamw", "normuon"])
def test_an_extended_trunk_is_the_longer_run(data, tmp_path, optimizer) -> None:
    """It ends at step 10, which no interval divides: the old end keeps its evaluation."""
    spec = constant(data, steps=24, average=(0.5,))
    spec = replace(spec, optim=replace(spec.optim, name=optimizer, lr=0.01))
    train(spec, tmp_path / "long", device="cpu")
    out = tmp_path / "run"
    train(replace(spec, steps=10), out, device="cpu")
    before = (out / "metrics.jsonl").read_bytes()
    for steps in (15, 24):
        extend(out, steps, device="cpu")
        assert RunFolder(out).done
        after = (out / "metrics.jsonl").read_bytes()
        assert after.startswith(before)
        before = after
    whole, made = lines(tmp_path / "long"), lines(out)
    assert [i for i, pair in enumerate(zip(made, whole, strict=True), 1) if len({*pair}) > 1] == [
        *(10, 15)
    ], "they differ by the evaluations at the old ends alone"
    for step in (10, 15):
        long, short = (json.loads(run[step - 1]) for run in (whole, made))
        assert "val_loss" not in long
        assert {key: short[key] for key in long} == long
    info = RunFolder(out).info
    assert (info.spec.steps, info.spec.pins) == (24, (10, 15))
    assert Change(10, "steps", "10", "15") in info.changes
    assert Change(15, "steps", "15", "24") in info.changes
    assert {10, 15, 24} <= {*checkpoint.steps(out / "checkpoints")}


def test_branches_of_an_extended_trunk_are_those_of_the_longer_one(data, tmp_path, long) -> None:
    out = tmp_path / "run"
    train(constant(data, steps=12), out, device="cpu")
    extend(out, 24, device="cpu")
    assert lines(out) == lines(long), "the old end had an evaluation anyway"
    for run in (out, long):
        assert main(["branch", str(run), "--at", "100%", "--device", "cpu"]) == 0
    made = [run.with_name(f"{run.name}-at24-decay8") for run in (out, long)]
    assert lines(made[0]) == lines(made[1])
    assert main(["branch", str(out), "--at", "12", "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    ("schedule", "steps", "message"),
    [
        ({"kind": "wsd"}, 24, "schedule.kind=wsd: the learning rate falls towards the last of 12"),
        ({"kind": "cosine"}, 24, "schedule.kind=cosine: the learning rate falls towards the"),
        ({"kind": "wsd", "decay": 0.02}, 24, None),
        ({"kind": "wsd", "decay": 0.02}, 100, "schedule.kind=wsd: the learning rate falls"),
        ({"kind": "constant"}, 11, "--to 11: the run has 12 steps already"),
        ({"kind": "constant", "fall": 0.1}, 24, None),
    ],
)
def test_only_a_constant_learning_rate_can_be_extended(schedule, steps, message) -> None:
    """0.02 of 12 and of 24 steps rounds to zero steps: that learning rate is constant, too."""
    spec = Spec(steps=12, schedule=ScheduleSpec(warmup=2, **schedule))
    if message is None:
        assert extended_spec(spec, steps).steps == steps
        return
    with pytest.raises(ValueError, match=message):
        extended_spec(spec, steps)


def test_a_refused_extension_leaves_the_run_as_it_is(whole, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    assert main(["extend", str(out), "--to", "24"]) == 2
    assert "only a run with schedule.kind=constant can be extended" in capsys.readouterr().err
    assert RunFolder(out).done
    assert (out / "spec.json").read_bytes() == (whole / "spec.json").read_bytes()
    assert main(["resume", str(out), "steps=24"]) == 2
    assert "extend RUN --to STEPS" in capsys.readouterr().err


def test_an_extension_may_change_how_it_is_run(data, tmp_path, long, capsys) -> None:
    out = tmp_path / "run"
    train(constant(data, steps=12), out, device="cpu")
    assert main(["extend", str(out), "--to", "24", "pins=16", "optim.lr=1"]) == 2
    assert "resume cannot change it" in capsys.readouterr().err
    assert main(["extend", str(out), "--to", "24", "pins=16", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert lines(out) == lines(long)
    assert {12, 16} <= {*checkpoint.steps(out / "checkpoints")}
    assert main(["extend", str(out), "--to", "24"]) == 0, "nothing is left to do"
    shutil.rmtree(out / "checkpoints")
    assert main(["extend", str(out), "--to", "30"]) == 2
    assert "has no checkpoint left" in capsys.readouterr().err
    assert lines(out) == lines(long)


def test_a_kill_before_the_new_length_is_written_loses_nothing(data, tmp_path, long) -> None:
    """DONE goes first: a kill right after it leaves the shorter run, with no step left to take."""
    out = tmp_path / "run"
    train(constant(data, steps=12), out, device="cpu")
    (out / "DONE").unlink()
    resume(out, [], "cpu")
    assert RunFolder(out).done
    assert lines(out) == lines(long)[:12]
    (out / "DONE").unlink()
    extend(out, 24, device="cpu")
    assert lines(out) == lines(long)


def test_done_is_gone_before_the_new_length_is_written(data, tmp_path, monkeypatch) -> None:
    out, seen = tmp_path / "run", []
    train(constant(data, steps=12), out, device="cpu")
    change = RunFolder.change_settings

    def watch(self, *arguments):
        seen.append(self.done)
        change(self, *arguments)

    monkeypatch.setattr(RunFolder, "change_settings", watch)
    extend(out, 13, device="cpu")
    assert seen == [False]


def test_kills_during_extend_lose_and_repeat_nothing(data, tmp_path) -> None:
    spec = constant(data, steps=60, save_every=3, eval_every=20)
    train(spec, tmp_path / "long", device="cpu")
    out = tmp_path / "run"
    train(replace(spec, steps=20), out, device="cpu")
    old = (out / "metrics.jsonl").read_bytes()
    for _ in range(4):
        before = logged(out)
        process = start_function(extend, out, 60, (), "cpu")
        wait_for(lambda n=before: logged(out) > n + 3, process)
        process.kill()
        process.join()
        assert (out / "metrics.jsonl").read_bytes().startswith(old)
    assert not RunFolder(out).done
    resume(out, [], "cpu")
    assert lines(out) == lines(tmp_path / "long")
    assert RunFolder(out).info.changes == (
        Change(20, "pins", "", "20"),
        Change(20, "steps", "20", "60"),
    )


def test_the_command_trunk_extends_the_trunk_of_the_store(
    data, tmp_path, monkeypatch, capsys
) -> None:
    """Further horizons at any time. A horizon whose branch point was not kept needs its own."""
    monkeypatch.chdir(tmp_path)
    command = ["trunk", "nano", f"data={data}", *SMALL, "--decay", "0.5", "--device", "cpu"]
    assert main([*command, "--horizons", "4,8"]) == 0
    (trunk,) = Path("runs").glob("*-trunk-*")
    before = (trunk / "metrics.jsonl").read_bytes()
    assert main([*command, "--horizons", "8,16,24"]) == 0
    assert [*Path("runs").glob("*-trunk-*")] == [trunk]
    assert (trunk / "metrics.jsonl").read_bytes().startswith(before)
    assert RunFolder(trunk).read_spec().steps == 12
    assert main([*command, "--horizons", "4,16"]) == 0, "a shorter one than it is now"
    assert RunFolder(trunk).read_spec().steps == 12
    capsys.readouterr()
    assert main([*command, "--horizons", "24"]) == 0
    assert len(capsys.readouterr().out.split()) == 1
    assert [*Path("runs").glob("*-trunk-*")] == [trunk]
    assert main([*command, "--horizons", "10,24"]) == 0
    assert len([*Path("runs").glob("*-trunk-*")]) == 2


def test_a_trunk_serves_those_with_its_settings_and_its_branch_points(data, tmp_path) -> None:
    spec = trunk_spec(tiny(data, keep=1, save_every=None), [4, 8])
    run = tmp_path / "runs" / spec.folder_name("tokens")
    train(spec, run, device="cpu")
    tokens = RunFolder(run).info.data
    for starts, seed, expected in (
        ([4, 8, 20], 0, True),
        ([8], 0, True),
        ([20], 0, True),
        ([5, 20], 0, False),
        ([4, 8, 20], 1, False),
    ):
        wanted = replace(trunk_spec(spec, starts), seed=seed)
        assert (trunk_folder(tmp_path / "runs", wanted, tokens) == run) is expected
    assert trunk_folder(tmp_path / "runs", trunk_spec(spec, [20]), "other") != run
    (run / "DIVERGED").touch()
    assert trunk_folder(tmp_path / "runs", trunk_spec(spec, [20]), tokens) != run
    assert trunk_folder(tmp_path / "runs", trunk_spec(spec, [4]), tokens) == run
