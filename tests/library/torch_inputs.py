"""torch's own inputs for tests of its optimizers, those of Muon and AdamW.

They are read in a process of their own: the module that has them switches torch's global flags off
and patches classes when it is imported.
"""

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

READ = """
import sys, types, unittest
# torch's test utilities derive a class from one of this package, which the inputs do not need
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
import torch
from torch.testing._internal.common_optimizers import optim_db

found = {"valid": [], "invalid": []}
for info in optim_db:
    if info.name in ("Muon", "AdamW"):
        for x in info.optim_inputs_func("cpu", torch.float32):
            found["valid"].append((x.desc, x.kwargs))
        for e in info.optim_error_inputs_func("cpu", torch.float32):
            x = e.optimizer_error_input
            found["invalid"].append((x.desc, x.params, x.kwargs, e.error_type.__name__))
torch.save(found, sys.argv[1])
"""


class Invalid(NamedTuple):
    description: str
    params: Any  # None for any
    arguments: dict[str, Any]
    error: str


@cache
def _read() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs.pt"
        subprocess.run([sys.executable, "-c", READ, str(path)], check=True, capture_output=True)
        return torch.load(path, weights_only=False)


def valid(optimizer: type) -> list[dict[str, Any]]:
    """Arguments of torch's inputs that a member of the family has too."""
    names = optimizer.__init__.__annotations__
    found = [kwargs for _, kwargs in _read()["valid"] if kwargs.keys() <= names.keys()]
    unique = {repr(kwargs): kwargs for kwargs in found}
    assert len(unique) >= 6, "torch has changed its inputs"
    return list(unique.values())


def invalid() -> list[Invalid]:
    return [Invalid(*row) for row in _read()["invalid"]]
