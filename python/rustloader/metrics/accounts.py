"""The counters of all loaders of a process by name, of loaders that are gone as well.

A monitoring system knows a loader by its name. So what a loader has counted stays in its name's account when the
program drops the loader, and an account only grows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from rustloader._core import CacheTable
from rustloader.caching.dataset import CachedDataset, usage_of
from rustloader.caching.usage import CacheUsage
from rustloader.metrics import caches, ledger
from rustloader.metrics.ledger import Ledger
from rustloader.system.protocols import LoaderLike


class Open(NamedTuple):
    """A loader, its counters, and the cache of its dataset. Each is None if it is gone or never existed."""

    loader: Callable[[], LoaderLike | None]
    ledger: Ledger
    cached: Callable[[], CachedDataset | None]

    @property
    def is_settled(self) -> bool:
        """True if nothing counts there any more. An iterator may outlive its loader."""
        return self.loader() is None and self.ledger.has_ended


class Account:
    """The loaders of one name."""

    def __init__(self) -> None:
        # Of loaders that are gone.
        self._gone = Ledger()
        self.open: list[Open] = []
        # The caches of its datasets, which programs use for one loader after the other.
        self._caches: list[_Cache] = []
        # The last hits and misses of those that are gone; None: none is.
        self._gone_caches: CacheUsage | None = None

    def add(self, opened: Open) -> None:
        """Adds a loader, unless it is there."""
        if any(it.ledger is opened.ledger for it in self.open):
            return
        self.settle()
        self.open.append(opened)
        cached = opened.cached()
        if cached is not None and not any(cache.table() is cached.table for cache in self._caches):
            self.caches()
            # The file of a cache that is gone keeps its figures.
            has_gone = self._gone_caches is not None
            self._caches.append(_Cache(cached.table, usage_of(cached.table) if has_gone else CacheUsage()))

    def settle(self) -> None:
        """Closes the entries of loaders that are gone."""
        for it in [it for it in self.open if it.is_settled]:
            self._gone.absorb(it.ledger)
            self.open.remove(it)

    def ledgers(self) -> list[Ledger]:
        """Returns the counters of the name: of loaders that are gone, and of each other one. Their sums only grow."""
        return [self._gone, *(it.ledger for it in self.open)]

    def caches(self) -> list[CacheUsage]:
        """Returns the figures of each cache of the loaders' datasets, and the hits and misses of former ones."""
        for cache in [it for it in self._caches if not it.read()]:
            gone = self._gone_caches or CacheUsage()
            self._gone_caches = CacheUsage(gone.hits + cache.last.hits, gone.misses + cache.last.misses)
            self._caches.remove(cache)
        return [*([] if self._gone_caches is None else [self._gone_caches]), *(it.last for it in self._caches)]


class _Cache:
    """A cache and its figures when it was last read, without the hits and misses that it had before ``since``."""

    def __init__(self, table: CacheTable, since: CacheUsage) -> None:
        self.table = weakref.ref(table)
        self.last = CacheUsage()
        self._since = since

    def read(self) -> bool:
        """Reads the figures. Returns False if the cache is gone."""
        table = self.table()
        if table is None:
            return False
        usage = usage_of(table)
        hits, misses = usage.hits - self._since.hits, usage.misses - self._since.misses
        self.last = replace(usage, hits=hits, misses=misses)
        return True


class Accounts:
    """The accounts of a process by name, of all loaders that begin an epoch before ``close``, or have begun one and
    live at the construction."""

    def __init__(self) -> None:
        self._by_name: dict[str, Account] = {}
        # Loaders that have no account yet.
        self._opened: list[Open] = []
        # Held to change or to read accounts.
        self.lock = threading.Lock()
        # A loader that another thread opens now waits for its account: it may come by both ways.
        with self.lock:
            ledger.openings.append(self._open)
            self._opened.extend(_opened(loader, counters) for loader, counters in ledger.of_loaders())
            self.items()

    def close(self) -> None:
        """Follows no further loaders. Safe to call more than once."""
        if self._open in ledger.openings:
            ledger.openings.remove(self._open)

    def _open(self, loader: LoaderLike | None, counters: Ledger) -> None:
        self._opened.append(_opened(loader, counters))
        # Without waiting, for this is the thread of a loop. If the lock is taken, its next holder does this.
        if self.lock.acquire(blocking=False):
            try:
                self.items()
            finally:
                self.lock.release()

    def items(self) -> list[tuple[str, Account]]:
        """Returns the accounts with their names. For the holder of the lock."""
        while self._opened:
            opened = self._opened.pop(0)
            self._by_name.setdefault(opened.ledger.name, Account()).add(opened)
        return list(self._by_name.items())


def _opened(loader: LoaderLike | None, counters: Ledger) -> Open:
    cached = caches.find(getattr(loader, "dataset", None))
    return Open(
        _nothing if loader is None else weakref.ref(loader),
        counters,
        _nothing if cached is None else weakref.ref(cached),
    )


def _nothing() -> None:
    return None
