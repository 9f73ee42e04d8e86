"""Two gloo ranks on loopback, with an end to waiting."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch

WORLD, LIMIT = 2, 120  # seconds that a test waits for its processes
FRESH = multiprocessing.get_context("spawn")


def _rank(
    work: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        work(*arguments)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def run_ranks(work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(*arguments)` on all ranks; it fails where one of them does, or takes too long."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD)}
    processes = []
    for rank in range(WORLD):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(FRESH.Process(target=_rank, args=(work, arguments, environment)))
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * WORLD, f"ranks left with {codes}"
    finally:
        for process in processes:
            process.kill()
