"""Pickles the results of a worker that got classes and functions by value.

The main process has them under their names, and must get its own back: with a copy, ``except`` and ``isinstance`` would
not know them. cloudpickle brings them to workers on other machines. On this machine ``definitions`` does, and they
have a key in addition, because a local class has no name that could be looked up.
"""

from __future__ import annotations

import importlib
import operator
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from rustloader.system.weak_table import WeakTable

# Objects that this process has sent by value, or received. Both ends have the same key for each. A metaclass may make
# classes that are not hashable, or that compare by value.
_by_key: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_keys: WeakTable[str] = WeakTable()


class _Pickler(pickle.Pickler):
    """A pickler that sends by name what cannot be imported here."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, FunctionType)) or type(obj) in self.dispatch_table:
            return NotImplemented
        if (key := _keys.find(obj)) is not None:
            return find_own, (key, obj.__module__, obj.__qualname__)
        return (find, (obj.__module__, obj.__qualname__)) if _is_by_value(obj) else NotImplemented


_pickler: type[pickle.Pickler] = pickle.Pickler


def use() -> None:
    """Makes ``pickler`` use names from now on. It is called by workers that do not have the main process's modules."""
    global _pickler
    _pickler = _Pickler


def pickler(*args: Any, **kwargs: Any) -> pickle.Pickler:
    """Returns a ``pickle.Pickler`` for values that this process sends to the main process."""
    return _pickler(*args, **kwargs)


def key_of(obj: Any) -> str:
    """Returns the key of a class or function that is sent by value. It lives as long as the object."""
    key = _keys.find(obj)
    if key is None:
        key = _keys.keep(obj, os.urandom(16).hex())
        _by_key[key] = obj
    return key


def define(key: str, name: str | None, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Makes a class or function that has come by value.

    Args:
        key: Its key in the main process.
        name: Its name in the program's ``__main__``, where it has one. It gets the same name in the ``__main__`` of
            this process, so that pickles of other code find it.
        make: Returns it.
        args: Arguments of ``make``.
    """
    obj = make(*args)
    _keys.keep(obj, key)
    _by_key[key] = obj
    if name is not None:
        setattr(sys.modules["__main__"], name, obj)
    use()
    return obj


def find_own(key: str, module: str, name: str) -> Any:
    """Returns the object that this process has sent or received by value under a key; without one, that of a module
    under the name."""
    obj = _by_key.get(key)
    return find(module, name) if obj is None else obj


def find(module: str, name: str) -> Any:
    """Returns the object that a module of this process has under a qualified name."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError) as error:
        error.add_note(f"A worker that got {name!r} of {module!r} by value has sent an object that needs it.")
        raise


def _is_by_value(obj: Any) -> bool:
    """Returns True if a class or function came here by value. Pickle itself handles the objects of modules
    that both ends have."""
    module = obj.__module__
    if module is None or "<locals>" in obj.__qualname__ or (module in sys.modules and module != "__main__"):
        return False
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[module]) is not obj
    except (AttributeError, KeyError):
        return True
