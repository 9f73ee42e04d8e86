"""What training writes apart from metrics.jsonl: samples of text, and the angle of every matrix."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from angular_lab.cli.main import main
from angular_lab.config.spec import CHANGEABLE
from angular_lab.data.batches import Tokens
from angular_lab.data.tokenizer import BytesTokenizer
from angular_lab.errors import UserError
from angular_lab.models import LanguageModel
from angular_lab.models.generate import continue_all
from angular_lab.run_folder import RunFolder
from angular_lab.sample import load_run
from angular_lab.training.start import train
from angular_muown import AngleMonitor
from tests.lab.runs import SMALL, stopped_copy, tiny


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    train(tiny(data), out, device="cpu")
    return out


@pytest.fixture(scope="module")
def sampled(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sampled") / "run"
    train(tiny(data, sample_every=5), out, device="cpu")
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_change_neither_the_log_nor_the_weights(plain: Path, sampled: Path) -> None:
    assert (sampled / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
    with_samples, without = load_run(sampled).state_dict(), load_run(plain).state_dict()
    assert all(bool((with_samples[name] == value).all()) for name, value in without.items())
    assert not (plain / "samples.jsonl").exists()
    spec = RunFolder(plain).read_spec()
    assert replace(spec, sample_every=5).identity("") == spec.identity("")
    assert "sample_every" in CHANGEABLE


def test_samples_continue_text_of_the_validation_split(sampled: Path, data: Path) -> None:
    written = lines(sampled / "samples.jsonl")
    assert [line["step"] for line in written] == [5, 5, 5, 10, 10, 10, 12, 12, 12]
    assert len({line["prompt"] for line in written}) == 3
    validation = Tokens(data, "val", 32, 257)
    first = validation.windows(np.array([0]))[0, :16]
    assert written[0]["prompt"] == BytesTokenizer().decode(first.tolist())
    assert all(line["text"] for line in written)
    assert written[0]["text"] != written[3]["text"], "the model has learned something"


def test_the_time_of_samples_is_not_that_of_evaluations(sampled: Path, plain: Path) -> None:
    times = lines(sampled / "timing.jsonl")
    assert [line["step"] for line in times if "sampling" in line] == [5, 10, 12]
    assert [line["step"] for line in times if "evaluating" in line] == [4, 8, 12]
    assert not any("sampling" in line for line in lines(plain / "timing.jsonl"))


def test_generating_leaves_the_random_numbers_and_the_mode_of_the_model(plain: Path) -> None:
    model = load_run(plain)
    before = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
        first, second = (continue_all(model, prompts, 40, 257) for _ in range(2))
        assert first.shape == (2, 43), "also beyond the model's sequence of 32"
        assert torch.equal(first, second)
        assert model.training == training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["samples", "angles"])
def test_a_resumed_run_writes_the_same_file(
    name: str, sampled: Path, data: Path, tmp_path: Path
) -> None:
    out = stopped_copy(sampled, tmp_path / "run", 8)
    train(tiny(data, sample_every=5), out, resume=True, device="cpu")
    path = f"{name}.jsonl"
    assert (out / path).read_bytes() == (sampled / path).read_bytes()


def test_sample_every_is_an_option_of_train(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "nano",
        *SMALL,
        f"data={data}",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "a"),
    ]
    assert main([*words, "--sample-every", "6"]) == 0
    (first, *_) = lines(tmp_path / "a" / "samples.jsonl")
    shown = capsys.readouterr().err
    assert f"step 6: {first['prompt']!r} -> {first['text']!r}" in shown
    assert main([*words, "--sample-every", "0"]) == 2
    assert "sample_every=0: it must be at least 1, or none" in capsys.readouterr().err


def test_samples_need_a_tokenizer(data: Path, tmp_path: Path) -> None:
    bare = tmp_path / "shards"
    bare.mkdir()
    for path in data.glob("*.bin"):
        (bare / path.name).symlink_to(path)
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        train(tiny(bare, sample_every=5), tmp_path / "run", device="cpu")
    assert not RunFolder(tmp_path / "run").started


def test_angles_are_those_of_the_monitor_in_the_order_of_the_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, float]] = []
    read: Callable[[AngleMonitor], dict[str, float]] = AngleMonitor.read

    def noted(monitor: AngleMonitor) -> dict[str, float]:
        values = read(monitor)
        seen.extend([values] if values else [])
        return values

    monkeypatch.setattr(AngleMonitor, "read", noted)
    train(tiny(data, steps=6), tmp_path / "run", device="cpu")
    written = lines(tmp_path / "run" / "angles.jsonl")
    assert [line["step"] for line in written] == [3, 6]
    for line, values in zip(written, seen, strict=True):
        expected = {
            k.partition("/")[2]: v for k, v in values.items() if k.startswith("angle_mean/")
        }
        assert line["angles"] == pytest.approx(expected, rel=1e-3)
    model: LanguageModel = load_run(tmp_path / "run")
    names = [name for name, _ in model.named_parameters() if name in written[0]["angles"]]
    assert [*written[0]["angles"]] == names
    assert len(names) == 8, "two layers of four matrices"
    longest = max(len(repr(x)) for line in written for x in line["angles"].values())
    assert longest <= 9, "four digits"


def test_a_run_without_angles_writes_no_file(data: Path, tmp_path: Path) -> None:
    train(tiny(data, steps=2, angle_every=None), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run" / "angles.jsonl").exists()
