"""The metrics of a process's loaders for prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from rustloader._core import WAIT_BOUNDS, Totals, WorkerTotals
from rustloader.caching.usage import CacheUsage
from rustloader.metrics import transfers
from rustloader.metrics.accounts import Account, Accounts, Open
from rustloader.metrics.parts import FaultStats
from rustloader.metrics.stats import of_ledger
from rustloader.system.procfs import resident

_PREFIX = "rustloader_"
_BOUNDS = (*map(repr, WAIT_BOUNDS), "+Inf")


class _Read(NamedTuple):
    """One reading of an account.

    Attributes:
        gone: The figures of all loaders that are gone.
        live: The figures of each other loader.
        faults: The faults of each, those that are gone first.
        fallbacks: Number of iterators on torch's own loop.
        caches: The figures of each cache, and the hits and misses of those that are gone.
    """

    gone: Totals
    live: list[Totals]
    faults: list[FaultStats]
    fallbacks: int
    caches: list[CacheUsage]

    def counted(self, name: str) -> float:
        """Returns a counter of the main process."""
        return sum(getattr(one.counts, name) for one in (self.gone, *self.live))

    def survived(self, name: str) -> float:
        """Returns a number of the faults."""
        return sum(getattr(one, name) for one in self.faults)

    def now(self, name: str) -> float:
        """Returns a figure that has no history."""
        return sum(getattr(one, name) for one in self.live)

    def workers(self) -> list[list[WorkerTotals]]:
        """Returns the totals by worker number."""
        each = [one.workers for one in (self.gone, *self.live)]
        return [[one[number] for one in each if number < len(one)] for number in range(max(map(len, each)))]


_Table = tuple[tuple[str, str, Callable[[Any], float]], ...]

# Metrics of a loader: name without prefix and "_total", description, value.
_COUNTERS: _Table = (
    ("batches", "Batches delivered to the loop.", lambda it: it.counted("batches")),
    ("bytes", "Bytes of these batches.", lambda it: it.counted("bytes")),
    ("epochs", "Epochs begun.", lambda it: it.counted("epochs")),
    ("first_wait_seconds", "Time of waiting for first batches of epochs.", lambda it: it.counted("first_seconds")),
    ("blocked_seconds", "Part of the other waits: later batches were ready.", lambda it: it.counted("blocked_seconds")),
    ("next_seconds", "Time in next(), waits included.", lambda it: it.counted("next_seconds")),
    ("step_seconds", "Time between two calls of next() in one epoch.", lambda it: it.counted("step_seconds")),
    ("restarts", "Workers that were started again after a death.", lambda it: it.survived("restarts")),
    ("stalls", "Part of the restarts: the worker was stuck.", lambda it: it.survived("stalls")),
    ("skipped_samples", "Samples that failed and were left out.", lambda it: it.survived("skipped")),
    ("replaced_samples", "Samples that failed and were replaced.", lambda it: it.survived("replaced")),
    ("fallback_iterators", "Iterators that ran on torch's own loop, uncounted.", lambda it: it.fallbacks),
)
_GAUGES: _Table = (
    ("workers", "Running workers.", lambda it: sum(worker.alive for one in it.live for worker in one.workers)),
    ("ready_batches", "Batches that workers have finished and the loop has not taken.", lambda it: it.now("ready")),
    ("arena_bytes", "Bytes of shared memory with pages.", lambda it: it.now("warm")),
)
# The same of a dataset's cache.
_CACHE_COUNTERS: _Table = (
    ("cache_hits", "Samples read from the cache, by all its processes.", lambda it: it.hits),
    ("cache_misses", "Samples that the dataset had to make, in all its processes.", lambda it: it.misses),
)
_CACHE_GAUGES: _Table = (
    ("cache_bytes", "Bytes of the samples in the cache.", lambda it: it.samples_bytes),
    ("cache_limit_bytes", "Bytes that the cache may take.", lambda it: it.limit),
)
_WORKER_COUNTERS: _Table = (
    ("worker_batches", "Batches sent by the worker.", lambda it: it.tasks),
    ("worker_starting_seconds", "Time before the first tasks of epochs.", lambda it: it.starting),
    ("worker_fetch_seconds", "Time in the dataset.", lambda it: it.fetch),
    ("worker_collate_seconds", "Time in collate_fn.", lambda it: it.collate),
    ("worker_pack_seconds", "Time of writing batches into shared memory.", lambda it: it.pack + it.publish),
    ("worker_idle_seconds", "Time of waiting for tasks.", lambda it: it.idle),
    ("worker_fetch_cpu_seconds", "Processor time of the measured fetches.", lambda it: it.fetch_cpu),
    ("worker_fetch_measured_seconds", "Time of the measured fetches.", lambda it: it.fetch_measured),
)


class LoaderCollector(Collector):
    """Reads the counters of all loaders when it is asked.

    Args:
        accounts: The loaders by name.
        rank: Value of the label ``rank``.
    """

    def __init__(self, accounts: Accounts, rank: str) -> None:
        self._accounts, self._rank = accounts, rank
        # The last value of each counter, which must not fall, for a fall means that it begins at zero. Sums of times
        # may fall by their last bit, and those of a worker that changes its state at that moment by more.
        self._last: dict[tuple[str, ...], float] = {}

    def collect(self) -> Iterable[Any]:
        """Returns the metrics, from one reading."""
        with self._accounts.lock:
            return list(self._collect())

    def _collect(self) -> Iterator[Any]:
        accounts = self._accounts.items()
        for _, account in accounts:
            account.settle()
        read = [(name, _read(account)) for name, account in accounts]
        yield from self._families(CounterMetricFamily, _COUNTERS, read)
        yield from self._families(GaugeMetricFamily, _GAUGES, read)
        cached = [(name, usage) for name, it in read if (usage := _summed(it.caches)) is not None]
        yield from self._families(CounterMetricFamily, _CACHE_COUNTERS, cached)
        yield from self._families(GaugeMetricFamily, _CACHE_GAUGES, cached)
        yield self._waits(read)
        yield from self._of_workers(read)
        yield from self._states(accounts)

    def _grown(self, value: float, *key: str) -> float:
        """Returns the value of a counter, or the last one if that was larger."""
        self._last[key] = max(self._last.get(key, 0.0), value)
        return self._last[key]

    def _families(self, kind: Any, table: Any, read: list[tuple[str, Any]]) -> Iterator[Any]:
        for name, text, value in table:
            family = kind(_PREFIX + name, text, labels=["rank", "loader"])
            for loader, it in read:
                number = value(it)
                if kind is CounterMetricFamily:
                    number = self._grown(number, name, loader)
                family.add_metric([self._rank, loader], number)
            yield family

    def _waits(self, read: list[tuple[str, _Read]]) -> Any:
        text = "Time that the loop waited in each next() but the first one of an epoch."
        family = HistogramMetricFamily(_PREFIX + "wait_seconds", text, labels=["rank", "loader"])
        for loader, it in read:
            numbers = [sum(each) for each in zip(*(one.waits for one in (it.gone, *it.live)), strict=True)]
            buckets = list(zip(_BOUNDS, accumulate(numbers), strict=True))
            waited = self._grown(it.counted("waited_seconds"), "wait_seconds", loader)
            family.add_metric([self._rank, loader], buckets, waited)
        return family

    def _of_workers(self, read: list[tuple[str, _Read]]) -> Iterator[Any]:
        labels = ["rank", "loader", "worker"]
        for name, text, value in _WORKER_COUNTERS:
            family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            for loader, it in read:
                for number, of_number in enumerate(it.workers()):
                    total = self._grown(sum(map(value, of_number)), name, loader, str(number))
                    family.add_metric([self._rank, loader, str(number)], total)
            yield family
        memory = GaugeMetricFamily(_PREFIX + "worker_resident_bytes", "Resident memory of the worker.", labels=labels)
        for loader, it in read:
            for number, of_number in enumerate(it.workers()):
                used = [resident(worker.pid) or 0 for worker in of_number if worker.alive]
                if used:
                    memory.add_metric([self._rank, loader, str(number)], sum(used))
        yield memory

    def _states(self, accounts: list[tuple[str, Account]]) -> Iterator[Any]:
        """Yields the verdict, and the batch size, of the last loader of each name that the engine has served."""
        verdicts = GaugeMetricFamily(
            _PREFIX + "verdict", "1 for what limits the loader.", labels=["rank", "loader", "kind"]
        )
        sizes = GaugeMetricFamily(_PREFIX + "batch_size", "Samples of a full batch.", labels=["rank", "loader"])
        for name, account in accounts:
            served = [it for it in account.open if it.ledger.iterators]
            if not served:
                continue
            verdicts.add_metric([self._rank, name, _verdict_of(served[-1])], 1)
            scheduling = served[-1].ledger.scheduling
            if scheduling is not None and scheduling.batch_size is not None:
                sizes.add_metric([self._rank, name], scheduling.batch_size)
        yield verdicts
        yield sizes


def _read(account: Account) -> _Read:
    ledgers = account.ledgers()
    gone, *live = [it.figures() for it in ledgers]
    return _Read(
        gone,
        live,
        [it.faults.figures() for it in ledgers],
        sum(sum(it.fallbacks.values()) for it in ledgers),
        account.caches(),
    )


def _summed(usages: list[CacheUsage]) -> CacheUsage | None:
    if not usages:
        return None
    fields = ("hits", "misses", "samples_bytes", "limit")
    return CacheUsage(**{name: sum(getattr(it, name) for it in usages) for name in fields})


def _verdict_of(opened: Open) -> str:
    ledger, loader = opened.ledger, opened.loader()
    alive = sum(worker.alive for worker in ledger.figures().workers)
    # Neither the dataset nor the memory of workers is looked at: that takes longer, and changes no kind.
    stats = of_ledger(ledger, alive, reads_memory=False)
    copies = None if loader is None else transfers.find(loader)
    return (stats if copies is None else replace(stats, transfers=copies.figures)).verdict().kind
