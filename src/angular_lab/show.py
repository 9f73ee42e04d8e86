"""Describe a run before it is started: settings, parameter groups, size, time."""

import json
import time

import torch

from angular_lab.config.spec import Spec
from angular_lab.data.passes import describe_passes
from angular_lab.text import estimated_time
from angular_lab.training import build
from angular_lab.training.progress import peak_flops
from angular_lab.training.start import data_place

USUAL_MFU = 0.4  # of a GPU that does not wait for the host; on a CPU the speed is measured


def describe(spec: Spec) -> str:
    """Return a run's settings, parameter groups and expected cost as text."""
    spec.check()
    model, optimizer = build.without_memory(spec)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = spec.steps * spec.tokens_per_step
    flops = model.flops_per_token() * tokens
    rate, source = rate_here()
    lines = [
        json.dumps(spec.to_dict(), indent=2),
        "",
        _plan(optimizer),
        "",
        f"parameters   {parameters:,}",
        f"tokens       {tokens:,} ({spec.steps:,} steps of {spec.tokens_per_step:,})",
        f"text         {_text(spec)}",
        f"operations   {flops:.3g} FLOP ({model.flops_per_token():.4g} per token)",
        f"memory       {build.training_bytes(spec, model, optimizer) / 2**30:.2f} GiB for weights, "
        "gradients and state; activations on top",
        f"time         {estimated_time(flops / rate)} at {rate / 1e12:.3g} TFLOP/s ({source})",
    ]
    return "\n".join(lines)


def _text(spec: Spec) -> str:
    """Return how often the run reads its corpus, if that is prepared."""
    data = data_place(spec)
    if data.is_dir():
        return describe_passes(spec, data)
    return f"{spec.data} is not prepared yet, so the passes over it are not known"


def _plan(optimizer: torch.optim.Optimizer) -> str:
    rows = []
    for group in optimizer.param_groups:
        algorithm = group.get("algorithm", "adamw")
        cut = group.get("blocks")
        blocks = f" in {len(cut) if isinstance(cut, list) else cut} blocks" if cut else ""
        view = f" ({group['view']})" if group.get("view", "matrix") != "matrix" else ""
        count = sum(p.numel() for p in group["params"])
        names = group.get("param_names", [])
        rows.append(
            f"{algorithm}{view}{blocks}: {len(group['params'])} parameters, {count:,} elements, "
            f"lr {group['lr']:g}, weight decay {group['weight_decay']:g}; first {names[0]}"
        )
    return f"{type(optimizer).__name__}\n" + "\n".join(f"  {row}" for row in rows)


def rate_here() -> tuple[float, str]:
    """Return the FLOP/s to expect on this machine and where the number comes from."""
    if torch.cuda.is_available():
        peak = peak_flops(torch.device("cuda"))
        if peak is not None:
            return USUAL_MFU * peak, f"{USUAL_MFU:.0%} of the datasheet's peak"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    A = torch.randn(1024, 1024, device=device)
    (A @ A).sum().item()
    start = time.perf_counter()
    for _ in range(5):
        B = A @ A
    B.sum().item()
    measured = 5 * 2 * 1024**3 / (time.perf_counter() - start)
    return 0.5 * measured, "half of a matrix product's speed, measured now"
