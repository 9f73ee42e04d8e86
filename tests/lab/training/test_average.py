"""Averages of recent weights: their values, and that training does not depend on them.

test_ranks.py trains with them on several ranks.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from math import nan, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_lab.cli.main import main
from angular_lab.config.branches import branch_point, trunk_spec
from angular_lab.config.overrides import override
from angular_lab.config.spec import Spec, average_loss
from angular_lab.data.batches import Tokens
from angular_lab.run_folder import RunFolder
from angular_lab.sample import load_run
from angular_lab.training import build, checkpoint
from angular_lab.training.averages import Averages
from angular_lab.training.evaluate import evaluate
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import branch_spec, train
from angular_lab.training.trainer import Trainer
from angular_muown import averaging
from tests.lab.runs import lines, stopped_copy, tiny

# In 12 steps, one window forgets, one is a plain mean for most of the time, one is a fraction.
WINDOWS = (3, 8, 0.3)
NAMES = Spec(average=WINDOWS).averages


def by_hand(history: list[Tensor], window: float) -> Tensor:
    """Return the average in float64, from the weight of every step multiplied out."""
    steps = range(1, len(history) + 1)
    shares = [min(1, 1 / (window * k)) if window < 1 else 1 / min(window, k) for k in steps]
    factors = [share * prod(1 - s for s in shares[k + 1 :]) for k, share in enumerate(shares)]
    assert sum(factors) == pytest.approx(1.0)  # nothing is left of the initial weights
    return sum((f * w.double() for f, w in zip(factors, history, strict=True)), torch.zeros(()))


def parsed(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(out)]


@pytest.fixture(scope="module")
def averaged_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with averages."""
    out = tmp_path_factory.mktemp("averaged") / "run"
    train(tiny(data, average=WINDOWS), out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [2, 7, 100, 0.1, 0.5])
def test_average_is_a_mean_that_forgets_old_weights(window: float, dtype: torch.dtype) -> None:
    """For windows in steps also bit for bit as in runs of earlier versions."""
    model = nn.Linear(5, 3).to(dtype)
    averages = Averages(model, [window])
    history: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    lerped = {name: p.detach().float() for name, p in model.named_parameters()}
    for k in range(1, 21):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(torch.randn_like(p))
                history[name].append(p.clone())
        averages.update()
        for name, average in averages.values(window).items():
            assert average.dtype == torch.float32
            expected = by_hand(history[name], window)
            torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-5)
            if k <= window:
                plain = torch.stack(history[name]).double().mean(0)
                torch.testing.assert_close(expected, plain, rtol=1e-12, atol=1e-12)
            if window >= 2:
                lerped[name] = lerped[name].lerp(history[name][-1].float(), 1 / min(window, k))
                assert torch.equal(average, lerped[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_restored_bit_for_bit_after_an_error(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2, dtype=dtype)
    averages = Averages(model, [2, 5])
    averages.update()
    odd = torch.tensor([[-0.0, 1e-40], [torch.nan, 0.1]]).to(dtype)
    with torch.no_grad():
        model.weight.copy_(odd)
        model.bias.copy_(torch.tensor([1.0, 2.0]))
    before = [(p, p.data_ptr(), p.detach().clone().view(torch.uint8)) for p in model.parameters()]
    copies = {name: value.clone() for name, value in averages.values(2).items()}

    def fail() -> dict[str, float]:
        assert model.weight.data_ptr() == before[0][1]
        assert torch.equal(model.weight, averages.values(2)["weight"].to(dtype))
        raise OSError("no tokens")

    with pytest.raises(OSError, match="no tokens"):
        averages.evaluate(fail)
    assert all(p is q for p, (q, _, _) in zip(model.parameters(), before, strict=True))
    for p, address, bits in before:
        assert p.data_ptr() == address
        assert torch.equal(p.detach().view(torch.uint8), bits)
    assert all(torch.equal(averages.values(2)[name], value) for name, value in copies.items())


def test_average_without_a_step_is_not_evaluated() -> None:
    averages = Averages(nn.Linear(2, 2), [4])
    assert averages.evaluate(lambda: {"val_loss": 1.0}) == {}
    averages.update()
    assert averages.evaluate(lambda: {"val_loss": 1.0}) == {average_loss(4): 1.0}


@pytest.mark.parametrize("average", ["1", "0", "8,1", "-3", "2.5", "-0.1", "3,nan"])
def test_invalid_windows_are_rejected(average: str) -> None:
    with pytest.raises(ValueError, match=f"average={average}: give windows of at least 2 steps"):
        override(Spec(), [f"average={average}"])


@pytest.mark.parametrize("window", [-3, 0, 1, 1.0, 2.5, nan, 2, 549, 0.1, 0.999])
def test_lab_and_library_accept_the_same_windows(window: float) -> None:
    """The lab checks without torch, so the rule exists twice."""
    accepted = []
    for take in (lambda: Spec(average=(window,)), lambda: averaging(window)):
        try:
            take()
        except ValueError:
            accepted.append(False)
        else:
            accepted.append(True)
    assert accepted[0] == accepted[1]


def test_losses_are_named_after_their_windows() -> None:
    spec = override(Spec(), ["average=0.1, 549,.05,1234567"])
    names = ("0.1", "549", "0.05", "1234567")
    assert list(spec.averages.values()) == [f"val_loss_averaged_{name}" for name in names]
    assert list(spec.averages) == [0.1, 549, 0.05, 1234567]


def test_training_does_not_depend_on_averages(
    data: Path, tmp_path: Path, averaged_run: Path
) -> None:
    """Without averages, metrics, identity and checkpoints contain no trace of them."""
    train(tiny(data), tmp_path / "off")
    without = [
        {key: value for key, value in line.items() if key not in NAMES.values()}
        for line in parsed(averaged_run)
    ]
    assert [json.dumps(line) for line in without] == lines(tmp_path / "off")
    assert [line["step"] for line in parsed(averaged_run) if NAMES[8] in line] == [4, 8, 12]
    assert tiny(data).identity("") != tiny(data, average=WINDOWS).identity("")
    off, on = _saved_keys(tmp_path / "off"), _saved_keys(averaged_run)
    averages = {key for key in on if key.startswith("average")}
    assert on - averages == off
    assert {"average.8.count", "average.0.3.weights.norm.weight"} <= averages


def _saved_keys(out: Path) -> set[str]:
    folder = checkpoint.step_folder(out / "checkpoints", 12)
    return set(checkpoint.SafeReader(folder).read_metadata().state_dict_metadata)


MOE = {"kind": "moe", "experts": 4, "experts_per_token": 2, "expert_mlp": 16, "tied": False}


@pytest.mark.parametrize("model", [{}, MOE], ids=["dense", "moe"])
def test_logged_loss_is_that_of_the_averaged_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """A second model gets the average computed by hand and the current buffers."""
    spec = tiny(data, average=WINDOWS)
    spec = replace(spec, model=replace(spec.model, **model))
    history: list[dict[str, Tensor]] = []
    losses: list[dict[str, float]] = []
    update, evaluate_run = Trainer.update, Trainer.evaluate

    def record_weights(self: Trainer) -> None:
        update(self)
        history.append({name: p.detach().clone() for name, p in self.model.named_parameters()})

    def evaluate_by_hand(self: Trainer) -> dict[str, float]:
        other = build.make_model(spec, self.ranks)
        other.load_state_dict(self.model.state_dict())
        losses.append({})
        for window, name in NAMES.items():
            with torch.no_grad():
                for key, p in other.named_parameters():
                    p.copy_(by_hand([weights[key] for weights in history], window))
            values = evaluate(other, self.validation, 8, 4, self.ranks, self.autocast)
            losses[-1][name] = values["val_loss"]
        return evaluate_run(self)

    monkeypatch.setattr(Trainer, "update", record_weights)
    monkeypatch.setattr(Trainer, "evaluate", evaluate_by_hand)
    train(spec, tmp_path / "run")
    logged = [line for line in parsed(tmp_path / "run") if "val_loss" in line]
    assert len(losses) == 3
    for line, expected in zip(logged, losses, strict=True):
        assert {key: line[key] for key in expected} == pytest.approx(expected, abs=2e-6)
        assert all(abs(line["val_loss"] - loss) > 1e-3 for loss in expected.values())


def test_resumed_run_continues_its_averages(
    data: Path, tmp_path: Path, averaged_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved at step 4, during the plain mean of the longer window, and stopped at 7."""
    spec = tiny(data, average=WINDOWS)
    update = Trainer.update

    def stop(self: Trainer) -> None:
        update(self)
        if self.step == 7:
            raise OSError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", stop)
        with pytest.raises(OSError, match="stopped"):
            train(spec, tmp_path / "cut")
    assert checkpoint.steps(tmp_path / "cut" / "checkpoints") == [4]
    train(spec, tmp_path / "cut", resume=True)
    assert lines(tmp_path / "cut") == lines(averaged_run)


@pytest.fixture(scope="module")
def straight_runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Metrics of runs of 8 and 16 steps."""
    folder = tmp_path_factory.mktemp("straight")
    for steps in (8, 16):
        train(tiny(data, steps=steps, average=WINDOWS), folder / str(steps))
    return {steps: lines(folder / str(steps)) for steps in (8, 16)}


@pytest.mark.parametrize("in_memory", [False, True], ids=["from disk", "from memory"])
def test_branch_continues_the_averages_of_its_trunk(
    data: Path, tmp_path: Path, straight_runs: dict[int, list[str]], in_memory: bool
) -> None:
    models = build.Models() if in_memory else None
    base = tiny(data, steps=16, average=WINDOWS)
    starts = {steps: branch_point(steps, 0.25) for steps in (8, 16)}
    train(trunk_spec(base, list(starts.values())), tmp_path / "trunk", models=models)
    trunk_lines = lines(tmp_path / "trunk")
    for steps, start in starts.items():
        spec = branch_spec(RunFolder(tmp_path / "trunk"), start, steps - start)
        train(spec, tmp_path / f"to{steps}", models=models)
        assert trunk_lines[:start] + lines(tmp_path / f"to{steps}") == straight_runs[steps]


@pytest.mark.parametrize(
    ("in_memory", "trunk_average"), [(False, ()), (False, (8,)), (True, (8,))], ids=str
)
def test_new_windows_of_a_branch_begin_with_its_first_step(
    data: Path, tmp_path: Path, in_memory: bool, trunk_average: tuple[int, ...]
) -> None:
    """Then the first average equals the weights; a window of the trunk continues."""
    models = build.Models() if in_memory else None
    base = tiny(data, steps=16, average=trunk_average, eval_every=1)
    train(trunk_spec(base, [8]), tmp_path / "trunk", models=models)
    spec = replace(branch_spec(RunFolder(tmp_path / "trunk"), 8, 8), average=WINDOWS)
    train(spec, tmp_path / "branch", models=models)
    first, second, *_ = parsed(tmp_path / "branch")
    assert first[NAMES[3]] == first["val_loss"]
    assert second[NAMES[3]] != second["val_loss"]
    assert (first[NAMES[8]] == first["val_loss"]) == (not trunk_average)
    assert "val_loss_averaged_3" not in lines(tmp_path / "trunk")[-1]


def test_skipped_batch_does_not_count_as_a_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int, int]] = []
    is_finite, save = Trainer.is_finite, Trainer.save

    def spoil(self: Trainer, tokens: Tensor, targets: Tensor) -> bool:
        if self.step == 5:
            self.host_loss._host = torch.tensor(torch.nan)
        return is_finite(self, tokens, targets)

    def record_count(self: Trainer) -> None:
        counts.append((self.step, self.averages.count(3)))
        save(self)

    monkeypatch.setattr(Trainer, "is_finite", spoil)
    monkeypatch.setattr(Trainer, "save", record_count)
    train(tiny(data, on_nan="skip", average=(3,)), tmp_path / "run")
    assert counts == [(4, 4), (8, 7), (9, 8), (12, 11)]


def test_commands_use_an_average_of_a_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loaded average has the logged loss; `export` and `sample` can use it."""
    spec, run = tiny(data, average=(0.5, 3)), tmp_path / "run"
    train(spec, run)
    screen, last = capsys.readouterr().err, parsed(run)[-1]
    tokens = Tokens(data, "val", spec.model.sequence, spec.model.vocabulary)
    ranks, autocast = Ranks(0, 1, torch.device("cpu")), nullcontext()
    losses = {}
    for average, name in ((None, "val_loss"), *spec.averages.items()):
        model = load_run(run, average=average)
        losses[name] = evaluate(model, tokens, 8, 4, ranks, autocast)["val_loss"]
        assert losses[name] == pytest.approx(last[name], abs=2e-6)
        assert average is None or f"average {average:g} {last[name]:.4f}" in screen
    assert len(set(losses.values())) == 3
    weights = []
    for options in ([], ["--average", "0.5"], ["--average", "3"]):
        out = tmp_path / f"export{len(weights)}"
        assert main(["export", str(run), "--out", str(out), *options]) == 0
        weights.append((out / "model.safetensors").read_bytes())
    assert len(set(weights)) == 3
    assert main(["sample", str(run), "def", "--average", "7"]) == 2
    assert "average=7 is not one of the averages of " in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch about its own code
def test_evaluating_averages_does_not_recompile_the_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaged_run: Path
) -> None:
    compile_module, graphs = nn.Module.compile, []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend=backend))
    torch.compiler.reset()
    train(tiny(data, average=WINDOWS, compile=True), tmp_path / "run", device="cpu")
    assert len(graphs) == 2  # for training and for evaluation
    for line, expected in zip(parsed(tmp_path / "run"), parsed(averaged_run), strict=True):
        assert line == pytest.approx(expected, abs=1e-4)


def test_further_forms_of_an_average() -> None:
    """`sphere`: average rows at their average length. `half`: halfway to the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    averages = Averages(model, [2], ("sphere", "half"), [model.weight])
    history: list[Tensor] = []
    for _ in range(5):
        with torch.no_grad():
            model.weight.copy_(torch.randn(3, 4))
            model.weight[2] = 0.0  # a zero row has no direction to keep
            model.bias.add_(1.0)
        history.append(model.weight.detach().clone())
        averages.update()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    mean = by_hand(history, 2).float()
    length = by_hand([w.norm(dim=1, keepdim=True) for w in history], 2).float()
    mean_bias = averages.values(2)["bias"].clone()
    expected = {
        "": (mean, mean_bias),
        "sphere": (length * nn.functional.normalize(mean), mean_bias),
        "half": ((weight + mean) / 2, (bias + mean_bias) / 2),
    }
    for form, (expected_weight, expected_bias) in expected.items():
        with averages.swapped_in(2, form):
            torch.testing.assert_close(model.weight.detach(), expected_weight)
            torch.testing.assert_close(model.bias.detach(), expected_bias)
        assert torch.equal(model.weight, weight)
        assert torch.equal(model.bias, bias)
    losses = averages.evaluate(lambda: {"val_loss": model.weight.square().sum().item()})
    assert set(losses) == {average_loss(2, form) for form in expected}
    assert len(set(losses.values())) == 3


def test_a_form_that_a_branch_adds_is_not_evaluated_before_its_first_step() -> None:
    """The lengths of the rows would be those of the initial weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trunk = Averages(model, [2])
    trunk.update()
    branch = Averages(model, [2], ("sphere",), [model.weight])
    branch.load(trunk.state())
    assert branch.evaluate(lambda: {"val_loss": 1.0}) == {average_loss(2): 1.0}
    branch.update()
    assert set(branch.evaluate(lambda: {"val_loss": 1.0})) == {
        average_loss(2), average_loss(2, "sphere"),
    }  # fmt: skip


def test_training_does_not_depend_on_further_forms(
    data: Path, tmp_path: Path, averaged_run: Path
) -> None:
    spec = tiny(data, average=WINDOWS, average_forms=("half", "sphere"))
    train(spec, tmp_path / "run")
    for with_forms, without in zip(parsed(tmp_path / "run"), parsed(averaged_run), strict=True):
        assert without.items() <= with_forms.items()
    names = {average_loss(window, form) for window in WINDOWS for form in spec.average_forms}
    last = parsed(tmp_path / "run")[-1]
    assert names <= last.keys()
    assert len({last[name] for name in (*names, *NAMES.values())}) == 3 * len(WINDOWS)


@pytest.mark.parametrize("in_memory", [False, True], ids=["from disk", "from memory"])
def test_a_branch_may_add_a_form(data: Path, tmp_path: Path, in_memory: bool) -> None:
    """The average of the trunk continues; that of the lengths begins with the branch."""
    models = build.Models() if in_memory else None
    base = tiny(data, steps=16, average=(8,), eval_every=1)
    train(trunk_spec(base, [8]), tmp_path / "trunk", models=models)
    spec = branch_spec(RunFolder(tmp_path / "trunk"), 8, 8)
    train(spec, tmp_path / "usual", models=models)
    train(replace(spec, average_forms=("sphere",)), tmp_path / "branch", models=models)
    name = NAMES[8]
    for line, usual in zip(parsed(tmp_path / "branch"), parsed(tmp_path / "usual"), strict=True):
        assert line.pop(average_loss(8, "sphere")) != line[name]
        assert line == usual


def test_further_forms_resume_bit_for_bit(data: Path, tmp_path: Path) -> None:
    spec = tiny(data, average=WINDOWS, average_forms=("sphere",), keep=9)
    train(spec, tmp_path / "run")
    half = stopped_copy(tmp_path / "run", tmp_path / "half", 8)
    train(spec, half, resume=True)
    assert lines(half) == lines(tmp_path / "run")
