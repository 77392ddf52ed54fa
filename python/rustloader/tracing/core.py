"""Begins and ends traces, and connects the loaders to them."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol

from rustloader._core import TRACE_KINDS, TRACE_MAIN, Engine, TraceSink
from rustloader.tracing import files
from rustloader.tracing.spool import SUFFIX, Spool, merge_command

logger = logging.getLogger("rustloader")

_LEVELS = {"batch": 1, "sample": 2}
_WHY_EMPTY = (
    "no rustloader loader of this process made a batch. Loaders on torch's own iterator are not recorded; a child "
    "process that has a loader needs a trace of its own"
)
FETCH, STEP, _COPY = map(TRACE_KINDS.index, ("fetch", "step", "copy"))


class Traceable(Protocol):
    """An iterator with workers that can be traced."""

    @property
    def engine(self) -> Engine:
        """The engine of the iterator."""

    def traced_as(self) -> tuple[object, str, int]:
        """Returns an object that lives as long as the loader, the loader's name, and its number of workers."""


# All live iterators that can be traced.
_live: weakref.WeakSet[Traceable] = weakref.WeakSet()
# The trace that this process is making, or that its parent was making at the fork.
_active: Trace | None = None


class Trace:
    """A trace in progress: the result of ``rustloader.trace()``, a context manager."""

    def __init__(self, path: str | os.PathLike[str], level: str, seconds: float | None) -> None:
        # Absolute, because the program may change its working directory.
        self.path = files.of_rank(os.path.abspath(os.fsdecode(path)))
        self._level, self._seconds = _LEVELS[level], seconds
        self.is_written = False
        # The number of slices in the file.
        self.slices = 0
        self._spool: Spool | None = None
        # The number of each loader in the trace.
        self._groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Trace:
        global _active
        if current() is not None:
            raise RuntimeError("this process is already making a trace: end that one first")
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, "the path of a trace must be a file, but this is a folder", self.path)
        if os.path.exists(self.path) and not os.access(self.path, os.W_OK):
            raise PermissionError(errno.EACCES, "this file is not writable", self.path)
        try:
            self._spool = Spool(self.path, self._level, self._seconds)
        except OSError as error:  # it names the spool
            raise OSError(error.errno, error.strerror, self.path) from None
        if self._spool.owner is not None:
            self._avoid(*self._spool.owner)
        logger.info("if this program is killed, this command makes its trace: %s", self.merge_command)
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
        if spool is None or not spool.is_ours:  # the `with` statement ends in a forked child
            return
        _active = None
        for traceable in _all_live():
            traceable.engine.end_trace()
        try:
            lost = spool.end()
            self.slices = files.convert(spool.folder, self.path)
        except OSError as error:
            # The error is only logged: the program may not have saved its results yet.
            text = "the trace %s could not be written: %s. This command makes it from its records: %s"
            logger.error(text, self.path, str(error), merge_command(spool.folder, self.path))
            return
        spool.remove()
        self.is_written = True
        if lost:
            logger.warning("the trace %s lacks %d events: there was no room for them", self.path, lost)
        if not self.slices:
            logger.warning("the trace %s is empty: %s", self.path, _WHY_EMPTY)

    def _avoid(self, pid: int, is_running: bool) -> None:
        """Chooses another name if another process is making a trace with this one. Logs how to make the trace of a
        process that was killed."""
        if is_running:
            own = files.with_label(self.path, f"pid{os.getpid()}")
            logger.warning("process %d is making the trace %s, so this one is %s", pid, self.path, own)
            self.path = own
        else:
            command = merge_command(self.path + SUFFIX, files.with_label(self.path, "killed"))
            text = "process %d was killed before it wrote its trace %s. This command makes the trace: %s"
            logger.warning(text, pid, self.path, command)

    @property
    def merge_command(self) -> str:
        """The command that makes the trace if the program is killed during it; "" before its start and after its
        end."""
        return "" if self._spool is None else merge_command(self._spool.folder, self.path)

    def add_source(self, key: object, name: str, workers: int) -> int | None:
        """Adds an iterator, and returns its number in the trace. Returns None if it cannot be added, or the trace has
        ended."""
        spool = self._spool
        if spool is None:
            return None
        try:
            return spool.add(self._groups.setdefault(key, len(self._groups)), name, workers)
        except OSError as error:
            logger.warning("the DataLoader %s is not in the trace %s: %s", name, self.path, error)
            return None

    def add(self, traceable: Traceable) -> None:
        """Starts to trace the workers of an iterator."""
        spool = self._spool
        if spool is None or not traceable.engine.is_ours or traceable.engine.closing:
            return
        source = self.add_source(*traceable.traced_as())
        if source is None:
            return
        try:
            traceable.engine.trace(spool.sink, source, self._level)
        except (OSError, MemoryError) as error:
            logger.warning("a DataLoader is not in the trace %s: %s", self.path, error)


def _all_live() -> list[Traceable]:
    while True:
        try:
            return list(_live)
        except RuntimeError:  # another thread created an iterator meanwhile
            continue


def trace(
    path: str | os.PathLike[str], *, level: Literal["batch", "sample"] = "batch", seconds: float | None = None
) -> Trace:
    """Records the work of this process's loaders during the body of a ``with`` statement, in a file for Perfetto.

    The file has the JSON format of Chrome's trace viewer: open it at https://ui.perfetto.dev. It has a row for the loop
    over each loader and a row for each of the loader's workers, including workers already running. It uses the same
    clock as ``torch.profiler``. The file is written at the end of the body, even after an exception. If the program is
    killed, its records remain in the folder ``path`` + ".spool", from which ``rustloader trace merge`` makes the trace.

    Args:
        path: The file. With the suffix ``.gz`` it is compressed to about a tenth of the size; Perfetto also opens
            compressed files. If a launcher has started several ranks, the name contains the rank ("run.json" becomes
            "run-rank0.json"); ``{rank}`` in ``path`` stands for the rank, too. The attribute ``path`` of the result
            has the name.
        level: "batch" for one slice per batch (default), "sample" to add one slice per sample.
        seconds: Keep only the last ``seconds`` seconds of the body (default: None, keep all).

    Returns:
        A context manager.

    Raises:
        ValueError: ``level`` or ``seconds`` is invalid.
        RuntimeError: This process is already making a trace; raised at the start of the body.
        OSError: The file cannot be written; raised at the start of the body. At the end of the body, the error is
            logged instead, with the command that creates the file.

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
    """Returns the trace that this process is making; None if there is none."""
    spool = None if _active is None else _active._spool
    return _active if spool is not None and spool.is_ours else None


def follow(traceable: Traceable) -> None:
    """Adds the workers of an iterator to the current trace, and to later ones while the iterator lives."""
    _live.add(traceable)
    active = current()
    if active is not None:
        active.add(traceable)


def follow_copies(key: object, name: str) -> Callable[[int], None] | None:
    """Returns a function that adds a copy to the current trace; None if there is no trace.

    The argument of the function is the time of ``time.monotonic_ns`` at which the copy started. The time of the call is
    recorded as the copy's end.

    Args:
        key: An object that lives as long as the object that makes the copies.
        name: The name of the copies' row.
    """
    sink, source = sink_and_source(key, name)
    if sink is None:
        return None
    return lambda begin: sink.put(source, _COPY, TRACE_MAIN, begin, time.monotonic_ns() - begin, 0)


def sink_and_source(key: object, name: str) -> tuple[TraceSink, int] | tuple[None, int]:
    """Adds an iterator without workers to the current trace. Returns its sink, which stays usable after its end, and
    the iterator's number. Returns None and 0 if there is no trace.

    Args:
        key: An object that lives as long as the loader.
        name: The loader's name.
    """
    active = current()
    spool = None if active is None else active._spool
    source = None if active is None else active.add_source(key, name, 0)
    return (None, 0) if spool is None or source is None else (spool.sink, source)
