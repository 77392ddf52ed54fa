"""Begins and ends a trace, and connects it with the loaders."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol

from rustloader._core import TRACE_KINDS, TRACE_MAIN, Engine
from rustloader.system.protocols import SingleIterator
from rustloader.tracing import files
from rustloader.tracing.spool import Spool

logger = logging.getLogger("rustloader")

_LEVELS = {"batch": 1, "sample": 2}
_FETCH, _STEP, _COPY = map(TRACE_KINDS.index, ("fetch", "step", "copy"))


class Traceable(Protocol):
    """The workers of an iterator."""

    @property
    def engine(self) -> Engine: ...

    def traced_as(self) -> tuple[object, str, int]:
        """Returns an object that lives as long as the loader, the loader's name, and its number of workers."""


# Iterators that can be traced now.
_live: weakref.WeakSet[Traceable] = weakref.WeakSet()
_active: Trace | None = None


class Trace:
    """A trace that is being made: the result of ``rustloader.trace()``, for a ``with`` statement."""

    def __init__(self, path: str | os.PathLike[str], level: str, seconds: float | None) -> None:
        # The program may change its working directory.
        self.path = os.path.abspath(os.fsdecode(path))
        self._level, self._seconds = _LEVELS[level], seconds
        self.is_written = False
        self._spool: Spool | None = None
        self._groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Trace:
        global _active
        if current() is not None:
            raise RuntimeError("a trace is being made already: one process makes one at a time")
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, "a trace needs the name of a file, and this is a folder", self.path)
        if os.path.exists(self.path) and not os.access(self.path, os.W_OK):
            raise PermissionError(errno.EACCES, "the file of a trace cannot be written", self.path)
        self._spool = Spool(self.path, self._level, self._seconds)
        _active = self
        try:
            for traceable in _all_live():
                self.add(traceable)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        spool, self._spool = self._spool, None
        if spool is None or not spool.is_ours:  # the `with` of a forked child
            return
        _active = None
        for traceable in _all_live():
            traceable.engine.end_trace()
        try:
            lost = spool.end()
            files.convert(spool.folder, self.path)
        except OSError as error:
            # The training is done, and may have its results still to save.
            text = "the trace %s could not be written: %s. `rustloader trace merge %s -o FILE` makes it of its records"
            logger.error(text, self.path, str(error), spool.folder)
            return
        spool.remove()
        self.is_written = True
        if lost:
            logger.warning("the trace %s lacks %d events, for which there was no room", self.path, lost)

    def source(self, key: object, name: str, workers: int) -> int | None:
        """Adds an iterator. Returns its number; None if it cannot be in the trace, or the trace has ended."""
        spool = self._spool
        if spool is None:
            return None
        try:
            return spool.add(self._groups.setdefault(key, len(self._groups)), name, workers)
        except OSError as error:
            logger.warning("the DataLoader %s is not in the trace %s: %s", name, self.path, error)
            return None

    def add(self, traceable: Traceable) -> None:
        """Traces the workers of an iterator."""
        spool = self._spool
        if spool is None or not traceable.engine.is_ours or traceable.engine.closing:
            return
        source = self.source(*traceable.traced_as())
        if source is None:
            return
        try:
            traceable.engine.trace(spool.sink, source, self._level)
        except (OSError, MemoryError) as error:
            logger.warning("a DataLoader is not in the trace %s: %s", self.path, error)

    def put(self, source: int, kind: int, begin: int, end: int, number: int = 0) -> None:
        """Adds a time of the main process to a loader without workers."""
        spool = self._spool
        if spool is not None and spool.is_ours:
            spool.sink.put(source, kind, TRACE_MAIN, begin, end - begin, number)


def _all_live() -> list[Traceable]:
    while True:
        try:
            return list(_live)
        except RuntimeError:  # another thread has made an iterator meanwhile
            continue


def trace(
    path: str | os.PathLike[str], *, level: Literal["batch", "sample"] = "batch", seconds: float | None = None
) -> Trace:
    """Writes what the loaders of this process do in the body of a ``with`` statement to a file for Perfetto.

    The file is the JSON of Chrome's trace viewer: open it at https://ui.perfetto.dev. It has a row for the loop of each
    loader and one for each of its workers, also those that run already, and the clock of ``torch.profiler``. The file
    is written at the end of the body, also after an exception.

    Args:
        path: The file. With the suffix ``.gz`` it is compressed, to a tenth; Perfetto opens both.
        level: "batch" for a slice per batch (default), "sample" for one per sample, too.
        seconds: Length of what is kept, the end of the body (default: None, all of it).

    Returns:
        A context manager.

    Raises:
        ValueError: ``level`` or ``seconds`` cannot have that value.
        RuntimeError: A trace is being made already, at the beginning of the body.
        OSError: The file cannot be written, at the beginning of the body. Later, an error of the log says why there is
            no file, and how to make it.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=2)
        >>> with rustloader.trace("run.json"):
        ...     for batch in loader:
        ...         pass
    """
    if level not in _LEVELS:
        raise ValueError(f"level must be 'batch' or 'sample', got {level!r}")
    if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise ValueError(f"seconds must be a positive number, got {seconds!r}")
    return Trace(path, level, seconds)


def current() -> Trace | None:
    """Returns the trace that this process is making."""
    spool = None if _active is None else _active._spool
    return _active if spool is not None and spool.is_ours else None


def follow(traceable: Traceable) -> None:
    """Lets traces have the workers of an iterator, as long as it lives."""
    _live.add(traceable)
    active = current()
    if active is not None:
        active.add(traceable)


def follow_copies(key: object, name: str) -> Callable[[int], None] | None:
    """Returns a function that adds a copy to the current trace, from a time of ``time.monotonic_ns`` to now.

    Returns None if there is no trace.

    Args:
        key: An object that lives as long as what makes the copies.
        name: The name of their row.
    """
    active = current()
    source = None if active is None else active.source(key, name, 0)
    if active is None or source is None:
        return None
    return lambda begin: active.put(source, _COPY, begin, time.monotonic_ns())


def follow_fetches(iterator: SingleIterator, key: object, name: str) -> None:
    """Lets the current trace, if there is one, have the fetches of an iterator without workers.

    Args:
        iterator: The iterator.
        key: An object that lives as long as the loader.
        name: The loader's name.
    """
    active = current()
    if active is None:
        return
    fetcher, source = iterator._dataset_fetcher, active.source(key, name, 0)
    if source is None:
        return
    # The fetcher must not refer to itself: it would outlive its iterator.
    of_class, weak = type(fetcher).fetch, weakref.ref(fetcher)
    number, left = 0, 0

    def fetch(index: Any) -> Any:
        nonlocal number, left
        begin = time.monotonic_ns()
        if left:
            active.put(source, _STEP, left, begin)
        try:
            return of_class(weak(), index)
        finally:
            left = time.monotonic_ns()
            active.put(source, _FETCH, begin, left, number)
            number += 1

    fetcher.fetch = fetch
