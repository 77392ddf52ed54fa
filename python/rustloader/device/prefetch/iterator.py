"""The iterator of a prefetcher, which takes batches from the loader in order, has them copied, and delivers them.

An error that a signal handler raises in ``next`` loses no batch. At any time a batch is either in `Position.ahead` or
in the list `answer` of a call of `next`. It moves from the former to the latter by the rules that the docstring of
`_core.call_into` gives.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from rustloader.device.prefetch.lane import Copied, Lane
from rustloader.system.call_into import call_into
from rustloader.system.cleanup import forget_frames
from rustloader.system.interrupts import is_interrupt


class _Failed:
    """An error that takes the place of a batch.

    Attributes:
        is_batch: True if the loader delivered the batch, but its copy failed.
        is_counted: True if the loader raised the error and counts it in its position.
    """

    __slots__ = ("error", "is_batch", "is_counted")

    def __init__(self, error: BaseException, *, is_batch: bool = False, is_counted: bool = False) -> None:
        self.error, self.is_batch, self.is_counted = error, is_batch, is_counted


class _End:
    """Takes the place of a batch at the end of the loader."""


class _Abandoned:
    """Takes the place of a batch that was taken from the loader, but was not delivered before the loop ended."""


_END, _ABANDONED = _End(), _Abandoned()


class Position:
    """The batches that an iterator has taken from the loader but not delivered.

    Attributes:
        ahead: In order: batches from the loader, before or after their copy (`Copied`), errors (`_Failed`), and at the
            end `_END`.
        returning: Number of batches that calls of ``next`` are about to return.
        has_ended: Whether ``next`` has raised StopIteration.
    """

    def __init__(self) -> None:
        self.ahead: list[Any] = []
        self.returning = 0
        self.has_ended = False

    def ahead_count(self) -> int:
        """Returns the number of batches that the loader counts as delivered but the program has not received."""
        ahead = self.ahead.copy()
        return sum(item.is_batch if isinstance(item, _Failed) else item is not _END for item in ahead) + self.returning

    def has_unseen_end(self) -> bool:
        """Returns True if the loader has ended but the program has not seen the end."""
        ahead = self.ahead.copy()
        return bool(ahead) and ahead[-1] is _END and not self.has_ended

    def has_unseen_error(self) -> bool:
        """Returns True if the loader's position is after an error that the program has not seen."""
        ahead = self.ahead.copy()
        return bool(ahead) and isinstance(ahead[-1], _Failed) and ahead[-1].is_counted


class DeviceIterator:
    """One loop over a loader.

    Args:
        loader: The loader.
        lane: Copies its batches.
        position: The batches ahead, in an object that outlives the iterator.
        log_unpinned: Called with the loader and the types of objects that are not pinned, if the first batch has any.

    Attributes:
        note_copy: Called after a copy is queued, with the time in nanoseconds at which the queuing began; None without
            tracing.
    """

    note_copy: Callable[[int], None] | None = None

    # Default for `__del__` after a failed construction.
    _position: Position | None = None
    # A batch that did not reach the caller because a signal handler raised an error.
    _rescued: list[Any] | None = None
    # An error of the loader that is not in `ahead` yet, and whether the loader's position is after it.
    _error: BaseException | None = None
    _is_counted = False
    # An error of a copy that has not replaced its batch in `ahead` yet.
    _failure: BaseException | None = None
    _is_closed = False
    # Number of batches to take ahead before the next delivery. It grows by one per call, so that the first batch does
    # not wait for others.
    _target = 1
    _has_copied = False

    def __init__(
        self, loader: Iterable[Any], lane: Lane, position: Position, log_unpinned: Callable[[Any, set[type]], None]
    ) -> None:
        self._loader, self._lane, self._log_unpinned = loader, lane, log_unpinned
        self._inner: Any = iter(loader)
        self._position = position
        self._ahead = position.ahead

    def __iter__(self) -> DeviceIterator:
        return self

    def __next__(self) -> Any:
        answer: list[Any] = [None]
        try:
            self._answer(answer)
        except BaseException:
            if answer[0] is not None:
                self._rescued = answer
            raise
        # Atomic for signal handlers.
        entry = answer[0]
        if entry is _END:
            raise StopIteration
        error = entry.error
        if error is not None:
            entry.error = None
            try:
                raise error
            finally:
                # The error's traceback refers to this frame and the caller's. In a reference cycle, both would keep
                # batches alive until the garbage collector runs.
                error = None
        self._position.returning -= 1  # type: ignore[union-attr]
        try:
            return entry.batch
        finally:
            # The traceback of an error that was raised while prefetching may keep this frame alive.
            entry.batch = entry.loans = None

    def _answer(self, answer: list[Any]) -> None:
        lane = self._lane
        if not lane.is_usable:
            raise RuntimeError(
                "next() of a prefetch_to_device() loop was called in a forked process: the device belongs to the "
                "process that made the loop; call prefetch_to_device() in the child"
            )
        try:
            with lane.lock:
                if lane.is_busy:
                    raise RuntimeError("next() was called by a signal handler or a destructor within another next()")
                try:
                    lane.is_busy = True
                    self._take(answer)
                finally:
                    lane.is_busy = False
        finally:
            # Ends the loops for which `close` was called in the meantime.
            lane.close_waiting()

    def _take(self, answer: list[Any]) -> None:
        lane, ahead, position = self._lane, self._ahead, self._position
        assert position is not None
        if lane.streams.is_capturing():
            raise RuntimeError(
                "next() was called while a graph is being captured: call it before, and copy the batch into the "
                "graph's own input, as in static.copy_(batch)"
            )
        rescued = self._rescued
        if rescued is not None:
            taken = rescued[0]
            if isinstance(taken, Copied):
                # The caller's stream may have changed since the interrupted call.
                lane.lend(taken)
            answer[0] = taken
            self._rescued = None
            return
        if self._is_closed:
            raise RuntimeError("next() was called after close(): call iter() for a new loop")
        lane.sweep()
        self._fill()
        first = ahead[0]
        if isinstance(first, Copied):
            lane.lend(first)
            target = min(self._target + 1, lane.depth + 1)
            # Atomic for signal handlers.
            answer[0] = first
            del ahead[0]
            position.returning += 1
            self._target = target
            return
        lane.settle()
        answer[0] = first
        if first is _END:
            position.has_ended = True
        else:
            del ahead[0]

    def _fill(self) -> None:
        """Takes batches from the loader until enough are ahead, and queues their copies."""
        ahead = self._ahead
        while True:
            for place in range(len(ahead)):
                if not isinstance(ahead[place], (Copied, _Failed, _End)):
                    self._copy(place)
            # After an error, the loader is asked for more only after the program has received the error.
            if len(ahead) >= self._target or (ahead and isinstance(ahead[-1], (_Failed, _End))):
                return
            self._pull()

    def _pull(self) -> None:
        ahead = self._ahead
        if self._error is not None:
            if ahead:
                _note_frames(self._error)
            failed = _Failed(self._error, is_counted=self._is_counted)
            # Atomic for signal handlers: the error is either in `_error` or in `ahead`.
            ahead += (failed,)
            self._error = None
            return
        count, handled = len(ahead), sys.exception()
        error_count = _error_count(self._inner)
        try:
            call_into(ahead, next, self._inner)
        except StopIteration:
            ahead.append(_END)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._error = error
            self._is_counted = _error_count(self._inner) != error_count
        if self._error is not None:
            # If a batch has arrived, a signal handler raised the error after the call of `next`.
            if len(ahead) > count or is_interrupt(self._error, handled):
                _raise(self, "_error")

    def _copy(self, place: int) -> None:
        ahead = self._ahead
        handled = sys.exception()
        start = time.monotonic_ns()
        try:
            copied, move = self._lane.copy(ahead[place], checks_pinning=not self._has_copied)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            self._failure = raised
        else:
            ahead[place] = copied
            if self.note_copy is not None:
                self.note_copy(start)
            if not self._has_copied:
                self._has_copied = True
                if move.unpinned:
                    self._log_unpinned(self._loader, move.unpinned)
            return
        assert self._failure is not None
        if is_interrupt(self._failure, handled):
            # The batch is still in `ahead`, and its copy will be retried.
            _raise(self, "_failure")
        if place:
            _note_frames(self._failure)
        failed = _Failed(self._failure, is_batch=True)
        # Atomic for signal handlers, as in `_pull`.
        ahead[place] = failed
        self._failure = None

    def close(self) -> None:
        """Ends the loop and frees its batches. If a call of ``next`` is running in any loop of the same prefetcher,
        that call does this at its end."""
        self._is_closed = True
        if self._lane.is_usable:
            self._lane.close(self._leave)

    def _leave(self) -> None:
        ahead, copied = self._ahead, []
        for place, item in enumerate(ahead.copy()):
            if isinstance(item, Copied):
                copied.append(item)
            if not isinstance(item, (_Failed, _End)):
                ahead[place] = _ABANDONED
        if self._rescued is not None and isinstance(self._rescued[0], Copied):
            copied.append(self._rescued[0])
            self._rescued = None
        self._inner = iter(())
        self._lane.drop(copied)

    def __del__(self) -> None:
        if self._position is None:
            return
        if self._lane.is_forked:
            self._lane.leak(self._ahead, self._rescued)
        elif self._lane.is_usable:
            # A device that has failed may fail again.
            with contextlib.suppress(Exception):
                self._leave()


def _error_count(inner: Any) -> int:
    """Returns the number of errors that an iterator with a state has counted in its position; 0 for any other
    iterator."""
    count: int = getattr(inner, "raised", 0)
    return count


def _note_frames(error: BaseException) -> None:
    """Replaces the traceback of an error with a note.

    Without this, the frames of an error that a later call raises would keep their callers' variables alive: batches of
    the program, and the iterator itself, which would not be freed when the program leaves the loop.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    forget_frames(error)
    error.add_note(f"This error was raised while its batch was prefetched:\n{text}")


def _raise(iterator: DeviceIterator, name: str) -> None:
    """Raises a signal handler's error that an attribute holds, and clears the attribute.

    `is_interrupt` inspects the frames of the traceback, and Python 3.11 and 3.12 then keep their variables. So no
    variable of these frames may refer to the error: such a cycle would keep the program's batches until the garbage
    collector runs.
    """
    error = getattr(iterator, name)
    setattr(iterator, name, None)
    try:
        raise error
    finally:
        del error
