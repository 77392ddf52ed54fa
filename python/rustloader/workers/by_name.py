"""Pickles the results of a worker that received classes and functions by value.

The results refer to them by name, because the main process must get its own objects back: ``except`` and ``isinstance``
would not recognize a copy. Workers on other machines receive the classes and functions through cloudpickle. Workers on
this machine receive them through ``definitions``, with a key in addition to the name, because a local class has no name
that can be looked up.
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

# Objects that this process has sent or received by value. Both ends have the same key for an object. A `WeakTable`
# compares by identity: a metaclass may make classes that are not hashable, or that compare by value.
_by_key: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_keys: WeakTable[str] = WeakTable()


class _Pickler(pickle.Pickler):
    """A pickler that sends classes and functions by name even if this process cannot import them."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, FunctionType)) or type(obj) in self.dispatch_table:
            return NotImplemented
        if (key := _keys.find(obj)) is not None:
            return find_own, (key, obj.__module__, obj.__qualname__)
        return (find, (obj.__module__, obj.__qualname__)) if _is_by_value(obj) else NotImplemented


_pickler: type[pickle.Pickler] = pickle.Pickler


def use() -> None:
    """Makes ``pickler`` send classes and functions by name from now on. Workers that lack definitions of the main
    process call it."""
    global _pickler
    _pickler = _Pickler


def pickler(*args: Any, **kwargs: Any) -> pickle.Pickler:
    """Returns a ``pickle.Pickler`` for values that this process sends to the main process."""
    return _pickler(*args, **kwargs)


def key_of(obj: Any) -> str:
    """Returns the key of a class or function that is sent by value. The first call for an object creates the key, which
    is valid while the object lives."""
    key = _keys.find(obj)
    if key is None:
        key = _keys.keep(obj, os.urandom(16).hex())
        _by_key[key] = obj
    return key


def define(key: str, name: str | None, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Makes a class or function that was sent by value, and returns it.

    Args:
        key: Its key in the main process.
        name: Its name in the program's ``__main__``, or None. The object gets the same name in the ``__main__`` of this
            process, where other code's pickles look it up.
        make: A function that returns the object.
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
    """Returns the object that this process has sent or received by value under a key. If there is none, returns the
    object that a module has under the name."""
    obj = _by_key.get(key)
    return find(module, name) if obj is None else obj


def find(module: str, name: str) -> Any:
    """Returns the object that a module of this process has under a qualified name."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError) as error:
        error.add_note(f"A worker received {name!r} of {module!r} by value, and sent back an object that needs it.")
        raise


def _is_by_value(obj: Any) -> bool:
    """Returns True if this process received a class or function by value. Returns False for definitions in modules that
    both ends have, which pickle itself can send."""
    module = obj.__module__
    if module is None or "<locals>" in obj.__qualname__ or (module in sys.modules and module != "__main__"):
        return False
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[module]) is not obj
    except (AttributeError, KeyError):
        return True
