"""Run a function on several Gloo ranks on this machine, with time limits.

Processes are forked from a server that has torch loaded, so eight ranks start in a second. Unlike
those of torch.multiprocessing.spawn, they exit without finalizing the interpreter: a Gloo thread
that still releases a tensor would then request the GIL and abort a process whose work is done
(github.com/pytorch/pytorch/issues/190489).
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

RESULT_TIMEOUT = 150  # seconds
COLLECTIVE_TIMEOUT = 20  # seconds
CONTEXT: Any = multiprocessing.get_context("forkserver")
# All that a rank would import in its first step, which would take it a second. A test process has
# only one server, so this list is for all tests that start processes.
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "angular_muown.distributed.session",
        "angular_muown.kernels.sharded",
        "tests.lab.runs",
        "tests.library.sharded",
        "tests.ranks",
        "pytest",
    ]
)
DIED = "exited without a result"


class RankError(Exception):
    """The traceback of a rank that failed."""


def on_ranks(
    world: int, work: Callable[..., Any], *args: Any, timeout: float = COLLECTIVE_TIMEOUT
) -> list[Any]:
    """Run `work(*args)` on every rank and return the results in rank order.

    The result of a rank that raises or dies is a RankError. `timeout` is that of collectives.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
        processes = [
            CONTEXT.Process(target=_rank, args=(i, world, folder, timeout, pipes[i][1], work, args))
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
    if not receiver.poll(RESULT_TIMEOUT):
        return RankError(f"no result within {RESULT_TIMEOUT} seconds")
    with suppress(EOFError):
        return torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False)
    return RankError(DIED)


def _send(sender: Any, value: Any) -> None:
    """Send a value as bytes: shared memory would not outlive the rank."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    sender.send_bytes(buffer.getvalue())


def _rank(
    rank: int, world: int, folder: str, timeout: float, sender: Any, work: Any, args: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import torch.distributed as dist

    store = f"file://{Path(folder) / 'store'}"
    limit = timedelta(seconds=timeout)
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
    """Run `work(*args)` like `on_ranks`, and fail the test if any rank fails."""
    outcomes = on_ranks(world, work, *args)
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, RankError), f"rank {rank}:\n{outcome}"
    return outcomes
