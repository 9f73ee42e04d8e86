"""Learning rates for `make demo`: the nano recipe, each optimizer over a grid.

python benchmarks/demo_grid.py --out results/demo_grid.json
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from angular_lab.demo import demo_spec
from angular_lab.report import summary
from angular_lab.runs import train

GRIDS = {
    "adamw": (2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
    "muon": (0.01, 0.02, 0.04, 0.08),
    "muown": (5e-3, 0.01, 0.02, 0.04),
    "angular_muown": (0.01, 0.02, 0.04, 0.08),
}
DECAY = {"adamw": 0.1, "muon": 0.1}  # as in the paper; the others have none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="0: the demo's own")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, grid in GRIDS.items():
            for lr in grid:
                spec = demo_spec(name, lr, DECAY.get(name, 0.0), arguments.steps)
                row = summary(train(spec, Path(folder) / f"{name}-{lr}"))
                results.append({"optimizer": name, "lr": lr, "val_loss": row["validation loss"]})
                print(f"{name:14} {lr:7g} {row['validation loss']:.4f}", flush=True)
                content = {"torch": torch.__version__, "results": results}
                arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
