"""The check before a run: every finding has a case that fails, and nothing stays on the disk."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_lab import check
from angular_lab.check import Finding, quick_check
from angular_lab.cli.main import main
from angular_lab.config.overrides import override
from angular_lab.config.spec import Spec
from angular_lab.data.shards import Manifest
from angular_lab.training import build
from angular_lab.training.build import OPTIMIZER_NAMES
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.start import train
from angular_lab.training.trainer import Trainer
from tests.lab.runs import SMALL, tiny

GB = 10**9


def sound(data: Path) -> Spec:
    """Return a run without a warning."""
    return override(tiny(data), ["optim.decay_scale=0.5"])


def found(spec: Spec, folder: Path, part: str) -> list[Finding]:
    return [x for x in quick_check(spec, folder, "cpu") if x.part == part and x.status != "ok"]


def set_free_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_a_sound_run_has_no_problem(data: Path, tmp_path: Path) -> None:
    findings = quick_check(sound(data), tmp_path / "run", "cpu")
    assert {x.status for x in findings} <= {"ok", "note"}
    parts = [x.part for x in findings]
    assert parts == ["settings", "vocabulary", "passes", "validation", "schedule", "disk", "state"]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("settings", "part", "status", "text", "advice"),
    [
        (["model.layers=0"], "settings", "error", "model.layers=0: it must be at least 1", ""),
        (["optim.name=adam"], "settings", "error", "optim.name=adam: it must be one of", ""),
        (["data=nowhere"], "settings", "error", "data=nowhere: no such folder", ""),
        (["loggers=paper"], "loggers", "error", "loggers=paper: it must be one of", ""),
        (["model.vocabulary=200"], "vocabulary", "error", "has 257 entries, but model.vocabulary",
         "set model.vocabulary=257"),
        (["model.vocabulary=1000"], "vocabulary", "warning", "743 of the model's 1,000 entries",
         "set model.vocabulary=257"),
        (["steps=1M"], "passes", "warning", "passes over", "prepare more text"),
        (["eval_tokens=1B"], "validation", "warning", "fewer than eval_tokens=1000000000",
         "--val-fraction"),
        (["eval_every=none"], "validation", "warning", "the run has no validation loss",
         "set eval_every"),
        (["model.sequence=1M"], "validation", "error", "not one sequence of 1,000,000",
         "--val-fraction"),
        (["eval_every=50"], "schedule", "warning", "only the last one is evaluated",
         "lower eval_every to 1"),
        (["schedule.decay=0.01"], "schedule", "warning", "cooldown over 0.01 of 12 steps has none",
         "raise schedule.decay"),
        (["schedule.decay=1"], "schedule", "warning", "the cooldown starts at step 0, during the "
         "warmup of 2", "lower schedule.warmup"),
        (["optim.decay_scale=1e-3", "schedule.decay=0.4"], "schedule", "warning",
         "in 12 steps kappa falls only to 0.99", "schedule.decay=0.5 lowers the angle"),
    ],
)  # fmt: skip
def test_each_problem_is_found(
    data: Path, tmp_path: Path, settings: list[str], part: str, status: str, text: str, advice: str
) -> None:
    (finding,) = found(override(sound(data), settings), tmp_path / "run", part)
    assert finding.status == status
    assert text in finding.text
    assert advice in finding.advice


def test_kappa_is_checked_only_where_it_alone_lowers_the_angle(data: Path, tmp_path: Path) -> None:
    for name in ("adamw", "muon"):
        spec = override(tiny(data), [f"optim.name={name}", "optim.lr=0.01"])
        assert not found(spec, tmp_path / "run", "schedule")
    settings = "optim.decay_degree=0", "schedule.decay=0.5", "schedule.kind=cosine"
    for setting in (*settings, "schedule.decay_steps=2"):  # of a cooldown that was given in steps
        assert not found(override(tiny(data), [setting]), tmp_path / "run", "schedule")
    (finding,) = found(override(tiny(data), ["schedule.decay=0"]), tmp_path / "run", "schedule")
    assert "has none" in finding.text, "one warning for a cooldown that is missing"


def test_the_disk_must_hold_all_checkpoints(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = sound(data)
    size = check._plan(spec, tmp_path, "cpu").checkpoint_bytes
    # saved at 4, 8, 9 (pinned) and 12; keep is 2: while 12 is written, 4, 8 and 9 are there
    set_free_disk(monkeypatch, 4 * size)
    assert not found(spec, tmp_path / "run", "disk")
    set_free_disk(monkeypatch, 4 * size - 50_000)
    (finding,) = found(spec, tmp_path / "deep" / "er" / "run", "disk")
    assert finding.status == "error"
    assert finding.text.startswith("4 checkpoints of ")
    assert finding.advice == "free 50 kB more, or lower keep"
    assert not found(replace(spec, save_every=None), tmp_path / "run", "disk"), "fewer are saved"


EIGHT_BIT = ["precision=bf16_weights", "optim.state_dtype=int8"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, []) for name in OPTIMIZER_NAMES),
        ("muon", EIGHT_BIT),
        ("muon", ["optim.slow_share=0.5"]),
    ],
)
def test_a_checkpoint_is_as_large_as_computed(
    data: Path, tmp_path: Path, name: str, more: list[str]
) -> None:
    """Of a model that is large enough to hide the files' headers."""
    settings = [*more, f"optim.name={name}", "optim.lr=0.001", "steps=1", "schedule.warmup=0",
                "model.width=192", "model.mlp=512", "average=0.5", "angle_every=none"]  # fmt: skip
    spec = override(sound(data), settings)
    train(spec, tmp_path / "run", device="cpu")
    written = sum(p.stat().st_size for p in tmp_path.glob("run/checkpoints/*/**/*") if p.is_file())
    computed = check._plan(spec, tmp_path, "cpu").checkpoint_bytes
    assert written <= computed <= 1.12 * written


def test_sixteen_and_eight_bits_need_less(data: Path, tmp_path: Path) -> None:
    plans = [check._plan(override(sound(data), x), tmp_path, "cpu") for x in ([], EIGHT_BIT)]
    weights = [build.weight_bytes(plan.model) for plan in plans]
    states = [build.state_bytes(plan.optimizer) for plan in plans]
    matrices = sum(
        p.numel()
        for group in plans[0].optimizer.param_groups
        for p in group["params"]
        if group["algorithm"] == "matrix"
    )
    assert weights[0] - weights[1] == 2 * matrices
    assert 2 * matrices < states[0] - states[1] < 3 * matrices


def test_what_a_trial_keeps_in_memory_counts(data: Path) -> None:
    """Extrapolation: weights before the move, and displacements. A slow average: gradients."""
    settings = {"usual": [], "average": ["average=0.5"], "ahead": ["extrapolate.strength=0.5"],
                "slow": ["optim.slow_share=0.5"]}  # fmt: skip
    size, parts = {}, {name: override(sound(data), words) for name, words in settings.items()}
    for name, spec in parts.items():
        model, optimizer = build.without_memory(spec)
        size[name] = build.training_bytes(spec, model, optimizer)
    weights = build.weight_bytes(model)
    assert size["average"] - size["usual"] == weights
    assert size["ahead"] - size["usual"] == 2 * weights
    matrices = sum(p.numel() for p in build.matrices(optimizer))
    assert size["slow"] - size["usual"] == 4 * matrices


def test_a_folder_without_tokens_is_an_error_of_its_own(data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    spec = override(sound(data), [f"data={tmp_path / 'empty'}"])
    (finding,) = check.quick_check(spec, tmp_path / "run", "cpu")
    assert finding.text.endswith("empty: no training tokens")
    assert finding.advice == "make them with angular-lab prepare"


def test_weights_must_fit_into_the_memory(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = sound(data)
    plan = check._plan(spec, tmp_path, "cpu")
    needed = 8 * plan.parameters + build.state_bytes(plan.optimizer)
    monkeypatch.setattr(check, "device_memory", lambda _: needed)
    assert not found(spec, tmp_path / "run", "state")
    monkeypatch.setattr(check, "device_memory", lambda _: needed - 1)
    (finding,) = found(spec, tmp_path / "run", "state")
    assert finding.status == "error"
    monkeypatch.setattr(check, "device_memory", lambda _: None)
    assert not found(spec, tmp_path / "run", "state")


def test_shards_without_a_manifest_are_counted(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "shards")
    manifest = Manifest.load(data)
    assert manifest is not None
    (tmp_path / "shards" / "manifest.json").unlink()
    assert check.validation_tokens(tmp_path / "shards") == check.validation_tokens(data)
    assert check.validation_tokens(data) == manifest.splits["val"].tokens
    (finding,) = found(sound(tmp_path / "shards"), tmp_path / "run", "vocabulary")
    assert finding.status == "note"


@pytest.fixture
def command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    settings = [
        *SMALL,
        "angle_every=none",
        "optim.decay_scale=1",
        f"data={data}",
        "--device",
        "cpu",
    ]
    return lambda name, *more: [name, "nano", *settings, "--out", "run", *more]


def test_the_command_takes_a_real_step_and_leaves_nothing(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("check", "--json")) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["folder"], content["passed"]) == ("run", True)
    last = {x["part"]: x["text"] for x in content["findings"] if x["status"] == "ok"}
    assert "at most; available: " in last["memory"]
    assert last["time"].startswith("about ")
    assert "6 steps of " in last["time"]
    assert "2 evaluations of " in last["time"]
    assert not [*tmp_path.iterdir()]
    assert main(command("check", "eval_every=none")) == 0
    text = capsys.readouterr().out
    assert "WARNING  validation  eval_every=none: the run has no validation loss" in text
    assert "to do: set eval_every" in text
    assert text.endswith("\n1 warning\n")


def test_an_error_is_exit_code_2_and_no_step_is_taken(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(check, "measure")
    assert main(command("check", "model.vocabulary=200")) == 2
    text = capsys.readouterr().out
    assert "ERROR    vocabulary" in text
    assert "not taken: the errors come first" in text
    monkeypatch.setenv("RANK", "1")
    assert main(command("check", "model.vocabulary=200")) == 2
    assert not capsys.readouterr().out, "the first rank prints it"


@pytest.mark.parametrize(
    ("error", "text", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "a step does not fit", "set micro_batch=1"),
        (NotFinite("the loss of step 1 is nan"), "the loss of step 1 is nan", ""),
    ],
)
def test_a_step_that_fails_is_an_error(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: Exception, text: str, advice: str,
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Trainer, "forward_backward", fail)
    assert main(command("check", "--json")) == 2
    finding = json.loads(capsys.readouterr().out)["findings"][-1]
    assert (finding["part"], finding["status"]) == ("step", "error")
    assert text in finding["text"]
    assert finding["advice"] == advice


def test_memory_that_is_nearly_full_is_a_warning() -> None:
    ranks: Any = type("Ranks", (), {"device": torch.device("cuda")})
    for reserved, status in ((0.9, "ok"), (0.96, "warning")):
        measured = check.Measured(0.0, 1.0, 1.0, 0.5 * GB, reserved * GB, GB)
        assert check._memory_used(measured, ranks).status == status


def test_the_expected_time_counts_steps_evaluations_and_compilation() -> None:
    spec = Spec(steps=100, batch=1, eval_every=30)
    text = check._expected_time(spec, check.Measured(12.0, 0.5, 2.0, 0, 0, None)).text
    assert text == (
        "about 1:10 without checkpoints: 100 steps of 0.5 s, 4 evaluations of 2 s, compiling "
        "12.0 s; 2.05k tokens/s"
    )
    one = replace(spec, steps=1)
    text = check._expected_time(one, check.Measured(0.0, 0.5, 2.0, 0, 0, None)).text
    assert "1 step of 0.5 s, 1 evaluation of 2 s;" in text


@pytest.mark.parametrize("name", ["train", "trunk"])
def test_a_run_that_does_not_fit_on_the_disk_is_refused(
    command: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    set_free_disk(monkeypatch, 10_000)
    more = ["--horizons", "6", "--decay", "0.5"] if name == "trunk" else []
    assert main(command(name, *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "and the disk of run has 10 kB; free " in error
    assert not [*tmp_path.iterdir()]


def test_train_warns_once_and_a_resumed_run_is_silent(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("train", "optim.decay_scale=1e-3")) == 0
    warning = capsys.readouterr().err.splitlines()[0]
    assert warning.startswith("warning: in 6 steps kappa falls only to 1.00, and the cooldown is ")
    assert main(command("train", "optim.decay_scale=1e-3", "--resume", "auto")) == 0
    assert "warning" not in capsys.readouterr().err
