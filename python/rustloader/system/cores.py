"""The CPU cores that a process may use, and the ranks that share them."""

import functools
import math
import os

import rustloader.system.local_ranks as local_ranks
from rustloader._core import cpu_quota as _read_quota
from rustloader.system.procfs import read

# Read only once per process, because the limits of cgroups rarely change.
cpu_quota = functools.cache(_read_quota)


def effective_cores(affinity: int | None = None) -> float:
    """Returns the number of cores that a process may use: the cores of its affinity, or the CPU quota of its cgroups if
    that is lower.

    Args:
        affinity: Number of cores in the process's affinity; None for the affinity of this process.
    """
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    quota = cpu_quota()
    return cores if quota is None else min(cores, quota)


def usable_cores(affinity: int | None = None) -> int:
    """Returns the number of effective cores, rounded up."""
    return max(1, math.ceil(effective_cores(affinity)))


def ranks_on_cores() -> int:
    """Returns the number of ranks that share this rank's cores: 1 if the ranks are bound to different cores, otherwise
    the number of ranks on this machine.

    If there is a CPU quota, the ranks never count as bound, because they all share the quota.
    """
    ranks = local_ranks.size() or 1
    bound = ranks > 1 and cpu_quota() is None and local_ranks.are_bound(os.sched_getaffinity(0))
    return 1 if bound else ranks


def own_cores() -> int:
    """Returns this rank's share of the usable cores: their number divided by the number of ranks that share them, but
    at least 1."""
    return max(1, usable_cores() // ranks_on_cores())


def busy_seconds() -> float | None:
    """Returns the CPU time that all processes have used so far on the cores that this process may use, in seconds; None
    if it is unknown.

    The time includes the time that other virtual machines have taken (steal).
    """
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in (read("/proc/stat") or "").splitlines() if line.startswith("cpu")]
    # user nice system idle iowait irq softirq steal
    ticks = [list(map(int, fields[1:9])) for fields in lines if fields[0] in cores]
    if len(ticks) < len(cores) or not any(map(sum, ticks)):
        return None
    return sum(sum(times) - sum(times[3:5]) for times in ticks) / os.sysconf("SC_CLK_TCK")


def share_of_cores(cpu_seconds: float | None, seconds: float) -> float | None:
    """Returns the share of this process's cores that ``cpu_seconds`` of CPU time keep busy over ``seconds`` of elapsed
    time, from 0 to 1; None if it is unknown."""
    cores = len(os.sched_getaffinity(0))
    # If a CPU quota allows fewer cores, this share is not meaningful.
    if cpu_seconds is None or seconds <= 0 or usable_cores() < cores:
        return None
    return min(1.0, max(0.0, cpu_seconds) / (cores * seconds))
