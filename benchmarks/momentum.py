"""Step time and memory by the dtype of the momentum, with float32 and with bf16 weights.

    python benchmarks/momentum.py --shapes gpt124 llama1b moe1.1b --json results/momentum_h200.json

Optimizers that differ in `state_dtype` alone step the same hidden matrices in turns: a few steps
each, in rounds, so that a drift of the clock hits all of them. Times are medians over rounds with
quartiles. Memory is measured for each on its own: parameters, gradients and state per parameter,
and the peak of a step above them. Without a GPU the shapes are those of gpt124 at a quarter of the
size.
"""

import argparse
import gc
import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from shapes import SHAPES, Shape, divided
from step_time import allocated, graph_bytes, held_bytes, make, peak_above, state_bytes, time_steps
from torch import nn

DTYPES = ("float32", "bfloat16", "int8")


def matrices(shapes: list[Shape], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    params = []
    for shape in shapes:
        p = nn.Parameter((torch.randn(shape, device=device) * 0.02).to(dtype))
        p.grad = torch.randn_like(p)
        params.append(p)
    return params


def member(name: str, params: list[nn.Parameter], dtype: str) -> torch.optim.Optimizer:
    optimizer = make(name, params, state_dtype=dtype)
    assert optimizer is not None, "a member of the family steps every shape"
    return optimizer


def times(name: str, params: list[nn.Parameter], rounds: int, steps: int) -> dict[str, Any]:
    """Return milliseconds per step by dtype: the median and the quartiles of the rounds."""
    cuda = params[0].is_cuda
    optimizers = {dtype: member(name, params, dtype) for dtype in DTYPES}
    for optimizer in optimizers.values():
        for _ in range(3):
            optimizer.step()
    measured: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for i in range(rounds):
        order = DTYPES[i % len(DTYPES) :] + DTYPES[: i % len(DTYPES)]
        for dtype in order:
            measured[dtype].append(time_steps(optimizers[dtype].step, steps, cuda)[0])
    return {
        dtype: {"ms": median(values), "quartiles": quantiles(values, n=4), "rounds": values}
        for dtype, values in measured.items()
    }


def memory(name: str, shapes: list[Shape], weights: torch.dtype, dtype: str, device: str) -> Any:
    """Return bytes per parameter of weights, gradients and state, and the peak of a step above."""
    cuda = device.startswith("cuda")
    gc.collect()
    before = allocated() if cuda else 0
    params = matrices(shapes, weights, device)
    optimizer = member(name, params, dtype)
    for _ in range(3):
        optimizer.step()
    held, count = held_bytes(params, optimizer), sum(p.numel() for p in params)
    pool = graph_bytes() if cuda else 0
    extra = pool + peak_above(before + held, optimizer.step, cuda)
    return {
        "weights": params[0].element_size(),
        "gradients": params[0].element_size(),
        "state": state_bytes(optimizer) / count,
        "peak": (held + extra) / count,
        "peak_gib": (held + extra) / 2**30,
        "parameters": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt124"])
    parser.add_argument("--optimizers", nargs="+", default=["AngularMuown", "Muon"])
    parser.add_argument("--divide", type=int, default=1 if cuda else 4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="per round")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    device = "cuda" if cuda else "cpu"
    results = []
    for shape in arguments.shapes:
        shapes = divided(SHAPES[shape](), arguments.divide)
        for weights in (torch.float32, torch.bfloat16):
            for name in arguments.optimizers:
                params = matrices(shapes, weights, device)
                timed = times(name, params, arguments.rounds, arguments.steps)
                del params
                held = {dtype: memory(name, shapes, weights, dtype, device) for dtype in DTYPES}
                row = {"shapes": shape, "optimizer": name, "weights": str(weights)[6:]}
                results.append({**row, "times": timed, "memory": held})
                cells = (
                    f"{dtype} {timed[dtype]['ms']:.3f} ms {held[dtype]['state']:.3f} B "
                    f"{held[dtype]['peak_gib']:.2f} GiB"
                    for dtype in DTYPES
                )
                print(shape, name, row["weights"], " | ".join(cells), flush=True)
                if arguments.json:
                    content = {
                        "device": torch.cuda.get_device_name() if cuda else "cpu",
                        "torch": torch.__version__,
                        "divide": arguments.divide,
                        "results": results,
                    }
                    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
