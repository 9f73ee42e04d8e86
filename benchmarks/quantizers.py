"""Error of 8-bit momentum by quantizer, on the momenta of a real run.

    python benchmarks/quantizers.py --json results/quantizers.json

Trains a small transformer on the source code of Python's standard library and stores the momentum
of every hidden matrix with each quantizer, rounded stochastically. Reported are medians over rows
of the error relative to the row, the same for the smaller half of a row's entries, and the angle
between the polar factors of the exact and of the stored matrix. An exact momentum is rounded once:
in training errors add up, by a factor of 1 / sqrt(1 - beta^2), 3.2 for a momentum of 0.95.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from math import degrees
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import OptimSpec
from angular_lab.run_folder import RunFolder
from angular_lab.training.ranks import start_ranks
from angular_lab.training.start import prepared_data
from angular_lab.training.trainer import Trainer

LEVELS = 127


def between_levels(share: Tensor, levels: Tensor) -> Tensor:
    """Round shares in [0, 1] to levels, up or down with the right mean."""
    above = torch.searchsorted(levels, share.contiguous(), right=True).clamp(max=len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    return torch.where(torch.rand_like(share) < (share - low) / (high - low), high, low)


def by_row(levels: Tensor, block: int | None = None) -> Callable[[Tensor], Tensor]:
    """Return a quantizer with a scale per row, or per `block` entries of a row."""

    def quantize(M: Tensor) -> Tensor:
        parts = M.split(block or M.shape[1], dim=1)
        return torch.cat([_scaled(part, levels) for part in parts], dim=1)

    return quantize


def _scaled(M: Tensor, levels: Tensor) -> Tensor:
    largest = M.abs().amax(dim=1, keepdim=True)
    share = M.abs() / torch.where(largest == 0, 1.0, largest)
    return between_levels(share, levels) * largest * M.sign()


def float8_levels() -> Tensor:
    """Return the positive numbers of float8_e4m3fn as shares of the largest, and zero."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return (numbers / numbers.max()).sort().values


EQUAL = torch.arange(LEVELS + 1) / LEVELS
QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "squares, scale per row": by_row(EQUAL**2),
    "squares, scale per 256 entries": by_row(EQUAL**2, 256),
    "equal levels, scale per row": by_row(EQUAL),
    "equal levels, scale per 256 entries": by_row(EQUAL, 256),
    "cubes, scale per row": by_row(EQUAL**3),
    "float8 e4m3, scale per row": by_row(float8_levels()),
}


def momenta(optimizer: str, steps: int) -> list[Tensor]:
    """Train, and return the momenta of the hidden matrices."""
    spec = named_run("nano")
    model = replace(spec.model, width=256, heads=4, mlp=1024)
    optim = OptimSpec(name=optimizer, lr=0.02)
    spec = replace(spec, steps=steps, model=model, optim=optim, batch=8, eval_every=None)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(folder)
        trainer = Trainer(spec, run, start_ranks("cpu"), prepared_data(spec))
        trainer.train()
    groups = (g for g in trainer.optimizer.param_groups if g["algorithm"] == "matrix")
    states = (trainer.optimizer.state[p] for g in groups for p in g["params"])
    return [state["momentum_buffer"].double() for state in states]


def polar_angle(M: Tensor, stored: Tensor) -> float:
    """Return the angle between two polar factors in degrees."""
    factors = []
    for X in (M, stored):
        u, _, vh = torch.linalg.svd(X, full_matrices=False)
        factors.append((u @ vh).flatten())
    return degrees(torch.acos(torch.cosine_similarity(*factors, dim=0).clamp(-1, 1)).item())


def errors(M: Tensor, quantize: Callable[[Tensor], Tensor]) -> dict[str, float]:
    stored = quantize(M)
    error = (stored - M).norm(dim=1) / M.norm(dim=1)
    small = M.abs() <= M.abs().median(dim=1, keepdim=True).values
    small_error = ((stored - M) * small).norm(dim=1) / (M * small).norm(dim=1)
    return {
        "row": error.median().item(),
        "worst row": error.max().item(),
        "smaller half": small_error.median().item(),
        "polar angle": polar_angle(M, stored),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--optimizer", default="angular_muown")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    matrices = momenta(arguments.optimizer, arguments.steps)
    torch.manual_seed(0)
    table = {}
    for name, quantize in QUANTIZERS.items():
        rows = [errors(M, quantize) for M in matrices]
        table[name] = {key: median(row[key] for row in rows) for key in rows[0]}
        print(f"{name:36}", "  ".join(f"{key} {x:.4f}" for key, x in table[name].items()))
    if arguments.json:
        content = {"optimizer": arguments.optimizer, "steps": arguments.steps, "medians": table}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
