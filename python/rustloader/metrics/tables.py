"""Formats statistics as a headline, as printed lines, and as HTML tables for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from rustloader.caching.usage import CacheUsage
from rustloader.metrics.faults import summary
from rustloader.metrics.fields import StatsFields, WorkerStats
from rustloader.metrics.verdict import Verdict, described_attribute
from rustloader.system.formatting import count_of, duration, short_index, size

# Maximum number of entries shown from each list, and maximum number of workers shown.
_MAX_LISTED, _MAX_WORKERS = 3, 16


def headline(stats: StatsFields) -> str:
    """Returns a one-line summary."""
    if stats.note:
        return f"no statistics: {stats.note}"
    bytes_ = f" ({size(stats.bytes)})" if stats.bytes else ""
    epochs, workers = count_of(stats.epochs, "epoch"), count_of(stats.num_workers, "worker")
    auto = " (auto)" if stats.scheduling is not None and stats.scheduling.auto_workers is not None else ""
    return f"{count_of(stats.batches, 'batch')}{bytes_} in {epochs} with {workers}{auto}"


def _times(stats: StatsFields) -> list[tuple[str, float, str]]:
    """Returns the nonzero parts of the loop's time, each as a name, seconds and a description."""
    wait_text = (
        f"{duration(stats.blocked_seconds)} of it while later batches were ready" if stats.blocked_seconds else ""
    )
    own_text = f"{duration(stats.sampler_seconds)} of it in the sampler" if stats.sampler_seconds else ""
    parts = [
        ("step", stats.step_seconds, "training step, between two calls of next()"),
        ("waited", stats.waited_seconds, wait_text),
        ("first", stats.first_seconds, f"waiting for the first batch of {count_of(stats.epochs, 'epoch')}"),
        ("own work", stats.own_seconds, own_text),
        ("turnaround", stats.turnaround_seconds, "in iter(), and ending the workers"),
    ]
    return [part for part in parts if part[1] > 0]


def _worker_times(worker: WorkerStats) -> list[tuple[str, float]]:
    times = [
        ("fetch", worker.fetch_seconds),
        # An estimate, because the CPU time of some fetches may not have been measured.
        ("fetch CPU", worker.fetch_seconds * (worker.fetch_cpu_share or 0.0)),
        ("collate", worker.collate_seconds),
        ("pack", worker.pack_seconds),
        ("idle", worker.idle_seconds),
        ("start", worker.starting_seconds),
        ("processor", worker.cpu_seconds or 0.0),
    ]
    return [(name, seconds) for name, seconds in times if seconds > 0]


def _process_text(worker: WorkerStats) -> str:
    private = f", {size(worker.private_bytes)} private" if worker.private_bytes else ""
    return f"pid {worker.pid}, {size(worker.rss_bytes)}{private}" if worker.alive else f"ended{private}"


def cache_line(usage: CacheUsage) -> str:
    """Describes the size and the counters of a cache in one line."""
    lookups = usage.hits + usage.misses
    share = f" ({usage.hits / lookups:.0%} of the samples)" if lookups else ""
    hits, misses = count_of(usage.hits, "hit"), count_of(usage.misses, "miss")
    return f"{hits}{share}, {misses}, {size(usage.samples_bytes)} of {size(usage.limit)}"


def _arena_text(stats: StatsFields) -> str:
    arena = stats.arena
    parts = ((arena.leased_bytes, "leased"), (arena.warm_bytes, "warm"), (arena.high_water_bytes, "at the peak"))
    texts = [f"{size(count)} {what}" for count, what in parts if count]
    return ", ".join(texts + ([count_of(arena.blocks, "block")] if arena.blocks else []))


def _other_stats(stats: StatsFields) -> Iterator[tuple[str, str]]:
    """Yields the nonzero statistics other than the times of the loop and the workers, each as a name and a text."""
    for task in stats.slowest[:_MAX_LISTED]:
        yield "slow batch", f"{duration(task.seconds)} on worker {task.worker}: {short_index(task.index)}"
    for task in stats.blocking[:_MAX_LISTED]:
        waited, took = duration(task.blocked_seconds), duration(task.seconds)
        yield "blocking", f"waited {waited} for {short_index(task.index)}, which took {took} on worker {task.worker}"
    for large in stats.large_attributes:
        yield "copied", f"{large.path}, {described_attribute(large)}"
    if text := _arena_text(stats):
        yield "arena", text
    if stats.copies.count:
        yield "copies", f"{count_of(stats.copies.count, 'copy')} ({size(stats.copies.bytes)})"
    if stats.copies.adopted:
        yield "not copied", f"{count_of(stats.copies.adopted, 'tensor or array')} ({size(stats.copies.adopted_bytes)})"
    if stats.copies.pickled:
        yield "pickled", count_of(stats.copies.pickled, "batch")
    if stats.pinning.batches or stats.pinning.running:
        yield "pin thread", f"{count_of(stats.pinning.batches, 'batch')} in {duration(stats.pinning.seconds)}"
    transfers = stats.transfers
    if transfers.batches:
        share = "" if transfers.overlapped_share is None else f", {transfers.overlapped_share:.0%} overlapped"
        text = (
            f"{count_of(transfers.batches, 'batch')} ({size(transfers.bytes)}) in {duration(transfers.seconds)}{share}"
        )
        yield "to the device", text
    elif transfers.note:
        yield "to the device", transfers.note
    if transfers.pageable:
        yield "not pinned", transfers.pageable
    if stats.cache is not None:
        yield "cache", cache_line(stats.cache)
    if text := summary(stats.faults):
        yield "faults", text
    for failure in stats.faults.failures[:_MAX_LISTED]:
        sample = "a sample" if failure.index is None else f"sample {failure.index}"
        yield failure.action, f"{sample}: {(failure.error_text.splitlines() or [''])[0]}"
    for fallback in stats.fallbacks:
        where = "" if stats.note else ", not in these statistics"
        yield "torch's loop", f"{count_of(fallback.count, 'iterator')}{where}: {fallback.reason}"
    if stats.note and stats.batches:
        yield "torch's loop", f"{count_of(stats.batches, 'batch')} so far"


def lines(stats: StatsFields) -> Iterator[str]:
    """Yields the lines of the printed form, which omits zeros."""

    def line(name: str, text: str) -> str:
        return f"  {name:14}{text}"

    yield headline(stats)
    if stats.name and not stats.note:
        yield line("loader", stats.name)
    if not stats.note:
        for name, seconds, what in _times(stats):
            yield line(name, f"{duration(seconds)}{f', {what}' if what else ''}")
        for worker in stats.workers[:_MAX_WORKERS]:
            times = ", ".join(f"{name} {duration(seconds)}" for name, seconds in _worker_times(worker))
            text = f"{count_of(worker.tasks, 'batch')}{f': {times}' if times else ''} ({_process_text(worker)})"
            yield line(f"worker {worker.id}", text)
        if len(stats.workers) > _MAX_WORKERS:
            yield line("...", f"{count_of(len(stats.workers) - _MAX_WORKERS, 'more worker')}")
    for name, text in _other_stats(stats):
        yield line(name, text)


def html(stats: StatsFields, verdict: Verdict) -> str:
    """Returns HTML tables for a notebook. They set no colors, so they suit light and dark themes."""
    parts = [f"<p><b>{escape(headline(stats))}</b>"]
    if not stats.note:
        parts.append(f"<br>{escape(verdict.sentence)}<br><small>{escape(verdict.reason)}</small>")
    parts.append("</p>")
    if not stats.note and (times := _times(stats)):
        loop = sum(seconds for _, seconds, _ in times)
        rows = [(name, duration(seconds), f"{seconds / loop:.0%}", what) for name, seconds, what in times]
        parts.append(_table(("loop", "time", "share", ""), rows))
    if not stats.note and stats.workers:
        parts.append(_worker_table(stats))
    if others := list(_other_stats(stats)):
        parts.append(_table((), others))
    return f"<div>{''.join(parts)}</div>"


def _worker_table(stats: StatsFields) -> str:
    shown = stats.workers[:_MAX_WORKERS]
    times = [dict(_worker_times(worker)) for worker in shown]
    # The columns, in the order of a printed worker line. A part that is zero for all workers shown has no column.
    names = list(dict.fromkeys(name for parts in times for name in parts))
    rows = [
        (
            str(worker.id),
            str(worker.tasks),
            *(duration(parts[name]) if name in parts else "" for name in names),
            _process_text(worker),
        )
        for worker, parts in zip(shown, times, strict=True)
    ]
    if len(stats.workers) > len(shown):
        rows.append((f"... {len(stats.workers) - len(shown)} more", "", *("" for _ in names), ""))
    return _table(("worker", "batches", *names, "process"), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    head = list(head)
    top = f"<thead>{row(head, 'th')}</thead>" if head else ""
    return f"<table>{top}<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table>"
