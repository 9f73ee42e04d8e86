"""What the commands say about wrong options, full disks, and files that exist."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.run_folder import RunFolder
from angular_lab.training import checkpoint
from angular_lab.training.start import train
from tests.lab.runs import SMALL, tiny


@pytest.mark.parametrize("text", ["abc", "0", "1", "10,,20", "", "5.5"])
def test_horizons_say_what_to_write(capsys, text) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trunk", "nano", "--horizons", text])
    assert stop.value.code == 2
    expected = f"--horizons: '{text}': write numbers of steps of at least 2, separated by commas"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("text", ["abc", "0", "10x", "", "1h30m", "nan", "-3h", "-5"])
def test_a_budget_says_what_to_write(capsys, text) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "teaser", "--budget", text])
    assert stop.value.code == 2
    expected = f"--budget: '{text}': write a time above 0, as in 540s, 30m or 2h"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.layers=0", "model.layers=0: it must be at least 1"),
        ("model.heads=5", "width=96"),
        ("model.kind=rnn", "model kind 'rnn' is not one of"),
        ("optim.name=adam", "optim.name=adam: it must be one of adamw, muon"),
        ("optim.beta1=2", "optim: betas=(2.0, 0.95) is not valid"),
        ("schedule.warmup=900", "schedule.warmup=900: the run has 300 steps"),
    ],
)
@pytest.mark.parametrize("command", ["show", "train", "trunk"])
def test_settings_that_cannot_run_leave_no_folder(
    data, tmp_path, monkeypatch, capsys, command, setting, message
) -> None:
    """`--out` decides what is created first: the run folder with its LOCK, or nothing."""
    monkeypatch.chdir(tmp_path)
    out = [] if command == "show" else ["--out", "store/run"]
    horizons = ["--horizons", "300"] if command == "trunk" else []
    if command == "trunk" and "warmup" in setting:
        message = "schedule.warmup=900: the run has 240 steps"
    assert main([command, "nano", f"data={data}", setting, *out, *horizons]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()], "nothing is created"


def test_resume_auto_from_nothing_says_so(data, tmp_path, capsys) -> None:
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(tmp_path / "run")]
    assert main([*command, "--resume", "auto", "--device", "cpu"]) == 0
    text = f"{tmp_path / 'run'}: nothing to resume, it starts from the beginning"
    assert text in capsys.readouterr().err
    assert main([*command, "--resume", "auto", "--device", "cpu"]) == 0
    assert "nothing to resume" not in capsys.readouterr().err


def test_a_full_disk_says_how_much_is_missing(data, tmp_path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    usage = shutil.disk_usage(tmp_path)
    with pytest.raises(OSError, match=r"file write failed; the last good one is step none"):
        train(tiny(data), tmp_path / "enough", device="cpu")
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(OSError, match="free") as error:
        train(tiny(data), tmp_path / "full", device="cpu")
    monkeypatch.undo()
    run = train(tiny(data), tmp_path / "sound", device="cpu")
    files = checkpoint.find(run.checkpoints).glob("__0_0*")
    size = sum(path.stat().st_size for path in files)
    words = str(error.value).split()
    takes = float(words[words.index("takes") + 1]) * 1000  # kB
    # tensors alone; the file has names and padding in addition
    assert 0.5 * size < takes <= size
    assert f"It takes {takes / 1000:g} kB and the disk has 5 kB" in str(error.value)
    assert f"free {(takes - 5000) / 1000:.0f}" in str(error.value)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("messages") / "run"
    return train(tiny(data), out, device="cpu").path


def test_an_export_is_readable_by_others_and_replaced_only_on_request(
    run, tmp_path, capsys
) -> None:
    out = tmp_path / "export"
    command = ["export", str(run), "--out", str(out)]
    before = os.umask(0o027)
    try:
        assert main(command) == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert modes == {"config.json": 0o640, "model.safetensors": 0o640}
    weights = (out / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main([*command, "--step", "8"]) == 2
    error = capsys.readouterr().err
    assert "holds config.json, model.safetensors already" in error
    assert "add --overwrite" in error
    assert (out / "model.safetensors").read_bytes() == weights
    (out / "tokenizer.json").write_text("of another run")
    (out / "README.md").write_text("mine")
    assert main([*command, "--step", "8", "--overwrite"]) == 0
    assert (out / "model.safetensors").read_bytes() != weights
    assert not (out / "tokenizer.json").exists(), "it would not match the weights"
    assert (out / "README.md").read_text() == "mine"
    (tmp_path / "file").touch()
    assert main(["export", str(run), "--out", str(tmp_path / "file")]) == 2


def test_export_speedrun_replaces_a_file_only_on_request(tmp_path, capsys) -> None:
    out = tmp_path / "train.py"
    out.write_text("mine")
    assert main(["export-speedrun", "--out", str(out)]) == 2
    assert f"--out {out} exists already: add --overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["export-speedrun", "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["export-speedrun", "--out", str(out), "--overwrite"]) == 0
    assert out.read_text().startswith('"""AngularMuown on the optimization track')


def test_trackio_does_not_warn(data, tmp_path) -> None:
    """In a process of its own: trackio starts threads and keeps files in the user's folder."""
    pytest.importorskip("trackio")
    command = [
        *(sys.executable, "-m", "angular_lab", "train", "nano"),
        *(f"data={data}", *SMALL, "optim.decay_scale=1", "loggers=trackio"),
        *("--device", "cpu", "--out", "run"),
    ]
    places = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **places}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    assert RunFolder(tmp_path / "run").done
