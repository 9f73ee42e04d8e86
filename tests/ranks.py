"""Gloo ranks on this machine: a function in several processes, with an end in sight.

Processes are forked from a server that has torch loaded, so a group of eight starts in a second.
They end without taking the interpreter down, unlike those of torch.multiprocessing.spawn: a thread
of Gloo that still drops a tensor would ask for the interpreter's lock then, and the process would
abort although all of its work was done (github.com/pytorch/pytorch/issues/190489).
"""

import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

LIMIT = 150  # seconds for everything
PATIENCE = 20  # seconds in which a collective has to end
CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "angular_muown", "tests.ranks"]
)
DIED = "ended without a word"


class RankError(Exception):
    """What a rank raised, as text."""


def on_ranks(world: int, work: Callable[..., Any], *args: Any, patience: float = PATIENCE) -> Any:
    """`work(*args)` on every rank; what the ranks return, in their order. A rank that raises
    leaves a RankError in its place, and so does one that dies."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
        processes = [
            CONTEXT.Process(
                target=_rank, args=(i, world, folder, patience, pipes[i][1], work, args)
            )
            for i in range(world)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return [_outcome(receiver) for receiver, _ in pipes]
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _outcome(receiver: Any) -> Any:
    if not receiver.poll(LIMIT):
        return RankError(f"nothing for {LIMIT} seconds")
    with suppress(EOFError):
        return torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False)
    return RankError(DIED)


def _send(sender: Any, value: Any) -> None:
    """As bytes: shared memory would end with the rank."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    sender.send_bytes(buffer.getvalue())


def _rank(
    rank: int, world: int, folder: str, patience: float, sender: Any, work: Any, args: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import torch.distributed as dist

    store = f"file://{Path(folder) / 'store'}"
    limit = timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    try:
        _send(sender, work(*args))
    except BaseException:
        _send(sender, RankError(traceback.format_exc()))
    finally:
        sender.close()
        with suppress(Exception):
            dist.destroy_process_group()


def results(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """As `on_ranks`, where all of them have to succeed."""
    found = on_ranks(world, work, *args)
    for rank, outcome in enumerate(found):
        assert not isinstance(outcome, RankError), f"rank {rank}:\n{outcome}"
    return found
