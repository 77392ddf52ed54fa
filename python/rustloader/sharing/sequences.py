"""Shared lists, tuples and dicts."""

from __future__ import annotations

import collections.abc
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

from rustloader._core import SharedItems, SharedPairs, SharedStore
from rustloader.sharing import pickling

# The kind of object that a store holds.
LIST, TUPLE, DICT, ARRAY, TENSOR = range(1, 6)
# Number of items that a repr shows.
_SHOWN = 3


def checked(store: SharedStore, kind: int) -> SharedStore:
    """Returns the store, or raises ValueError if its image is of another kind."""
    if store.kind != kind:
        raise ValueError(f"the image of a shared object has kind {store.kind}, but {kind} is expected")
    return store


def forbid(cls: type, names: Iterable[str], remedy: str) -> None:
    """Makes the named methods of a class raise a TypeError that suggests a remedy."""
    for name in names:

        def method(self: Any, *args: Any, _name: str = name, **kwargs: Any) -> NoReturn:
            raise TypeError(f"a {type(self).__name__} is read-only ({_name}): change a copy made by {remedy}")

        method.__name__ = name
        setattr(cls, name, method)


class _Sequence(SharedItems):
    """The common base of a shared list and a shared tuple."""

    __slots__ = ()
    # Types of the objects that can be compared with this object.
    _comparable_types: ClassVar[Any] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickling.reduce_by_value(self, protocol)

    def _compare(self, other: Any, test: Callable[[Any, Any], Any]) -> Any:
        """Compares as lists and tuples do: the first differing items decide; if there are none, the lengths do."""
        if not isinstance(other, self._comparable_types):
            return NotImplemented
        for own_item, other_item in zip(self, other, strict=False):
            # This does not use `!=`, which a type may define differently.
            if not (own_item == other_item):
                return test(own_item, other_item)
        return test(len(self), len(other))

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, operator.ge)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        # No copy is needed, because nothing can change the object.
        return self

    @property
    def nbytes(self) -> int:
        """Size of the shared memory in bytes."""
        return self.store.nbytes

    def to_list(self) -> list[Any]:
        """Returns the items as a new list."""
        return list(self)

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the items as a tuple."""
        return tuple(self)

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:_SHOWN])) + (", ..." if len(self) > _SHOWN else "")
        return f"<{type(self).__name__} of {len(self)} items, {self.nbytes} bytes: [{shown}]>"


class SharedList(_Sequence):
    """A list in shared memory, made by ``rustloader.share``."""

    __slots__ = ()

    def __new__(cls, store: SharedStore) -> SharedList:
        return super().__new__(cls, checked(store, LIST), False)

    def __eq__(self, other: object) -> bool:
        return self.equals(other) if isinstance(other, self._comparable_types) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def copy(self) -> list[Any]:
        """Returns the items as a new list."""
        return list(self)

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other] if isinstance(other, (list, SharedList)) else NotImplemented

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __mul__(self, count: Any) -> list[Any]:
        return self.to_list() * count

    __rmul__ = __mul__


class SharedTuple(_Sequence):
    """A tuple in shared memory, made by ``rustloader.share``."""

    __slots__ = ()

    def __new__(cls, store: SharedStore) -> SharedTuple:
        return super().__new__(cls, checked(store, TUPLE), True)

    def __eq__(self, other: object) -> bool:
        return self.equals(other) if isinstance(other, self._comparable_types) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_tuple())

    def __add__(self, other: Any) -> tuple[Any, ...]:
        return (*self, *other) if isinstance(other, (tuple, SharedTuple)) else NotImplemented

    def __radd__(self, other: Any) -> tuple[Any, ...]:
        return (*other, *self) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, count: Any) -> tuple[Any, ...]:
        return self.to_tuple() * count

    __rmul__ = __mul__


class _Values(collections.abc.ValuesView[Any]):
    """The values of a shared dict, in the order of its keys."""

    _mapping: SharedDict

    def __iter__(self) -> Any:
        return self._mapping.iterate_values(False)

    def __reversed__(self) -> Any:
        return self._mapping.iterate_values(True)

    def __contains__(self, value: object) -> bool:
        return any(item is value or item == value for item in self)


class _Items(collections.abc.ItemsView[Any, Any]):
    """The keys and values of a shared dict."""

    _mapping: SharedDict

    def __iter__(self) -> Any:
        return zip(self._mapping, self._mapping.iterate_values(False), strict=True)

    def __reversed__(self) -> Any:
        return zip(reversed(self._mapping), self._mapping.iterate_values(True), strict=True)


class _Keys(collections.abc.KeysView[Any]):
    """The keys of a shared dict."""

    _mapping: SharedDict

    def __reversed__(self) -> Any:
        return reversed(self._mapping)


class SharedDict(SharedPairs):
    """A dict in shared memory, made by ``rustloader.share``."""

    __slots__ = ()

    def __new__(cls, store: SharedStore) -> SharedDict:
        return super().__new__(cls, checked(store, DICT))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickling.reduce_by_value(self, protocol)

    def __copy__(self) -> SharedDict:
        return self

    def __deepcopy__(self, memo: Any) -> SharedDict:
        # No copy is needed, because nothing can change the object.
        return self

    @property
    def nbytes(self) -> int:
        """Size of the shared memory in bytes."""
        return self.store.nbytes

    def keys(self) -> collections.abc.KeysView[Any]:
        """Returns a view of the keys, in the dict's order."""
        return _Keys(self)

    def values(self) -> collections.abc.ValuesView[Any]:
        """Returns a view of the values, in the order of the keys."""
        return _Values(self)

    def items(self) -> collections.abc.ItemsView[Any, Any]:
        """Returns a view of the keys with their values."""
        return _Items(self)

    def to_dict(self) -> dict[Any, Any]:
        """Returns the keys and values as a new dict."""
        return dict(self.items())

    def copy(self) -> dict[Any, Any]:
        """Returns the keys and values as a new dict."""
        return self.to_dict()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (dict, SharedDict)):
            return NotImplemented
        if len(self) != len(other):
            return False
        missing = object()
        pairs = ((other.get(key, missing), value) for key, value in self.items())
        return all(other_value is not missing and other_value == value for other_value, value in pairs)

    __hash__ = None  # type: ignore[assignment]  # as a dict's

    def __or__(self, other: Any) -> dict[Any, Any]:
        if isinstance(other, SharedDict):
            other = other.to_dict()
        return {**self.to_dict(), **other} if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> dict[Any, Any]:
        return {**other, **self.to_dict()} if isinstance(other, dict) else NotImplemented

    def __repr__(self) -> str:
        shown = [f"{key!r}: {value!r}" for key, value in itertools.islice(self.items(), _SHOWN)]
        dots = ", ..." if len(self) > _SHOWN else ""
        return f"<SharedDict of {len(self)} items, {self.nbytes} bytes: {{{', '.join(shown)}{dots}}}>"


_MUTATORS = ("__setitem__", "__delitem__", "clear", "pop")
_LIST_MUTATORS = ("append", "extend", "insert", "remove", "sort", "reverse", "__iadd__", "__imul__")
forbid(SharedList, (*_MUTATORS, *_LIST_MUTATORS), "to_list()")
forbid(SharedTuple, _MUTATORS[:2], "to_list()")
forbid(SharedDict, (*_MUTATORS, "popitem", "setdefault", "update", "__ior__"), "to_dict()")

SharedList._comparable_types, SharedTuple._comparable_types = (list, SharedList), (tuple, SharedTuple)
for _cls in (SharedList, SharedTuple, SharedDict):
    pickling.register(_cls, pickling.reduce_to_store)
collections.abc.Sequence.register(SharedList)
collections.abc.Sequence.register(SharedTuple)
collections.abc.Mapping.register(SharedDict)
