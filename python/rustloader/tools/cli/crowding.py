"""Detects ranks of distributed programs that share cores while other cores of the machine are unused."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Set

import rustloader.system.local_ranks as local_ranks
import rustloader.system.procfs as procfs
from rustloader.settings.option_values import MAX_CORES

_ANY_CORE = range(MAX_CORES)


def ranks() -> list[tuple[int, Set[int]]]:
    """Returns the pid of each rank on this machine, and the cores that it may use.

    A rank is a process whose launcher has set a rank variable in its environment. Children that inherit the variable
    from a rank do not count. Processes of other users cannot be read, and are left out.
    """
    numbers = {pid: number for pid in procfs.pids() if (number := local_ranks.rank_variable_of(pid)) is not None}
    children = defaultdict(list)
    first = []
    for pid, number in numbers.items():
        parent = procfs.parent(pid)
        if numbers.get(parent) == number:
            children[parent].append(pid)
        else:
            first.append(pid)
    bound: list[tuple[int, Set[int]]] = []
    for pid in first:
        # The process may be a shell that starts the program and binds it to other cores.
        while not _is_python(pid) and len(children[pid]) == 1:
            (pid,) = children[pid]
        # The process may have ended since.
        with contextlib.suppress(OSError):
            bound.append((pid, os.sched_getaffinity(pid)))
    return bound


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def obtainable_cores() -> Set[int]:
    """Returns the cores that this process can be bound to: all cores of the machine, or those in its cpuset."""
    cores: Set[int] = os.sched_getaffinity(0)

    def try_all_cores() -> None:
        nonlocal cores
        # The kernel restricts the request to the cpuset. Only the affinity of this thread changes.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _ANY_CORE)
            cores = os.sched_getaffinity(0)

    thread = threading.Thread(target=try_all_cores)
    thread.start()
    thread.join()
    return cores


def crowding() -> tuple[str, str] | None:
    """Returns a finding about the ranks' cores, and advice ("" if none is needed); None if there is only one rank."""
    local = ranks()
    count = max(len(local), local_ranks.size() or 1)
    if count == 1:
        return None
    users: dict[int, int] = defaultdict(int)
    for _, cores in local:
        for core in cores:
            users[core] += 1
    crowd = [cores for _, cores in local if any(users[core] > 1 for core in cores)]
    if not crowd:
        return f"{count} on this machine; no two share a core", ""
    cores = set().union(*crowd)
    text = f"{count} on this machine; {len(crowd)} of them share cores ({procfs.core_ranges(cores)})"
    total = len(obtainable_cores() | cores)
    if len(cores) == total:
        return text, ""
    return text, (
        f"they crowd onto {len(cores)} of {total} cores: bind each rank to its own cores (numactl, taskset, "
        "srun --cpu-bind), or give them all cores and set worker_affinity='spread'"
    )
