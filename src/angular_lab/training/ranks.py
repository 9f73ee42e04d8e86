"""The ranks of a run; a single process is the case without communication."""

import os
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from angular_lab.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a run, and their collectives."""

    rank: int
    world: int
    device: torch.device
    hosts: Any = None  # process group of the CPUs (Gloo)
    tensor: int = 1  # consecutive ranks that work on the same sequences

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def data_world(self) -> int:
        """Return the number of groups of ranks that read different sequences."""
        return self.world // self.tensor

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's group among them."""
        return self.rank // self.tensor

    def mean(self, t: torch.Tensor) -> torch.Tensor:
        return self.sum(t) / self.world

    def sum(self, t: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            t = t.clone()
            dist.all_reduce(t)
        return t

    def any(self, flag: bool) -> bool:
        """True if the flag is true on any rank; communicated between CPUs, so no GPU waits."""
        if self.world == 1:
            return flag
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags, group=self.hosts)
        return bool(flags.item())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.hosts)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def choose_device(name: str = "") -> torch.device:
    """Return this rank's device, by default a GPU if there is one.

    Raises ValueError if the device does not exist.
    """
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", kind):
        raise UserError(f"--device {name}: it must be cpu or cuda")
    if kind == "cpu":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise UserError(f"--device {name}: torch finds no CUDA device here; use --device cpu")
    local = os.environ.get("LOCAL_RANK", "0")
    index, count = int(kind.partition(":")[2] or local), torch.cuda.device_count()
    if index >= count:
        what = f"--device {name}" if ":" in kind else f"LOCAL_RANK={local}"
        raise UserError(f"{what}: there are {count} CUDA devices here, from 0 to {count - 1}")
    return torch.device("cuda", index)


def start_ranks(device: str = "") -> Ranks:
    """Join the ranks of torchrun's environment; without it, return a single rank."""
    world, chosen = int(os.environ.get("WORLD_SIZE", 1)), choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    hosts = dist.new_group(backend="gloo") if world > 1 else None
    return Ranks(rank(), world, chosen, hosts)


def rank() -> int:
    """Return this process's rank from torchrun's environment."""
    return int(os.environ.get("RANK", 0))


def stop_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
