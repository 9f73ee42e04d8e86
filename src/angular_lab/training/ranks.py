"""The ranks of a run: one process is the case with nothing to exchange."""

import os
import re
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


def choose_device(name: str = "") -> torch.device:
    """Return the device of this rank, by default a GPU if there is one. Raises ValueError if it
    does not exist."""
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", kind):
        raise ValueError(f"--device {name}: it must be cpu or cuda")
    if kind == "cpu":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no CUDA device here; use --device cpu")
    local = os.environ.get("LOCAL_RANK", "0")
    index, count = int(kind.partition(":")[2] or local), torch.cuda.device_count()
    if index >= count:
        what = f"--device {name}" if ":" in kind else f"LOCAL_RANK={local}"
        raise ValueError(f"{what}: there are {count} CUDA devices here, from 0 on")
    return torch.device("cuda", index)


def start_ranks(device: str = "") -> Ranks:
    """From torchrun's environment; without it, one rank."""
    world, chosen = int(os.environ.get("WORLD_SIZE", 1)), choose_device(device)
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
