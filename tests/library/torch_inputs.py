"""torch's own test inputs for its optimizers Muon and AdamW.

They are read in a separate process: importing their module switches off global flags of torch and
patches classes.
"""

import inspect
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

SCRIPT = """
import sys, types, unittest
# torch's test utilities subclass a class of expecttest, which the inputs do not need
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
import torch
from torch.testing._internal.common_optimizers import optim_db

inputs = {"valid": [], "invalid": []}
for info in optim_db:
    if info.name in ("Muon", "AdamW"):
        for x in info.optim_inputs_func("cpu", torch.float32):
            inputs["valid"].append((x.desc, x.kwargs))
        for e in info.optim_error_inputs_func("cpu", torch.float32):
            x = e.optimizer_error_input
            inputs["invalid"].append((x.desc, x.params, x.kwargs, e.error_type.__name__))
torch.save(inputs, sys.argv[1])
"""


class InvalidInput(NamedTuple):
    description: str
    params: Any  # None if any will do
    arguments: dict[str, Any]
    error: str


@cache
def _inputs() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs.pt"
        subprocess.run([sys.executable, "-c", SCRIPT, str(path)], check=True, capture_output=True)
        return torch.load(path, weights_only=False)


def valid_arguments(optimizer: type) -> list[dict[str, Any]]:
    """Return torch's valid arguments that this optimizer accepts."""
    names = inspect.signature(optimizer).parameters
    accepted = [kwargs for _, kwargs in _inputs()["valid"] if kwargs.keys() <= names.keys()]
    unique = {repr(kwargs): kwargs for kwargs in accepted}
    assert len(unique) >= 6, "torch has changed its inputs"
    return list(unique.values())


def invalid_inputs() -> list[InvalidInput]:
    return [InvalidInput(*row) for row in _inputs()["invalid"]]
