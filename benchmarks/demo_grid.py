"""Learning rates for `make demo`: the named run nano, each optimizer over a grid.

python benchmarks/demo_grid.py --out results/demo_grid.json
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from angular_lab.demo import demo_spec
from angular_lab.report.report import summary
from angular_lab.training.start import train

# lr x aux_lr; AdamW trains everything at one learning rate
AUX = (2e-3, 4e-3, 8e-3)
GRIDS = {
    "adamw": [(lr, lr) for lr in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)],
    "muon": [(lr, aux) for lr in (0.01, 0.02, 0.04) for aux in AUX],
    "muown": [(lr, aux) for lr in (0.01, 0.02, 0.04) for aux in AUX],
    "angular_muown": [(lr, aux) for lr in (0.02, 0.04, 0.08) for aux in AUX],
}
DECAY = {"adamw": 0.1, "muon": 0.1}  # as in the paper; the others have none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, help="per run; default: those of the demo")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, grid in GRIDS.items():
            for lr, aux in grid:
                spec = demo_spec(name, lr, aux, DECAY.get(name, 0.0), arguments.steps)
                loss = summary(train(spec, Path(folder) / f"{name}-{lr}-{aux}"))["validation loss"]
                results.append({"optimizer": name, "lr": lr, "aux_lr": aux, "val_loss": loss})
                print(f"{name:14} {lr:7g} {aux:7g} {loss:.4f}", flush=True)
                content = {"torch": torch.__version__, "results": results}
                arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
