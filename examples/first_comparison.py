"""Compare AdamW and AngularMuown on a tiny GPT: each at a few learning rates, a table at the end.

    python examples/first_comparison.py
    python examples/first_comparison.py --seeds 0 1 2 --steps 600

It needs torch only. The model and the text are those of plain_loop.py; a tenth of the text is held
out. Both optimizers get the same batches, the same schedule and no weight decay.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from plain_loop import CONTEXT, GPT, batch, python_source
from torch import Tensor, nn
from torch.optim import Optimizer

from angular_muown import AngularMuown, wsd_schedule

Make = Callable[[nn.Module, float], Optimizer]  # (model, lr)


def adamw(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def angular_muown(model: nn.Module, lr: float) -> Optimizer:
    return AngularMuown.for_model(model, lr=lr, blocks={"*.qkv.weight": 3})


# Three learning rates each, by factors of 2. If the best one is at an edge, add another.
GRIDS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "AdamW": (adamw, (1e-3, 2e-3, 4e-3)),
    "AngularMuown": (angular_muown, (0.04, 0.08, 0.16)),
}


def train(make: Make, lr: float, steps: int, seed: int, text: Tensor) -> GPT:
    torch.manual_seed(seed)
    model = GPT()
    optimizer = make(model, lr)
    scheduler = wsd_schedule(optimizer, steps, warmup=0.1)
    for step in range(steps):
        model(*batch(text, step, seed)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def held_out_loss(model: GPT, text: Tensor, count: int = 256) -> float:
    windows = text[: count * (CONTEXT + 1)].view(count, -1)
    return model(windows[:, :-1], windows[:, 1:]).item()


def main(steps: int = 200, seeds: Sequence[int] = (0,)) -> dict[str, dict[float, float]]:
    """Return the mean held-out loss by optimizer and learning rate."""
    text = python_source()
    border = len(text) * 9 // 10
    losses: dict[str, dict[float, float]] = {}
    for name, (make, rates) in GRIDS.items():
        losses[name] = {}
        for lr in rates:
            start = time.perf_counter()
            models = [train(make, lr, steps, seed, text[:border]) for seed in seeds]
            losses[name][lr] = fmean(held_out_loss(model, text[border:]) for model in models)
            seconds = time.perf_counter() - start
            print(f"{name:13} lr {lr:<7g} loss {losses[name][lr]:.3f}  {seconds:.0f} s", flush=True)
    print("\n| optimizer | best lr | held-out loss | inside the grid |\n|---|---|---|---|")
    for name, by_lr in losses.items():
        best = min(by_lr, key=by_lr.__getitem__)
        inside = "yes" if best not in (min(by_lr), max(by_lr)) else "no: extend it"
        print(f"| {name} | {best:g} | {by_lr[best]:.3f} | {inside} |")
    print(f"\n{len(seeds)} seed(s), {steps} steps, a tiny model: an exercise, not evidence.")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    main(**vars(parser.parse_args()))
