"""The scripts in examples/, as modules: tests run what a user runs."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    """Bit for bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def assert_falls(losses: list[float], factor: float) -> None:
    """From the first losses to the last, by a factor at least."""
    tenth = max(1, len(losses) // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    assert last < first * factor, (first, last)
