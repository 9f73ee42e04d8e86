"""The ranks of a run: one process is the case with nothing to exchange."""

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device
    hosts: Any = None  # a process group over the hosts' network
    tensor: int = 1  # ranks side by side that work on the same sequences

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def data_world(self) -> int:
        """How many read different sequences, and which of them this one is."""
        return self.world // self.tensor

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor

    def mean(self, t: torch.Tensor) -> torch.Tensor:
        return self.sum(t) / self.world

    def sum(self, t: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            t = t.clone()
            dist.all_reduce(t)
        return t

    def any(self, flag: bool) -> bool:
        """True on all ranks where it is true on one; between hosts, so no GPU has to wait."""
        if self.world == 1:
            return flag
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags, group=self.hosts)
        return bool(flags.item())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.hosts)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def start_ranks(device: str = "") -> Ranks:
    """From torchrun's environment; without it, one rank."""
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    hosts = dist.new_group(backend="gloo") if world > 1 else None
    return Ranks(rank(), world, chosen, hosts)


def rank() -> int:
    """This process's, from torchrun's environment."""
    return int(os.environ.get("RANK", 0))


def stop_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
