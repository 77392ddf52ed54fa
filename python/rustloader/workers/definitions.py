"""Pickles the arguments of a loader for workers that do not inherit them, with the definitions that workers lack.

The standard pickle has classes and functions by name. It refuses lambdas and local ones, and a worker by spawn or
forkserver does not find what a notebook, a REPL, ``python -c`` or stdin has defined in ``__main__``. These go by value,
with cloudpickle, if it is installed. The standard pickle is tried first, and kept if it works.

A function that goes by value has the globals of its module in the worker, like functions that go by name. Those that
its code names get the values that they have in the main process, as after a fork.
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
from types import FunctionType, ModuleType
from typing import Any

from rustloader.workers import arguments, by_name
from rustloader.workers.preparation import Call

_Reducers = dict[type, Callable[[Any], Any]]
# What `functools.cache` and `lru_cache` make. The standard pickle has it by name.
_Cached: type = type(functools.cache(len))

# The text that a pickle of protocol 4 or later has where it names something of `__main__`.
_OF_MAIN = b"\x8c\x08__main__"
# Types that cloudpickle would turn into something else, or the standard pickle takes.
_LEFT_OUT = (io.TextIOWrapper, memoryview, logging.Logger, logging.RootLogger)
MISSING = (
    "With cloudpickle installed (`pip install 'rustloader[notebook]'` or `pip install cloudpickle`), lambdas, local "
    "functions and classes, and those of a notebook or `python -c`, reach such workers."
)
_NEITHER = "Nor can it go by value: {}: {}"
_REFERRED = (
    "Workers cannot import what this `__main__` defines. Its classes and functions go by value, with all that they "
    "refer to, and something of that cannot be pickled."
)


class _NamesMain(Exception):
    """Raised if the standard pickle needs a definition of a ``__main__`` that workers do not have."""


class _Watched:
    """A file that refuses a pickle that needs ``__main__``. Names are never cut by two calls of ``write``."""

    def __init__(self, file: Any) -> None:
        self._write = file.write

    def write(self, data: Any) -> Any:
        if isinstance(data, bytes) and _OF_MAIN in data:
            raise _NamesMain
        return self._write(data)


def is_available() -> bool:
    """Returns True if cloudpickle is installed."""
    return "cloudpickle" in sys.modules or importlib.util.find_spec("cloudpickle") is not None


def _main_file() -> str | None:
    """Returns the file that multiprocessing has a worker run for its ``__main__``, if the program's has one."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return None
    return os.path.normpath(os.path.join(process.ORIGINAL_DIR or "", file))  # type: ignore[attr-defined]


def workers_have_main() -> bool:
    """Returns True if a worker by spawn or forkserver has the definitions of the program's ``__main__``.

    ``multiprocessing.spawn`` decides in the same way, except that it fails where the file is no file.
    """
    name = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None)
    if name is not None:
        return name.rpartition(".")[2] != "__main__"
    file = _main_file()
    if file is None or os.path.splitext(os.path.basename(file))[0] == "ipython":
        return False
    return os.path.isfile(file)


def main_is_missing() -> bool:
    """Returns True if the file that processes would run for their ``__main__`` does not exist, as that of stdin."""
    file = _main_file()
    return getattr(sys.modules["__main__"], "__spec__", None) is None and file is not None and not os.path.exists(file)


def first_calls() -> list[Call]:
    """Returns the first calls of a worker that would run a missing file: they set the ``__file__`` of its ``__main__``,
    as if it had come from there."""
    if not main_is_missing():
        return []
    return [Call(setattr, Call(importlib.import_module, "__main__"), "__file__", _main_file())]


class _Namespace:
    """The globals of a module, in the worker those of its own module of that name."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return _namespace, (self._module,)


def _namespace(module: str) -> dict[str, Any]:
    names = vars(importlib.import_module(module))
    if module == "__main__":
        # A worker runs the script in a namespace of its own. Its `__main__` has a copy.
        for value in [*names.values()]:
            for it in (value, *(vars(value).values() if isinstance(value, type) else ())):
                if isinstance(it, FunctionType) and it.__module__ == "__mp_main__":
                    return it.__globals__
    return names


class Pickling:
    """Pickles the arguments of workers that start together."""

    def __init__(self) -> None:
        self._has_main = workers_have_main()
        # The reason why the standard pickle does not do, and the argument at which it failed.
        self._refusal: Exception | None = None
        self._refused: str | None = None

    def dump(self, value: Any, file: Any, table: Callable[[], _Reducers] | None = None) -> None:
        """Pickles a value into a file.

        Args:
            value: The value.
            file: A file that can be rewound. After an error it has parts of a pickle.
            table: Makes the reducers of types, which may give up with errors of their own; None: those of
                ``ForkingPickler``.

        Raises:
            Exception: The standard pickle's error, if what goes by value does not make up for it. With a table any
                error may come.
        """
        if self._refusal is None:
            start, descriptors = file.tell(), _descriptors()
            taken = len(descriptors)
            try:
                self._by_reference(value, file, table)
                return
            except (AttributeError, pickle.PicklingError, _NamesMain) as error:
                if not isinstance(error, _NamesMain) and not _is_of_pickle(error):
                    raise
                if not is_available():
                    error.add_note(MISSING)
                    raise
                self._refusal, self._refused = error.with_traceback(None), arguments.present()
            file.seek(start)
            file.truncate()
            del descriptors[taken:]
        try:
            self._by_value(value, file, table)
        except Exception as error:
            if table is not None:
                raise
            if isinstance(self._refusal, _NamesMain):
                error.add_note(_REFERRED)
                raise
            arguments.reach(self._refused)
            # The frames of its traceback must not refer to it.
            refusal, self._refusal = self._refusal, None
            refusal.add_note(_NEITHER.format(type(error).__name__, error))
            try:
                raise refusal from None
            finally:
                del refusal

    def _by_reference(self, value: Any, file: Any, table: Callable[[], _Reducers] | None) -> None:
        if not self._has_main and is_available():
            file = _Watched(file)
        if table is None:
            reduction.dump(value, file)
        else:
            pickler = pickle.Pickler(file)
            pickler.dispatch_table = table()
            pickler.dump(value)

    def _by_value(self, value: Any, file: Any, table: Callable[[], _Reducers] | None) -> None:
        cloudpickle = importlib.import_module("cloudpickle")
        more = {kind: it for kind, it in cloudpickle.Pickler.dispatch_table.items() if kind not in _LEFT_OUT}
        if table is None:
            extra: _Reducers = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
            reducers = {**more, **copyreg.dispatch_table, **extra}
        else:
            reducers = table()
            reducers.update({kind: it for kind, it in more.items() if kind not in copyreg.dispatch_table})
        reducers.setdefault(functools.cached_property, _reduce_property)
        _pickler_of(cloudpickle, reducers, self._has_main)(file, protocol=pickle.DEFAULT_PROTOCOL).dump(value)


def _pickler_of(cloudpickle: ModuleType, reducers: _Reducers, has_main: bool) -> Any:
    """Makes a class of picklers that pickle by value the definitions that workers lack."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined,misc]
        dispatch_table = reducers

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, _Cached):
                return NotImplemented if _is_found_by_name(obj, has_main) else _reduce_cached(obj)
            if not isinstance(obj, (type, FunctionType)) or type(obj) in reducers:
                return NotImplemented
            name = _name_in_main(obj)
            if name is not None and has_main:
                return NotImplemented
            if isinstance(obj, FunctionType) and (module := _module_of(obj)) is not None:
                self.globals_ref.setdefault(id(obj.__globals__), _Namespace(module))
            reduced = super().reducer_override(obj)
            # A short reduction is that of a builtin type.
            if reduced is NotImplemented or len(reduced) < 3:
                return reduced
            make, args, *rest = reduced
            plain = name if name is not None and "." not in name else None
            return (by_name.define, (by_name.key_of(obj), plain, make, args), *rest)

    return Pickler


def _is_found_by_name(cached: Any, has_main: bool) -> bool:
    """Returns True if workers find a function with a cache under its name."""
    module = getattr(cached, "__module__", None)
    return (module != "__main__" or has_main) and _lookup(module, cached) is cached


def _reduce_cached(cached: Any) -> Any:
    """Returns the function and its settings. The cache is empty, as in a process that imports it."""
    return _cached, (cached.__wrapped__, cached.cache_parameters())


def _cached(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return functools.lru_cache(**settings)(function)


def _reduce_property(it: functools.cached_property[Any]) -> Any:
    """Reduces a property without the lock that it has before Python 3.12."""
    state = {name: value for name, value in vars(it).items() if name not in ("func", "lock")}
    return functools.cached_property, (it.func,), state


def _module_of(function: FunctionType) -> str | None:
    """Returns the module whose globals a function has, if workers have it as well. Their ``__main__`` may be empty."""
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or vars(module) is not function.__globals__:
        return None
    return name if name == "__main__" or getattr(module, "__spec__", None) is not None else None


def _name_in_main(obj: Any) -> str | None:
    """Returns the qualified name under which the program's ``__main__`` has a class or function."""
    if obj.__module__ != "__main__":
        return None
    return obj.__qualname__ if _lookup("__main__", obj) is obj else None


def _lookup(module: str | None, obj: Any) -> Any:
    """Returns the value that a module has under the qualified name of an object; None without one."""
    value = sys.modules.get(module or "")
    for part in getattr(obj, "__qualname__", "").split("."):
        value = getattr(value, part, None)
    return value


def _is_of_pickle(error: Exception) -> bool:
    """Returns True if pickle has raised an error itself, rather than code that it has called."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__") in (__name__, reduction.__name__)


def _descriptors() -> list[int]:
    """Returns the descriptors that the process being spawned gets, as far as it has been pickled."""
    descriptors: list[int] = getattr(get_spawning_popen(), "_fds", [])
    return descriptors
