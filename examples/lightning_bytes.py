"""AngularMuown in Lightning and in Fabric: a small network learns the bytes of this very file.

    pip install -e '.[lightning]'
    python examples/lightning_bytes.py --out runs/lightning_bytes

Each trains two epochs at once, and the second one again from the checkpoint after the first.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from angular_muown import AngularMuown, wsd_schedule
from angular_muown.integrations.lightning import AngleMonitorCallback, per_step

CONTEXT, EPOCHS = 8, 2


class Network(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.mix = nn.Linear(CONTEXT * width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.out = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.mix(self.embedding(x).flatten(1)).relu())
        return self.head(self.out(x).relu())


def batches() -> DataLoader[Any]:
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long() % 128
    windows = text.unfold(0, CONTEXT + 1, 1)[: 64 * 30]
    return DataLoader(TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=64)


def make_optimizer(network: nn.Module, steps: int) -> tuple[AngularMuown, LRScheduler]:
    optimizer = AngularMuown.for_model(network, lr=0.03)
    return optimizer, wsd_schedule(optimizer, steps, warmup=0.1)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network, self.losses = Network(), []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        return per_step(*make_optimizer(self.network, steps))


def with_trainer(out: Path, resume: Path | None = None) -> Module:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu", max_epochs=EPOCHS, gradient_clip_val=1.0, default_root_dir=out,
        logger=CSVLogger(out, name="log"), log_every_n_steps=10, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[
            AngleMonitorCallback(every=10),
            ModelCheckpoint(out / "checkpoints", filename="{epoch}", save_top_k=-1),
        ],
    )  # fmt: skip
    module = Module()
    trainer.fit(module, batches(), ckpt_path=resume)
    return module


def with_fabric(out: Path, resume: Path | None = None) -> tuple[nn.Module, list[float]]:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0, verbose=False)
    bare = Network()
    loader = batches()
    optimizer, scheduler = make_optimizer(bare, EPOCHS * len(loader))
    network, wrapped = fabric.setup(bare, optimizer)
    state = {"network": network, "optimizer": wrapped, "scheduler": scheduler, "epoch": 0}
    if resume is not None:
        fabric.load(resume, state)
    losses = []
    for epoch in range(state["epoch"], EPOCHS):
        for x, y in loader:
            loss = nn.functional.cross_entropy(network(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(network, wrapped, max_norm=1.0)
            wrapped.step()
            wrapped.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        state["epoch"] = epoch + 1
        fabric.save(out / f"fabric-{epoch}.ckpt", state)
    return bare, losses


def main(out: Path) -> dict[str, Any]:
    module = with_trainer(out / "whole")
    resumed = with_trainer(out / "resumed", out / "whole" / "checkpoints" / "epoch=0.ckpt")
    bare, losses = with_fabric(out / "whole")
    again, _ = with_fabric(out / "resumed", out / "whole" / "fabric-0.ckpt")
    for name, seen in (("Lightning", module.losses), ("Fabric", losses)):
        print(f"{name}: loss {seen[0]:.3f} -> {seen[-1]:.3f} in {len(seen)} steps")
    return {
        "losses": {"lightning": module.losses, "fabric": losses},
        "weights": {"lightning": module.network, "fabric": bare},
        "resumed": {"lightning": resumed.network, "fabric": again},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/lightning_bytes"))
    main(**vars(parser.parse_args()))
