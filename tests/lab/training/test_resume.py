"""A run continues from its folder alone, and only how it is run may change."""

import json
import shutil
import time
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.config.overrides import as_typed
from angular_lab.config.spec import CHANGEABLE, IRRELEVANT, Spec, get
from angular_lab.run_folder import Change, RunFolder
from angular_lab.training import checkpoint, loggers
from angular_lab.training.start import resume, train
from tests.lab.runs import LIMIT, lines, start_function, stopped_copy, tiny


def test_a_stopped_run_continues_without_its_settings(data, tmp_path, whole, capsys) -> None:
    out = stopped_copy(whole, tmp_path / "run", 8)
    assert main(["resume", str(out), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert lines(out) == lines(whole)
    assert RunFolder(out).done
    assert RunFolder(out).info.changes == ()
    assert main(["resume", str(out)]) == 0, "a finished run is left alone"
    assert lines(out) == lines(whole)


def test_how_it_is_run_changes_from_a_step_on_and_no_loss_does(tmp_path, whole) -> None:
    out = stopped_copy(whole, tmp_path / "run", 8)
    resume(out, ["eval_every=2", "save_every=1", "keep=2", "pins=9,10"], "cpu")
    before, after = ([json.loads(line) for line in lines(run)] for run in (whole, out))
    assert [line["loss"] for line in after] == [line["loss"] for line in before]
    assert after[:8] == before[:8]
    assert [line["step"] for line in after if "val_loss" in line] == [4, 8, 10, 12]
    assert checkpoint.steps(out / "checkpoints") == [9, 10, 11, 12]
    info = RunFolder(out).info
    assert info.changes == (
        Change(8, "eval_every", "4", "2"),
        Change(8, "keep", "9", "2"),
        Change(8, "pins", "", "9,10"),
        Change(8, "save_every", "4", "1"),
    )
    assert (info.spec.keep, info.spec.pins) == (2, (9, 10))
    assert info.undo_changes(info.spec) == RunFolder(whole).read_spec()
    assert info.spec.identity("") == RunFolder(whole).read_spec().identity("")


def test_a_run_set_back_has_its_changes_from_there_on(tmp_path, whole) -> None:
    out = stopped_copy(whole, tmp_path / "run", 8)
    resume(out, ["save_every=3"], "cpu")
    resume(out, ["log_every=2"], "cpu", step=4)
    expected = (Change(4, "save_every", "4", "3"), Change(4, "log_every", "1", "2"))
    assert RunFolder(out).info.changes == expected
    assert [json.loads(line)["step"] for line in lines(out)] == [1, 2, 3, 4, 6, 8, 9, 10, 12]


FROZEN = {
    "optim.lr": "0.5", "seed": "3", "steps": "20", "batch": "8", "clip": "none", "name": "mine",
    "schedule.decay": "0.5", "schedule.kind": "constant", "model.layers": "1",
    "eval_tokens": "512", "parent": "other", "precision": "bf16", "on_nan": "skip",
}  # fmt: skip


@pytest.mark.parametrize(("key", "new"), FROZEN.items())
def test_what_a_loss_depends_on_cannot_change(key, new, tmp_path, whole, capsys) -> None:
    out = stopped_copy(whole, tmp_path / "run", 8)
    spec_json, old = (out / "spec.json").read_bytes(), get(RunFolder(out).read_spec(), key)
    assert main(["resume", str(out), "save_every=3", f"{key}={new}"]) == 2
    error = capsys.readouterr().err
    expected = f"{out} has {key}={as_typed(old)}, and resume cannot change it to {new}: "
    assert expected in error
    assert "use train for another run" in error
    assert error.count("\n") == 1
    assert (out / "spec.json").read_bytes() == spec_json
    assert not RunFolder(out).done


def test_every_changeable_setting_is_outside_the_identity() -> None:
    """A new setting is frozen until it is listed, and what is listed changes no digest."""
    assert CHANGEABLE < IRRELEVANT
    assert not CHANGEABLE & Spec().identity("").keys()
    assert not {*FROZEN} & CHANGEABLE


def test_the_tokens_may_move_but_not_change(data, tmp_path, whole, capsys) -> None:
    out = stopped_copy(whole, tmp_path / "run", 8)
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(data, moved)
    shutil.copytree(data, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["arguments"]["tokenizer"] = "another"
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert main(["resume", str(out), f"data={other}"]) == 2
    assert "the tokens are not those that the run was started on" in capsys.readouterr().err
    resume(out, [f"data={moved}"], "cpu")
    assert lines(out) == lines(whole)
    assert RunFolder(out).read_spec().data == str(moved)


def test_a_change_to_a_finished_run_is_refused(whole, capsys) -> None:
    assert main(["resume", str(whole), "keep=3"]) == 2
    assert f"{whole} is finished, and keep=3 would have no effect" in capsys.readouterr().err
    assert RunFolder(whole).read_spec().keep == 9


def test_train_says_how_to_change_a_setting(data, tmp_path, whole) -> None:
    out = stopped_copy(whole, tmp_path / "a run", 8)
    with pytest.raises(ValueError, match=r"angular-lab resume '\S+/a run' save_every=none"):
        train(tiny(data, keep=9, save_every=None), out, resume=True)
    with pytest.raises(ValueError, match=r"seed=0 \(now 1\): give the same, or a new --out$"):
        train(tiny(data, keep=9, seed=1), out, resume=True)


def test_what_is_not_a_run_stays_untouched(tmp_path, capsys) -> None:
    assert main(["resume", str(tmp_path / "nowhere")]) == 2
    assert "is not a run folder: it has no spec.json" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_a_dashboard_run_keeps_its_id(tmp_path, whole) -> None:
    out = stopped_copy(whole, tmp_path / "run", 8)
    first = loggers.run_id(RunFolder(out).read_spec(), RunFolder(out))
    resume(out, ["save_every=3", "eval_every=6"], "cpu")
    assert loggers.run_id(RunFolder(out).read_spec(), RunFolder(out)) == first


def test_kills_during_resume_lose_and_repeat_nothing(data, tmp_path) -> None:
    """Each attempt changes a setting; the log is that of a run that was never stopped."""
    spec = tiny(data, steps=40, save_every=3, eval_every=20)
    train(spec, tmp_path / "whole")
    out = tmp_path / "run"
    stopped = stop_early(spec, out)
    for keep in (3, 4, 5):
        process = start_function(resume, out, [f"keep={keep}"], "cpu")
        wait_for(lambda n=stopped: logged(out) > n + 3, process)
        process.kill()
        process.join()
        stopped = logged(out)
        assert RunFolder(out).read_spec().keep == keep
    assert not RunFolder(out).done
    resume(out, [], "cpu")
    assert lines(out) == lines(tmp_path / "whole")
    changes = RunFolder(out).info.changes
    assert [(c.before, c.after) for c in changes] == [("2", "3"), ("3", "4"), ("4", "5")]
    assert [c.step for c in changes] == sorted(c.step for c in changes)


def stop_early(spec: Spec, out: Path) -> int:
    """Start a run in another process and kill it after its first checkpoint."""
    process = start_function(train, spec, out, True, "cpu")
    wait_for(lambda: bool(checkpoint.steps(out / "checkpoints")), process)
    process.kill()
    process.join()
    return logged(out)


def logged(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition, process) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.is_alive() or condition(), "the process ended before its time"
        assert time.monotonic() < deadline
        time.sleep(0.001)
