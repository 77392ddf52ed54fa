"""Predicts how much time a loader would take with another dispatch policy or reorder window.

It replays the recorded durations of recent batches through a model of the scheduler: greedy list scheduling (R. L.
Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17, 1969) or round robin, with
a bounded window, in front of a loop that takes the batches in order. Transport costs nothing in the model.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

# Multiples of the batches under way that are tried as windows.
_MULTIPLES = (1, 2, 4, 8)
# A smaller window whose time is within this factor of the best one is preferred, because a window takes memory.
_TOLERANCE = 1.03
# Fewer batches per worker predict nothing.
_MIN_BATCHES_PER_WORKER = 2


class Scheduler(NamedTuple):
    """The settings of the model.

    Attributes:
        workers: number of workers, 1 or more.
        outstanding: maximum number of batches without a result: prefetch_factor x workers.
        window: maximum number of batches under way or waiting for their turn.
        shared: whether the first free worker takes a batch; otherwise worker i takes every batch i modulo ``workers``.
    """

    workers: int
    outstanding: int
    window: int
    shared: bool


def makespan(durations: Sequence[float], scheduler: Scheduler, step: float) -> float:
    """Returns the seconds from the first submission until the loop has taken the last batch.

    Args:
        durations: seconds of work on each batch, in order.
        scheduler: the settings.
        step: seconds that the loop takes between two batches. The main process submits nothing in that time.

    Example:
        >>> makespan([3.0, 1.0, 1.0, 1.0], Scheduler(workers=2, outstanding=4, window=4, shared=True), 0.0)
        3.0
        >>> makespan([3.0, 1.0, 1.0, 1.0], Scheduler(workers=2, outstanding=4, window=4, shared=False), 0.0)
        4.0
    """
    model = _Model(durations, scheduler)
    now = taken = 0.0
    for batch in range(len(durations)):
        model.submit(now, batch)
        while model.ends[batch] > now:
            now = model.under_way[0]
            model.submit(now, batch)
        # As the engine does, before it returns the batch.
        model.submit(now, batch + 1)
        taken, now = now, now + step
    return taken


class _Model:
    """The state of the scheduler and its workers."""

    def __init__(self, durations: Sequence[float], scheduler: Scheduler) -> None:
        self._durations, self._scheduler = durations, scheduler
        # The time at which each worker is free; of a shared queue a heap.
        self._free = [0.0] * scheduler.workers
        # The time at which each submitted batch is finished, and a heap of those times that are still to come.
        self.ends: list[float] = []
        self.under_way: list[float] = []

    def submit(self, now: float, delivered: int) -> None:
        """Submits as many batches as the limits admit."""
        while self.under_way and self.under_way[0] <= now:
            heapq.heappop(self.under_way)
        limit = min(len(self._durations), delivered + self._scheduler.window)
        while len(self.ends) < limit and len(self.under_way) < self._scheduler.outstanding:
            end = self._work(now)
            self.ends.append(end)
            heapq.heappush(self.under_way, end)

    def _work(self, now: float) -> float:
        """Returns the time at which the next batch, which is submitted now, is finished."""
        free, batch = self._free, len(self.ends)
        if self._scheduler.shared:
            end = max(now, free[0]) + self._durations[batch]
            heapq.heapreplace(free, end)
            return end
        worker = batch % len(free)
        free[worker] = max(now, free[worker]) + self._durations[batch]
        return free[worker]


class Prediction(NamedTuple):
    """A setting, and how many times as fast as now it is predicted to be. ``window`` is None for the default."""

    window: int | None
    gain: float


def predict(durations: Sequence[float], now: Scheduler, step: float, least: float = 0.0) -> Prediction | None:
    """Returns the smallest reorder window that makes the shared queue about as fast as it can be.

    Args:
        durations: seconds of work on recent batches, in order.
        now: the current settings.
        step: seconds that the loop takes between two batches.
        least: seconds of all batches that no settings can go below, such as their processor time divided by the cores.

    Returns:
        The window and its gain over ``now``; None for too few durations.

    Example:
        >>> now = Scheduler(workers=4, outstanding=8, window=8, shared=False)
        >>> predict([0.06 if n % 10 == 5 else 0.0045 for n in range(200)], now, step=0.0)
        Prediction(window=32, gain=1.7...)
    """
    if len(durations) < _MIN_BATCHES_PER_WORKER * now.workers:
        return None
    before = max(least, makespan(durations, now, step))
    windows = {now.window, *(multiple * now.outstanding for multiple in _MULTIPLES)}
    times = {
        window: max(least, makespan(durations, now._replace(window=window, shared=True), step))
        for window in sorted(windows)
        if window >= now.window
    }
    best = min(times.values())
    window, time = next((window, time) for window, time in times.items() if time <= best * _TOLERANCE)
    return Prediction(None if window == now.window else window, before / time if time else 1.0)
