"""Time a CPU step of ordinary but awkward models: a group per parameter, a shape per parameter.

    python benchmarks/many_groups.py

Prints milliseconds per step, the least of several rounds that take turns: one group of 1,000 small
matrices, 1,000 groups of one, and 930 matrices of different shapes, next to torch.optim.Muon.
"""

import argparse
import json
from time import perf_counter
from typing import Any

import torch
from torch import nn

from angular_muown import AngularMuown, Muon

ROUNDS, STEPS = 5, 3


def matrices(shapes: list[tuple[int, int]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


def optimizers(count: int, kinds: int, least_side: int) -> dict[str, Any]:
    same = [(16, 24)] * count
    side = range(least_side, least_side + int(kinds**0.5) + 1)
    different = [(m, n) for m in side for n in side][:kinds]
    return {
        f"one group of {count}": AngularMuown(matrices(same)),
        f"{count} groups of one": AngularMuown([{"params": [p]} for p in matrices(same)]),
        f"{count} groups, AdamW": AngularMuown(
            [{"params": [p], "algorithm": "adamw"} for p in matrices(same)]
        ),
        f"{kinds} shapes, AngularMuown": AngularMuown(matrices(different)),
        f"{kinds} shapes, Muon": Muon(matrices(different)),
        f"{kinds} shapes, torch.optim.Muon": torch.optim.Muon(matrices(different)),
    }


def least_ms(optimizer: Any) -> float:
    start = perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    return (perf_counter() - start) / STEPS * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--shapes", type=int, default=930)
    parser.add_argument("--least-side", type=int, default=8)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = optimizers(arguments.count, arguments.shapes, arguments.least_side)
    for optimizer in found.values():
        optimizer.step()  # makes the state
    times = {name: float("inf") for name in found}
    for _ in range(ROUNDS):
        for name, optimizer in found.items():
            times[name] = min(times[name], least_ms(optimizer))
    for name, ms in times.items():
        print(f"{name:32} {ms:8.1f} ms")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"torch": torch.__version__, "ms": times}, file, indent=1)


if __name__ == "__main__":
    main()
