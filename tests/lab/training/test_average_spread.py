"""Averages of weights that lie on several ranks, and of a compiled model's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from angular_lab.config.spec import Spec
from angular_lab.training import checkpoint
from angular_lab.training.start import train
from tests.lab.runs import lines, tiny, train_on

WINDOWS = "3,8"


def spread(data: Path, **values: Any) -> Spec:
    """Evaluated where nothing is saved: saving would put right what an evaluation left."""
    return tiny(data, average=WINDOWS, eval_every=3, **values)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(spread(data), out)
    return _losses(out)


def _losses(out: Path) -> list[float]:
    keys = ("loss", "val_loss", *Spec(average=WINDOWS).averages.values())
    found = [line[key] for text in lines(out) for key in keys if key in (line := json.loads(text))]
    assert len(found) == 12 + 4 * 3
    return found


@pytest.mark.parametrize(
    "way", [{"parallel": "ddp"}, {"parallel": "fsdp"}, {"tensor": 2}], ids=["ddp", "fsdp", "tensor"]
)
def test_two_ranks_average_as_one_does(
    data: Path, tmp_path: Path, alone: list[float], way: dict[str, Any]
) -> None:
    """And one goes on where they stopped."""
    spec, out = spread(data, **way), tmp_path / "run"
    train_on(2, spec, out)
    assert _losses(out) == pytest.approx(alone, abs=1e-5)
    (out / "DONE").unlink()
    for step in checkpoint.steps(out / "checkpoints"):
        if step > 8:
            shutil.rmtree(checkpoint.step_folder(out / "checkpoints", step))
    train(spec, out, resume=True)
    assert _losses(out) == pytest.approx(alone, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch about itself
def test_a_compiled_model_takes_the_average_without_compiling_anew(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: list[float]
) -> None:
    compile_, graphs = nn.Module.compile, []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_(self, backend=backend))
    torch.compiler.reset()
    train(spread(data, compile=True), tmp_path / "run", device="cpu")
    assert len(graphs) == 2  # one that trains and one that evaluates
    assert _losses(tmp_path / "run") == pytest.approx(alone, abs=1e-5)
