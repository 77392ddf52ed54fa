"""Counters of loaders and iterators, kept in a weak side table.

A loader's attributes, copies and pickles stay torch's, and one attribute more would cost an iterator the compact form
that Python has for few.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from typing import Any

from rustloader._core import Meter, Totals
from rustloader._core import figures as figures_of
from rustloader.metrics.cpu_time import Workers, WorkTime, total

_NUMBER = re.compile(r"\d+")

# Held for a swap alone. Reentrant, because the collector or a signal handler may make an iterator in the midst of one.
_swap = threading.RLock()


def _renew_lock() -> None:
    global _swap
    # In the parent another thread may have held it.
    _swap = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Ledger:
    """The counters of a loader's iterators, or of one iterator. It holds neither loader nor iterator."""

    def __init__(self, loaders: Ledger | None = None) -> None:
        # Of an iterator: that of its loader, which gets all that it gets.
        self._loaders = loaders
        # Iterators that the engine has served.
        self.iterators = 0
        # Why iterators were torch's own, and how many.
        self.fallbacks: dict[str, int] = {}
        self._ended = Meter()
        self._meters: list[Meter] = []
        # The times of processes that have ended, and those that may run. Swapped as one, for readers in other threads.
        self._processes: tuple[list[WorkTime], tuple[Workers, ...]] = [], ()

    def serve(self) -> None:
        """Notes an iterator that the engine serves."""
        self.iterators += 1
        if self._loaders is not None:
            self._loaders.serve()

    def add(self, meter: Meter) -> None:
        """Takes in the counters of one more engine."""
        # One for each epoch would come to a lot.
        self._ended.absorb(self._meters)
        self._meters.append(meter)
        if self._loaders is not None:
            self._loaders.add(meter)

    def start_workers(self, pids: list[int], meter: Meter) -> None:
        """Notes the processes of one more engine, by the worker's number, and its counters."""
        self._watch(Workers(pids, meter))

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

    def end_workers(self) -> None:
        """Keeps the processor times of an iterator's workers, which are about to end."""
        if self._loaders is not None:
            for workers in self._processes[1]:
                workers.end()

    def processor_times(self) -> list[WorkTime]:
        """Processor times by the worker's number."""
        times, watched = self._processes
        for workers in watched:
            times = total(times, workers.times())
        return times

    def fall_back(self, reason: str) -> bool:
        """Notes an iterator that is torch's own. True for the first of its loader with this reason."""
        # Of texts that differ in numbers alone, such as the memory that is left, the first stands for all.
        known = next((text for text in self.fallbacks if _NUMBER.sub("", text) == _NUMBER.sub("", reason)), reason)
        is_new = known not in self.fallbacks
        self.fallbacks[known] = self.fallbacks.get(known, 0) + 1
        return is_new if self._loaders is None else self._loaders.fall_back(reason)

    def figures(self) -> Totals:
        """What has been counted."""
        return figures_of([self._ended, *self._meters])


# By the object's id: loaders may compare by value, and then have no hash.
_ledgers: dict[int, tuple[weakref.ref[Any], Ledger]] = {}


def find(source: Any) -> Ledger | None:
    """The ledger of a loader or an iterator, if it has one."""
    reference, ledger = _ledgers.get(id(source), (None, None))
    return ledger if reference is not None and reference() is source else None


def of(source: Any) -> Ledger:
    """The ledger of a loader or an iterator; a new one where there is none."""
    return find(source) or _keep(source, Ledger())


def open_for(iterator: Any, loader: Any) -> None:
    """Makes the ledger of an iterator."""
    _keep(iterator, Ledger(of(loader)))


def end_workers(iterator: Any) -> None:
    """Keeps the processor times of an iterator's workers, which are about to end."""
    ledger = find(iterator)
    if ledger is not None:
        ledger.end_workers()


def _keep(source: Any, ledger: Ledger) -> Ledger:
    """Keeps a ledger for as long as its object lives; not at all where nothing can look after that."""
    key = id(source)

    def forget(reference: weakref.ref[Any]) -> None:
        # Where the collector takes an iterator, its destructor finds no ledger any more.
        ledger.end_workers()
        # The id may be another object's by now.
        if _ledgers.get(key, (None,))[0] is reference:
            del _ledgers[key]

    with contextlib.suppress(TypeError):  # a class with slots
        _ledgers[key] = weakref.ref(source, forget), ledger
    return ledger
