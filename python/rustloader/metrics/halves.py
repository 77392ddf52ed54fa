"""The statistics of each half of the batches, with which a verdict checks its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rustloader._core import Counts, Totals, WorkerTotals
from rustloader.metrics.cpu_time import WorkTime
from rustloader.metrics.fields import PinningStats, WorkerStats
from rustloader.metrics.stats import Stats, fields_of_counts, worker_stats


def halves_of(stats: Stats, totals: Totals) -> tuple[Stats, ...]:
    """Returns the statistics of the first and the second half of the batches; nothing if they are unknown.

    Args:
        stats: The statistics of all batches.
        totals: The counters from which they are computed.
    """
    if totals.half is None:
        return ()
    counts, workers = totals.half  # without workers that had not started
    first = [*workers, *(worker.since(worker) for worker in totals.workers[len(workers) :])]
    second = [worker.since(before) for worker, before in zip(totals.workers, first, strict=True)]
    halves = _part(stats, counts, first), _part(stats, totals.counts.since(counts), second)
    return halves if all(half.batches for half in halves) else ()


def _part(stats: Stats, counts: Counts, workers: Sequence[WorkerTotals]) -> Stats:
    # A single start in a half is one of several of the loader.
    epochs = max(counts.epochs, min(stats.epochs, 2))
    return replace(
        stats,
        **fields_of_counts(counts, workers) | {"epochs": epochs},
        iterators=epochs if stats.iterators == stats.epochs else 1,
        workers=tuple(map(_worker, stats.workers, workers)),
        turnaround_seconds=stats.turnaround_seconds * counts.epochs / max(1, stats.epochs),
        pinning=PinningStats(stats.pinning.running, counts.pinned, counts.pinning_seconds),
    )


def _worker(whole: WorkerStats, totals: WorkerTotals) -> WorkerStats:
    """Returns a worker's statistics for a half, with a part of its CPU time, which is known only for all batches."""
    busy = totals.fetch + totals.collate + totals.pack + totals.publish
    share = busy / whole.busy_seconds if whole.busy_seconds else 0.0
    cpu, queued = (None if time is None else time * share for time in (whole.cpu_seconds, whole.queued_seconds))
    time = WorkTime(cpu, queued, whole.unmeasured_seconds * share)
    return worker_stats(whole.id, whole.pid, whole.alive, whole.rss_bytes, totals, time, whole.private_bytes)
