"""Collects the metrics of all loaders in a process, for prometheus_client."""

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
from rustloader.metrics.accounts import Account, Accounts, LoaderEntry
from rustloader.metrics.fields import FaultStats
from rustloader.metrics.loader_stats import stats_of_ledger
from rustloader.system.procfs import resident

_PREFIX = "rustloader_"
_BOUNDS = (*map(repr, WAIT_BOUNDS), "+Inf")


class _Reading(NamedTuple):
    """One reading of an account.

    Attributes:
        gone: The total counts of loaders that are gone.
        live: The counts of each remaining loader.
        faults: The total faults of loaders that are gone, then those of each remaining loader.
        fallbacks: Number of iterators on torch's own loop.
        caches: The usage of each cache, preceded by the total hits and misses of caches that are gone, if any.
    """

    gone: Totals
    live: list[Totals]
    faults: list[FaultStats]
    fallbacks: int
    caches: list[CacheUsage]

    def counter(self, name: str) -> float:
        """Returns the sum of a counter of the main process over all loaders."""
        return sum(getattr(totals.counts, name) for totals in (self.gone, *self.live))

    def fault_count(self, name: str) -> float:
        """Returns the sum of a fault count over all loaders."""
        return sum(getattr(faults, name) for faults in self.faults)

    def gauge(self, name: str) -> float:
        """Returns the sum of a current value over the remaining loaders."""
        return sum(getattr(totals, name) for totals in self.live)

    def workers(self) -> list[list[WorkerTotals]]:
        """Returns, for each worker number, the totals of all loaders' workers with that number."""
        by_loader = [totals.workers for totals in (self.gone, *self.live)]
        count = max(map(len, by_loader))
        return [[workers[number] for workers in by_loader if number < len(workers)] for number in range(count)]


_Table = tuple[tuple[str, str, Callable[[Any], float]], ...]

# The metrics of a loader, each with its name (without prefix and "_total"), its description and the function that reads
# its value.
_COUNTERS: _Table = (
    ("batches", "Batches delivered to the loop.", lambda it: it.counter("batches")),
    ("bytes", "Size of the delivered batches in bytes.", lambda it: it.counter("bytes")),
    ("epochs", "Epochs begun.", lambda it: it.counter("epochs")),
    (
        "first_wait_seconds",
        "Time spent waiting for the first batch of each epoch.",
        lambda it: it.counter("first_seconds"),
    ),
    (
        "blocked_seconds",
        "Part of wait_seconds during which later batches were ready.",
        lambda it: it.counter("blocked_seconds"),
    ),
    ("next_seconds", "Time in next(), including waits.", lambda it: it.counter("next_seconds")),
    ("step_seconds", "Time between calls of next() in one epoch.", lambda it: it.counter("step_seconds")),
    ("restarts", "Workers restarted after a death.", lambda it: it.fault_count("restarts")),
    ("stalls", "Part of the restarts: the worker was stuck.", lambda it: it.fault_count("stalls")),
    ("skipped_samples", "Samples that failed and were skipped.", lambda it: it.fault_count("skipped")),
    ("replaced_samples", "Samples that failed and were replaced.", lambda it: it.fault_count("replaced")),
    ("fallback_iterators", "Iterators on torch's own loop, whose batches are not counted.", lambda it: it.fallbacks),
)
_GAUGES: _Table = (
    ("workers", "Running workers.", lambda it: sum(worker.alive for totals in it.live for worker in totals.workers)),
    ("ready_batches", "Finished batches that the loop has not taken yet.", lambda it: it.gauge("ready")),
    ("arena_bytes", "Shared memory with resident pages, in bytes.", lambda it: it.gauge("warm")),
)
# The metrics of a dataset's cache.
_CACHE_COUNTERS: _Table = (
    ("cache_hits", "Samples read from the cache, in all processes.", lambda it: it.hits),
    ("cache_misses", "Samples that the dataset had to make, in all processes.", lambda it: it.misses),
)
_CACHE_GAUGES: _Table = (
    ("cache_bytes", "Size of the samples in the cache, in bytes.", lambda it: it.samples_bytes),
    ("cache_limit_bytes", "Maximum size of the cache in bytes.", lambda it: it.limit),
)
_WORKER_COUNTERS: _Table = (
    ("worker_batches", "Batches sent by the worker.", lambda it: it.tasks),
    ("worker_starting_seconds", "Time before the first task of each epoch.", lambda it: it.starting),
    ("worker_fetch_seconds", "Time in the dataset.", lambda it: it.fetch),
    ("worker_collate_seconds", "Time in collate_fn.", lambda it: it.collate),
    ("worker_pack_seconds", "Time spent writing batches into shared memory.", lambda it: it.pack + it.publish),
    ("worker_idle_seconds", "Time spent waiting for tasks.", lambda it: it.idle),
    ("worker_fetch_cpu_seconds", "CPU time of the fetches that were measured.", lambda it: it.fetch_cpu),
    (
        "worker_fetch_measured_seconds",
        "Time in the fetches whose CPU time was measured.",
        lambda it: it.fetch_measured,
    ),
)


class LoaderCollector(Collector):
    """A collector that reads the counters of all loaders on each request.

    Args:
        accounts: The loaders by name.
        rank: Value of the label ``rank``.
    """

    def __init__(self, accounts: Accounts, rank: str) -> None:
        self._accounts, self._rank = accounts, rank
        # The last value of each counter. A counter must not decrease, because Prometheus would take a decrease for a
        # restart from zero. A sum of times may decrease by rounding, or by more if a worker changes state during the
        # reading.
        self._last_values: dict[tuple[str, ...], float] = {}

    def collect(self) -> Iterable[Any]:
        """Returns all metrics, from one reading."""
        with self._accounts.lock:
            return list(self._collect())

    def _collect(self) -> Iterator[Any]:
        accounts = self._accounts.items()
        for _, account in accounts:
            account.absorb_final()
        readings = [(name, _read_account(account)) for name, account in accounts]
        yield from self._families(CounterMetricFamily, _COUNTERS, readings)
        yield from self._families(GaugeMetricFamily, _GAUGES, readings)
        cached = [(name, usage) for name, it in readings if (usage := _summed(it.caches)) is not None]
        yield from self._families(CounterMetricFamily, _CACHE_COUNTERS, cached)
        yield from self._families(GaugeMetricFamily, _CACHE_GAUGES, cached)
        yield self._wait_histogram(readings)
        yield from self._worker_families(readings)
        yield from self._loader_states(accounts)

    def _monotonic(self, value: float, *key: str) -> float:
        """Returns the value of a counter, or its last value if that is larger."""
        self._last_values[key] = max(self._last_values.get(key, 0.0), value)
        return self._last_values[key]

    def _families(self, kind: Any, table: Any, readings: list[tuple[str, Any]]) -> Iterator[Any]:
        for name, text, value in table:
            family = kind(_PREFIX + name, text, labels=["rank", "loader"])
            for loader, it in readings:
                number = value(it)
                if kind is CounterMetricFamily:
                    number = self._monotonic(number, name, loader)
                family.add_metric([self._rank, loader], number)
            yield family

    def _wait_histogram(self, readings: list[tuple[str, _Reading]]) -> Any:
        text = "Time that the loop waited in each next() except the first of an epoch."
        family = HistogramMetricFamily(_PREFIX + "wait_seconds", text, labels=["rank", "loader"])
        for loader, it in readings:
            counts = [sum(each) for each in zip(*(totals.waits for totals in (it.gone, *it.live)), strict=True)]
            buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
            waited = self._monotonic(it.counter("waited_seconds"), "wait_seconds", loader)
            family.add_metric([self._rank, loader], buckets, waited)
        return family

    def _worker_families(self, readings: list[tuple[str, _Reading]]) -> Iterator[Any]:
        labels = ["rank", "loader", "worker"]
        for name, text, value in _WORKER_COUNTERS:
            family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            for loader, it in readings:
                for number, totals in enumerate(it.workers()):
                    total = self._monotonic(sum(map(value, totals)), name, loader, str(number))
                    family.add_metric([self._rank, loader, str(number)], total)
            yield family
        memory = GaugeMetricFamily(_PREFIX + "worker_resident_bytes", "Resident memory of the worker.", labels=labels)
        for loader, it in readings:
            for number, totals in enumerate(it.workers()):
                used = [resident(worker.pid) or 0 for worker in totals if worker.alive]
                if used:
                    memory.add_metric([self._rank, loader, str(number)], sum(used))
        yield memory

    def _loader_states(self, accounts: list[tuple[str, Account]]) -> Iterator[Any]:
        """Yields, for each name, the verdict of the latest loader on the engine and the batch size of the latest
        loader."""
        verdicts = GaugeMetricFamily(
            _PREFIX + "verdict", "1 for the kind of the loader's bottleneck.", labels=["rank", "loader", "kind"]
        )
        sizes = GaugeMetricFamily(
            _PREFIX + "batch_size", "Number of samples in a full batch.", labels=["rank", "loader"]
        )
        for name, account in accounts:
            served = [it for it in account.entries if it.ledger.iterators]
            if served:
                verdicts.add_metric([self._rank, name, _verdict_of(served[-1])], 1)
            known = [it.ledger.scheduling.batch_size for it in account.entries if it.ledger.scheduling is not None]
            if known and known[-1] is not None:
                sizes.add_metric([self._rank, name], known[-1])
        yield verdicts
        yield sizes


def _read_account(account: Account) -> _Reading:
    ledgers = account.ledgers()
    gone, *live = [it.totals() for it in ledgers]
    return _Reading(
        gone,
        live,
        [it.faults.stats() for it in ledgers],
        sum(sum(it.fallbacks.values()) for it in ledgers),
        account.caches(),
    )


def _summed(usages: list[CacheUsage]) -> CacheUsage | None:
    if not usages:
        return None
    fields = ("hits", "misses", "samples_bytes", "limit")
    return CacheUsage(**{name: sum(getattr(it, name) for it in usages) for name in fields})


def _verdict_of(entry: LoaderEntry) -> str:
    ledger, loader = entry.ledger, entry.loader()
    alive = sum(worker.alive for worker in ledger.totals().workers)
    # Skips the dataset and the memory of workers, which take longer to read and do not affect the kind of verdict.
    stats = stats_of_ledger(ledger, alive, reads_memory=False)
    copies = None if loader is None else transfers.find(loader)
    return (stats if copies is None else replace(stats, transfers=copies.stats)).verdict().kind
