"""What is counted of each loader and iterator. It stands beside them: a loader's attributes, copies and pickles
stay torch's, and one attribute more would cost an iterator the compact form that Python has for few."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from rustloader import _core
from rustloader._core import Meter

__all__ = ["Ledger", "find", "of", "open_for"]


class Ledger:
    """The counters of a loader's iterators, or of one iterator. It holds neither loader nor iterator."""

    def __init__(self, loaders: Ledger | None = None) -> None:
        # Of an iterator: that of its loader, which gets all that it gets.
        self._loaders = loaders
        # Iterators that the engine has served.
        self.iterators = 0
        # Why iterators were torch's own, and how many.
        self.handovers: dict[str, int] = {}
        self._ended = Meter()
        self._meters: list[Meter] = []

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

    def hand_over(self, reason: str) -> None:
        """Notes an iterator that is torch's own."""
        self.handovers[reason] = self.handovers.get(reason, 0) + 1
        if self._loaders is not None:
            self._loaders.hand_over(reason)

    def figures(self) -> dict[str, Any]:
        """What has been counted, see ``_core.figures``."""
        return _core.figures([self._ended, *self._meters])


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


def _keep(source: Any, ledger: Ledger) -> Ledger:
    """Keeps a ledger for as long as its object lives; not at all where nothing can look after that."""
    key = id(source)

    def forget(reference: weakref.ref[Any]) -> None:
        # The id may be another object's by now.
        if _ledgers.get(key, (None,))[0] is reference:
            del _ledgers[key]

    with contextlib.suppress(TypeError):  # a class with slots
        _ledgers[key] = weakref.ref(source, forget), ledger
    return ledger
