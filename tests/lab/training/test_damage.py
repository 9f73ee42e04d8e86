"""Damaged checkpoints are detected before they are loaded; the message names a good step."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from angular_lab.cli.main import main
from angular_lab.log import configure_logging
from angular_lab.run_folder import RunFolder
from angular_lab.sample import load_run
from angular_lab.training import checkpoint
from angular_lab.training.start import branch_spec, train
from tests.lab.runs import LIMIT, SMALL, free_port, lines, start, stopped_copy, tiny, train_on

FILES = ["__0_0.distcp", ".metadata"]


def _folder(run: Path, step: int) -> Path:
    return checkpoint.step_folder(run / "checkpoints", step)


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A run of 12 steps with checkpoints at 4, 8 and 9 that was killed after step 9."""
    out = stopped_copy(whole, tmp_path / "run", 9)
    assert checkpoint.steps(out / "checkpoints") == [4, 8, 9]
    return out


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_detected_and_the_newest_good_step_named(data, run, name) -> None:
    for step in (8, 9):
        _flip_bit(_folder(run, step) / name)
    before = lines(run)
    with pytest.raises(
        ValueError, match=rf"step_00000009 is damaged: {name} .*step is 4.*--from 4"
    ):
        train(tiny(data, keep=9), run, resume=True, device="cpu")
    assert lines(run) == before
    assert checkpoint.steps(run / "checkpoints") == [4, 8, 9]


def test_a_file_that_is_missing_or_shorter_is_detected(run) -> None:
    part = _folder(run, 9) / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"damaged: __0_0.distcp does not match its hash"):
        load_run(run)
    part.unlink()
    with pytest.raises(ValueError, match=r"damaged: __0_0.distcp is missing"):
        load_run(run)


def test_hashes_that_cannot_be_read_are_damage(run) -> None:
    (_folder(run, 9) / checkpoint.HASHES).write_text("{")
    with pytest.raises(ValueError, match=r"damaged: hashes.json cannot be read.*--step 8"):
        load_run(run)


def test_a_run_without_a_good_checkpoint_is_reported(run) -> None:
    for step in (4, 8, 9):
        _flip_bit(_folder(run, step) / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"no other checkpoint in .* has hashes that match"):
        load_run(run)


def test_resuming_at_a_step_replaces_what_came_after_it(data, run, whole) -> None:
    _flip_bit(_folder(run, 9) / "__0_0.distcp")
    train(tiny(data, keep=9), run, resume=True, resume_step=8, device="cpu")
    assert lines(run) == lines(whole)
    assert checkpoint.steps(run / "checkpoints") == [4, 8, 9, 12]
    load_run(run, step=9)


def test_a_kill_after_resuming_at_a_step_leaves_no_gap_in_the_log(
    data, run, whole, monkeypatch
) -> None:
    """The next resume must not find the later checkpoint whose log lines are gone."""
    (run / "DONE").touch()
    with monkeypatch.context() as patch:
        patch.setattr("angular_lab.training.trainer.Trainer.train", lambda self: None)
        train(tiny(data, keep=9), run, resume=True, resume_step=4, device="cpu")
    assert checkpoint.steps(run / "checkpoints") == [4]
    assert not RunFolder(run).done
    train(tiny(data, keep=9), run, resume=True, device="cpu")
    assert lines(run) == lines(whole)


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half(data, run, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            checkpoint.drop_after(run / "checkpoints", 4)
    assert checkpoint.steps(run / "checkpoints") == [4, 9]
    train(tiny(data, keep=9), run, resume=True, device="cpu")
    assert not list((run / "checkpoints").glob(".*"))


def test_a_finished_run_can_be_resumed_at_a_step(data, whole, tmp_path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    _flip_bit(_folder(out, 12) / "__0_0.distcp")
    train(tiny(data, keep=9), out, resume=True, resume_step=9, device="cpu")
    assert RunFolder(out).done
    assert lines(out) == lines(whole)
    load_run(out)


def test_the_command_line_chooses_steps(data, tmp_path, capsys) -> None:
    out = str(tmp_path / "run")
    command = ["train", "nano", f"data={data}", *SMALL, "--out", out]
    assert main(command) == 0
    _flip_bit(_folder(tmp_path / "run", 6) / "__0_0.distcp")
    capsys.readouterr()
    export = ["export", out, "--out", str(tmp_path / "hf"), "--overwrite"]
    for reading in (["sample", out, "def ", "--length", "5"], export):
        assert main(reading) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: checkpoint ")
        assert error.endswith("--step 5\n")
        assert main([*reading, "--step", "5"]) == 0
        capsys.readouterr()
        assert main([*reading, "--step", "4"]) == 2
        assert "no checkpoint at step 4; it has 3, 5, 6" in capsys.readouterr().err
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert main([*command, "--resume", "4"]) == 2
    assert "no checkpoint at step 4; it has 3, 5, 6" in capsys.readouterr().err
    assert main([*command, "--resume", "3"]) == 0
    with pytest.raises(SystemExit):
        main([*command, "--resume", "newest"])
    assert "newest: write auto, never or a step" in capsys.readouterr().err


def test_a_step_can_be_chosen_for_sampling(run) -> None:
    older, newer = load_run(run, step=4), load_run(run)
    assert not torch.equal(older.lm_head.weight, newer.lm_head.weight)
    assert torch.equal(load_run(run, step=9).lm_head.weight, newer.lm_head.weight)


def test_a_new_run_cannot_resume_at_a_step(data, tmp_path) -> None:
    with pytest.raises(ValueError, match="no checkpoint at step 4; it has none"):
        train(tiny(data), tmp_path / "run", resume=True, resume_step=4, device="cpu")
    assert not RunFolder(tmp_path / "run").started


def test_a_branch_from_a_damaged_step_names_a_good_one(data, run, tmp_path) -> None:
    spec = branch_spec(RunFolder(run), 9, 2)
    _flip_bit(_folder(run, 9) / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"newest good step is 8: .*--at 8"):
        train(spec, tmp_path / "branch", device="cpu")


def test_checkpoints_without_hashes_still_load(data, run, whole, capsys) -> None:
    """Earlier versions saved none."""
    (_folder(run, 9) / checkpoint.HASHES).unlink()
    configure_logging()
    train(tiny(data, keep=9), run, resume=True, device="cpu")
    assert lines(run) == lines(whole)
    assert "step_00000009 has no hashes: loaded without a check" in capsys.readouterr().err


def test_large_files_are_hashed_in_pieces(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 10)
    path = tmp_path / "file"
    digests = set()
    for content in (b"", b"a" * 9, b"a" * 10, b"a" * 11, b"a" * 30, b"a" * 20 + b"b" + b"a" * 9):
        path.write_bytes(content)
        digests.add(checkpoint.digest(path, 10))
    assert len(digests) == 6


def test_ranks_share_the_hashing(data, tmp_path) -> None:
    out = tmp_path / "run"
    spec = tiny(data, parallel="fsdp")
    train_on(2, spec, out)
    hashes = json.loads((_folder(out, 12) / checkpoint.HASHES).read_text())
    assert set(hashes["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    load_run(out)
    (out / "DONE").unlink()
    _flip_bit(_folder(out, 12) / "__1_0.distcp")
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [start(spec, out, RANK=str(i), LOCAL_RANK=str(i), **common) for i in range(2)]
    for rank in ranks:
        rank.join(LIMIT)
        assert rank.exitcode not in (0, None, -signal.SIGKILL), "every rank refuses"


def test_a_file_that_the_disk_cannot_read_is_damage(run, monkeypatch) -> None:
    """It names the newest good step, as for a flipped bit."""
    digest, bad = checkpoint.digest, _folder(run, 9)

    def read(path: Path, piece: int) -> str:
        if path.parent == bad:
            raise OSError(5, "Input/output error")
        return digest(path, piece)

    monkeypatch.setattr(checkpoint, "digest", read)
    with pytest.raises(ValueError, match=r"cannot be read .*Input/output.*newest good step is 8"):
        load_run(run)


def test_the_record_of_a_stop_is_removed_when_the_run_cannot_continue(data, run) -> None:
    """A script that requeues stopped runs would try it again and again."""
    RunFolder(run).record_stop(75, 9)
    _flip_bit(_folder(run, 9) / FILES[0])
    with pytest.raises(ValueError, match="is damaged"):
        train(tiny(data, keep=9), run, resume=True, device="cpu")
    assert not (run / "STOPPED").exists()
