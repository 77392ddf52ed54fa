"""Recommends scheduling options, based on statistics."""

from __future__ import annotations

import math

from rustloader.metrics.fields import SchedulingStats, StatsFields
from rustloader.metrics.finding import MIN_GAIN
from rustloader.metrics.prediction import CacheGain, Prediction, Scheduler, predict, predict_cache
from rustloader.metrics.work import Shares, dataset_shares
from rustloader.settings.option_values import byte_size
from rustloader.system.formatting import size

# Minimum predicted gain for advice on a cache, and the latest epoch from which on it may pay.
_MIN_CACHE_GAIN, _LATEST_EPOCH = 1.5, 5
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
    return prediction if prediction is not None and prediction.gain >= MIN_GAIN else None


def _window(stats: StatsFields, settings: SchedulingStats, outstanding: int) -> int:
    """Returns the reorder window in batches."""
    window = settings.reorder_window
    if isinstance(window, str):
        return max(1, int(byte_size(window) * stats.batches / stats.bytes)) if stats.bytes else outstanding
    return outstanding if window is None else window


def shared_queue_text(stats: StatsFields, prediction: Prediction) -> str:
    """Formats a prediction as keyword arguments."""
    assert stats.scheduling is not None
    options = [] if stats.scheduling.dispatch == "shared_queue" else ['dispatch="shared_queue"']
    options += [] if prediction.window is None else [f"reorder_window={prediction.window}"]
    return " and ".join(options)


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
    limit = min(_MAX_THREADS, shares.threads_for(threads), settings.batch_size or _MAX_THREADS)
    number = min(wanted, limit)
    return number if number > threads else None


def cache_text(stats: StatsFields) -> str:
    """Returns advice to use a cache; empty if the gain is unknown or small, or if a cache would not pay soon."""
    estimate, gain = stats.cache_estimate, _cache_gain(stats)
    if estimate is None or gain is None or gain.later < _MIN_CACHE_GAIN or gain.pays_from > _LATEST_EPOCH:
        return ""
    held = min(1.0, estimate.free_bytes / estimate.bytes)
    what = "all samples" if held == 1 else f"{held:.0%} of the samples"
    text = (
        f"A cache of {size(min(estimate.bytes, estimate.free_bytes))} would hold {what} ({size(estimate.free_bytes)} "
    )
    text += f"are free): the epoch that fills it takes about {gain.filling:.1f} times as long, later ones are about "
    text += f"{gain.later:.{1 if gain.later < 10 else 0}f} times as fast, and it pays from epoch {gain.pays_from} on. "
    return f"{text}rustloader.cache(dataset) keeps the samples; pass random transforms as its then=."


def _cache_gain(stats: StatsFields) -> CacheGain | None:
    estimate, tasks = stats.cache_estimate, sum(worker.tasks for worker in stats.workers)
    if estimate is None or not tasks or not stats.batches:
        return None
    batch_bytes = stats.bytes / stats.batches
    return predict_cache(
        fetch=sum(worker.fetch_seconds for worker in stats.workers) / tasks,
        other=sum(worker.collate_seconds + worker.pack_seconds for worker in stats.workers) / tasks,
        main=(stats.own_seconds + stats.step_seconds) / stats.batches,
        samples=batch_bytes * estimate.samples / estimate.bytes,
        bytes_=batch_bytes,
        workers=max(1, min(stats.num_workers or len(stats.workers), stats.cores)),
        held=min(1.0, estimate.free_bytes / estimate.bytes),
    )
