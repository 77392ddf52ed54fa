"""Processor cores that a process may use."""

import functools
import math
import os

from rustloader._core import cpu_quota as _read_quota

# Read once per process: cgroups rarely change.
cpu_quota = functools.cache(_read_quota)


def effective_cores(affinity: int | None = None) -> float:
    """Cores that the affinity (default: this process's) and the CPU quota of this process's cgroups allow."""
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    quota = cpu_quota()
    return cores if quota is None else min(cores, quota)


def usable_cores(affinity: int | None = None) -> int:
    """The effective cores, rounded up."""
    return max(1, math.ceil(effective_cores(affinity)))
