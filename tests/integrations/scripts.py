"""The scripts in examples/, as modules: tests run what a user runs."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # as Python does for a script, whose neighbours it imports
    return importlib.import_module(name)


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
