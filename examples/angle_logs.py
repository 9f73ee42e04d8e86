"""Angles, radii and kappa in TensorBoard, W&B or trackio, with one line.

    pip install -e '.[tensorboard]'      # or wandb, or trackio
    python examples/angle_logs.py --to tensorboard --out runs/angle_logs
    tensorboard --logdir runs/angle_logs

W&B is used offline (WANDB_MODE=offline) unless you say otherwise.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from angular_muown import AngularMuown, wsd_schedule
from angular_muown.integrations.loggers import log_angles


def open_writer(to: str, out: Path) -> Any:
    if to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(out))
    out.mkdir(parents=True, exist_ok=True)
    if to == "wandb":
        os.environ.setdefault("WANDB_MODE", "offline")
        import wandb

        return wandb.init(project="angles", dir=str(out))
    os.environ.setdefault("TRACKIO_DIR", str(out))
    import trackio

    return trackio.init(project="angles", embed=False)


def main(out: Path, to: str = "tensorboard", steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    head = nn.Linear(64, 1)
    network = nn.ModuleDict({"body": model, "head": head})
    optimizer = AngularMuown.for_model(network, lr=0.02)
    scheduler = wsd_schedule(optimizer, steps, warmup=10)
    writer = open_writer(to, out)
    log_angles(network, optimizer, writer, every=10)  # the one line
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 16)
        loss = (head(model(x)).squeeze(-1) - x[:, 0] * x[:, 1]).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    (writer.close if to == "tensorboard" else writer.finish)()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; see {out}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", choices=("tensorboard", "wandb", "trackio"), default="tensorboard")
    parser.add_argument("--out", type=Path, default=Path("runs/angle_logs"))
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
