"""How row kernels are launched, by the registers that they take on a Hopper GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_muown import AngularMuown
from angular_muown.kernels import launch
from angular_muown.kernels.triton.rows import before_kernel
from tests.library.family import parameter
from tests.library.kernels.test_fused import SHAPES, kernels

ROOT = Path(__file__).parents[3]


def test_8_bits_leave_as_many_rows_in_flight_as_float32(tmp_path: Path) -> None:
    """By the compiler, for which no GPU is needed."""
    out = tmp_path / "registers.json"
    command = [sys.executable, "benchmarks/registers.py", "--sizes", "768", "8192", "--json", out]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=200)
    rows = json.loads(out.read_text())["results"]
    by_case = {(row["n"], row["momentum"], row["bounded"]): row for row in rows}
    for n in (768, 8192):
        exact, eight = (by_case[n, momentum, True] for momentum in ("float32", "int8"))
        in_flight = [row["programs"] * row["tile"][0] for row in (exact, eight)]
        assert in_flight[1] >= in_flight[0]
        assert eight["spilled_bytes"] == 0
        assert by_case[n, "int8", False]["programs"] < eight["programs"], "the bound is needed"


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_only_the_kernel_that_rounds_to_8_bits_is_bounded(
    dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded: dict[bool, set[Any]] = {True: set(), False: set()}
    launch_rows = launch.launch_rows

    def record(kernel: Any, *args: Any, eight_bit: bool = False) -> None:
        bounded[eight_bit].add(kernel)
        launch_rows(kernel, *args, eight_bit=eight_bit)

    monkeypatch.setattr(launch, "launch_rows", record)
    with kernels(True):
        p = parameter(*SHAPES[0], dtype=torch.float32)
        p.grad = torch.randn_like(p)
        AngularMuown([p], state_dtype=dtype).step()
    assert bounded[True] == ({before_kernel} if dtype else set())
    assert bounded[False], "the kernels run"
