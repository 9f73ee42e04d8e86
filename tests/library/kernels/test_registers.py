"""How row kernels are launched, by the registers that they take on a Hopper GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from angular_muown import AngularMuown
from angular_muown.kernels import launch, sharded
from angular_muown.kernels.triton.rows import before_kernel
from tests.library.family import noise, parameter
from tests.library.kernels.interpreter import interpret
from tests.library.kernels.test_fused import SHAPES, kernels
from tests.library.sharded import PLACEMENTS, place
from tests.ranks import results

ROOT = Path(__file__).parents[3]


def test_8_bits_leave_as_many_rows_in_flight_as_float32(tmp_path: Path) -> None:
    """By the compiler, for which no GPU is needed."""
    out = tmp_path / "registers.json"
    command = [sys.executable, "benchmarks/registers.py", "--sizes", "768", "8192", "--json", out]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=200)
    rows = json.loads(out.read_text())["results"]
    by_case = {(row["n"], row["momentum"], row["summed"], row["launched"]): row for row in rows}
    for n in (768, 8192):
        for summed in (False, True):
            exact, eight = (by_case[n, name, summed, True] for name in ("float32", "int8"))
            in_flight = [row["programs"] * row["tile"][0] for row in (exact, eight)]
            assert in_flight[1] >= in_flight[0]
            assert eight["spilled_bytes"] == 0
            assert eight["instructions"] > exact["instructions"] > 20
        unbounded, bounded = (by_case[n, "int8", False, launched] for launched in (False, True))
        assert unbounded["programs"] < bounded["programs"], "the bound is needed"
        assert by_case[n, "int8", True, False]["spilled_bytes"] > 0, "the bound would spill"


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


def bounds_on_ranks(placement: str) -> dict[str, bool]:
    """Return whether the registers of each row kernel are bounded, by its name."""
    interpret()
    bounds: dict[str, bool] = {}
    launch_rows = sharded.launch_rows

    def record(kernel: Any, m: int, n: int, *args: Any, **kind: bool) -> None:
        options = launch.row_tile(n, **{"eight_bit": False, **kind})[2]
        bounds[kernel.__name__] = "maxnreg" in options
        launch_rows(kernel, m, n, *args, **kind)

    sharded.launch_rows = record
    W, G = (noise(128, 256, seed=seed, dtype=torch.float32) for seed in range(2))
    p = nn.Parameter(place(W, PLACEMENTS[placement]))
    p.grad = place(G, PLACEMENTS[placement])
    AngularMuown([p], state_dtype="int8").step()
    return bounds


@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_no_kernel_is_bounded_where_ranks_share_rows(placement: str) -> None:
    for bounds in results(2, bounds_on_ranks, placement):
        assert bounds["before_kernel"] == (placement == "rows")
        assert not any(bounds[name] for name in bounds if name != "before_kernel")
