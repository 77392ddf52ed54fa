"""``worker_affinity``: the cores that each worker runs on."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import rustloader.system.local_ranks as local_ranks
from rustloader.system.procfs import core_ranges


def of_workers(affinity: str | Sequence[int | Collection[int]] | None, workers: int) -> list[list[int]] | None:
    """Returns the cores of each worker, or None if all workers use the cores of the main process.

    Raises:
        ValueError: There are fewer entries than workers, or this process may not use one of the cores.
    """
    if affinity is None:
        return None
    usable = sorted(os.sched_getaffinity(0))
    if isinstance(affinity, str):
        return spread(cores_of_rank(usable), workers)
    if len(affinity) < workers:
        raise ValueError(
            f"worker_affinity has cores for {len(affinity)} of {workers} workers; give it one entry for each worker, "
            "or 'spread'"
        )
    cores = [[entry] if isinstance(entry, int) else sorted(entry) for entry in affinity[:workers]]
    for worker, worker_cores in enumerate(cores):
        for core in worker_cores:
            if core not in usable:
                raise ValueError(
                    f"worker_affinity gives core {core} to worker {worker}, but this process may use only "
                    f"{core_ranges(usable)}; choose from these, or allow the program more cores (taskset, Slurm, the "
                    "container's cpuset)"
                )
    return cores


def spread(cores: Sequence[int], workers: int) -> list[list[int]]:
    """Divides cores among workers. Each worker gets adjacent cores. If there are fewer cores than workers, each worker
    gets one core, which it may share with other workers."""
    count = len(cores)
    if workers >= count:
        return [[cores[worker % count]] for worker in range(workers)]
    return [list(cores[worker * count // workers : (worker + 1) * count // workers]) for worker in range(workers)]


def cores_of_rank(cores: Sequence[int]) -> Sequence[int]:
    """Returns this rank's share of ``cores`` if the launcher has not bound the local ranks to cores, otherwise all of
    ``cores``."""
    rank, ranks = local_ranks.rank(), local_ranks.size()
    if rank is None or ranks is None or rank >= ranks or local_ranks.are_bound(cores):
        return cores
    return spread(cores, ranks)[rank]
