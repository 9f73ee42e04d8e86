"""Memory of a training step by the dtype of the weights and of the momentum.

    python benchmarks/train_memory.py --json results/train_memory_h200.json

Two of the lab's models take a few steps on random tokens: the mixture of the named run `moe-1.1b`,
and a dense model with the hidden matrices of Llama 3.2 1B and the lab's vocabulary. A step is a
forward pass under bf16 autocast, a backward pass, clipping and the optimizer; nothing is compiled.
Embeddings, head, norms and routers are always in float32 and stepped by AdamW, as with the lab's
precision=bf16_weights.

The table has the bytes per parameter of the hidden matrices, and GiB of the whole model: what is
held between steps (weights, gradients and state), and the peak of a step, activations included.
Without a GPU the models are small, and no peak is measured.
"""

import argparse
import gc
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from step_time import allocated, graph_bytes
from torch import Tensor, nn

from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import ModelSpec, OptimSpec, Spec
from angular_lab.models import LanguageModel, build_model
from angular_lab.training.build import make_optimizer
from angular_lab.training.evaluate import autocast_of
from angular_muown import Engine, plan

GIB = 2**30
MODELS = {
    "llama1b": ModelSpec(layers=16, width=2048, heads=32, kv_heads=8, mlp=8192),
    "moe1.1b": named_run("moe-1.1b").model,
}


@dataclass(frozen=True)
class Setup:
    optimizer: str
    weights: torch.dtype
    momentum: str | None  # None: AdamW has two moments in the dtype of the weights

    @property
    def label(self) -> str:
        weights = str(self.weights).removeprefix("torch.")
        return f"{self.optimizer}, {weights} weights" + (
            f", {self.momentum} momentum" if self.momentum else ""
        )


SETUPS = (
    Setup("adamw", torch.float32, None),
    Setup("angular_muown", torch.float32, "float32"),
    Setup("angular_muown", torch.bfloat16, "float32"),
    Setup("angular_muown", torch.bfloat16, "int8"),
)


def divided(spec: ModelSpec, by: int) -> ModelSpec:
    """Divide all dimensions; the numbers of heads and experts stay, and at least two layers."""
    keys = ("vocabulary", "width", "mlp", "expert_mlp", "shared_mlp")
    smaller = {key: getattr(spec, key) // by for key in keys}
    return replace(spec, layers=max(2, spec.layers // by), **smaller)


def hidden_matrices(model: LanguageModel) -> list[nn.Parameter]:
    groups = plan(model, blocks=model.blocks(), stacks=model.stacks())
    return [p for group in groups if group["algorithm"] == "matrix" for _, p in group["params"]]


@torch.no_grad()
def make_model(spec: ModelSpec, weights: torch.dtype, device: str) -> LanguageModel:
    """Return a model with random weights.

    They are drawn on the device: the lab draws them on the CPU, which takes most of the time of a
    few steps.
    """
    with torch.device(device):
        model = build_model(spec)
    for p in model.parameters():
        if p.ndim == 1:
            p.fill_(1.0)
        else:
            p.normal_(0.0, spec.init_std)
    for p in hidden_matrices(model):
        p.data = p.data.to(weights)
    return model


class Training:
    """A model, its optimizer, and one batch of random tokens."""

    def __init__(self, spec: ModelSpec, setup: Setup, sequences: int, device: str) -> None:
        torch.manual_seed(0)
        optim = OptimSpec(name=setup.optimizer, lr=1e-3, state_dtype=setup.momentum)
        self.spec = Spec(model=spec, optim=optim)
        self.model = make_model(spec, setup.weights, device)
        self.hidden = hidden_matrices(self.model)
        self.optimizer = make_optimizer(self.model, self.spec)
        shape = (sequences, spec.sequence)
        self.tokens = torch.randint(0, spec.vocabulary, shape, device=device)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast_of(self.spec, self.tokens.device):
            loss: Tensor = self.model(self.tokens, self.tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.balance()
        return loss.item()

    def held(self, params: Iterable[nn.Parameter]) -> dict[str, int]:
        """Return the bytes of some parameters, of their gradients and of their state."""
        params = list(params)
        gradients = [p.grad for p in params if p.grad is not None]
        states = [x for p in params for x in self.optimizer.state[p].values()]
        parts = {"weights": params, "gradients": gradients, "state": states}
        return {name: sum(x.nbytes for x in tensors) for name, tensors in parts.items()}


def measure(spec: ModelSpec, setup: Setup, arguments: argparse.Namespace) -> dict[str, Any]:
    cuda = arguments.device == "cuda"
    before = start_empty() if cuda else 0
    training = Training(spec, setup, arguments.sequences, arguments.device)
    losses = [training.step() for _ in range(arguments.steps)]
    peak = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # without the first steps: kernels were compiled
        losses.append(training.step())
        pool = graph_bytes() if isinstance(training.optimizer, Engine) else 0
        peak = torch.cuda.max_memory_allocated() - before + pool
    count = sum(p.numel() for p in training.hidden)
    per_parameter = {k: v / count for k, v in training.held(training.hidden).items()}
    everything = training.held(training.model.parameters())
    held = sum(everything.values())
    return {
        "setup": setup.label,
        "hidden_parameters": count,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "bytes_per_hidden_parameter": per_parameter,
        "gib": {name: size / GIB for name, size in everything.items()},
        "held_gib": held / GIB,
        "peak_gib": None if peak is None else peak / GIB,
        "allocated_before_gib": before / GIB,  # not part of the peak
        "peak_above_held_gib": None if peak is None else (peak - held) / GIB,
        "losses": losses,
    }


def start_empty() -> int:
    """Free what the last configuration held, and return the bytes that are still allocated."""
    gc.collect()
    torch.cuda.empty_cache()
    return allocated()


COLUMNS = ("weights", "gradients", "state", "held", "peak", "above")


def header(name: str, row: dict[str, Any]) -> str:
    counts = f"{row['parameters']:,} parameters, {row['hidden_parameters']:,} of them in"
    return (
        f"\n{name}: {counts} hidden matrices\n"
        f"{'':50}    bytes per hidden parameter   GiB of all parameters\n"
        f"{'':50}    weights gradients    state   " + " ".join(f"{x:>9}" for x in COLUMNS)
    )


def line(row: dict[str, Any]) -> str:
    per_parameter = " ".join(f"{x:9.3f}" for x in row["bytes_per_hidden_parameter"].values())
    sizes = (*row["gib"].values(), row["held_gib"], row["peak_gib"], row["peak_above_held_gib"])
    cells = " ".join("        -" if x is None else f"{x:9.3f}" for x in sizes)
    return f"{row['setup']:50} {per_parameter}   {cells}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--divide", type=int, default=1 if cuda else 16)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--sequences", type=int, default=1, help="per step")
    parser.add_argument("--length", type=int, default=1024 if cuda else 64, help="in tokens")
    parser.add_argument("--steps", type=int, default=3, help="before the measured one")
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    cuda = arguments.device == "cuda"
    machine = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    settings = {k: v for k, v in vars(arguments).items() if k != "json"}
    content: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "settings": settings}
    print(f"{machine}, torch {torch.__version__}, dimensions divided by {arguments.divide}")
    for name in arguments.models:
        spec = divided(replace(MODELS[name], sequence=arguments.length), arguments.divide)
        rows = content[name] = []
        for setup in SETUPS:
            rows.append(measure(spec, setup, arguments))
            if len(rows) == 1:
                print(header(name, rows[0]))
            print(line(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
