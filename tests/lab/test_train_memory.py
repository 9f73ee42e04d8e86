"""benchmarks/train_memory.py: what a training step holds, on tiny models."""

import json
import math
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from angular_lab.models import build_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import train_memory
from shapes import SHAPES
from train_memory import MODELS, SETUPS, divided, hidden_matrices, line, measure

ADAMW, FLOAT32, BFLOAT16, EIGHT_BIT = SETUPS


def rows_of(name: str, *setups: train_memory.Setup) -> list[dict]:
    arguments = Namespace(device="cpu", sequences=1, steps=1)
    spec = divided(replace(MODELS[name], sequence=32), 16)
    return [measure(spec, setup, arguments) for setup in setups]


@pytest.mark.parametrize("name", MODELS)
def test_weights_gradients_and_state_take_two_two_and_one_bytes(name: str) -> None:
    (row,) = rows_of(name, EIGHT_BIT)
    shortest = {"llama1b": 2048, "moe1.1b": 704}[name] // 16
    held = row["bytes_per_hidden_parameter"]
    assert (held["weights"], held["gradients"]) == (2, 2)
    assert 1 < held["state"] <= 1 + 12 / shortest + 0.001  # and a counter per parameter
    assert all(map(math.isfinite, row["losses"]))
    assert row["peak_gib"] is None, "not measured on a CPU"
    assert EIGHT_BIT.label in line(json.loads(json.dumps(row)))


def test_the_other_setups_hold_what_their_dtypes_say() -> None:
    rows = rows_of("llama1b", ADAMW, FLOAT32, BFLOAT16)
    held = [[round(x) for x in row["bytes_per_hidden_parameter"].values()] for row in rows]
    assert held == [[4, 4, 8], [4, 4, 4], [2, 2, 4]]
    total = [row["held_gib"] for row in rows]
    assert total == sorted(total, reverse=True)
    assert sum(rows[0]["gib"].values()) == pytest.approx(rows[0]["held_gib"])


def test_the_models_have_the_sizes_of_the_other_benchmarks() -> None:
    with torch.device("meta"):
        models = {name: build_model(spec) for name, spec in MODELS.items()}
    hidden = {name: sum(p.numel() for p in hidden_matrices(m)) for name, m in models.items()}
    wanted = {name: sum(math.prod(shape) for shape in SHAPES[name]()) for name in MODELS}
    assert hidden["llama1b"] == wanted["llama1b"]
    # shapes.py has one more expert in place of the shared one, and no dense layer
    assert hidden["moe1.1b"] == pytest.approx(wanted["moe1.1b"], rel=0.05)
