"""Recommends scheduling options, based on statistics."""

from __future__ import annotations

import math

from rustloader.metrics.fields import SchedulingStats, StatsFields
from rustloader.metrics.prediction import Prediction, Scheduler, predict
from rustloader.metrics.work import Shares, dataset_shares
from rustloader.settings.option_values import byte_size

# Minimum predicted gain for a recommendation.
_MIN_GAIN = 1.05
# Maximum number of threads per worker to recommend, and the number to recommend if there is no training step.
_MAX_THREADS, _USUAL_THREADS = 64, 16


def shared_queue(stats: StatsFields, workers: int) -> Prediction | None:
    """Returns the reorder window to try with ``dispatch="shared_queue"``, and its predicted gain.

    Returns None if there is too little to gain, the option has no effect, or the statistics are insufficient.
    """
    settings = stats.scheduling
    if settings is None or not settings.in_order or not settings.map_style or not stats.batches or workers < 2:
        return None
    outstanding = settings.prefetch_factor * workers
    window = _window(stats, settings, outstanding)
    now = Scheduler(workers, outstanding, window, settings.dispatch == "shared_queue")
    step = (stats.step_seconds + stats.own_seconds) / stats.batches
    shares = dataset_shares(stats)
    # The work takes at least this long, even if it is spread perfectly over all cores.
    lower_bound = 0.0 if shares is None else shares.cpu * sum(stats.recent_seconds) / stats.cores
    prediction = predict(stats.recent_seconds, now, step, lower_bound)
    return prediction if prediction is not None and prediction.gain >= _MIN_GAIN else None


def _window(stats: StatsFields, settings: SchedulingStats, outstanding: int) -> int:
    """Returns the reorder window in batches."""
    window = settings.reorder_window
    if isinstance(window, str):
        return max(1, int(byte_size(window) * stats.batches / stats.bytes)) if stats.bytes else outstanding
    return outstanding if window is None else window


def shared_queue_text(stats: StatsFields, prediction: Prediction) -> str:
    """Formats a prediction as keyword arguments, with the gain."""
    assert stats.scheduling is not None
    options = [] if stats.scheduling.dispatch == "shared_queue" else ['dispatch="shared_queue"']
    options += [] if prediction.window is None else [f"reorder_window={prediction.window}"]
    return f"{' and '.join(options)} (predicted to be {prediction.gain:.1f} times as fast)"


def worker_threads(stats: StatsFields, workers: int, needed: int | None, shares: Shares) -> int | None:
    """Returns the ``worker_threads`` to try; None if more threads would not help, or the settings are unknown.

    Args:
        stats: Statistics of workers that wait for storage.
        workers: Number of workers.
        needed: Number of workers that the training step needs; None without a step.
        shares: Breakdown of the workers' time in the dataset.
    """
    settings = stats.scheduling
    if settings is None or not settings.per_sample:
        return None
    threads = settings.worker_threads
    wanted = _USUAL_THREADS if needed is None else math.ceil(threads * needed / workers)
    # The threads of a worker share its GIL, and a batch cannot keep more threads busy than it has samples.
    limit = min(_MAX_THREADS, int(threads / max(shares.cpu, 1e-3)), settings.batch_size or _MAX_THREADS)
    number = min(wanted, limit)
    return number if number > threads else None
