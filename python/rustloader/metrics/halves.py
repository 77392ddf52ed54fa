"""The statistics of each half of the batches, with which a verdict checks its figures."""

from __future__ import annotations

from dataclasses import replace

from rustloader._core import Totals, WorkerTotals
from rustloader.metrics.cpu_time import WorkTime
from rustloader.metrics.fields import WorkerStats
from rustloader.metrics.stats import Stats, fields_of_totals, worker_stats


def halves_of(stats: Stats, totals: Totals) -> tuple[Stats, ...]:
    """Returns the statistics of the first and the second half of the batches; nothing if they are unknown.

    Args:
        stats: The statistics of all batches.
        totals: The counters from which they are computed.
    """
    first = totals.half
    if first is None:
        return ()
    halves = _part(stats, first), _part(stats, totals.since(first))
    return halves if all(half.batches for half in halves) else ()


def _part(stats: Stats, totals: Totals) -> Stats:
    fields = fields_of_totals(totals)
    # A single start in a half is one of several of the loader.
    epochs = max(fields["epochs"], min(stats.epochs, 2))
    return replace(
        stats,
        **fields | {"epochs": epochs},
        iterators=epochs if stats.iterators == stats.epochs else 1,
        workers=tuple(map(_worker, stats.workers, totals.workers)),
        turnaround_seconds=stats.turnaround_seconds * fields["epochs"] / max(1, stats.epochs),
    )


def _worker(whole: WorkerStats, totals: WorkerTotals) -> WorkerStats:
    """Returns a worker's statistics for a half, with a part of its CPU time, which is known only for all batches."""
    share = totals.busy_seconds / whole.busy_seconds if whole.busy_seconds else 0.0
    cpu, queued = (None if time is None else time * share for time in (whole.cpu_seconds, whole.queued_seconds))
    time = WorkTime(cpu, queued, whole.unmeasured_seconds * share)
    others = {name: getattr(whole, name) for name in ("pid", "alive", "rss_bytes", "private_bytes")}
    return worker_stats(whole.id, totals, time, **others)
