"""Training throughput of the lab: tokens/s, MFU and the optimizer's share of a step.

    python benchmarks/train_throughput.py --runs s:32 s:64 dense-124m:32 --json results/x.json

A run is RECIPE:SEQUENCES or RECIPE:SEQUENCESxK; a step is K forward and backward passes over so
many sequences of random tokens (as expensive as text), gradient clipping and one optimizer step.
Medians over `--steps` steps after `--warmup`, which holds compilation.
"""

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from angular_lab.config.named_runs import named_run
from angular_lab.models import LanguageModel
from angular_lab.training import build
from angular_lab.training.progress import peak_flops
from angular_lab.training.ranks import Ranks
from angular_lab.training.recorded_passes import WARM_UP, Passes, can_record


def clock(work: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Seconds of each call, by events on a GPU."""
    if device.type != "cuda":
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


@dataclass(frozen=True)
class Work:
    """A model, what trains it, and one batch."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    passes: Passes
    tokens: torch.Tensor
    count: int  # passes per step

    def gradients(self) -> None:
        for _ in range(self.count):
            self.passes.forward(self.tokens, self.tokens, 1 / self.count)
            self.passes.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def without_optimizer(self) -> None:
        self.gradients()
        self.passes.clear()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.passes.clear()


def prepare(
    name: str, sequences: int, count: int, optimizer: str, arguments: argparse.Namespace
) -> Work:
    spec = named_run(name)
    spec = replace(spec, deterministic=arguments.deterministic, compile=not arguments.eager)
    spec = replace(spec, optim=replace(spec.optim, name=optimizer))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = Ranks(0, 1, device)
    build.make_deterministic(spec)
    model = build.make_model(spec, ranks)
    parallel = build.parallelize(model, spec, ranks)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    passes = Passes(parallel, autocast, can_record(spec, model, ranks))
    shape = (sequences, spec.model.sequence)
    tokens = torch.randint(0, spec.model.vocabulary, shape, device=device)
    return Work(model, build.make_optimizer(model, spec), passes, tokens, count)


def measure(
    name: str, sequences: int, count: int, optimizer: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    work = prepare(name, sequences, count, optimizer, arguments)
    device = work.tokens.device
    cuda = device.type == "cuda"
    start = time.perf_counter()
    for _ in range(WARM_UP + 1):
        work.step()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    clock(work.step, arguments.warmup, device)
    full = median(clock(work.step, arguments.steps, device))
    plain = median(clock(work.without_optimizer, arguments.steps, device))
    tokens_per_step = count * work.tokens.numel()
    rate = tokens_per_step / full
    peak = peak_flops(device)
    return {
        "recipe": name,
        "optimizer": optimizer,
        "tokens_per_step": tokens_per_step,
        "passes_per_step": count,
        "tokens_per_second": rate,
        "mfu": rate * work.model.flops_per_token() / peak if peak else None,
        "step_ms": full * 1e3,
        "gradients_ms": plain * 1e3,
        "optimizer_share": 1 - plain / full,
        "first_steps_s": first,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="+", default=["nano:16"])
    parser.add_argument("--optimizers", nargs="+", default=["angular_muown", "adamw"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    results: list[dict[str, Any]] = []
    print(f"{machine}, torch {torch.__version__}, deterministic {arguments.deterministic}")
    print("run          optimizer      tokens/step   tokens/s    MFU   step ms  optimizer  first s")
    for run in arguments.runs:
        name, _, size = run.partition(":")
        sequences, _, passes = size.partition("x")
        for optimizer in arguments.optimizers:
            r = measure(name, int(sequences), int(passes or 1), optimizer, arguments)
            results.append(r)
            mfu = f"{r['mfu']:6.1%}" if r["mfu"] else "     -"
            cells = (
                f"{name:12} {optimizer:14} {r['tokens_per_step']:11,}",
                f"{r['tokens_per_second']:10,.0f} {mfu} {r['step_ms']:9.2f}",
                f"{r['optimizer_share']:9.1%} {r['first_steps_s']:8.1f}",
            )
            print(*cells, flush=True)
            if arguments.json:
                content = {
                    "machine": machine,
                    "torch": torch.__version__,
                    "settings": {k: v for k, v in vars(arguments).items() if k != "json"},
                    "results": results,
                }
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(content, indent=1) + "\n")
            gc.collect()  # the last model, which would lie beside the next one
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
