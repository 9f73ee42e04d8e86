"""Why times are not those of one process alone: other processes on the GPU, and the load."""

from collections.abc import Sequence

from angular_lab.status.device_use import DeviceUse

BUSY = 10  # percent of the time: an idle GPU reports less
IDLE_MIB = 2048  # of GPU memory: a process that has computed nothing yet takes less
DRIVER_MIB = 4096  # what the driver takes for a process that computes: contexts, kernels, graphs
SLACK = 0.5  # of the load average: the system's own processes


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
