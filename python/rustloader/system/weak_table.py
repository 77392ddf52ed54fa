"""A table of values that belong to objects. It keeps no object alive."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_V = TypeVar("_V")


class WeakTable(Generic[_V]):
    """Values by the identity of their objects: loaders that compare by value may not be hashable.

    Args:
        on_end: Called with the value when its object ends.
    """

    def __init__(self, on_end: Callable[[_V], None] | None = None) -> None:
        self._on_end = on_end
        self._entries: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def find(self, source: object) -> _V | None:
        """Returns the value of an object, or None."""
        reference, value = self._entries.get(id(source), (None, None))
        return value if reference is not None and reference() is source else None

    def items(self) -> Iterator[tuple[Any, _V]]:
        """Yields the objects that live, with their values."""
        for reference, value in list(self._entries.values()):
            source = reference()
            if source is not None:
                yield source, value

    def keep(self, source: object, value: _V) -> _V:
        """Keeps a value while its object lives, if that supports weak references. Returns the value."""
        # Weak: while the interpreter exits, the callbacks must go with the table.
        key, weak = id(source), weakref.ref(self)

        def forget(reference: weakref.ref[Any]) -> None:
            table = weak()
            if table is None:
                return
            # If the collector frees an iterator, its destructor no longer finds the value.
            if table._on_end is not None:
                table._on_end(value)
            # Another object may have the id by now.
            if table._entries.get(key, (None,))[0] is reference:
                del table._entries[key]

        with contextlib.suppress(TypeError):  # a class with slots
            self._entries[key] = weakref.ref(source, forget), value
        return value
