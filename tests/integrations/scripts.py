"""Import the scripts in examples/, so that tests run what users run."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))  # as for a script: examples import each other
    loaded = sys.modules.get(name)
    if loaded is not None and Path(str(loaded.__file__)).parent != EXAMPLES:
        del sys.modules[name]  # a benchmark of the same name
    return importlib.import_module(name)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    """Assert that two models' state dicts are equal bit for bit."""
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def assert_falls(losses: list[float], factor: float) -> None:
    """Assert that the last tenth of the losses is below `factor` times the first tenth."""
    tenth = max(1, len(losses) // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    assert last < first * factor, (first, last)
