"""Collects the metrics of all loaders in a process, for prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from rustloader._core import WAIT_BOUNDS, Totals
from rustloader.caching.usage import CacheUsage
from rustloader.metrics import transfers
from rustloader.metrics.accounts import Account, Accounts
from rustloader.metrics.fields import ArenaStats, FaultStats, StatsFields, WorkerStats
from rustloader.metrics.loader_stats import stats_of_ledger
from rustloader.metrics.stats import Stats
from rustloader.system.figures import Figure, figures_of

_PREFIX = "rustloader_"
_BOUNDS = (*map(repr, WAIT_BOUNDS), "+Inf")


class _Reading(NamedTuple):
    """One reading of an account.

    Attributes:
        account: The account.
        totals: The total counts of loaders that are gone, then those of each remaining loader.
        stats: The same as statistics.
        caches: The usage of each cache, preceded by the total hits and misses of caches that are gone, if any.
    """

    account: Account
    totals: list[Totals]
    stats: list[Stats]
    caches: list[CacheUsage]

    @classmethod
    def of(cls, account: Account) -> _Reading:
        ledgers = account.ledgers()
        totals = [it.totals() for it in ledgers]
        # Skips the dataset and the private memory of workers, which take longer to read.
        stats = [
            stats_of_ledger(ledger, reads_memory=False, totals=it) for ledger, it in zip(ledgers, totals, strict=True)
        ]
        return cls(account, totals, stats, account.caches())

    def workers(self) -> list[list[WorkerStats]]:
        """Returns, for each worker number, the statistics of all loaders' workers with that number."""
        by_number = zip_longest(*(stats.workers for stats in self.stats))
        return [[worker for worker in workers if worker is not None] for workers in by_number]


# The classes whose figures are summed over the loaders of a name, each with a function that returns its objects.
_Parts = Callable[[_Reading], Iterable[Any]]
_LOADERS: list[tuple[type, _Parts]] = [
    (StatsFields, lambda it: it.stats),
    (FaultStats, lambda it: [stats.faults for stats in it.stats]),
    (ArenaStats, lambda it: [stats.arena for stats in it.stats]),
]
# Figures that are not fields.
_OTHERS: list[tuple[Figure, Callable[[_Reading], float]]] = [
    (
        Figure("", "fallback_iterators", "Iterators on torch's own loop, whose batches are not counted.", False, False),
        lambda it: sum(fallback.count for stats in it.stats for fallback in stats.fallbacks),
    ),
    (
        Figure("", "workers", "Running workers.", True, False),
        lambda it: sum(worker.alive for stats in it.stats for worker in stats.workers),
    ),
    (
        Figure("", "ready_batches", "Finished batches that the loop has not taken yet.", True, False),
        lambda it: sum(totals.ready for totals in it.totals),
    ),
]


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
        readings = [(name, _Reading.of(account)) for name, account in accounts]
        for kind, parts in _LOADERS:
            for figure in _shown(kind):
                yield self._family(figure, [((loader,), _sum(parts(it), figure)) for loader, it in readings])
        for figure, value in _OTHERS:
            yield self._family(figure, [((loader,), value(it)) for loader, it in readings])
        for figure in _shown(CacheUsage):
            cached = [(loader, it.caches) for loader, it in readings if it.caches]
            yield self._family(figure, [((loader,), _sum(usages, figure)) for loader, usages in cached])
        yield self._wait_histogram(readings)
        workers = [
            ((loader, str(number)), those) for loader, it in readings for number, those in enumerate(it.workers())
        ]
        for figure in _shown(WorkerStats):
            known = [(names, _running(those) if figure.is_gauge else those) for names, those in workers]
            yield self._family(figure, [(names, _sum(those, figure)) for names, those in known if those], "worker")
        yield from self._loader_states(readings)

    def _monotonic(self, value: float, *key: str) -> float:
        """Returns the value of a counter, or its last value if that is larger."""
        self._last_values[key] = max(self._last_values.get(key, 0.0), value)
        return self._last_values[key]

    def _family(self, figure: Figure, values: list[tuple[tuple[str, ...], float]], *labels: str) -> Any:
        """Returns the family of a figure with its values, each with the labels after the rank."""
        kind = GaugeMetricFamily if figure.is_gauge else CounterMetricFamily
        family = kind(_PREFIX + figure.name, figure.text, labels=["rank", "loader", *labels])
        for names, value in values:
            shown = value if figure.is_gauge else self._monotonic(value, figure.name, *names)
            family.add_metric([self._rank, *names], shown)
        return family

    def _wait_histogram(self, readings: list[tuple[str, _Reading]]) -> Any:
        text = "Time that the loop waited in each next() except the first of an epoch."
        family = HistogramMetricFamily(_PREFIX + "wait_seconds", text, labels=["rank", "loader"])
        for loader, it in readings:
            counts = [sum(each) for each in zip(*(totals.waits for totals in it.totals), strict=True)]
            buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
            waited = self._monotonic(sum(stats.waited_seconds for stats in it.stats), "wait_seconds", loader)
            family.add_metric([self._rank, loader], buckets, waited)
        return family

    def _loader_states(self, readings: list[tuple[str, _Reading]]) -> Iterator[Any]:
        """Yields, for each name, the verdict of the latest loader on the engine and the batch size of the latest
        loader."""
        verdicts = GaugeMetricFamily(
            _PREFIX + "verdict", "1 for the kind of the loader's bottleneck.", labels=["rank", "loader", "kind"]
        )
        sizes = GaugeMetricFamily(
            _PREFIX + "batch_size", "Number of samples in a full batch.", labels=["rank", "loader"]
        )
        for name, it in readings:
            loaders = list(zip(it.account.entries, it.stats[1:], strict=True))
            served = [(entry, stats) for entry, stats in loaders if stats.iterators]
            if served:
                entry, stats = served[-1]
                loader = entry.loader()
                copies = None if loader is None else transfers.find(loader)
                stats = stats if copies is None else replace(stats, transfers=copies.stats)
                verdicts.add_metric([self._rank, name, stats.verdict().kind], 1)
            known = [stats.scheduling.batch_size for _, stats in loaders if stats.scheduling is not None]
            if known and known[-1] is not None:
                sizes.add_metric([self._rank, name], known[-1])
        yield verdicts
        yield sizes


def _shown(kind: type) -> list[Figure]:
    return [figure for figure in figures_of(kind) if figure.text]


def _running(workers: list[WorkerStats]) -> list[WorkerStats]:
    return [worker for worker in workers if worker.alive]


def _sum(parts: Iterable[Any], figure: Figure) -> float:
    return sum(getattr(part, figure.field) for part in parts)
