"""The command line: what its commands print, and how mistakes and bugs are reported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.config.named_runs import NAMED_RUNS
from angular_lab.errors import UserError
from angular_lab.run_folder import RunFolder
from angular_lab.training import checkpoint
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.signals import Preempted, WorkerDied
from tests.lab.runs import SMALL


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 6 steps. Tests that change it copy it."""
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "nano", f"data={data}", *SMALL, "--out", str(out)]) == 0
    return out


def test_a_run_can_be_sampled_branched_and_exported(run, tmp_path, capsys) -> None:
    assert RunFolder(run).done
    samples = []
    for _ in range(2):
        assert main(["sample", str(run), "def ", "--length", "20"]) == 0
        samples.append(capsys.readouterr().out)
    assert samples[0].startswith("def ")
    assert samples[0] == samples[1]
    branch = tmp_path / "branch"
    assert main(["branch", str(run), "--at", "3", "--decay", "2", "--out", str(branch)]) == 0
    assert capsys.readouterr().out == f"{branch}\n"
    info = RunFolder(branch).info
    assert (info.spec.parent, info.spec.parent_step, info.spec.steps) == (str(run), 3, 5)
    assert info.versions["torch"]
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_a_run_has_a_folder_of_its_own_by_default(data, tmp_path, monkeypatch, capsys) -> None:
    """The folder is named by what the losses depend on; other settings must stay the same too."""
    monkeypatch.chdir(tmp_path)
    command = ["train", "nano", f"data={data}", *SMALL, "steps=2"]
    assert main(command) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.parent == Path("runs")
    assert folder.name == RunFolder(folder).read_spec().folder_name(RunFolder(folder).info.data)
    assert main(command) == 2
    assert f"{folder} holds a run already: add --resume auto" in capsys.readouterr().err
    assert main([*command, "--resume", "auto"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert main([*command, "save_every=none", "--resume", "auto"]) == 2
    assert "was started with save_every=3 (now none): give the same" in capsys.readouterr().err
    assert main([*command, "seed=1"]) == 0
    assert len([*Path("runs").iterdir()]) == 2


def test_trunk_trains_a_trunk_and_its_cooldowns(data, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("it read a checkpoint"))
    out = tmp_path / "trunk"
    command = ["trunk", "nano", f"data={data}", *SMALL, "--horizons", "4,8", "--decay", "0.5"]
    assert main([*command, "--out", str(out)]) == 0
    assert capsys.readouterr().out.split() == [f"{out}-to4", f"{out}-to8"]
    assert checkpoint.steps(out / "checkpoints") == [2, 3, 4]
    assert RunFolder(f"{out}-to8").read_spec().parent == str(out)
    assert main([*command, "--out", str(out)]) == 0, "finished runs are not repeated"


def test_branches_leave_at_shares_of_the_steps(data, tmp_path, capsys) -> None:
    """A cooldown over the run's own share is the straight run of that length."""
    small, out = [f"data={data}", *SMALL, "schedule.decay=0.25"], tmp_path / "run"
    trunk = ["steps=15", "schedule.kind=constant", "pins=6,9,15", "keep=1"]
    assert main(["train", "nano", *small, *trunk, "--out", str(out)]) == 0
    capsys.readouterr()
    command = ["branch", str(out), "--at", "100%,40%,9"]
    assert main(command) == 0
    names = [f"{out}-at6-decay2", f"{out}-at9-decay3", f"{out}-at15-decay5"]
    assert capsys.readouterr().out.split() == names
    straight = tmp_path / "straight"
    assert main(["train", "nano", *small, "steps=12", "--out", str(straight)]) == 0
    made, expected = ((Path(f) / "metrics.jsonl").read_text() for f in (names[1], straight))
    assert made == "".join(expected.splitlines(True)[9:])
    assert main(["branch", str(out), "--at", "60%", "--decay", "50%"]) == 0
    assert RunFolder(f"{out}-at9-decay9").read_spec().steps == 18
    assert main([*command, "--resume", "auto"]) == 0, "what is finished is not repeated"


def test_no_branch_starts_if_one_of_them_cannot(run, tmp_path, capsys) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for arguments, message in (
        (["--at", "50%,4", "--decay", "2"], "has no checkpoint at step 4: it keeps [3, "),
        (["--at", "50%,100%", "--decay", "2"], "at step 6 the learning rate of"),
        (["--at", "50%,5", "--decay", "2", "--out", str(tmp_path / "x")], "--out is for one"),
        (["--at", "50%", "--decay", "100%"], "a cooldown over 1 of the steps: it must be"),
    ):
        assert main(["branch", str(copy), *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["branch", str(copy), "--at", "half"])
    assert "half: write steps, or a share like 80%" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_show_describes_a_run_before_it_starts(capsys) -> None:
    assert main(["show", "dense-124m"]) == 0
    text = capsys.readouterr().out
    assert "parameters   123," in text
    assert "matrix in 3 blocks: 12 parameters" in text
    assert "2,499,805,184" in text  # 4768 steps of 524,288
    assert "AngularMuown" in text


@pytest.mark.parametrize("name", NAMED_RUNS)
def test_every_named_run_is_listed_and_can_be_shown(name, capsys) -> None:
    assert main(["named-runs"]) == 0
    assert name in capsys.readouterr().out
    assert main(["show", name]) == 0
    assert "operations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nanoo"], "unknown run 'nanoo': did you mean nano?"),
        (["train", "xyz"], "unknown run 'xyz'. The named runs are "),
        (["train", "nano", "step=3"], "unknown key 'step'; did you mean steps?"),
        (["train", "nano", "data=nowhere"], "data=nowhere: no such folder"),
        (["train", "nano", "schedule.warmup=301"], "schedule.warmup=301: the run has 300 steps"),
        (["train", "nano", "tensor=2"], "tensor=2 in one process: start it with torchrun"),
        (["train", "nano", "--device", "gpu"], "--device gpu: it must be cpu or cuda"),
        (["train", "nano", "--device", "mps"], "--device mps: it must be cpu or cuda"),
        (["train", "nano", "--device", "cuda:x"], "--device cuda:x: it must be cpu or cuda"),
        (["train", "nano", "loggers=paper"], "loggers=paper: it must be one of tensorboard"),
        (["train", "nano", "optim.name=adam"], "optim.name=adam: it must be one of adamw, muon"),
        (["train", "nano", "optim.beta1=2"], "optim: betas=(2.0, 0.95) is not valid"),
        (["train", "nano", "optim.name=adamw", "optim.lr=-1"], "optim: Invalid learning rate"),
        (["train", "nano", "model.mlp=0"], "model.mlp=0: it must be at least 1, or none"),
        (["train", "nano", "model.init_std=-1"], "model.init_std=-1: it must be at least 0"),
        (["trunk", "nano", "--horizons", "2"], "a cooldown over 0.2 of 2 steps has 0"),
        (["trunk", "nano", "--horizons", "20"], "schedule.warmup=20: the run has 16 steps"),
        (["trunk", "nano", "--horizons", "99", "--decay", "nan"], "a cooldown over nan of the"),
        (["show", "nano", "steps=10"], "schedule.warmup=20: the run has 10 steps"),
        (["sample", "nowhere", "x", "--temperature", "-1"], "--temperature -1: it must be at"),
        (["sample", "nowhere", "x", "--temperature", "nan"], "--temperature nan: it must be at"),
        (["sample", "nowhere", "x", "--length", "-1"], "--length -1: it must be at least 0"),
        (["sample", "nowhere", "x"], "nowhere is not a run folder: it has no spec.json"),
        (["prepare", "--tokenizer", "bytes", "--out", "x"], "give either files"),
        (["demo", "--steps", "0"], "steps=0: it must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments, message, data, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] in ("train", "trunk"):
        named = any(word.startswith("data=") for word in arguments)
        arguments = [*arguments, *([] if named else [f"data={data}"]), "--out", "store/run"]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1
    assert not [*tmp_path.iterdir()], "nothing is written"


def test_the_traceback_of_a_mistake_can_be_shown() -> None:
    with pytest.raises(UserError, match="unknown run 'nanoo'"):
        main(["train", "nanoo", "--traceback"])


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (UserError("wrong"), 2, "error: wrong"),
        (OSError("disk full"), 2, "error: disk full"),
        (ImportError("no numpy"), 2, "error: no numpy"),
        (NotFinite("loss is nan"), 3, "error: loss is nan"),
        (WorkerDied("killed"), 4, "error: killed"),
        (Preempted("saved"), 75, "stopped: saved"),
        (KeyboardInterrupt("not saved"), 130, "interrupted: not saved"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_codes(error, exit_code, line, monkeypatch, capsys) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("angular_lab.show.describe", fail)
    assert main(["show", "nano"]) == exit_code
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("bug", [ValueError, KeyError, TypeError, RuntimeError, AssertionError])
def test_a_bug_keeps_its_traceback(bug, monkeypatch, capsys) -> None:
    def fail(_: object) -> None:
        raise bug("a bug")

    monkeypatch.setattr("angular_lab.show.describe", fail)
    with pytest.raises(bug, match="a bug"):
        main(["show", "nano"])
    assert capsys.readouterr().err == ""


def test_a_run_of_the_first_edition_names_the_command_that_converts_it(tmp_path, capsys) -> None:
    """Its spec.json has no format."""
    old = tmp_path / "old"
    old.mkdir()
    content = {"spec": {"recipe": "nano", "pins": ""}, "versions": {}, "git": {}, "data": ""}
    (old / "spec.json").write_text(json.dumps(content))
    (old / "metrics.jsonl").write_text('{"step": 1}\n')
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    for command in (
        ["sample", str(old), "x"],
        ["export", str(old), "--out", str(tmp_path / "hf")],
        ["branch", str(old), "--at", "3", "--decay", "2"],
        ["train", "nano", "--out", str(old), "--resume", "auto"],
    ):
        assert main(command) == 2
        expected = f"error: {old} was written by an earlier version: convert it with "
        assert capsys.readouterr().err.startswith(f"{expected}angular-lab convert-runs {old} --out")
    assert {path.name: path.read_bytes() for path in old.iterdir() if path.name != "LOCK"} == before


def test_settings_may_follow_options(data, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert main(["train", "nano", "--out", str(out), f"data={data}", *SMALL, "steps=2"]) == 0
    with pytest.raises(SystemExit):
        main(["train", "nano", "--outt", str(out), "steps=1"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["sweep", "teaser", "--scale", "nano", "model.vocabulary=300"])
    assert "unrecognized: model.vocabulary=300" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["trunk", "nano", "--horizons", "4,many"])
    assert (
        "--horizons: '4,many': write numbers of steps of at least 2, separated"
        in capsys.readouterr().err
    )


def test_a_failed_start_leaves_the_folder_free(data, tmp_path) -> None:
    command = ["train", "nano", *SMALL, "steps=2", "--out", str(tmp_path / "run")]
    assert main([*command, "data=nowhere"]) == 2
    assert main([*command, f"data={data}"]) == 0


@pytest.mark.parametrize("index", ["", ":7"])
def test_cuda_without_a_cuda_device(index, data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "run"
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(out)]
    assert main([*command, "--device", f"cuda{index}"]) == 2
    expected = f"error: --device cuda{index}: torch finds no CUDA device here"
    assert capsys.readouterr().err.startswith(expected)
    assert not out.exists()


def test_a_cuda_device_that_does_not_exist(data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(tmp_path / "run")]
    assert main([*command, "--device", "cuda:2"]) == 2
    assert "--device cuda:2: there are 2 CUDA devices here, from 0" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert main([*command, "--device", "cuda"]) == 2
    assert "LOCAL_RANK=2: there are 2 CUDA devices here, from 0" in capsys.readouterr().err


def test_one_process_resumes_a_run_of_tensor_ranks(data, run, tmp_path) -> None:
    """A checkpoint can be resumed on any number of ranks; only a new run needs them."""
    out = tmp_path / "run"
    shutil.copytree(run, out)
    content = json.loads((out / "spec.json").read_text())
    content["spec"]["tensor"] = 2
    (out / "spec.json").write_text(json.dumps(content))
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(out)]
    assert main([*command, "tensor=2", "--resume", "3"]) == 0


def test_wandb_without_a_key_is_one_line(data, tmp_path) -> None:
    out = tmp_path / "run"
    command = ["train", "nano", f"data={data}", *SMALL, "loggers=wandb", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    environment |= {"HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "angular_lab", *command],
        env=environment, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: loggers=wandb: ")
    assert "WANDB_API_KEY" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()
    assert not (tmp_path / "wandb").exists()


def test_git_is_not_needed(data, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    command = ["train", "nano", f"data={data}", *SMALL, "steps=2", "--out", str(tmp_path / "run")]
    assert main(command) == 0
