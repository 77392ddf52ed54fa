"""Counters of loaders and iterators, in a table of weak references.

The counters are not attributes of a loader, because copies and pickles of a loader must be the same as torch's. An
iterator with one more attribute would also lose Python's compact layout for objects with few attributes.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, _DatasetKind

from rustloader._core import Meter, Totals
from rustloader._core import figures as totals_of
from rustloader.metrics.cpu_time import Workers, WorkTime, sum_by_worker
from rustloader.metrics.faults import Faults
from rustloader.metrics.fields import SchedulingStats
from rustloader.metrics.memory import Allowance
from rustloader.remote.context import is_remote
from rustloader.settings import names
from rustloader.settings.config import LoaderConfig
from rustloader.system.forks import at_fork
from rustloader.system.protocols import IteratorLike, LoaderLike
from rustloader.system.weak_table import WeakTable

_NUMBER = re.compile(r"\d+")

# Held while `Ledger._processes` is replaced. Reentrant, because the garbage collector or a signal handler may create an
# iterator meanwhile.
_swap_lock = threading.RLock()


def _renew_lock() -> None:
    global _swap_lock
    # Another thread of the parent process may have held the lock at the fork.
    _swap_lock = threading.RLock()


at_fork("ledgers", after_in_child=_renew_lock)


class Ledger:
    """The counters of all iterators of a loader, or of one iterator.

    A ledger keeps neither the loader nor its iterators alive.

    Args:
        parent: The loader's ledger, if this is an iterator's. Everything counted here is also counted there.
        name: The loader's name.
        given_name: The name that the program gave the loader (``name=``); None if it gave none.
    """

    def __init__(self, parent: Ledger | None = None, name: str = "", given_name: str | None = None) -> None:
        self.name: str = name if parent is None else parent.name
        self.given_name: str | None = given_name if parent is None else parent.given_name
        self._parent = parent
        # Number of iterators that the engine has served.
        self.iterators = 0
        # Settings of the latest iterator.
        self.scheduling: SchedulingStats | None = None
        # Seconds in which epochs began and workers ended, and the time until which they are counted.
        self.turnaround_seconds = 0.0
        self._counted_until = 0.0
        # Number of iterators on torch's own loop, by reason.
        self.fallbacks: dict[str, int] = {}
        # Worker restarts, and failed samples.
        self.faults: Faults = Faults(None if parent is None else parent.faults)
        # Limits the time spent reading the workers' memory.
        self._allowance: Allowance = Allowance() if parent is None else parent._allowance
        self._ended = Meter()
        self._meters: list[Meter] = []
        # Live iterators without workers, whose fetches `_ended` counts.
        self._fetching: weakref.WeakSet[IteratorLike] = weakref.WeakSet()
        # Times of ended processes, and processes that may be running. Both are replaced together, because other threads
        # read them.
        self._processes: tuple[list[WorkTime], tuple[Workers, ...]] = [], ()

    def serve(self, scheduling: SchedulingStats) -> None:
        """Counts an iterator on the engine, and records its settings."""
        self.iterators += 1
        self.scheduling = scheduling
        if self._parent is not None:
            self._parent.serve(scheduling)

    def turn_around(self, begin: float) -> None:
        """Counts the seconds of the monotonic clock since ``begin`` as ``turnaround_seconds``.

        The end of workers may be part of the beginning of an epoch. Its time is not counted twice.
        """
        now = time.monotonic()
        seconds = now - max(begin, self._counted_until)
        self._counted_until = now
        self.turnaround_seconds += seconds
        if self._parent is not None:
            self._parent.turnaround_seconds += seconds

    def note_settings(self, **changed: Any) -> None:
        """Records settings of the latest iterator that have changed: fields of ``SchedulingStats``."""
        if self.scheduling is not None:
            self.scheduling = dataclasses.replace(self.scheduling, **changed)
        if self._parent is not None:
            self._parent.note_settings(**changed)

    def add(self, meter: Meter) -> None:
        """Adds the counters of a new engine."""
        # Meters of ended engines are merged, because each epoch may add a meter.
        self._ended.absorb(self._meters)
        self._meters.append(meter)
        if self._parent is not None:
            self._parent.add(meter)

    def count_fetches(self, iterator: IteratorLike, scheduling: SchedulingStats) -> Meter:
        """Records the settings of an iterator without workers. Returns the meter that counts its fetches."""
        self.scheduling = scheduling
        self._fetching.add(iterator)
        return self._ended

    def start_workers(self, pids: list[int], meter: Meter) -> None:
        """Adds the worker processes of a new engine, by worker number, and the engine's counters."""
        self._watch(Workers(pids, meter, self._allowance))

    def _watch(self, workers: Workers) -> None:
        while True:
            before = self._processes
            times, watched = before
            ended = [it for it in watched if it.ended]
            for it in ended:
                times = sum_by_worker(times, it.times())
            after = times, (*(it for it in watched if it not in ended), workers)
            with _swap_lock:
                if self._processes is before:
                    self._processes = after
                    break
        if self._parent is not None:
            self._parent._watch(workers)

    def workers(self) -> Workers | None:
        """Returns the worker processes of the latest engine; None if there is no engine."""
        watched = self._processes[1]
        return watched[-1] if watched else None

    def end_workers(self) -> None:
        """Saves the CPU times of an iterator's workers before they exit. Does nothing for a loader's ledger."""
        if self._parent is not None:
            for workers in self._processes[1]:
                workers.end()

    def cpu_times(self) -> list[WorkTime]:
        """Returns the CPU times, by worker number."""
        times, watched = self._processes
        for workers in watched:
            times = sum_by_worker(times, workers.times())
        return times

    def fall_back(self, reason: str) -> bool:
        """Counts an iterator on torch's own loop. Returns True if its loader had no fallback for this reason before."""
        # Reasons that differ only in numbers, such as the amount of free memory, count as the same reason.
        first = next((text for text in self.fallbacks if _NUMBER.sub("", text) == _NUMBER.sub("", reason)), reason)
        is_new = first not in self.fallbacks
        self.fallbacks[first] = self.fallbacks.get(first, 0) + 1
        return is_new if self._parent is None else self._parent.fall_back(reason)

    def detached(self) -> Ledger:
        """Returns a copy with the current engines and processes, without a parent."""
        ledger = Ledger()
        ledger._ended, ledger._meters, ledger._processes = self._ended, [*self._meters], self._processes
        return ledger

    @property
    def has_ended(self) -> bool:
        """True if all engines, and all iterators whose fetches are counted, have ended."""
        return not self._fetching and all(meter.ended for meter in self._meters)

    def absorb(self, other: Ledger) -> None:
        """Adds the counters of a loader that is gone and whose engines have ended, except CPU times."""
        self.iterators += other.iterators
        self.turnaround_seconds += other.turnaround_seconds
        for reason, count in other.fallbacks.items():
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + count
        self.faults.absorb(other.faults)
        self._ended.absorb([other._ended, *other._meters])

    def totals(self) -> Totals:
        """Returns the sums over all engines."""
        # Reads both attributes without a call in between; during a call, another thread could move counters from one to
        # the other.
        return totals_of([self._ended, *self._meters])


# When an iterator is destroyed, the last CPU times of its workers are saved.
_ledgers: WeakTable[Ledger] = WeakTable(on_end=Ledger.end_workers)
find = _ledgers.find

# Functions to call with a loader and its ledger when the ledger is created. There are some only while metrics are
# served.
new_ledger_hooks: list[Callable[[LoaderLike, Ledger], object]] = []


def of(source: Any) -> Ledger:
    """Returns the ledger of a loader or an iterator. Creates one for a loader that has none."""
    ledger = find(source)
    if ledger is None:
        ledger = _ledgers.keep(source, Ledger(name=names.of(source), given_name=names.given(source)))
        for hook in new_ledger_hooks:
            hook(source, ledger)
    return ledger


def loader_ledgers() -> Iterator[tuple[LoaderLike | None, Ledger]]:
    """Yields the loaders of this process with their ledgers.

    A ledger may be yielded more than once: with its loader, and with None for each live iterator of that loader. An
    iterator may outlive its loader.
    """
    for source, ledger in _ledgers.items():
        yield (source, ledger) if ledger._parent is None else (None, ledger._parent)


def open_for(iterator: IteratorLike, loader: LoaderLike) -> None:
    """Creates the ledger of an iterator."""
    _ledgers.keep(iterator, Ledger(of(loader)))


def settings(
    loader: LoaderLike, iterator: IteratorLike, config: LoaderConfig, auto_workers: int | None = None
) -> SchedulingStats:
    """Returns the settings that the statistics show. Values that torch's constructor copied from the loader are read
    from the iterator, because the program may have defined the loader's attributes as properties."""
    map_style = loader._dataset_kind == _DatasetKind.Map
    sampler = iterator._index_sampler
    batch_size = sampler.batch_size if type(sampler) is BatchSampler else None
    return SchedulingStats(
        prefetch_factor=int(config.prefetch_factor or 0),  # torch's is None without workers
        in_order=bool(config.in_order),
        # An iterable dataset always uses round robin and one thread.
        dispatch=config.dispatch if map_style else "round_robin",
        reorder_window=config.reorder_window,
        worker_threads=config.worker_threads if map_style else 1,
        map_style=map_style,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        # Looked up on the class, because reading an attribute of the dataset itself may run the program's code.
        per_sample=map_style and bool(iterator._auto_collation) and not hasattr(type(loader.dataset), "__getitems__"),
        auto_workers=auto_workers,
        remote=is_remote(loader.multiprocessing_context),
    )


def end_workers(iterator: IteratorLike) -> None:
    """Saves the CPU times of an iterator's workers before they exit, if the iterator has a ledger."""
    ledger = find(iterator)
    if ledger is not None:
        ledger.end_workers()
