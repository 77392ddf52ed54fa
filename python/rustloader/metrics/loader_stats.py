"""``rustloader.stats()``: the statistics of a loader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from rustloader._core import SlowTask, Totals
from rustloader.metrics import caches, copied, transfers
from rustloader.metrics.cpu_time import NO_TIME
from rustloader.metrics.fields import Fallback, FaultStats, SlowBatch
from rustloader.metrics.halves import halves_of
from rustloader.metrics.ledger import Ledger, find
from rustloader.metrics.stats import Stats, fields_of_totals, no_loader, worker_stats
from rustloader.metrics.transfers import TransferStats
from rustloader.metrics.wrappers import loader_in
from rustloader.settings import names
from rustloader.system.cores import usable_cores
from rustloader.system.procfs import resident

_NO_WORKERS = (
    "with num_workers=0, torch's own loop runs and there is nothing to accelerate; set num_workers to use the engine"
)
_TORCH_ITERATOR = "this is torch's own iterator; call rustloader.install() before creating it"
_NOTHING_YET = "no iterator has used the engine so far; iterate over a rustloader.DataLoader, or call install() first"
_TORCH_LOOP = "torch's own loop made the batches: "


def stats(source: Any) -> Stats:
    """Returns the statistics of a loader or an iterator so far.

    Safe to call at any time, from any thread. The statistics of a pickled or copied loader start at zero.

    Args:
        source: A ``rustloader.DataLoader``, a ``torch.utils.data.DataLoader``, an iterator of either, or another
            library's wrapper: an iterable with exactly one loader among its attributes. The statistics of a loader
            cover all of its iterators on the engine, including those that have ended.

    Returns:
        The current statistics. If the engine has served no iterator, ``note`` gives the reason.

    Raises:
        TypeError: ``source`` is neither a loader, nor an iterator, nor a wrapper.

    Examples:
        >>> loader = rustloader.DataLoader(range(64), batch_size=8, num_workers=2)
        >>> batches = list(loader)
        >>> rustloader.stats(loader).batches
        8
    """
    copies = transfers.find(source)
    source = loader_in(source, _has_stats)
    copies = copies or transfers.find(source)
    transfer_stats = TransferStats() if copies is None else copies.stats
    # Only loaders and iterators on the engine have a ledger.
    ledger = find(source)
    if isinstance(source, _BaseDataLoaderIter):
        note = _NO_WORKERS if isinstance(source, _SingleProcessDataLoaderIter) else _TORCH_ITERATOR
    elif ledger is None and copies is None and not isinstance(source, DataLoader):
        raise no_loader(source)
    else:
        note = _NO_WORKERS if getattr(source, "num_workers", None) == 0 else _NOTHING_YET
    workers: int = getattr(source, "num_workers", 0) or getattr(source, "_num_workers", 0)
    if hasattr(workers, "__index__"):
        workers = int(workers)  # torch accepts NumPy's integers, which `json` cannot write
    if ledger is not None and ledger.scheduling is not None and ledger.scheduling.auto_workers:
        workers = ledger.scheduling.auto_workers
    if ledger is not None and ledger.iterators:
        known = stats_of_ledger(ledger, workers, _dataset_of(source))
        return replace(known, transfers=transfer_stats, **caches.fields_of(source, _dataset_of(source), known))
    fallbacks = () if ledger is None else _fallbacks_of(ledger)
    if fallbacks:
        note = _TORCH_LOOP + "; ".join(fallback.reason for fallback in fallbacks)
    return Stats(
        name=_name_of(source) if ledger is None else ledger.name,
        num_workers=workers,
        cores=usable_cores(),
        batches=getattr(source, "_num_yielded", 0),
        transfers=transfer_stats,
        faults=FaultStats() if ledger is None else ledger.faults.stats(),
        fallbacks=fallbacks,
        cache=caches.usage(_dataset_of(source)),
        note=note,
    )


def _has_stats(source: Any) -> bool:
    ledger = find(source)
    return ledger is not None and bool(ledger.iterators or ledger.fallbacks)


def _dataset_of(source: Any) -> Any:
    """Returns the dataset of a loader or an iterator."""
    return getattr(source, "_dataset" if isinstance(source, _BaseDataLoaderIter) else "dataset", None)


def _name_of(source: Any) -> str:
    return "" if isinstance(source, _BaseDataLoaderIter) else names.of(source)


def _fallbacks_of(ledger: Ledger) -> tuple[Fallback, ...]:
    return tuple(Fallback(*it) for it in [*ledger.fallbacks.items()])


def stats_of_ledger(
    ledger: Ledger,
    num_workers: int | None = None,
    dataset: Any = None,
    reads_memory: bool = True,
    totals: Totals | None = None,
) -> Stats:
    """Returns the statistics in a ledger whose engines have served iterators.

    Args:
        ledger: The ledger.
        num_workers: Current number of workers; None for the number of running ones.
        dataset: Dataset to search for large attributes; None to skip the search.
        reads_memory: Whether to read the private memory of the workers, which takes milliseconds per GB.
        totals: The counters, if the caller has read them.
    """
    totals = totals or ledger.totals()
    workers = totals.workers
    # Read after the counters. Otherwise the CPU time of the latest work would be missing, and that work would
    # look like waiting.
    times = ledger.cpu_times()
    processes = ledger.workers()
    private = processes.private() if processes is not None and reads_memory else []
    is_remote = ledger.scheduling is not None and ledger.scheduling.remote
    has_grown = any((size or 0) >= copied.MIN_PRIVATE_BYTES for size in private)
    stats = Stats(
        name=ledger.name,
        num_workers=sum(worker.alive for worker in workers) if num_workers is None else num_workers,
        cores=usable_cores(),
        iterators=ledger.iterators,
        turnaround_seconds=ledger.turnaround_seconds,
        **fields_of_totals(totals),
        workers=tuple(
            worker_stats(
                number,
                worker,
                times[number] if number < len(times) else NO_TIME,
                private_bytes=private[number] if number < len(private) else None,
                # A local process may have the same pid as a process on another machine.
                rss_bytes=(resident(worker.pid) or 0) if worker.alive and not is_remote else 0,
            )
            for number, worker in enumerate(workers)
        ),
        slowest=tuple(map(_slow_batch, totals.slowest)),
        blocking=tuple(map(_slow_batch, totals.blocking)),
        recent_seconds=tuple(totals.recent),
        scheduling=ledger.scheduling,
        large_attributes=copied.find(dataset) if has_grown else (),
        faults=ledger.faults.stats(),
        core_users=None if processes is None or is_remote else processes.core_users(),
        fallbacks=_fallbacks_of(ledger),
    )
    return replace(stats, halves=halves_of(stats, totals))


def _slow_batch(task: SlowTask) -> SlowBatch:
    return SlowBatch(task.index, task.worker, task.fetch, task.collate, task.pack, task.blocked)
