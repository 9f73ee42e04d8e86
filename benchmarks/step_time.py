"""Step time, state and peak memory of the family, torch.optim.Muon and AdamW.

    python benchmarks/step_time.py --shapes gpt124 llama1b moe1.1b --json results/step_time.json

Hidden matrices of three models, float32, random gradients. Medians over `--steps` steps after
`--warmup`; on a GPU by events between steps that follow each other, as they follow a backward pass,
with the time the host needs to issue a step beside it. `extra` is the peak above parameters,
gradients and state, workspaces of recorded products included. The floor is what five Polar Express
iterations with symmetric products and 28 bytes per element cost at the rates of a large product and
a large copy, measured in the same run.
Without a GPU the default is gpt124 at a quarter of its size.
"""

import argparse
import gc
import json
import math
import platform
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shapes import SHAPES, Shape, divided
from torch import nn

import angular_muown as library
from angular_muown.engine import Engine

FAMILY = [kind.__name__ for kind in Engine.__subclasses__()]
BASELINES = ("torch.optim.Muon", "torch.optim.AdamW")


def make(name: str, params: list[nn.Parameter], **settings: Any) -> torch.optim.Optimizer | None:
    stacks = [p for p in params if p.ndim > 2]
    if name == "torch.optim.AdamW":
        return torch.optim.AdamW(params, fused=params[0].is_cuda)
    if name == "torch.optim.Muon":
        return None if stacks else torch.optim.Muon(params)
    groups: list[dict[str, Any]] = [{"params": [p for p in params if p.ndim == 2]}]
    if stacks:
        groups.append({"params": stacks, "view": "stack"})
    return getattr(library, name)(groups, **settings)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [v for state in optimizer.state.values() for v in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def held_bytes(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Parameters, gradients and state."""
    return 2 * sum(p.numel() * p.element_size() for p in params) + state_bytes(optimizer)


def peak_above(held: int, step: Callable[[], Any], cuda: bool) -> int:
    """Bytes beyond `held` while a step runs; on the CPU, what the process grows by (Linux)."""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - held
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    step()
    return max(0, _status("VmHWM") - before)


def graph_bytes() -> int:
    """What the memory pools of recorded graphs keep, cuBLAS's workspaces, beside what the
    allocator counts."""
    segments = torch.cuda.memory_snapshot()
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["segment_pool_id"] != (0, 0)
    )


def allocated() -> int:
    """As in training, where the current stream's products have taken cuBLAS's workspace."""
    torch.ones(16, 16, device="cuda").mm(torch.ones(16, 16, device="cuda"))
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def time_steps(step: Callable[[], Any], steps: int, cuda: bool) -> tuple[float, float]:
    """Milliseconds per step, and of the host until the step is issued."""
    host: list[float] = []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)] if cuda else []
    for event in events[:1]:
        event.record()
    for i in range(steps):
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        if cuda:
            events[i + 1].record()
    issued = 1e3 * median(host)
    if not cuda:
        return issued, issued
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events)), issued


def rates() -> tuple[float, float]:
    """Operations and bytes per second of this GPU: a large bf16 product, a large copy."""
    A = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    product, _ = time_steps(lambda: A @ A, 20, True)
    copy, _ = time_steps(lambda: target.copy_(source), 20, True)
    return 2 * 8192**3 / product * 1e3, 2 * source.numel() * 4 / copy * 1e3


def floor_ms(shapes: list[Shape], operations: float, bandwidth: float) -> float:
    seconds = 0.0
    for shape in shapes:
        count, short, long = math.prod(shape[:-2]), min(shape[-2:]), max(shape[-2:])
        work = 5 * count * (3 * short**2 * long + short**3)
        seconds += work / operations + 28 * count * short * long / bandwidth
    return 1e3 * seconds


def measure(name: str, shapes: list[Shape], arguments: argparse.Namespace) -> dict[str, Any]:
    device, cuda = arguments.device, arguments.device.startswith("cuda")
    before = allocated() if cuda else 0
    params = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = make(name, params)
    if optimizer is None:
        return {"optimizer": name, "note": "no 3D"}
    start = time.perf_counter()
    optimizer.step()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(arguments.warmup):
        optimizer.step()
    state = state_bytes(optimizer)
    pool = graph_bytes() if cuda and isinstance(optimizer, Engine) else 0
    _ = allocated() if cuda else 0
    extra = pool + peak_above(before + held_bytes(params, optimizer), optimizer.step, cuda)
    milliseconds, host = time_steps(optimizer.step, arguments.steps, cuda)
    recorded = arguments.graph and cuda and isinstance(optimizer, Engine)
    del optimizer
    return {
        "optimizer": name,
        "ms": milliseconds,
        "host_ms": host,
        **({"graph_host_ms": graph_host_ms(name, params, arguments.steps)} if recorded else {}),
        "first_step_s": first,
        "state_mib": state / 2**20,
        "extra_mib": extra / 2**20,
        "parameters_mib": sum(p.numel() for p in params) * 4 / 2**20,
    }


def graph_host_ms(name: str, params: list[nn.Parameter], steps: int) -> float:
    """The host's time for a step that was recorded in a graph of the user's."""
    optimizer = make(name, params, capturable=True)
    assert optimizer is not None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    return time_steps(graph.replay, steps, True)[1]


def line(result: dict[str, Any], reference: float) -> str:
    if "note" in result:
        return f"{result['optimizer']:18} {result['note']:>9}"
    return (
        f"{result['optimizer']:18} {result['ms']:9.2f} {result['ms'] / reference:7.2f} "
        f"{result['host_ms']:9.2f} {result['first_step_s']:8.2f} "
        f"{result['state_mib']:10,.0f} {result['extra_mib']:10,.0f}"
        + (f"  in a graph: host {result['graph_host_ms']:.3f}" if "graph_host_ms" in result else "")
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES) if cuda else ["gpt124"]
    )
    parser.add_argument("--divide", type=int, default=1 if cuda else 4)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    names = [*FAMILY, *BASELINES]
    parser.add_argument("--optimizers", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--graph", action="store_true", help="the host's time inside a graph too")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    cuda = arguments.device.startswith("cuda")
    machine = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    settings = {k: v for k, v in vars(arguments).items() if k != "json"}
    content: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "settings": settings}
    print(f"{machine}, torch {torch.__version__}, dimensions divided by {arguments.divide}")
    peak = rates() if cuda else None
    if peak:
        content["operations_per_second"], content["bytes_per_second"] = peak
        print(f"bf16 product {peak[0] / 1e12:.0f} TFLOP/s, copy {peak[1] / 1e12:.2f} TB/s")
    for name in arguments.shapes:
        layers = {} if arguments.layers is None else {"layers": arguments.layers}
        shapes = divided(SHAPES[name](**layers), arguments.divide)
        floor = floor_ms(shapes, *peak) if peak else None
        content[f"{name}_floor_ms"] = floor
        print(f"\n{name}: {len(shapes)} parameters", f"floor {floor:.2f} ms" if floor else "")
        print("optimizer                 ms   ratio   host ms  first s  state MiB  extra MiB")
        results = content[name] = []
        for optimizer in arguments.optimizers:
            results.append(measure(optimizer, shapes, arguments))
            reference = next((r["ms"] for r in results if "ms" in r), 1.0)
            print(line(results[-1], reference), flush=True)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
