"""Processor cores that a process may use."""

import functools
import math
import os

import rustloader.system.local_ranks as local_ranks
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


def ranks_on_cores() -> int:
    """The ranks that share the cores of this one: itself if they are bound, and all ranks of this machine otherwise.

    A CPU quota is for all of them.
    """
    ranks = local_ranks.size() or 1
    bound = ranks > 1 and cpu_quota() is None and local_ranks.are_bound(os.sched_getaffinity(0))
    return 1 if bound else ranks


def own_cores() -> int:
    """The usable cores, divided among the ranks that share them; 1 or more."""
    return max(1, usable_cores() // ranks_on_cores())
