"""Breakdown of the workers' time, computed from statistics."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from rustloader.metrics.fields import StatsFields, WorkerStats

# A worker that takes at least this many times as long as the others is slow.
SLOW = 2.0
# Workers that keep more than this share of the cores busy do not wait for storage.
_SATURATED_SHARE = 0.5


class Shares(NamedTuple):
    """Shares of the workers' time in the dataset: computing (``cpu``), and waiting for a core (``queued``)."""

    cpu: float
    queued: float

    @property
    def waiting(self) -> float:
        """The remaining share, spent waiting for storage, the network or a lock."""
        return 1 - self.cpu - self.queued

    def threads_for(self, cores: int) -> int:
        """Returns the largest number of threads or workers that compute at most as much as ``cores`` cores can."""
        # Rounded, because the last digits of `sum` differ between versions of Python.
        return int(round(cores / max(self.cpu, 1e-3), 3))


def dataset_shares(stats: StatsFields) -> Shares | None:
    """Returns the shares of the workers' time in the dataset; None if they are unknown.

    The time for which fetches wait for a core is not measured. Its share of the fetch time is assumed to equal its
    share of all busy time.
    """
    queued = queued_share(stats)
    measured = sum(worker.fetch_measured_seconds for worker in stats.workers)
    if queued is None or measured <= 0:
        return None
    cpu = min(1.0, sum(worker.fetch_cpu_seconds for worker in stats.workers) / measured)
    return Shares(cpu, min(1 - cpu, queued))


def queued_share(stats: StatsFields) -> float | None:
    """Returns the time spent waiting for a core as a share of the busy time; None if unknown."""
    known = [worker for worker in stats.workers if worker.queued_seconds is not None]
    busy = sum(worker.busy_seconds - worker.unmeasured_seconds for worker in known)
    # The sum includes the waits at the starts of later epochs and after wake-ups. Too high is better than too low,
    # because a missing part would look like waiting for storage.
    return sum(worker.queued_seconds or 0.0 for worker in known) / busy if busy > 0 else None


def saturated(stats: StatsFields, loop: float) -> bool:
    """Returns True if the workers alone keep more than half of the cores busy.

    ``loop`` is the duration of the training loop in seconds, without the waits for first batches.
    """
    cpu = sum(worker.cpu_seconds or 0.0 for worker in stats.workers)
    # Neither `cpu` nor `since_start` includes the start of the processes.
    since_start = max((worker.busy_seconds + worker.idle_seconds for worker in stats.workers), default=0.0)
    return cpu > _SATURATED_SHARE * stats.cores * min(loop + stats.first_seconds, since_start)


def slow_worker(stats: StatsFields) -> tuple[WorkerStats, float] | None:
    """Returns the worker that is much slower than the others, and the others' median seconds per batch.

    Returns None if there is no such worker.
    """
    workers = sorted((w for w in stats.workers if w.tasks), key=lambda worker: worker.busy_seconds / worker.tasks)
    if len(workers) < 2:
        return None
    usual = statistics.median(worker.busy_seconds / worker.tasks for worker in workers[:-1])
    slowest = workers[-1]
    # By chance, a normal worker may have received all of the few slow batches. Then its slowest batch takes far longer
    # than its mean.
    slow_batches = [task for task in stats.slowest if task.worker == slowest.id]
    if slowest.busy_seconds / slowest.tasks < SLOW * usual or not slow_batches:
        return None
    return (slowest, usual) if slow_batches[0].seconds < SLOW * 2 * slowest.busy_seconds / slowest.tasks else None
