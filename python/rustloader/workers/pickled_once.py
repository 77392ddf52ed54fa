"""Pickles the workers' common arguments once instead of once per worker, if no program can tell the difference.

torch pickles the dataset for each worker. A class's own ``__getstate__`` or reducer may count its calls or return a
different value each time. Descriptors, locks, queues and tensors in shared memory belong to one worker's pickle. A
dataset that contains any of these is still pickled for each worker.
"""

from __future__ import annotations

import contextlib
import copyreg
import mmap
import operator
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

from rustloader.workers.arguments import Mark
from rustloader.workers.definitions import Pickling

# Packages whose objects can be pickled once. Objects of other packages may be tied to one process, or their code may
# reveal how often it runs.
_PLAIN = (sys.stdlib_module_names | {"numpy", "pandas", "torch"}) - {"multiprocessing", "_multiprocessing"}
# Methods of an object's class that pickling calls.
_HOOKS = (
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
    "__getattribute__",
    "__getattr__",
)
# Methods that pickling also calls for subclasses of list and dict.
_ITEMS = ("__iter__", "items")
# multiprocessing's own reducers of methods and partial functions, whose results refer to no process.
_PLAIN_REDUCERS = {
    reduction._reduce_method,  # type: ignore[attr-defined]
    reduction._reduce_method_descriptor,  # type: ignore[attr-defined]
    reduction._reduce_partial,  # type: ignore[attr-defined]
}


class _NotPlain(Exception):
    """Raised if the value contains an object that must be pickled for each worker."""


def _is_plain(module: Any) -> bool:
    return str(module).partition(".")[0] in _PLAIN


def _is_plain_class(kind: type) -> bool:
    """Returns True if pickling an object of a class runs only code of known packages."""
    for name in _HOOKS + (_ITEMS if issubclass(kind, list | dict) else ()):
        for base in kind.__mro__:
            if name in vars(base):
                # The `__module__` of a method that the standard library adds to a class, for example to a named tuple,
                # is a module of the library.
                module = getattr(vars(base)[name], "__module__", None) or base.__module__
                if not _is_plain(module):
                    return False
                break
    return True


class _Table(dict[type, Callable[[Any], Any]]):
    """The reducers by type. The first object of a type adds the type's reducer, or ends the pickling with an error."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        registered = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        if kind in registered:
            if registered[kind] not in _PLAIN_REDUCERS:
                raise _NotPlain
            return self.setdefault(kind, registered[kind])
        if kind in copyreg.dispatch_table:
            reducer = copyreg.dispatch_table[kind]
            if not _is_plain(getattr(reducer, "__module__", None)):
                raise _NotPlain
            return self.setdefault(kind, reducer)
        if issubclass(kind, type):
            # Classes are pickled by name.
            raise KeyError(kind)
        if kind is not Mark and not _is_plain_class(kind):
            raise _NotPlain
        return self.setdefault(kind, _reduce)


# Reduces an object as the pickler would if the table had no entry for its type.
_reduce: Callable[[Any], Any] = operator.methodcaller("__reduce_ex__", pickle.DEFAULT_PROTOCOL)


class PickledOnce:
    """A pickle in a memfd, which workers map. It is in memory only once, regardless of the number of workers."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @classmethod
    def of(cls, value: Any, pickling: Pickling | None = None) -> PickledOnce | None:
        """Pickles a value. Returns None if it must be pickled for each worker, or cannot be pickled at all."""
        file = None
        try:
            file = os.fdopen(os.memfd_create("rustloader-start", os.MFD_CLOEXEC), "wb")
            (pickling or Pickling()).dump(value, file, _Table)
            file.flush()
        except Exception:
            # If this is a genuine error, pickling for the first worker raises it again.
            if file is not None:
                _close(file)
            return None
        return cls(file)

    def for_child(self) -> Any:
        """Returns the descriptor in a form that can be pickled for a child process."""
        return reduction.DupFd(self._file.fileno())

    def close(self) -> None:
        """Closes the file, which must stay open until all workers have been started."""
        _close(self._file)


def _close(file: Any) -> None:
    # A failed write has already raised its error.
    with contextlib.suppress(OSError):
        file.close()


def load(duplicate: Any) -> Any:
    """Unpickles the value in a worker."""
    fd = duplicate.detach()
    try:
        # The file is mapped instead of read, because spawned workers share its file offset.
        contents = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    with contents:
        return pickle.loads(contents)
