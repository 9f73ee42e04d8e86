"""Whether a run has its device to itself: the machine's load, and other processes on its GPU.

Times of a run that shared its device say little about its optimizer. The reader of a run folder
decides by these records (`run_folder.Run.shared_device`), and `pace` by what it looks at itself.
"""

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

STATE = "--query-gpu=utilization.gpu,memory.used"
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory",
         "--format=csv,noheader,nounits")  # fmt: skip
TIMEOUT = 10  # seconds; a driver that does not answer must not stop a run
GIB = 1024  # MiB, the unit of nvidia-smi


def device_use(threads: int, uuid: str | None = None) -> dict[str, Any]:
    """Return the load per core, the part of it that this run's own threads may cause and, with the
    UUID of a GPU, the other processes on it and their memory. What cannot be known is None."""
    count = os.cpu_count() or 1
    load = _load()
    per_core = None if load is None else round(load / count, 4)
    found: dict[str, Any] = {"load": per_core, "own_load": round(threads / count, 4)}
    if uuid is not None:
        processes, memory = other_processes(uuid)
        found |= {"other_gpu_processes": processes, "other_gpu_gib": memory}
    return found


def _load() -> float | None:
    """Return the load of the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def other_processes(uuid: str) -> tuple[int | None, float | None]:
    """Return the number of other processes on a GPU, those of MPS included, and their memory in
    GiB. (None, None) if it cannot be known: no nvidia-smi, an error, or a part of a GPU (MIG).

    A container may show the processes under the numbers of its host. Then this process is one of
    them, but which one is unknown, and so is the memory of the others.
    """
    listed = _processes(uuid)
    if not listed:  # this process uses the GPU: an empty list is not the truth
        return None, None
    if os.getpid() not in listed:
        return len(listed) - 1, None if len(listed) > 1 else 0.0
    others = {pid: memory for pid, memory in listed.items() if pid != os.getpid()}
    known = [memory for memory in others.values() if memory is not None]
    total = round(sum(known) / GIB, 3) if len(known) == len(others) else None
    return len(others), total


def _processes(uuid: str) -> dict[int, float | None]:
    """Return the processes on a GPU and their memory in MiB."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        rows = [[cell.strip() for cell in row.split(",")] for row in done.stdout.splitlines()]
        own = [row for row in rows if row[0].removeprefix("GPU-") == uuid.removeprefix("GPU-")]
        return {int(pid): _number(memory) for _, pid, memory in own}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdigit() else None  # [N/A], [Not Supported]


@dataclass(frozen=True)
class DeviceUse:
    """A look at the machine. What is unknown is None: the GPU's numbers if nvidia-smi does not
    answer, its processes in some containers."""

    load: float | None  # average over the last minute, this process included
    cores: int
    gpu: bool = False  # True if a GPU was looked at
    others: int | None = None  # other compute processes on the GPU
    others_mib: float | None = None  # their memory
    utilization: float | None = None  # percent of the time in which the GPU was busy
    memory_mib: float | None = None  # of the GPU, in use by all processes
    own_mib: float = 0.0  # of it, reserved by this process


def look(gpu: str | None = None, own_mib: float = 0.0) -> DeviceUse:
    """Look at the load and, if given, at the GPU with this UUID, on which this process runs and has
    reserved `own_mib`."""
    use = DeviceUse(_load(), os.cpu_count() or 1, gpu is not None, own_mib=own_mib)
    if gpu is None:
        return use
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        command = ["nvidia-smi", "-i", gpu, STATE, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        busy, memory = map(float, done.stdout.split(","))
        use = replace(use, utilization=busy, memory_mib=memory)
    others, gib = other_processes(gpu)
    return replace(use, others=others, others_mib=None if gib is None else GIB * gib)
