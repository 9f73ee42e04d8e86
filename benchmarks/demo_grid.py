"""Learning rates for `make demo`: the named run nano, each optimizer over a grid.

python benchmarks/demo_grid.py --out results/demo_grid.json [--only angular_muown] [--lr 0.04]

Rows that the file has already are kept, and not run again on the same device: a grid can be
extended. Losses of two devices are not comparable if their Pythons differ: the corpus is Python's
standard library.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from angular_lab.config.spec import Spec
from angular_lab.demo import demo_spec
from angular_lab.report.report import summary
from angular_lab.training.start import train

# lr x aux_lr; AdamW trains everything at one learning rate
AUX = (2e-3, 4e-3, 8e-3)
GRIDS = {
    "adamw": [(lr, lr) for lr in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)],
    "muon": [(lr, aux) for lr in (0.005, 0.01, 0.02, 0.04) for aux in (0.001, *AUX)],
    "muown": [(lr, aux) for lr in (0.01, 0.02, 0.04, 0.08) for aux in (*AUX, 0.016)],
    "angular_muown": [(lr, aux) for lr in (0.02, 0.04, 0.08) for aux in AUX],
}
DECAY = {"adamw": 0.1, "muon": 0.1}  # as in the paper; the others have none


def setting(spec: Spec, device: str) -> dict[str, Any]:
    """Return what identifies a row of the grid."""
    optim = spec.optim
    values = {"optimizer": optim.name, "lr": optim.lr, "aux_lr": optim.aux_lr}
    return values | {"steps": spec.steps, "cooldown": spec.schedule.decay, "device": device}


def measure(spec: Spec, device: str) -> dict[str, Any]:
    """Train the spec and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(spec, Path(folder) / "run")
        loss, versions = summary(run)["validation loss"], run.info.versions
        where = {key: versions[key] for key in ("torch", "python")}
        return setting(spec, device) | {"val_loss": loss, **where}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=GRIDS, action="append", help="default: all optimizers")
    parser.add_argument("--lr", type=float, nargs="+", help="default: all of the grid")
    parser.add_argument("--aux-lr", type=float, nargs="+", help="default: all of the grid")
    parser.add_argument("--steps", type=int, help="per run; default: those of the demo")
    arguments = parser.parse_args()
    out: Path = arguments.out
    rows: list[dict[str, Any]] = json.loads(out.read_text())["results"] if out.exists() else []
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for name in arguments.only or GRIDS:
        for lr, aux in GRIDS[name]:
            if lr not in (arguments.lr or [lr]) or aux not in (arguments.aux_lr or [aux]):
                continue
            spec = demo_spec(name, lr, aux, DECAY.get(name, 0.0), arguments.steps)
            if any(setting(spec, device).items() <= row.items() for row in rows):
                continue
            rows.append(measure(spec, device))
            print(f"{name:14} {lr:7g} {aux:7g} {rows[-1]['val_loss']:.4f}", flush=True)
            out.write_text(json.dumps({"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
