"""The command line: what a user types, what comes back, and what a slip of the pen gets."""

import json
import os
import subprocess
import sys
import time
from dataclasses import fields, replace

import pytest

from angular_lab.cli.main import main
from angular_lab.config.named_runs import NAMED_RUNS, named_run
from angular_lab.config.overrides import count, keys, override
from angular_lab.config.spec import Spec
from angular_lab.experiments.comparison import EXPERIMENTS, SCALES, experiment, planned
from angular_lab.training import checkpoint

SMALL = (
    "steps=6", "batch=2", "eval_every=3", "eval_tokens=64", "save_every=3", "log_every=1",
    "model.sequence=32", "model.layers=1", "model.width=16", "model.heads=2", "model.mlp=32",
    "schedule.warmup=1",
)  # fmt: skip


def test_train_sample_branch_export(data, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert main(["train", "nano", f"data={data}", *SMALL, "--out", str(out)]) == 0
    assert (out / "DONE").exists()
    assert capsys.readouterr().out.strip() == str(out)
    assert main(["sample", str(out), "def ", "--length", "20"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert main(["sample", str(out), "def ", "--length", "20"]) == 0
    assert capsys.readouterr().out == first
    branch = tmp_path / "branch"
    assert main(["branch", str(out), "--at", "3", "--decay", "2", "--out", str(branch)]) == 0
    content = json.loads((branch / "spec.json").read_text())
    assert content["spec"]["parent"] == str(out)
    assert content["spec"]["steps"] == 5
    assert content["versions"]["torch"]
    assert main(["export", str(out), "--out", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_trunk_and_branches_in_one_command(data, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("it read a checkpoint"))
    out = tmp_path / "trunk"
    command = ["trunk", "nano", f"data={data}", *SMALL, "--horizons", "4,8", "--decay", "0.5"]
    assert main([*command, "--out", str(out)]) == 0
    assert capsys.readouterr().out.split() == [f"{out}-to4", f"{out}-to8"]
    assert main([*command, "--out", str(out)]) == 0, "finished parts are not run again"


def test_show_tells_the_run_before_it_runs(capsys) -> None:
    assert main(["show", "dense-124m"]) == 0
    text = capsys.readouterr().out
    assert "parameters   123," in text
    assert "matrix in 3 blocks: 12 parameters" in text
    assert "2,499,805,184" in text  # 4768 steps of 524,288
    assert "AngularMuown" in text


@pytest.mark.parametrize("name", NAMED_RUNS)
def test_every_recipe_can_be_shown(name, capsys) -> None:
    assert main(["show", name]) == 0
    assert "operations" in capsys.readouterr().out


def test_recipes_lists_them(capsys) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMED_RUNS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nanoo"], "unknown recipe 'nanoo': did you mean nano?"),
        (["train", "nano", "step=3"], "unknown key 'step'; did you mean steps?"),
        (["train", "nano", "optim.rl=3"], "unknown key 'optim.rl'; did you mean optim.lr?"),
        (["train", "nano", "lr=3"], "unknown key 'lr'; did you mean optim.lr?"),
        (["train", "nano", "steps=many"], "steps=many: steps wants a whole number"),
        (["train", "nano", "optim.lr=fast"], "optim.lr wants a number"),
        (["train", "nano", "compile=maybe"], "compile wants true or false"),
        (["train", "nano", "optim=muon"], "'optim' has parts"),
        (["train", "nano", "steps.x=1"], "unknown key 'steps.x'"),
        (["train", "nano", "steps=-3"], "steps=-3: it must be at least 1"),
        (["train", "nano", "steps=inf"], "steps wants a whole number"),
        (["train", "nano", "keep=0"], "keep=0: it must be at least 1"),
        (["train", "nano", "precision=fp16"], "precision=fp16: it must be bf16 or fp32"),
        (["train", "nano", "on_nan=foo"], "on_nan=foo: it must be stop or skip"),
        (["train", "nano", "parallel=magic"], "parallel=magic: it must be ddp or fsdp"),
        (["train", "nano", "pins=abc"], "pins=abc: write steps"),
        (["train", "nano", "schedule.kind=up"], "schedule.kind=up: it must be wsd"),
        (["trunk", "nano", "--horizons", "2"], "a cool-down of 0.2 of 2 steps"),
        (["train", "nano", "faster"], "'faster' is no override: write key=value"),
        (["train", "nano", "data=nowhere"], "no such folder"),
        (["train", "nano", "schedule.warmup=301"], "schedule.warmup=301: the run has 300 steps"),
        (["train", "nano", "schedule.warmup=-1"], "schedule.warmup=-1: it must be at least 0"),
        (["train", "nano", "schedule.decay=1.5"], "schedule.decay=1.5: it must be between 0 and 1"),
        (["train", "nano", "schedule.decay=-1"], "schedule.decay=-1: it must be between 0 and 1"),
        (["train", "nano", "schedule.decay=nan"], "schedule.decay=nan: it must be between 0"),
        (
            ["train", "nano", "schedule.decay_steps=301"],
            "schedule.decay_steps=301: the run has",
        ),
        (["train", "nano", "clip=-1"], "clip=-1: it must be at least 0"),
        (["train", "nano", "tensor=2"], "tensor=2 in one process: start it with torchrun"),
        (["train", "nano", "--device", "gpu"], "--device gpu: it must be cpu or cuda"),
        (["train", "nano", "--device", "mps"], "--device mps: it must be cpu or cuda"),
        (["train", "nano", "loggers=paper"], "loggers=paper: 'paper' is not one of tensorboard"),
        (["trunk", "nano", "--horizons", "20"], "schedule.warmup=20: the run has 16 steps"),
        (["trunk", "nano", "--horizons", "99", "--decay", "1.5"], "a cool-down of 1.5 of 99 steps"),
        (["show", "nano", "steps=10"], "schedule.warmup=20: the run has 10 steps"),
        (
            ["sample", "nowhere", "x", "--temperature", "-1"],
            "--temperature -1: it must be at",
        ),
        (["sample", "nowhere", "x", "--temperature", "nan"], "--temperature nan: it must be at"),
        (["sample", "nowhere", "x", "--length", "-1"], "--length -1: it must be at least 0"),
        (["sample", "nowhere", "x"], "no run folder"),
        (["prepare", "--tokenizer", "bytes", "--out", "x"], "either files"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, capsys, tmp_path) -> None:
    extra = ["--out", str(tmp_path / "all" / "run")] if arguments[0] in ("train", "trunk") else []
    assert main([*arguments, *extra]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_settings_may_stand_behind_options(data, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert main(["train", "nano", "--out", str(out), f"data={data}", *SMALL]) == 0
    with pytest.raises(SystemExit):
        main(["train", "nano", "--outt", str(out), "steps=1"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["sweep", "teaser", "--scale", "nano", "model.vocabulary=300"])
    assert "unrecognized: model.vocabulary=300" in capsys.readouterr().err


def test_a_start_that_failed_leaves_the_folder_free(data, tmp_path) -> None:
    out = tmp_path / "run"
    assert main(["train", "nano", "data=nowhere", *SMALL, "--out", str(out)]) == 2
    assert not out.exists()
    assert main(["train", "nano", f"data={data}", *SMALL, "--out", str(out)]) == 0


def test_sigterm_leaves_with_code_75(data, tmp_path) -> None:
    out = tmp_path / "run"
    command = ["train", "nano", f"data={data}", *SMALL, "steps=100000", "save_every=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "angular_lab", *command, "--out", str(out)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "stopped: saved at step" in error
    assert len(list((out / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(("index", "words"), [("", "torch finds no CUDA"), (":7", "no CUDA")])
def test_cuda_where_there_is_none(index, words, data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "run"
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(out)]
    assert main([*command, "--device", f"cuda{index}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --device cuda{index}: ")
    assert words in error
    assert not out.exists()


def test_a_cuda_device_that_is_not_there(data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(tmp_path / "run")]
    assert main([*command, "--device", "cuda:2"]) == 2
    assert "--device cuda:2: there are 2 CUDA devices here, from 0" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert main([*command, "--device", "cuda"]) == 2
    assert "LOCAL_RANK=2: there are 2 CUDA devices here, from 0" in capsys.readouterr().err


def test_tensor_ranks_of_a_run_may_become_one_process(data, tmp_path) -> None:
    """A checkpoint continues at any number of ranks; only a new run needs them."""
    out = str(tmp_path / "run")
    command = ["train", "nano", f"data={data}", *SMALL, "--out", out]
    assert main(command) == 0
    content = json.loads((tmp_path / "run" / "spec.json").read_text())
    content["spec"]["tensor"] = 2
    (tmp_path / "run" / "spec.json").write_text(json.dumps(content))
    assert main([*command, "tensor=2", "--resume", "3"]) == 0


def test_wandb_without_a_key_is_one_line(data, tmp_path) -> None:
    out = tmp_path / "run"
    command = ["train", "nano", f"data={data}", *SMALL, "loggers=wandb", "--out", str(out)]
    kept = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    environment = {**kept, "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
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


def test_every_planned_run_can_start() -> None:
    for scale in SCALES:
        for name in EXPERIMENTS:
            plan = experiment(name, scale)
            for line in plan.lines:
                for horizon in plan.horizons:
                    replace(line.spec, steps=horizon).check()


def test_git_is_not_needed(data, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["train", "nano", f"data={data}", *SMALL, "--out", str(tmp_path / "run")]) == 0


def test_an_unknown_optimizer_is_told_the_known_ones(data, tmp_path, capsys) -> None:
    command = ["train", "nano", f"data={data}", *SMALL, "optim.name=adam", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "one of adamw, muon" in capsys.readouterr().err


def test_another_column_is_another_corpus(tmp_path, capsys) -> None:
    source = tmp_path / "docs.jsonl"
    rows = [{"a": f"first {i} " * 9, "b": f"second {i} " * 9} for i in range(60)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["prepare", str(source), "--tokenizer", "bytes", "--val-fraction", "0.2"]
    command += ["--out", str(tmp_path / "data"), "--workers", "1"]
    assert main([*command, "--column", "a"]) == 0
    assert main([*command, "--column", "b"]) == 2
    assert "[b]" in capsys.readouterr().err


def test_prepare_from_files(tmp_path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(f"document {i} says hello" for i in range(200)))
    out = tmp_path / "data"
    command = ["prepare", str(text), "--tokenizer", "train:300", "--val-fraction", "0.1"]
    assert main([*command, "--out", str(out), "--workers", "1"]) == 0
    train, val = (
        json.loads((out / "manifest.json").read_text())["splits"][s] for s in ("train", "val")
    )
    told = capsys.readouterr().err
    assert f"train: {train['tokens']:,} tokens, {train['documents']} documents" in told
    assert f"val: {val['tokens']:,} tokens, {val['documents']} documents" in told
    assert ("fewer than 20 documents" in told) == (val["documents"] < 20)
    assert main([*command, "--out", str(out), "--workers", "1"]) == 0, "finished: nothing to do"
    run = ["train", "nano", f"data={out}", *SMALL, "model.vocabulary=300"]
    assert main([*run, "model.sequence=16", "--out", str(tmp_path / "run")]) == 0
    for name in ("teaser", "width"):
        small, large = experiment(name, "nano"), planned(name, "nano", str(out))
        assert {line.spec.model.vocabulary for line in small.lines} == {257}
        assert {line.spec.model.vocabulary for line in large.lines} == {300}
    assert planned("teaser", "s", str(out)) == experiment("teaser", "s"), "it has more already"


def test_overrides_reach_every_key_and_keep_types() -> None:
    spec = named_run("nano")
    for key in keys(spec):
        value = spec
        for part in key.split("."):
            value = getattr(value, part)
        assert override(spec, [f"{key}={value}"]) == spec, key
    assert override(spec, ["optim.lr=0.5", "compile=true"]).optim.lr == 0.5
    assert {f.name for f in fields(Spec)} >= {"steps", "seed", "data", "eval_every", "save_every"}


@pytest.mark.parametrize(
    ("text", "number"), [("3B", 3 * 10**9), ("2.5M", 2_500_000), ("10k", 10**4)]
)
def test_counts_may_have_units(text, number) -> None:
    assert count(text) == number


def test_a_spec_survives_json() -> None:
    for make in NAMED_RUNS.values():
        spec = make()
        assert Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
