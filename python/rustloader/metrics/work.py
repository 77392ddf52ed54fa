"""Breakdown of the workers' time, from statistics."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from rustloader.metrics.parts import Figures, WorkerStats

# A worker that takes this many times as long as the others is slow.
SLOW = 2.0
# Workers that keep this share of the cores busy do not wait for storage.
_SATURATED_SHARE = 0.5


class Shares(NamedTuple):
    """Breakdown of the workers' time in the dataset, as shares of it."""

    cpu: float
    queued: float

    @property
    def waiting(self) -> float:
        """The share in which workers neither compute nor wait for a core: they wait for storage, the network or a
        lock."""
        return 1 - self.cpu - self.queued


def in_dataset(stats: Figures) -> Shares | None:
    """Returns the shares; None if they are unknown. A fetch has no time of waiting for a core of its own, so it has the
    mean share of all work.
    """
    queued = queued_share(stats)
    measured = sum(worker.fetch_measured_seconds for worker in stats.workers)
    if queued is None or measured <= 0:
        return None
    cpu = min(1.0, sum(worker.fetch_cpu_seconds for worker in stats.workers) / measured)
    return Shares(cpu, min(1 - cpu, queued))


def queued_share(stats: Figures) -> float | None:
    """Returns the time of waiting for a core as a share of the time at work; None if unknown."""
    known = [worker for worker in stats.workers if worker.queued_seconds is not None]
    busy = sum(worker.busy_seconds - worker.unmeasured_seconds for worker in known)
    # It includes starts of later epochs and wake-ups. Rather too much than too little, which would look like waiting.
    return sum(worker.queued_seconds or 0.0 for worker in known) / busy if busy > 0 else None


def saturated(stats: Figures, loop: float) -> bool:
    """Returns True if the workers alone keep the cores busy. ``loop``: seconds of the loop, without first batches."""
    cpu = sum(worker.cpu_seconds or 0.0 for worker in stats.workers)
    # Neither side includes the start of the processes.
    since_start = max((worker.busy_seconds + worker.idle_seconds for worker in stats.workers), default=0.0)
    return cpu > _SATURATED_SHARE * stats.cores * min(loop + stats.first_seconds, since_start)


def slow_worker(stats: Figures) -> tuple[WorkerStats, float] | None:
    """Returns the worker that is much slower than the others, and the others' seconds per batch."""
    workers = sorted((w for w in stats.workers if w.tasks), key=lambda worker: worker.busy_seconds / worker.tasks)
    if len(workers) < 2:
        return None
    usual = statistics.median(worker.busy_seconds / worker.tasks for worker in workers[:-1])
    slowest = workers[-1]
    # A few slow batches may all be one worker's by chance, but then its other batches are not slow.
    typical = [task for task in stats.slowest if task.worker == slowest.id]
    if slowest.busy_seconds / slowest.tasks < SLOW * usual or not typical:
        return None
    return (slowest, usual) if typical[0].seconds < SLOW * 2 * slowest.busy_seconds / slowest.tasks else None
