"""Counters of loaders and iterators, kept in a weak side table.

The table keeps a loader's attributes, copies and pickles the same as torch's. One more attribute would also cost
iterators Python's compact layout for objects with few attributes.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rustloader._core import Meter, Totals
from rustloader._core import figures as figures_of
from rustloader.metrics.cpu_time import Workers, WorkTime, total
from rustloader.metrics.faults import Faults
from rustloader.metrics.memory import Allowance
from rustloader.metrics.parts import SchedulingStats
from rustloader.settings import names
from rustloader.system.forks import at_fork
from rustloader.system.protocols import IteratorLike, LoaderLike
from rustloader.system.weak_table import WeakTable

_NUMBER = re.compile(r"\d+")

# Held only for a swap. Reentrant, because the collector or a signal handler may create an iterator during one.
_swap = threading.RLock()


def _renew_lock() -> None:
    global _swap
    # Another thread of the parent may have held the lock.
    _swap = threading.RLock()


at_fork("ledgers", after_in_child=_renew_lock)


class Ledger:
    """The counters of a loader's iterators, or of one iterator. It keeps neither alive."""

    def __init__(self, loaders: Ledger | None = None, name: str = "", given_name: str | None = None) -> None:
        # The loader's name, and the one that it was given.
        self.name: str = name if loaders is None else loaders.name
        self.given_name: str | None = given_name if loaders is None else loaders.given_name
        # For an iterator: its loader's ledger, which receives the same counts.
        self._loaders = loaders
        # Iterators that the engine has served.
        self.iterators = 0
        # Settings of the last of them.
        self.scheduling: SchedulingStats | None = None
        # Number of iterators on torch's own loop, by reason.
        self.fallbacks: dict[str, int] = {}
        # Restarts of workers, and failed samples.
        self.faults: Faults = Faults(None if loaders is None else loaders.faults)
        # Bounds the cost of readings of the workers' memory.
        self._allowance: Allowance = Allowance() if loaders is None else loaders._allowance
        self._ended = Meter()
        self._meters: list[Meter] = []
        # Times of ended processes, and processes that may run. Swapped together, for readers in other threads.
        self._processes: tuple[list[WorkTime], tuple[Workers, ...]] = [], ()

    def serve(self, scheduling: SchedulingStats) -> None:
        """Counts an iterator that the engine serves with these settings."""
        self.iterators += 1
        self.scheduling = scheduling
        if self._loaders is not None:
            self._loaders.serve(scheduling)

    def note_workers(self, count: int) -> None:
        """Notes that num_workers="auto" has changed the number of workers of the last iterator."""
        if self.scheduling is not None:
            self.scheduling = dataclasses.replace(self.scheduling, auto_workers=count)
        if self._loaders is not None:
            self._loaders.note_workers(count)

    def add(self, meter: Meter) -> None:
        """Adds the counters of another engine."""
        # Meters of ended engines are merged, because there may be one per epoch.
        self._ended.absorb(self._meters)
        self._meters.append(meter)
        if self._loaders is not None:
            self._loaders.add(meter)

    def start_workers(self, pids: list[int], meter: Meter) -> None:
        """Adds the processes of another engine, by worker number, and its counters."""
        self._watch(Workers(pids, meter, self._allowance))

    def _watch(self, workers: Workers) -> None:
        while True:
            before = self._processes
            times, watched = before
            ended = [it for it in watched if it.ended]
            for it in ended:
                times = total(times, it.times())
            after = times, (*(it for it in watched if it not in ended), workers)
            with _swap:
                if self._processes is before:
                    self._processes = after
                    break
        if self._loaders is not None:
            self._loaders._watch(workers)

    def workers(self) -> Workers | None:
        """Returns the processes of the last engine, or None."""
        watched = self._processes[1]
        return watched[-1] if watched else None

    def end_workers(self) -> None:
        """Saves the processor times of an iterator's workers before they end."""
        if self._loaders is not None:
            for workers in self._processes[1]:
                workers.end()

    def processor_times(self) -> list[WorkTime]:
        """Returns the processor times by worker number."""
        times, watched = self._processes
        for workers in watched:
            times = total(times, workers.times())
        return times

    def fall_back(self, reason: str) -> bool:
        """Counts an iterator on torch's own loop. Returns True for the first of its loader with this reason."""
        # Reasons that differ only in numbers, such as the free memory, count as the first of them.
        first = next((text for text in self.fallbacks if _NUMBER.sub("", text) == _NUMBER.sub("", reason)), reason)
        is_new = first not in self.fallbacks
        self.fallbacks[first] = self.fallbacks.get(first, 0) + 1
        return is_new if self._loaders is None else self._loaders.fall_back(reason)

    def alone(self) -> Ledger:
        """Returns the counters as they are kept now, without those of the loader."""
        ledger = Ledger()
        ledger._ended, ledger._meters, ledger._processes = self._ended, [*self._meters], self._processes
        return ledger

    @property
    def has_ended(self) -> bool:
        """True if all engines have ended."""
        return all(meter.ended for meter in self._meters)

    def absorb(self, other: Ledger) -> None:
        """Adds the counters of a loader that is gone, whose engines have ended. Processor times are left out."""
        self.iterators += other.iterators
        for reason, count in other.fallbacks.items():
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + count
        self.faults.absorb(other.faults)
        self._ended.absorb([other._ended, *other._meters])

    def figures(self) -> Totals:
        # No call in between, in which another thread might move counters from one to the other.
        return figures_of([self._ended, *self._meters])


# The last processor times of an iterator's workers are saved when the iterator ends.
_ledgers: WeakTable[Ledger] = WeakTable(on_end=Ledger.end_workers)
find = _ledgers.find

# Called with each loader that gets a ledger, and with that.
openings: list[Callable[[LoaderLike, Ledger], object]] = []


def of(source: Any) -> Ledger:
    """Returns the ledger of a loader, created if there is none, or of an iterator."""
    ledger = find(source)
    if ledger is None:
        ledger = _ledgers.keep(source, Ledger(name=names.of(source), given_name=names.given(source)))
        for opening in openings:
            opening(source, ledger)
    return ledger


def of_loaders() -> Iterator[tuple[LoaderLike | None, Ledger]]:
    """Yields the loaders of this process with their ledgers; None in place of one that is gone and has an iterator at
    work.
    """
    for source, ledger in _ledgers.items():
        yield (source, ledger) if ledger._loaders is None else (None, ledger._loaders)


def open_for(iterator: IteratorLike, loader: LoaderLike) -> None:
    _ledgers.keep(iterator, Ledger(of(loader)))


def end_workers(iterator: IteratorLike) -> None:
    """Saves the processor times of an iterator's workers before they end."""
    ledger = find(iterator)
    if ledger is not None:
        ledger.end_workers()
