"""Predicts how long a loader would take with another dispatch policy or reorder window, or with a cache.

The recorded durations of recent batches are replayed in a model of the scheduler. It dispatches by greedy list
scheduling (R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17, 1969) or
round robin, with a bounded window. The training loop takes the batches in order. Transport takes no time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

# Windows to try, as multiples of the maximum number of outstanding batches.
_MULTIPLES = (1, 2, 4, 8)
# The smallest window whose time is within this factor of the best time is preferred, because windows take memory.
_TOLERANCE = 1.03
# Minimum number of batches per worker for a prediction.
_MIN_BATCHES_PER_WORKER = 2
# CPU seconds that a worker takes to add a sample to a cache and to read one from it: per sample, and per byte. Measured
# with `python benches/caching.py` (rows of 80 B to 197 KB on two cores of a virtual machine, the lowest of 3 rounds).
_FILL, _READ = (2.2e-6, 0.9e-9), (0.6e-6, 0.1e-9)


class Scheduler(NamedTuple):
    """The settings of the model.

    Attributes:
        workers: Number of workers, 1 or more.
        outstanding: Maximum number of outstanding batches: prefetch_factor x workers.
        window: Maximum number of batches that are outstanding or in the reorder buffer.
        shared: Whether the first free worker takes the next batch; otherwise batch i goes to worker i modulo
            ``workers``.
    """

    workers: int
    outstanding: int
    window: int
    shared: bool


def makespan(durations: Sequence[float], scheduler: Scheduler, step: float) -> float:
    """Returns the seconds from the first submission until the loop takes the last batch.

    Args:
        durations: Seconds of work on each batch, in order.
        scheduler: The settings.
        step: Seconds between two calls of ``next``, during which the main process submits nothing.

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
            now = model.outstanding_ends[0]
            model.submit(now, batch)
        # The engine also submits before it returns the batch.
        model.submit(now, batch + 1)
        taken, now = now, now + step
    return taken


class _Model:
    """The simulated scheduler and its workers."""

    def __init__(self, durations: Sequence[float], scheduler: Scheduler) -> None:
        self._durations, self._scheduler = durations, scheduler
        # The time at which each worker becomes free; a heap if the queue is shared.
        self._free = [0.0] * scheduler.workers
        # The time at which each submitted batch is finished, and a heap of the times that are still in the future.
        self.ends: list[float] = []
        self.outstanding_ends: list[float] = []

    def submit(self, now: float, delivered: int) -> None:
        """Submits batches at the time ``now``, up to the limits. ``delivered`` batches have left the window."""
        while self.outstanding_ends and self.outstanding_ends[0] <= now:
            heapq.heappop(self.outstanding_ends)
        limit = min(len(self._durations), delivered + self._scheduler.window)
        while len(self.ends) < limit and len(self.outstanding_ends) < self._scheduler.outstanding:
            end = self._work(now)
            self.ends.append(end)
            heapq.heappush(self.outstanding_ends, end)

    def _work(self, now: float) -> float:
        """Assigns the next batch to a worker at the time ``now``. Returns the time at which it is finished."""
        free, batch = self._free, len(self.ends)
        if self._scheduler.shared:
            end = max(now, free[0]) + self._durations[batch]
            heapq.heapreplace(free, end)
            return end
        worker = batch % len(free)
        free[worker] = max(now, free[worker]) + self._durations[batch]
        return free[worker]


class Prediction(NamedTuple):
    """A reorder window for the shared queue, and the predicted gain.

    ``window`` is None to keep the current window. ``gain`` is the predicted speed as a multiple of the current speed.
    """

    window: int | None
    gain: float


def predict(durations: Sequence[float], now: Scheduler, step: float, lower_bound: float = 0.0) -> Prediction | None:
    """Returns the smallest reorder window with which the shared queue is nearly as fast as with the best window.

    Only the current window and larger ones are tried.

    Args:
        durations: Seconds of work on recent batches, in order.
        now: The current settings.
        step: Seconds between two calls of ``next``.
        lower_bound: Minimum seconds for all batches under any settings, such as their CPU time divided by the
            number of cores.

    Returns:
        The window, and the gain over the current settings; None if there are too few durations.

    Example:
        >>> now = Scheduler(workers=4, outstanding=8, window=8, shared=False)
        >>> predict([0.06 if n % 10 == 5 else 0.0045 for n in range(200)], now, step=0.0)
        Prediction(window=32, gain=1.7...)
    """
    if len(durations) < _MIN_BATCHES_PER_WORKER * now.workers:
        return None
    before = max(lower_bound, makespan(durations, now, step))
    windows = {now.window, *(multiple * now.outstanding for multiple in _MULTIPLES)}
    times = {
        window: max(lower_bound, makespan(durations, now._replace(window=window, shared=True), step))
        for window in sorted(windows)
        if window >= now.window
    }
    best = min(times.values())
    window, time = next((window, time) for window, time in times.items() if time <= best * _TOLERANCE)
    return Prediction(None if window == now.window else window, before / time if time else 1.0)


class CacheGain(NamedTuple):
    """The predicted gain of a cache.

    ``filling`` is the duration of the epoch that fills the cache, as a multiple of an epoch without a cache. ``later``
    is the speed of later epochs as a multiple of the speed without a cache. ``pays_from`` is the first epoch after
    which the program has spent no more time than without a cache; infinity if there is none.
    """

    filling: float
    later: float
    pays_from: float


def predict_cache(
    fetch: float, other: float, main: float, samples: float, bytes_: float, workers: int, held: float
) -> CacheGain:
    """Predicts the gain of a cache. All times are per batch.

    Args:
        fetch: Seconds of a worker in the dataset, which samples in the cache do not take.
        other: Seconds of a worker for its other work.
        main: Seconds of the main process in ``next`` and in the training step, without waiting.
        samples: Number of samples.
        bytes_: Size in bytes.
        workers: Number of workers that work at the same time.
        held: Share of the samples that the cache can hold.

    Example:
        >>> predict_cache(0.032, 0.001, 0.0, samples=32, bytes_=4.8e6, workers=2, held=1.0)
        CacheGain(filling=1.1..., later=22..., pays_from=2)
    """

    def seconds(of_worker: float) -> float:
        return max(of_worker / workers, main)

    def cost(of: tuple[float, float]) -> float:
        return held * (of[0] * samples + of[1] * bytes_)

    without = seconds(fetch + other)
    if not without:
        return CacheGain(1.0, 1.0, math.inf)
    filling = seconds(fetch + other + cost(_FILL)) / without
    later = seconds(other + (1 - held) * fetch + cost(_READ)) / without
    return CacheGain(filling, 1 / later if later else math.inf, pays_from(filling, later))


def pays_from(filling: float, later: float) -> float:
    """Returns the first epoch after which a cache has saved at least the time that filling it took.

    Args:
        filling: Duration of the epoch that fills the cache, as a multiple of an epoch without a cache.
        later: Duration of later epochs, as such a multiple.

    Returns:
        The number of the epoch, 2 or more; infinity if later epochs are not faster.

    Example:
        >>> pays_from(filling=3.0, later=0.5)
        5
    """
    return max(2, 1 + math.ceil(round((filling - 1) / (1 - later), 6))) if later < 1 else math.inf
