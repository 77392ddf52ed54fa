"""Pickles what a worker on another machine sends.

cloudpickle has brought the classes and functions of the main script there by value. The main process has them under
their names, and must get its own back: with a copy, ``except`` and ``isinstance`` would not know them.
"""

from __future__ import annotations

import importlib
import operator
import pickle
import sys
from types import FunctionType
from typing import Any


class _Pickler(pickle.Pickler):
    """A pickler that names what cannot be imported here."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, FunctionType)) or type(obj) in self.dispatch_table or not _is_by_value(obj):
            return NotImplemented
        return find, (obj.__module__, obj.__qualname__)


_pickler: type[pickle.Pickler] = pickle.Pickler


def use() -> None:
    """Makes ``pickler`` give names from now on. A worker calls it that the main process's modules do not reach."""
    global _pickler
    _pickler = _Pickler


def pickler(*args: Any, **kwargs: Any) -> pickle.Pickler:
    """A ``pickle.Pickler`` for what this process sends to the main process."""
    return _pickler(*args, **kwargs)


def find(module: str, name: str) -> Any:
    """What a module of this process has under a qualified name."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError) as error:
        error.add_note(f"A worker on another machine has sent an object that needs {name!r} of {module!r}.")
        raise


def _is_by_value(obj: Any) -> bool:
    """Whether a class or function came here by value. What is in a module of both ends is for pickle itself."""
    module = obj.__module__
    if module is None or "<locals>" in obj.__qualname__ or (module in sys.modules and module != "__main__"):
        return False
    try:
        return operator.attrgetter(obj.__qualname__)(sys.modules[module]) is not obj
    except (AttributeError, KeyError):
        return True
