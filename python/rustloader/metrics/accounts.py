"""The counters of all loaders in a process, by loader name.

A monitoring system identifies a loader by its name. The account of a name keeps a loader's counts after the program
drops the loader, so the counts in an account never decrease.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from rustloader._core import CacheTable
from rustloader.caching.dataset import CachedDataset
from rustloader.caching.keeping import usage_of
from rustloader.caching.usage import CacheUsage
from rustloader.metrics import caches, ledger
from rustloader.metrics.ledger import Ledger
from rustloader.system.protocols import LoaderLike


class LoaderEntry(NamedTuple):
    """A loader, its counters, and its cached dataset.

    ``loader`` and ``cached`` are weak references: they return None if the object is gone or never existed.
    """

    loader: Callable[[], LoaderLike | None]
    ledger: Ledger
    cached: Callable[[], CachedDataset[object] | None]

    @property
    def is_final(self) -> bool:
        """True if the counters can no longer change: the loader is gone and all of its iterators have ended.

        The iterators are checked, too, because an iterator may outlive its loader.
        """
        return self.loader() is None and self.ledger.has_ended


class Account:
    """The loaders that share one name."""

    def __init__(self) -> None:
        # The total counts of loaders that are gone.
        self._gone = Ledger()
        self.entries: list[LoaderEntry] = []
        # The caches of the loaders' datasets. Successive loaders may share a cache.
        self._caches: list[_Cache] = []
        # The total hits and misses of caches that are gone; None if no cache is gone.
        self._gone_caches: CacheUsage | None = None

    def add(self, entry: LoaderEntry) -> None:
        """Adds a loader, unless the account already has it."""
        if any(known.ledger is entry.ledger for known in self.entries):
            return
        self.absorb_final()
        self.entries.append(entry)
        cached = entry.cached()
        if cached is not None and not any(cache.table() is cached.table for cache in self._caches):
            self._caches.append(_Cache(cached.table))

    def absorb_final(self) -> None:
        """Merges the entries whose counters are final into the totals of loaders that are gone."""
        for entry in [entry for entry in self.entries if entry.is_final]:
            self._gone.absorb(entry.ledger)
            self.entries.remove(entry)

    def ledgers(self) -> list[Ledger]:
        """Returns the total counters of loaders that are gone, then those of each remaining loader.

        The sums over the list never decrease.
        """
        return [self._gone, *(it.ledger for it in self.entries)]

    def caches(self) -> list[CacheUsage]:
        """Returns the usage of each cache, preceded by the total hits and misses of caches that are gone, if any."""
        for cache in [it for it in self._caches if not it.read()]:
            gone = self._gone_caches or CacheUsage()
            self._gone_caches = CacheUsage(gone.hits + cache.last.hits, gone.misses + cache.last.misses)
            self._caches.remove(cache)
        return [*([] if self._gone_caches is None else [self._gone_caches]), *(it.last for it in self._caches)]


class _Cache:
    """A cache and its latest usage."""

    def __init__(self, table: CacheTable) -> None:
        self.table = weakref.ref(table)
        self.last = CacheUsage()

    def read(self) -> bool:
        """Updates ``last``. Returns False if the cache is gone."""
        table = self.table()
        if table is None:
            return False
        self.last = usage_of(table)
        return True


class Accounts:
    """The accounts of a process, by name.

    They cover the live loaders that have already started an epoch when this object is created, and the loaders that
    start their first epoch before ``close``.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Account] = {}
        # Loaders that are not in an account yet.
        self._pending: list[LoaderEntry] = []
        # Held while the accounts are read or written.
        self.lock = threading.Lock()
        # If another thread starts a loader now, the loader may be both reported to the hook and listed below. The lock
        # keeps the hook from calling `items` meanwhile, and `Account.add` ignores the second entry.
        with self.lock:
            ledger.new_ledger_hooks.append(self._on_new_ledger)
            self._pending.extend(_entry_of(loader, counters) for loader, counters in ledger.loader_ledgers())
            self.items()

    def close(self) -> None:
        """Stops adding new loaders to the accounts. Safe to call more than once."""
        if self._on_new_ledger in ledger.new_ledger_hooks:
            ledger.new_ledger_hooks.remove(self._on_new_ledger)

    def _on_new_ledger(self, loader: LoaderLike | None, counters: Ledger) -> None:
        self._pending.append(_entry_of(loader, counters))
        # This runs in the training loop's thread, so it does not wait for the lock. If another thread holds the lock,
        # the next call of `items` adds the loader.
        if self.lock.acquire(blocking=False):
            try:
                self.items()
            finally:
                self.lock.release()

    def items(self) -> list[tuple[str, Account]]:
        """Returns the names and accounts, after adding pending loaders. The caller holds ``lock``."""
        while self._pending:
            entry = self._pending.pop(0)
            self._by_name.setdefault(entry.ledger.name, Account()).add(entry)
        return list(self._by_name.items())


def _entry_of(loader: LoaderLike | None, counters: Ledger) -> LoaderEntry:
    cached = caches.find(getattr(loader, "dataset", None))
    return LoaderEntry(
        _dead_reference if loader is None else weakref.ref(loader),
        counters,
        _dead_reference if cached is None else weakref.ref(cached),
    )


def _dead_reference() -> None:
    """Stands in for a weak reference whose object never existed."""
    return None
