"""Pickles the arguments of a loader for workers that do not inherit them, including the definitions that workers lack.

The standard pickle refers to classes and functions by name. It refuses lambdas and local definitions, and a worker
started by spawn or forkserver cannot find definitions that a notebook, a REPL, ``python -c`` or stdin made in
``__main__``. These are sent by value with cloudpickle. The standard pickle is tried first, and kept if it works.

In the worker, a function that is sent by value uses the globals of its module, like functions that are sent by name.
Globals that its code names get the values that they have in the main process, as after a fork.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.util
import io
import logging
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import process, reduction
from multiprocessing.context import get_spawning_popen
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rustloader.workers import arguments, by_name
from rustloader.workers.preparation import Call
from rustloader.workers.sources import with_sources

_Reducers = dict[type, Callable[[Any], Any]]
# The type of functions that `functools.cache` or `lru_cache` wraps. The standard pickle refers to them by name.
_CachedFunction: type = type(functools.cache(len))

# The bytes that name the module of an object of `__main__` in a pickle of protocol 4 or later.
_MAIN_IN_PICKLE = b"\x8c\x08__main__"
# Types that cloudpickle would convert to another type, or that the standard pickle supports.
_NOT_FOR_CLOUDPICKLE = (io.TextIOWrapper, memoryview, logging.Logger, logging.RootLogger)
_MISSING = "Run `pip install cloudpickle`: workers started by spawn or forkserver need it to receive {}"
_REFUSED = "the argument {}, which the standard pickle refuses ({})"
_IN_MAIN = "the classes and functions of this `__main__`, which they cannot import"
_NOT_BY_VALUE = "It cannot be sent by value either: {}: {}"
_REFERENCED = (
    "Workers cannot import the definitions of this `__main__`. Its classes and functions are sent by value, with "
    "everything that they refer to, but part of that cannot be pickled."
)


class CloudpickleMissing(pickle.PicklingError):
    """Raised if an argument can only be pickled by value, and cloudpickle is not installed."""


class _NamesMain(Exception):
    """Raised if a standard pickle names a definition of a ``__main__`` that workers do not have."""


class _FileRefusingMain:
    """A file that refuses a pickle that names an object of ``__main__``. pickle never splits a name across two calls of
    ``write``."""

    def __init__(self, file: Any) -> None:
        self._write = file.write

    def write(self, data: Any) -> Any:
        if isinstance(data, bytes) and _MAIN_IN_PICKLE in data:
            raise _NamesMain
        return self._write(data)


def _main_file() -> str | None:
    """Returns the file that multiprocessing runs as a worker's ``__main__``, or None if the program's ``__main__`` has
    no file."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return None
    return os.path.normpath(os.path.join(process.ORIGINAL_DIR or "", file))  # type: ignore[attr-defined]


def workers_have_main() -> bool:
    """Returns True if a worker started by spawn or forkserver has the definitions of the program's ``__main__``.

    ``multiprocessing.spawn`` decides in the same way, except that it fails if the path is not a file.
    """
    name = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None)
    if name is not None:
        return name.rpartition(".")[2] != "__main__"
    file = _main_file()
    if file is None or os.path.splitext(os.path.basename(file))[0] == "ipython":
        return False
    return os.path.isfile(file)


def main_is_missing() -> bool:
    """Returns True if the file that workers would run as their ``__main__`` does not exist, as for a program read from
    stdin."""
    file = _main_file()
    return getattr(sys.modules["__main__"], "__spec__", None) is None and file is not None and not os.path.exists(file)


def first_calls() -> list[Call]:
    """Returns the first calls of a worker that would run a missing file. They set the ``__file__`` of its ``__main__``,
    so that multiprocessing assumes that the file has been run."""
    if not main_is_missing():
        return []
    return [Call(setattr, Call(importlib.import_module, "__main__"), "__file__", _main_file())]


class _Namespace:
    """A reference to the globals of a module. In a worker, unpickling it returns the globals of the worker's own module
    with that name."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return _namespace, (self._module,)


def _namespace(module: str) -> dict[str, Any]:
    names = vars(importlib.import_module(module))
    if module == "__main__":
        # A worker runs the script in a separate namespace, `__mp_main__`, and copies the names into its `__main__`.
        for value in [*names.values()]:
            for function in (value, *(vars(value).values() if isinstance(value, type) else ())):
                if isinstance(function, FunctionType) and function.__module__ == "__mp_main__":
                    return function.__globals__
    return names


class Pickling:
    """Pickles the arguments of workers that start together."""

    def __init__(self) -> None:
        self._has_main = workers_have_main()
        # The error of the standard pickle, if it has failed, and the argument at which it failed.
        self._refusal: Exception | None = None
        self._refused_argument: str | None = None

    def dump(self, value: Any, file: Any, table: Callable[[], _Reducers] | None = None) -> None:
        """Pickles a value into a file.

        Args:
            value: The value to pickle.
            file: A seekable file. After an error it may contain part of a pickle.
            table: Returns a table of reducers by type, which may raise any error to stop the pickling; None for the
                reducers of ``ForkingPickler``.

        Raises:
            CloudpickleMissing: The value must be pickled by value, and cloudpickle is not installed.
            Exception: The value cannot be pickled. The error is the standard pickle's, or that of pickling by value
                if the standard pickle only names definitions that workers lack. With a table, it may be any error.
        """
        if self._refusal is None:
            start, descriptors = file.tell(), _descriptors()
            descriptors_before = len(descriptors)
            try:
                self._by_reference(value, file, table)
                return
            except (AttributeError, pickle.PicklingError, _NamesMain) as error:
                if not isinstance(error, _NamesMain) and not _is_raised_by_pickle(error):
                    raise
                if importlib.util.find_spec("cloudpickle") is None:
                    is_in_main = isinstance(error, _NamesMain)
                    what = _IN_MAIN if is_in_main else _REFUSED.format(arguments.current(), error)
                    arguments.set_current(None)  # this error needs no note that names the argument
                    raise CloudpickleMissing(_MISSING.format(what)) from None
                self._refusal, self._refused_argument = error.with_traceback(None), arguments.current()
            file.seek(start)
            file.truncate()
            del descriptors[descriptors_before:]
        try:
            self._by_value(value, file, table)
        except Exception as error:
            if table is not None:
                raise
            if isinstance(self._refusal, _NamesMain):
                arguments.add_first_note(error, _REFERENCED)
                raise
            arguments.set_current(self._refused_argument)
            # The frames in the error's traceback must not refer to the error.
            refusal, self._refusal = self._refusal, None
            arguments.add_first_note(refusal, _NOT_BY_VALUE.format(type(error).__name__, error))
            try:
                raise refusal from None
            finally:
                del refusal

    def _by_reference(self, value: Any, file: Any, table: Callable[[], _Reducers] | None) -> None:
        if not self._has_main:
            file = _FileRefusingMain(file)
        if table is None:
            reduction.dump(value, file)
        else:
            pickler = pickle.Pickler(file)
            pickler.dispatch_table = table()
            pickler.dump(value)

    def _by_value(self, value: Any, file: Any, table: Callable[[], _Reducers] | None) -> None:
        cloudpickle = importlib.import_module("cloudpickle")
        available = cloudpickle.Pickler.dispatch_table.items()
        added = {kind: reducer for kind, reducer in available if kind not in _NOT_FOR_CLOUDPICKLE}
        if table is None:
            extra: _Reducers = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
            reducers = {**added, **copyreg.dispatch_table, **extra}
        else:
            reducers = table()
            reducers.update({kind: added[kind] for kind in added if kind not in copyreg.dispatch_table})
        reducers.setdefault(functools.cached_property, _reduce_property)
        reducers[CodeType] = with_sources(added[CodeType])
        _pickler_of(cloudpickle, reducers, self._has_main)(file, protocol=pickle.DEFAULT_PROTOCOL).dump(value)


def _pickler_of(cloudpickle: ModuleType, reducers: _Reducers, has_main: bool) -> Any:
    """Returns a pickler class that sends by value the definitions that workers lack."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined,misc]
        dispatch_table = reducers

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, _CachedFunction):
                return NotImplemented if _is_found_by_name(obj, has_main) else _reduce_cached(obj)
            if not isinstance(obj, (type, FunctionType)) or type(obj) in reducers:
                return NotImplemented
            name = _name_in_main(obj)
            if name is not None and has_main:
                return NotImplemented
            if isinstance(obj, FunctionType) and (module := _module_of(obj)) is not None:
                self.globals_ref.setdefault(id(obj.__globals__), _Namespace(module))
            reduced = super().reducer_override(obj)
            # Builtin types have a reduction of fewer than three items.
            if reduced is NotImplemented or len(reduced) < 3:
                return reduced
            make, args, *state = reduced
            top_level = name if name is not None and "." not in name else None
            return (by_name.define, (by_name.key_of(obj), top_level, make, args), *state)

    return Pickler


def _is_found_by_name(cached: Any, has_main: bool) -> bool:
    """Returns True if workers can import a cached function by its name."""
    module = getattr(cached, "__module__", None)
    return (module != "__main__" or has_main) and _lookup(module, cached) is cached


def _reduce_cached(cached: Any) -> Any:
    """Reduces a cached function to the function and the cache's settings. The copy's cache is empty, as after an
    import."""
    return _rebuild_cached, (cached.__wrapped__, cached.cache_parameters())


def _rebuild_cached(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return functools.lru_cache(**settings)(function)


def _reduce_property(cached: functools.cached_property[Any]) -> Any:
    """Reduces a cached property, without the lock that it has in Python before 3.12."""
    state = {name: value for name, value in vars(cached).items() if name not in ("func", "lock")}
    return functools.cached_property, (cached.func,), state


def _module_of(function: FunctionType) -> str | None:
    """Returns the name of the module whose globals a function uses. Returns None if no module has these globals, or if
    workers may lack the module. Workers always have a ``__main__``, although it may be empty."""
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or vars(module) is not function.__globals__:
        return None
    return name if name == "__main__" or getattr(module, "__spec__", None) is not None else None


def _name_in_main(obj: Any) -> str | None:
    """Returns the qualified name of a class or function if the program's ``__main__`` has it under that name, otherwise
    None."""
    if obj.__module__ != "__main__":
        return None
    return obj.__qualname__ if _lookup("__main__", obj) is obj else None


def _lookup(module: str | None, obj: Any) -> Any:
    """Returns the value that a module has under an object's qualified name, or None."""
    value = sys.modules.get(module or "")
    for part in getattr(obj, "__qualname__", "").split("."):
        value = getattr(value, part, None)
    return value


def _is_raised_by_pickle(error: Exception) -> bool:
    """Returns True if pickle itself raised an error, rather than code that it called."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_globals.get("__name__") in (__name__, reduction.__name__)


def _descriptors() -> list[int]:
    """Returns the descriptors that pickling has collected so far for the process that is being spawned."""
    descriptors: list[int] = getattr(get_spawning_popen(), "_fds", [])
    return descriptors
