"""What else uses the machine while something is timed: other processes on the GPU, and the load."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

APPS = "--query-compute-apps=pid,used_memory"
STATE = "--query-gpu=utilization.gpu,memory.used"
BUSY = 10  # percent of the time: an idle GPU reports less
IDLE_MIB = 2048  # of GPU memory: a process that has computed nothing yet takes less
DRIVER_MIB = 4096  # what the driver takes for a process that computes: contexts, kernels, graphs
SLACK = 0.5  # of the load average: the system's own processes


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


FAILURES = (OSError, ValueError, subprocess.SubprocessError)


def look(gpu: str | None = None, own_mib: float = 0.0) -> DeviceUse:
    """Look at the load and, if given, at the GPU with this UUID, on which this process runs and has
    reserved `own_mib`."""
    use = DeviceUse(_load(), os.cpu_count() or 1, gpu is not None, own_mib=own_mib)
    if gpu is None:
        return use
    with suppress(*FAILURES):
        [state] = _ask(gpu, STATE)
        busy, memory = map(float, state.split(","))
        use = replace(use, utilization=busy, memory_mib=memory)
    with suppress(*FAILURES):
        if apps := [_row(line) for line in _ask(gpu, APPS)]:  # an empty list lacks this process
            others = _others(apps)
            use = replace(use, others=len(others), others_mib=sum(mib for _, mib in others))
    return use


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _others(apps: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the processes without this one."""
    # In a container, nvidia-smi may number processes as the host does: then one of them is this.
    own = next((app for app in apps if app[0] == os.getpid()), apps[0])
    return [app for app in apps if app is not own]


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
    reasons = _gpu_disturbances(before, during)
    loads = [use.load for use in during if use.load is not None]
    if before.load is None:
        reasons.append("the load is unknown")
    elif before.load > before.cores - threads + SLACK:
        reasons.append(
            f"a load of {before.load:.1f} before the start, and {threads} of {before.cores} cores "
            "are needed"
        )
    if (load := max(loads, default=0.0)) > before.cores + SLACK:
        reasons.append(f"a load of up to {load:.1f} on {before.cores} cores during the rounds")
    return reasons


def _gpu_disturbances(before: DeviceUse, during: Sequence[DeviceUse]) -> list[str]:
    looks = [before, *during]
    reasons = []
    if any(use.gpu and use.others is None and use.memory_mib is None for use in looks):
        reasons.append("nvidia-smi does not answer, so other processes on the GPU are unknown")
    if others := max(use.others or 0 for use in looks):
        mib = max(use.others_mib or 0 for use in looks)
        reasons.append(f"{others} other process{'es' * (others != 1)} on the GPU ({mib:,.0f} MiB)")
    if (before.utilization or 0) > BUSY:
        reasons.append(f"the GPU was busy {before.utilization:.0f}% of the time before the start")
    # A container may not see the processes of others, but it sees their memory.
    extra = [(use.memory_mib or 0) - use.own_mib for use in looks]
    if extra[0] > IDLE_MIB:
        reasons.append(f"{extra[0]:,.0f} MiB of the GPU were in use before the start")
    elif not others and (most := max(extra)) > DRIVER_MIB:
        reasons.append(f"{most:,.0f} MiB of the GPU were not this process's during the rounds")
    return reasons
