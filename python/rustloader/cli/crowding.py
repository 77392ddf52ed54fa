"""Whether the ranks of a distributed program crowd the same cores of a machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set

import rustloader.local_ranks as local_ranks
import rustloader.procfs as procfs


def ranks() -> list[tuple[int, Set[int]]]:
    """The pids of this program's ranks on this machine, and the cores that each may use: the processes of the same
    parent with the same command, this one first."""
    me = os.getpid()
    parent, command = procfs.stat(me)[1:2], procfs.read(f"/proc/{me}/cmdline")
    found: list[tuple[int, Set[int]]] = [(me, os.sched_getaffinity(0))]
    for pid in procfs.pids():
        if pid != me and procfs.stat(pid)[1:2] == parent and procfs.read(f"/proc/{pid}/cmdline") == command:
            # It may have ended, or belong to another user.
            with contextlib.suppress(OSError):
                found.append((pid, os.sched_getaffinity(pid)))
    return found


def crowding() -> tuple[str, str] | None:
    """What was found of the ranks' cores, and what to do, if anything; None without other ranks."""
    (_, mine), *others = ranks()
    count = max(len(others) + 1, local_ranks.size() or 1)
    if count == 1:
        return None
    same = [pid for pid, cores in others if cores == mine]
    cores = procfs.core_ranges(mine)
    found = f"{count} on this machine, {len(same)} of them on the same cores as this one ({cores})"
    total = os.cpu_count() or 1
    if same and len(mine) < total:
        return found, (
            f"they crowd {len(mine)} of {total} cores: bind each rank to cores of its own (numactl, taskset, "
            "srun --cpu-bind), or give them all cores and set worker_affinity='spread'"
        )
    return found, ""
