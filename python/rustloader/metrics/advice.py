"""Recommendation of scheduling options, from statistics."""

from __future__ import annotations

import math

from rustloader.metrics.parts import Figures, SchedulingStats
from rustloader.metrics.prediction import Prediction, Scheduler, predict
from rustloader.metrics.work import Shares, in_dataset
from rustloader.settings.option_values import byte_size

# A smaller predicted gain is not recommended.
_MIN_GAIN = 1.05
# Maximum of recommended threads per worker, and their number if the loop has no training step to derive it from.
_MAX_THREADS, _USUAL_THREADS = 64, 16


def shared_queue(stats: Figures, workers: int) -> Prediction | None:
    """Returns the reorder window to try with ``dispatch="shared_queue"``, and its predicted gain; None if there is
    nothing to gain, the option has no effect, or the figures do not suffice.
    """
    settings = stats.scheduling
    if settings is None or not settings.in_order or not settings.map_style or not stats.batches or workers < 2:
        return None
    outstanding = settings.prefetch_factor * workers
    window = _window(stats, settings, outstanding)
    now = Scheduler(workers, outstanding, window, settings.dispatch == "shared_queue")
    step = (stats.step_seconds + stats.own_seconds) / stats.batches
    shares = in_dataset(stats)
    # Work that computes cannot be faster than all cores.
    least = 0.0 if shares is None else shares.cpu * sum(stats.recent_seconds) / stats.cores
    prediction = predict(stats.recent_seconds, now, step, least)
    return prediction if prediction is not None and prediction.gain >= _MIN_GAIN else None


def _window(stats: Figures, settings: SchedulingStats, outstanding: int) -> int:
    """Returns the reorder window in batches."""
    window = settings.reorder_window
    if isinstance(window, str):
        return max(1, int(byte_size(window) * stats.batches / stats.bytes)) if stats.bytes else outstanding
    return outstanding if window is None else window


def shared_queue_text(stats: Figures, prediction: Prediction) -> str:
    """Returns the options of a prediction as keyword arguments, with the gain."""
    assert stats.scheduling is not None
    options = [] if stats.scheduling.dispatch == "shared_queue" else ['dispatch="shared_queue"']
    options += [] if prediction.window is None else [f"reorder_window={prediction.window}"]
    return f"{' and '.join(options)} (predicted to be {prediction.gain:.1f} times as fast)"


def worker_threads(stats: Figures, workers: int, needed: int | None, shares: Shares) -> int | None:
    """Returns the ``worker_threads`` to try; None if more threads do not help, or the figures do not suffice.

    Args:
        stats: figures of workers that wait for storage.
        workers: number of workers.
        needed: number of workers that the training step needs; None without a step.
        shares: what the workers do in the dataset.
    """
    settings = stats.scheduling
    if settings is None or not settings.per_sample:
        return None
    threads = settings.worker_threads
    wanted = _USUAL_THREADS if needed is None else math.ceil(threads * needed / workers)
    # The threads of a worker share its GIL, and a batch has no more samples to fetch at a time.
    limit = min(_MAX_THREADS, int(threads / max(shares.cpu, 1e-3)), settings.batch_size or _MAX_THREADS)
    number = min(wanted, limit)
    return number if number > threads else None
