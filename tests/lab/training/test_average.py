"""Averages of the last weights: what they are, and that training does not notice them."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_lab.cli.main import main
from angular_lab.config.overrides import override
from angular_lab.config.spec import Spec
from angular_lab.data.batches import Tokens
from angular_lab.run_folder import RunDir
from angular_lab.sample import load_run
from angular_lab.sweeps.trials import decisive
from angular_lab.training import build, checkpoint
from angular_lab.training.averages import Averages
from angular_lab.training.evaluate import evaluate
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import branch_spec, train, trunk_spec
from angular_lab.training.trainer import Trainer
from angular_muown import AngularMuown, averaging, plan
from tests.lab.runs import lines, tiny

# Of 12 steps: one forgets, one is a plain mean for most of the time, one is a share of them.
WINDOWS = "3,8,0.3"
NAMES = Spec(average=WINDOWS).averages


def by_hand(history: list[Tensor], window: float) -> Tensor:
    """What every step's weights count for, multiplied out, in float64."""
    ages = range(1, len(history) + 1)
    shares = [min(1, 1 / (window * k)) if window < 1 else 1 / min(window, k) for k in ages]
    counts = [share * prod(1 - s for s in shares[k + 1 :]) for k, share in enumerate(shares)]
    assert sum(counts) == pytest.approx(1.0)  # nothing is left of what was before
    return sum((c * w.double() for c, w in zip(counts, history, strict=True)), torch.zeros(()))


def parsed(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(out)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [2, 7, 100, 0.1, 0.5])
def test_it_is_a_mean_that_begins_to_forget(window: float, dtype: torch.dtype) -> None:
    model = nn.Linear(5, 3).to(dtype)
    averages = Averages(model, {window: "loss"})
    history: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for step in range(20):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(torch.randn_like(p))
                history[name].append(p.clone())
        averages.update()
        for name, average in averages.copies[window].items():
            assert average.dtype == torch.float32
            wanted = by_hand(history[name], window)
            torch.testing.assert_close(average.double(), wanted, rtol=1e-5, atol=1e-5)
            if step < window:
                plain = torch.stack(history[name]).double().mean(0)
                torch.testing.assert_close(wanted, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_come_back_to_the_bit_whatever_happens(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2, dtype=dtype)
    averages = Averages(model, {2: "two", 5: "five"})
    averages.update()
    odd = torch.tensor([[-0.0, 1e-40], [torch.nan, 0.1]]).to(dtype)
    with torch.no_grad():
        model.weight.copy_(odd)
        model.bias.copy_(torch.tensor([1.0, 2.0]))
    before = [(p, p.data_ptr(), p.detach().clone().view(torch.uint8)) for p in model.parameters()]

    def fail() -> dict[str, float]:
        assert model.weight.data_ptr() == before[0][1]
        assert torch.equal(model.weight, averages.copies[2]["weight"].to(dtype))
        raise OSError("no tokens")

    kept = {name: average.clone() for name, average in averages.copies[2].items()}
    with pytest.raises(OSError, match="no tokens"):
        averages.evaluate(fail)
    assert all(p is q for p, (q, _, _) in zip(model.parameters(), before, strict=True))
    for p, address, bits in before:
        assert p.data_ptr() == address
        assert torch.equal(p.detach().view(torch.uint8), bits)
    assert all(torch.equal(averages.copies[2][name], average) for name, average in kept.items())


def test_an_average_of_nothing_is_left_out() -> None:
    averages = Averages(nn.Linear(2, 2), {4: "four"})
    assert averages.evaluate(lambda: {"val_loss": 1.0}) == {}
    averages.update()
    assert averages.evaluate(lambda: {"val_loss": 1.0}) == {"four": 1.0}


@pytest.mark.parametrize("window", [2, 5, 0.1, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_optimizers_own_to_the_bit(window: float, dtype: torch.dtype) -> None:
    """And for steps what the share 1 / min(window, k) gives, which kept runs were made with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)
    averages = Averages(model, {window: "loss"})
    optimizer = AngularMuown(plan(model, head="1.weight"), lr=0.05, average=window)
    plain = {name: p.detach().float() for name, p in model.named_parameters()}
    for k in range(1, 13):
        model(torch.randn(6, 5, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averages.update()
        for name, p in model.named_parameters():
            assert torch.equal(averages.copies[window][name], optimizer.state[p]["average"]), name
            if window >= 2:
                plain[name] = plain[name].lerp(p.detach().float(), 1 / min(window, k))
                assert torch.equal(averages.copies[window][name], plain[name]), name


WRONG = ["1", "0", "8,1", "-3", "2.5", "half", "3;4", "1.0", "0.0", "-0.1", "3,nan", "549.0"]


@pytest.mark.parametrize("average", WRONG)
def test_windows_that_make_no_sense(average: str) -> None:
    with pytest.raises(ValueError, match=f"average={average}: write windows of at least 2 steps"):
        Spec(average=average)


@pytest.mark.parametrize("text", ["-3", "0", "1", "1.0", "2.5", "nan", "2", "549", "0.1", "0.999"])
def test_the_lab_and_the_optimizers_take_the_same_windows(text: str) -> None:
    """The lab asks without torch, so the rule stands in two places."""
    number = int(text) if text.isdecimal() else float(text)
    accepted = []
    for take in (lambda: Spec(average=text), lambda: averaging(number)):
        try:
            take()
        except ValueError:
            accepted.append(False)
        else:
            accepted.append(True)
    assert accepted[0] == accepted[1]


def test_windows_are_named_as_they_are() -> None:
    spec = override(Spec(), ["average=0.1, 549,.05,1234567"])
    names = ("0.1", "549", "0.05", "1234567")
    assert list(spec.averages.values()) == [f"val_loss_averaged_{name}" for name in names]
    assert list(spec.averages) == [0.1, 549, 0.05, 1234567]


def test_training_does_not_notice(data: Path, tmp_path: Path) -> None:
    """Nor do the names of runs that have none, nor their checkpoints."""
    train(tiny(data), tmp_path / "off")
    train(tiny(data, average=WINDOWS), tmp_path / "on")
    without = [
        {key: value for key, value in line.items() if key not in NAMES.values()}
        for line in parsed(tmp_path / "on")
    ]
    assert [json.dumps(line) for line in without] == lines(tmp_path / "off")
    assert [line["step"] for line in parsed(tmp_path / "on") if NAMES[8] in line] == [4, 8, 12]
    assert "average" not in decisive(tiny(data))
    assert decisive(tiny(data, average=WINDOWS))["average"] == WINDOWS
    keys = {name: _saved_keys(tmp_path / name) for name in ("off", "on")}
    assert not any(key.startswith("average") for key in keys["off"])
    assert {key for key in keys["on"] if not key.startswith("average")} == keys["off"]


def _saved_keys(out: Path) -> set[str]:
    folder = checkpoint.step_folder(out / "checkpoints", 12)
    return set(checkpoint.SafeReader(folder).read_metadata().state_dict_metadata)


MOE = {"kind": "moe", "experts": 4, "experts_per_token": 2, "expert_mlp": 16, "tied": False}


@pytest.mark.parametrize("model", [{}, MOE], ids=["dense", "moe"])
def test_the_loss_is_that_of_the_averaged_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """A second model gets the mean that was made by hand, and the buffers that there are."""
    spec = tiny(data, average=WINDOWS)
    spec = replace(spec, model=replace(spec.model, **model))
    history: list[dict[str, Tensor]] = []
    losses: list[dict[str, float]] = []
    update, evaluate_ = Trainer.update, Trainer.evaluate

    def watch(self: Trainer) -> None:
        update(self)
        history.append({name: p.detach().clone() for name, p in self.model.named_parameters()})

    def look(self: Trainer) -> dict[str, float]:
        other = build.make_model(spec, self.ranks)
        other.load_state_dict(self.model.state_dict())
        losses.append({})
        for window, name in NAMES.items():
            with torch.no_grad():
                for key, p in other.named_parameters():
                    p.copy_(by_hand([weights[key] for weights in history], window))
            own = evaluate(other, self.validation, 8, 4, self.ranks, self.autocast)
            losses[-1][name] = own["val_loss"]
        return evaluate_(self)

    monkeypatch.setattr(Trainer, "update", watch)
    monkeypatch.setattr(Trainer, "evaluate", look)
    train(spec, tmp_path / "run")
    logged = [line for line in parsed(tmp_path / "run") if "val_loss" in line]
    assert len(losses) == 3
    for line, wanted in zip(logged, losses, strict=True):
        assert {key: line[key] for key in wanted} == pytest.approx(wanted, abs=2e-6)
        assert all(abs(line["val_loss"] - loss) > 1e-3 for loss in wanted.values())


def test_a_stopped_run_goes_on_with_its_averages(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved at step 4 in the midst of the plain mean, stopped at 7."""
    spec = tiny(data, average=WINDOWS)
    train(spec, tmp_path / "whole")
    update = Trainer.update

    def stop(self: Trainer) -> None:
        update(self)
        if self.step == 7:
            raise OSError("enough")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", stop)
        with pytest.raises(OSError, match="enough"):
            train(spec, tmp_path / "cut")
    assert checkpoint.steps(tmp_path / "cut" / "checkpoints") == [4]
    train(spec, tmp_path / "cut", resume=True)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


from_where = pytest.mark.parametrize("make", [lambda: None, build.Models], ids=["disk", "memory"])


@from_where
def test_a_branch_goes_on_with_its_trunks_averages(
    data: Path, tmp_path: Path, make: Callable[[], build.Models | None]
) -> None:
    models = make()
    straight = tiny(data, steps=16, average=WINDOWS)
    train(straight, tmp_path / "straight")
    trunk, branches = trunk_spec(straight, [(8, 0.25), (16, 0.25)])
    train(trunk, tmp_path / "trunk", models=models)
    for at, length in branches:
        spec = branch_spec(RunDir(tmp_path / "trunk"), at, length)
        train(spec, tmp_path / f"to{at + length}", models=models)
    assert lines(tmp_path / "trunk") + lines(tmp_path / "to16") == lines(tmp_path / "straight")
    train(replace(straight, steps=8), tmp_path / "short")
    assert lines(tmp_path / "trunk")[:6] + lines(tmp_path / "to8") == lines(tmp_path / "short")


@from_where
@pytest.mark.parametrize("before", ["", "8"])
def test_what_the_trunk_has_not_averaged_begins_with_the_branch(
    data: Path, tmp_path: Path, make: Callable[[], build.Models | None], before: str
) -> None:
    """Then the first step's average is its weights; a window that the trunk has goes on."""
    models = make()
    base = tiny(data, steps=16, average=before, eval_every=1)
    trunk, [(at, length)] = trunk_spec(base, [(16, 0.5)])
    train(trunk, tmp_path / "trunk", models=models)
    spec = replace(branch_spec(RunDir(tmp_path / "trunk"), at, length), average=WINDOWS)
    train(spec, tmp_path / "branch", models=models)
    first, second, *_ = parsed(tmp_path / "branch")
    assert first[NAMES[3]] == first["val_loss"]
    assert second[NAMES[3]] != second["val_loss"]
    assert (first[NAMES[8]] == first["val_loss"]) == (not before)
    assert "val_loss_averaged_3" not in lines(tmp_path / "trunk")[-1]


def test_a_batch_that_is_left_out_is_no_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, dict[int, int]]] = []
    finite, save = Trainer.is_finite, Trainer.save

    def spoiled(self: Trainer, tokens: Tensor, targets: Tensor) -> bool:
        if self.step == 5:
            self.host_loss._host = torch.tensor(torch.nan)
        return finite(self, tokens, targets)

    def look(self: Trainer) -> None:
        seen.append((self.step, dict(self.averages.counts)))
        save(self)

    monkeypatch.setattr(Trainer, "is_finite", spoiled)
    monkeypatch.setattr(Trainer, "save", look)
    train(tiny(data, on_nan="skip", average="3"), tmp_path / "run")
    assert seen == [(4, {3: 4}), (8, {3: 7}), (9, {3: 8}), (12, {3: 11})]


@pytest.mark.parametrize("window", [0.5, 3.0])
def test_a_runs_average_can_be_taken_from_its_checkpoint(
    data: Path, tmp_path: Path, window: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss is the one that was logged; and the commands reach it."""
    spec, run = tiny(data, average="0.5,3", precision="fp32"), tmp_path / "run"
    train(spec, run)
    tokens = Tokens(data, "val", spec.model.sequence, spec.model.vocabulary)
    ranks, autocast = Ranks(0, 1, torch.device("cpu")), nullcontext()
    last, found = parsed(run)[-1], {}
    shown = f"average {window:g} {last[f'val_loss_averaged_{window:g}']:.4f}"
    assert shown in capsys.readouterr().err
    for average, name in ((None, "val_loss"), (window, f"val_loss_averaged_{window:g}")):
        model = load_run(run, average=average)
        found[name] = evaluate(model, tokens, 8, 4, ranks, autocast)["val_loss"]
        assert found[name] == pytest.approx(last[name], abs=2e-6)
    assert len(set(found.values())) == 2
    texts = []
    for words in ([], ["--average", str(window)]):
        assert main(["export", str(run), "--out", str(tmp_path / f"out{len(words)}"), *words]) == 0
        texts.append((tmp_path / f"out{len(words)}" / "model.safetensors").read_bytes())
    assert texts[0] != texts[1]
    assert main(["sample", str(run), "def", "--average", "7"]) == 2
    assert "keeps 0.5, 3; a run keeps those that it is started with" in capsys.readouterr().err
