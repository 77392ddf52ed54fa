"""A table that associates values with objects without keeping the objects alive."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_V = TypeVar("_V")


class WeakTable(Generic[_V]):
    """A table that associates values with objects. It compares objects by identity, because an object that compares by
    value may not be hashable.

    Args:
        on_end: Called with the value when its object is destroyed.
    """

    def __init__(self, on_end: Callable[[_V], None] | None = None) -> None:
        self._on_end = on_end
        self._entries: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def __reduce__(self) -> Any:
        # A copy in another process is empty: the objects are those of this process.
        return WeakTable, ()

    def find(self, source: object) -> _V | None:
        """Returns the value of an object; None if the table has none."""
        reference, value = self._entries.get(id(source), (None, None))
        return value if reference is not None and reference() is source else None

    def items(self) -> Iterator[tuple[Any, _V]]:
        """Yields each object that is still alive, together with its value."""
        for reference, value in list(self._entries.values()):
            source = reference()
            if source is not None:
                yield source, value

    def keep(self, source: object, value: _V) -> _V:
        """Stores a value for as long as its object is alive. Does not store it if the object does not support weak
        references. Returns the value."""
        # The callback holds only a weak reference to the table, so that it does nothing once the table is gone, for
        # example while the interpreter exits.
        key, weak = id(source), weakref.ref(self)

        def forget(reference: weakref.ref[Any]) -> None:
            table = weak()
            if table is None:
                return
            # `on_end` is called here and not by the object's destructor: when the garbage collector destroys an object,
            # it clears the weak references first, so the destructor would not find the value.
            if table._on_end is not None:
                table._on_end(value)
            # By now, another object may have the same id.
            if table._entries.get(key, (None,))[0] is reference:
                del table._entries[key]

        with contextlib.suppress(TypeError):  # a class with slots
            self._entries[key] = weakref.ref(source, forget), value
        return value
