"""Calls that a process started by spawn or forkserver makes before its first import.

multiprocessing first sends preparation data, which is unpickled before the program's main module is imported. The name
of the process is part of that data, and the pickle of the name contains the calls. They can use only functions that
Python has loaded by then.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Call:
    """A call of a function, made when this object is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = function, args

    def __reduce__(self) -> Any:
        return self._reduced


class _Name(str):
    """The name of a process. Unpickling it makes the calls first and results in a plain string."""

    __slots__ = ("_calls",)

    _calls: Callable[[], Sequence[Call]] | None

    def __new__(cls, name: str, calls: Callable[[], Sequence[Call]]) -> _Name:
        self = super().__new__(cls, name)
        self._calls = calls
        return self

    def __reduce__(self) -> Any:
        name = str.__str__(self)
        # The process object, pickled after the preparation data, has the same name: the calls are pickled only the
        # first time.
        calls, self._calls = self._calls, None
        return (str, (name,)) if calls is None else (operator.itemgetter(0), ((name, *calls()),))


@contextlib.contextmanager
def calling_first(process: Any, calls: Callable[[], Sequence[Call]]) -> Iterator[None]:
    """Makes a process execute calls before its first import. The body must start the process.

    Args:
        process: The process, which has not started yet.
        calls: Returns the calls. It is called while multiprocessing pickles the preparation data.
    """
    name = process._name
    process._name = _Name(name, calls)
    try:
        yield
    finally:
        process._name = name
