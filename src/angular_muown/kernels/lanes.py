"""Order of a step's launches."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from angular_muown.kernels.chunks import Chunk

LANES = 2


def launch(chunks: Sequence[Chunk], device: torch.device, count: int) -> None:
    """Chunks in `count` lanes, each with its part of the work buffer: the tiles of one fill the
    processors that the last tiles of the other leave idle."""
    if device.type != "cuda":
        for chunk in chunks:
            chunk.run()
        return
    current = torch.cuda.current_stream(device)
    lanes = [current, *(side_stream(device, f"lane {i}") for i in range(1, count))]
    for lane in lanes[1:]:
        lane.wait_stream(current)
    for number, chunk in enumerate(chunks):
        with torch.cuda.stream(lanes[number % count]):
            chunk.run()
    for lane in lanes[1:]:
        current.wait_stream(lane)


@cache  # for all optimizers: what graphs allocate (cuBLAS's workspaces, 32 MiB for each lane) once
def graph_pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle()


@cache
def side_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
