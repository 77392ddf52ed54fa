"""Calls that a process of spawn or forkserver makes before it imports anything.

multiprocessing sends preparation data first, which are unpickled before the program's main module is imported. The name
of the process is part of them. Only functions that Python has loaded by then are of use.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = function, args

    def __reduce__(self) -> Any:
        return self._reduced


class _Name(str):
    """The name of a process that arrives as a plain string, after the calls."""

    __slots__ = ("_calls",)

    _calls: Callable[[], Sequence[Call]] | None

    def __new__(cls, name: str, calls: Callable[[], Sequence[Call]]) -> _Name:
        self = super().__new__(cls, name)
        self._calls = calls
        return self

    def __reduce__(self) -> Any:
        name = str.__str__(self)
        # The process itself is pickled after the preparation data, with the same name.
        calls, self._calls = self._calls, None
        return (str, (name,)) if calls is None else (operator.itemgetter(0), ((name, *calls()),))


@contextlib.contextmanager
def calling_first(process: Any, calls: Callable[[], Sequence[Call]]) -> Iterator[None]:
    """Makes a process that is started in the body make some calls first.

    Args:
        process: The process.
        calls: Gives the calls, while multiprocessing pickles for this start.
    """
    name = process._name
    process._name = _Name(name, calls)
    try:
        yield
    finally:
        process._name = name
