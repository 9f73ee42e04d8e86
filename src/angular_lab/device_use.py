"""What else uses the machine while something is timed: other processes on the GPU, and the load."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

APPS = "--query-compute-apps=pid,used_memory"
STATE = "--query-gpu=utilization.gpu,memory.used"
BUSY = 10  # percent of the time: an idle GPU reports less
IDLE_MIB = 2048  # of GPU memory: a process that has computed nothing yet takes less
SLACK = 0.5  # of the load average: the system's own processes


@dataclass(frozen=True)
class DeviceUse:
    """A look at the machine. Numbers of the GPU are None on a CPU, or if nvidia-smi failed."""

    load: float  # average over the last minute, this process included
    cores: int
    gpu: bool = False  # True if a GPU was looked at
    others: int | None = None  # other compute processes on the GPU
    others_mib: float | None = None  # their memory
    utilization: float | None = None  # percent of the time in which the GPU was busy
    memory_mib: float | None = None  # of the GPU, in use by all processes


def look(gpu: str | None = None) -> DeviceUse:
    """Look at the load and, if given, at the GPU with this UUID, on which this process runs."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if gpu is None:
        return DeviceUse(load, cores)
    try:
        apps = [_row(line) for line in _ask(gpu, APPS)]
        [state] = _ask(gpu, STATE)
        busy, memory = map(float, state.split(","))
    except (OSError, ValueError, subprocess.SubprocessError):
        return DeviceUse(load, cores, True)
    # In a container, nvidia-smi may number processes as the host does: then one of them is this.
    own = next((app for app in apps if app[0] == os.getpid()), apps[0] if apps else None)
    others = [app for app in apps if app is not own]
    return DeviceUse(load, cores, True, len(others), sum(mib for _, mib in others), busy, memory)


def _ask(gpu: str, query: str) -> list[str]:
    command = ["nvidia-smi", "-i", gpu, query, "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [line for line in answer.stdout.splitlines() if line.strip()]


def _row(line: str) -> tuple[int, float]:
    """Return a process and its memory in MiB, which is unknown on some systems."""
    pid, _, memory = (part.strip() for part in line.partition(","))
    return int(pid), float(memory) if memory.replace(".", "").isdigit() else 0.0


def disturbances(before: DeviceUse, during: Sequence[DeviceUse], threads: int) -> list[str]:
    """Return why times are not those of this process alone; [] if nothing was in the way.

    `threads` is how many cores this process needs. `before` was taken while it was idle.
    """
    looks = [before, *during]
    reasons = []
    if any(use.gpu and use.others is None for use in looks):
        reasons.append("nvidia-smi does not answer, so other processes on the GPU are unknown")
    if others := max(use.others or 0 for use in looks):
        mib = max(use.others_mib or 0 for use in looks)
        reasons.append(f"{others} other process{'es' * (others != 1)} on the GPU ({mib:,.0f} MiB)")
    if (before.utilization or 0) > BUSY:
        reasons.append(f"the GPU was busy {before.utilization:.0f}% of the time before the start")
    if (before.memory_mib or 0) > IDLE_MIB:  # a container may not see the processes of others
        reasons.append(f"{before.memory_mib:,.0f} MiB of the GPU were in use before the start")
    if before.load > before.cores - threads + SLACK:
        reasons.append(
            f"a load of {before.load:.1f} before the start, and {threads} of {before.cores} cores "
            "are needed"
        )
    if (load := max((use.load for use in during), default=0.0)) > before.cores + SLACK:
        reasons.append(f"a load of up to {load:.1f} on {before.cores} cores during the rounds")
    return reasons
