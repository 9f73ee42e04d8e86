"""Bytes of optimizer state per parameter, measured on a matrix."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from angular_muown import AngularMuown, Muon
from evidence.kept import Rows

ROWS, COLUMNS = 256, 1024
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _ours(**options: Any) -> Make:
    return lambda params: AngularMuown(params, lr=0.02, **options)


CASES: dict[str, tuple[str, Make]] = {  # with the formula, n being the number of columns
    "torch.optim.AdamW": ("8", torch.optim.AdamW),
    "Muon": ("4", lambda params: Muon(params, lr=0.02)),
    "AngularMuown": ("4 + 8/n", _ours()),
    'AngularMuown, `state_dtype="bfloat16"`': ("2 + 8/n", _ours(state_dtype="bfloat16")),
    'Muon, `state_dtype="int8"`': (
        "1 + 4/n",
        lambda params: Muon(params, lr=0.02, state_dtype="int8"),
    ),
    'AngularMuown, `state_dtype="int8"`': ("1 + 12/n", _ours(state_dtype="int8")),
    "AngularMuown, `average=0.1`": ("8 + 8/n", _ours(average=0.1)),
    'AngularMuown, `average=0.1`, `state_dtype="bfloat16"`': (
        "6 + 8/n",
        _ours(average=0.1, state_dtype="bfloat16"),
    ),
}


def state_bytes(make: Make, rows: int = ROWS, columns: int = COLUMNS) -> float:
    """Return the bytes per parameter after a step; a counter of steps does not count."""
    weight = nn.Parameter(torch.linspace(-1, 1, rows * columns).reshape(rows, columns))
    weight.grad = weight.detach().cos()
    optimizer = make([weight])
    optimizer.step()
    tensors = (x for x in optimizer.state[weight].values() if isinstance(x, torch.Tensor))
    return sum(x.nbytes for x in tensors if x.numel() > 1) / weight.numel()


def table() -> Rows:
    rows = [[name, formula, f"{state_bytes(make):.3f}"] for name, (formula, make) in CASES.items()]
    return [["state, bytes per parameter", "formula", f"measured, n = {COLUMNS}"], *rows]
