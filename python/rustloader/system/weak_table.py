"""A table that associates values with objects and keeps no object alive."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_V = TypeVar("_V")


class WeakTable(Generic[_V]):
    """A table of values by the identity of their objects, because loaders that compare by value may not be hashable.

    Args:
        on_end: Called with the value when its object is destroyed.
    """

    def __init__(self, on_end: Callable[[_V], None] | None = None) -> None:
        self._on_end = on_end
        self._entries: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def find(self, source: object) -> _V | None:
        """Returns the value of an object, or None."""
        reference, value = self._entries.get(id(source), (None, None))
        return value if reference is not None and reference() is source else None

    def items(self) -> Iterator[tuple[Any, _V]]:
        """Yields the objects that are alive, with their values."""
        for reference, value in list(self._entries.values()):
            source = reference()
            if source is not None:
                yield source, value

    def keep(self, source: object, value: _V) -> _V:
        """Keeps a value while its object is alive, if the object supports weak references. Returns the value."""
        # Only a weak reference to the table, so that the callbacks end with it while the interpreter exits.
        key, weak = id(source), weakref.ref(self)

        def forget(reference: weakref.ref[Any]) -> None:
            table = weak()
            if table is None:
                return
            # If the garbage collector destroys an iterator, the iterator's destructor no longer finds the value.
            if table._on_end is not None:
                table._on_end(value)
            # By now, another object may have the same id.
            if table._entries.get(key, (None,))[0] is reference:
                del table._entries[key]

        with contextlib.suppress(TypeError):  # a class with slots
            self._entries[key] = weakref.ref(source, forget), value
        return value
