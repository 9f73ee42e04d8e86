"""Train the tiny GPT of plain_loop.py with FSDP2: each rank holds a part of every weight's rows.

    torchrun --nproc-per-node 2 examples/fsdp2.py --out runs/fsdp2              # CPUs or GPUs
    torchrun --nproc-per-node 2 examples/fsdp2.py --out runs/fsdp2 --resume
    python examples/fsdp2.py --out runs/fsdp2 --resume                          # one process

The optimizer needs no setting for it: shard the model first, then construct the optimizer. Half of
the run is saved with torch's distributed checkpoint, which any number of ranks can load.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_loop import GPT, batch, python_source
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LRScheduler

from angular_muown import AngularMuown, wsd_schedule

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}


def start() -> torch.device:
    """Join the other ranks: NCCL on GPUs, gloo on CPUs."""
    for name, value in {**ALONE, "MASTER_PORT": "29577"}.items():
        os.environ.setdefault(name, value)  # without torchrun: one rank
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def build(device: torch.device, steps: int) -> tuple[GPT, AngularMuown, LRScheduler]:
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AngularMuown.for_model(  # after fully_shard, which replaces the parameters
        model, lr=0.02, blocks={"*.qkv.weight": 3}
    )
    return model, optimizer, wsd_schedule(optimizer, steps, warmup=0.1)


class Checkpoint:
    """Model, optimizer and scheduler, as torch's distributed checkpoint saves and loads them."""

    def __init__(self, model: GPT, optimizer: AngularMuown, scheduler: LRScheduler) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        steps = {"steps": self.scheduler.last_epoch}
        return {"model": model, "optimizer": optimizer, "scheduler": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.last_epoch = state["scheduler"]["steps"]  # a function of the step


def main(out: Path, resume: bool = False, steps: int = 100) -> list[float]:
    """Return the losses of the steps that were taken, the mean over the ranks."""
    device = start()
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer, scheduler = build(device, steps)
    if rank == 0:
        print(optimizer.exchange_plan() if world > 1 else optimizer.plan)
    saved = Checkpoint(model, optimizer, scheduler)
    if resume:
        dcp.load({"run": saved}, checkpoint_id=out / "half")
    losses = []
    for step in range(scheduler.last_epoch, steps):
        if step == steps // 2 and not resume:
            dcp.save({"run": saved}, checkpoint_id=out / "half")
        tokens, targets = (x.chunk(world)[rank].to(device) for x in batch(python_source(), step))
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        if rank == 0 and step % 5 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}", flush=True)
    dist.barrier()  # gloo's threads release the last sum while this waits, not at Python's exit
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--resume", action="store_true", help="continue from the saved half")
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
