"""Order of a step's launches."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from angular_muown.kernels.chunks import Chunk


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
    for chunk in chunks:
        with torch.cuda.stream(lanes[chunk.lane]):
            chunk.run()
    for lane in lanes[1:]:
        current.wait_stream(lane)


def record(chunks: Sequence[Chunk], device: torch.device, count: int) -> torch.cuda.CUDAGraph:
    """The launches as a graph."""
    # cuBLAS keeps a workspace per stream. The graph's must be its own: others may free theirs.
    torch._C._cuda_clearCublasWorkspaces()
    graph = _captured(lambda: launch(chunks, device, count), device, _keeper(device).pool())
    torch._C._cuda_clearCublasWorkspaces()
    return graph


@cache
def _keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """Holds the memory pool that all optimizers' graphs share: what they allocate (cuBLAS's
    workspaces, 32 MiB for each lane) is there once. A pool ends with the last graph in it."""
    return _captured(lambda: torch.zeros(1, device=device), device, None)


def _captured(work: Callable[[], Any], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), side_stream(device, "capture")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # thread_local: other threads (data loaders, NCCL's watchdog) may use the GPU meanwhile
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph


@cache
def side_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
