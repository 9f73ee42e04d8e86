"""The polar factor alone, per shape and path: milliseconds, TFLOP/s and error.

    python benchmarks/orthogonalize.py --json results/orthogonalize_h200.json

Paths: `plain`, batched products in bf16 as published; `single` and `pairs`, the two forms of
angular_muown.kernels.polar_chain in float16, of which the dispatch takes the one marked *. TFLOP/s
count what five iterations with symmetric products must compute, so paths compare by them. The
error is relative to the same iteration in float64. Needs a GPU.
"""

import argparse
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from angular_muown.kernels import products
from angular_muown.kernels.polar_chain import SCALE, Product, allocate, chain_for
from angular_muown.kernels.polar_chain import products as chain_of
from angular_muown.stages.orthogonalize import POLAR_EXPRESS, POLAR_EXPRESS_MARGIN, polar_express

SHAPES = [(48, 768, 768), (24, 2048, 768), (12, 768, 2048), (32, 2048, 2048), (32, 512, 2048)]
SHAPES += [(11, 8192, 2048), (8, 2048, 8192), (172, 704, 1024), (143, 1024, 704), (28, 256, 1024)]


def milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Of the GPU alone: launches are recorded once and replayed."""
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events))


def by_kernels(X: Tensor, chain: tuple[Product, ...]) -> tuple[float, Tensor]:
    count, m, n = X.shape
    allocation = allocate(m, n, chain)
    work = torch.zeros(count, allocation.size, dtype=torch.float16, device="cuda")
    norm = torch.linalg.matrix_norm(X.float(), keepdim=True)
    start = (SCALE / POLAR_EXPRESS_MARGIN * X / norm).half()
    tall = start if m >= n else start.mT

    def run() -> None:  # on finite numbers, whatever they are by now
        products.run(work, m, n, chain, allocation, cublas=True)

    def load() -> None:
        work[:, : m * n].unflatten(1, tall.shape[1:]).copy_(tall)

    load()
    took = milliseconds(run)
    load()
    run()
    end = allocation.offsets[-1]
    return took, work[:, end : end + m * n].unflatten(1, (m, n)).double() / SCALE


def measure(count: int, m: int, n: int) -> dict[str, Any]:
    X = torch.randn(count, m, n, device="cuda")
    exact = polar_express(X[:2].double())
    short, long = min(m, n), max(m, n)
    operations = 5 * count * (3 * short**2 * long + short**3)
    chosen = chain_for(m, n, polar_express)
    paths: dict[str, tuple[float, Tensor]] = {
        "plain": (milliseconds(lambda: polar_express(X)), polar_express(X).double())
    }
    for name, segments in (("single", (1,) * 5), ("pairs", (1, 2, 2))):
        chain = tuple(chain_of(POLAR_EXPRESS, segments))
        paths[name + ("*" if chain == chosen else "")] = by_kernels(X, chain)
    return {
        "shape": [count, m, n],
        "paths": {
            name: {
                "ms": took,
                "tflops": operations / took / 1e9,
                "error": float((Q[:2] - exact).norm() / exact.norm()),
            }
            for name, (took, Q) in paths.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = torch.cuda.get_device_name()
    print(f"{machine}, torch {torch.__version__}")
    results = []
    for shape in SHAPES:
        results.append(measure(*shape))
        cells = [
            f"{name:8} {path['ms']:8.3f} ms {path['tflops']:5.0f} TFLOP/s {path['error']:.1e}"
            for name, path in results[-1]["paths"].items()
        ]
        print(f"{shape!s:18}", " | ".join(cells), flush=True)
        if arguments.json:
            content = {"machine": machine, "torch": torch.__version__, "results": results}
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
