"""Copies batches to a device on a separate stream, and keeps their memory alive until the device is done with it.

The memory of a copy belongs to the copy stream: torch's allocator gives freed memory to the next copy at once, while
the program's stream may still read it. So each storage is *lent*: an alias keeps it alive.

* A lent storage that the program has dropped, according to its use count, is *retired*: an event is recorded in the
  streams that the batch was delivered to. The alias is freed after these events. If too many batches are retired, the
  copy stream waits for the events, and the alias is freed at once. Either way, no copy reuses the memory before the
  program's work on it is done.
* A storage that the program keeps for longer than `depth` batches is left to torch's allocator with ``record_stream``.
  Only these storages cost the extra memory that ``record_stream`` is known for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rustloader.device.prefetch.moving import Move
from rustloader.device.prefetch.streams import NoStreams, Streams
from rustloader.metrics.transfers import Transfers

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


def _sole_use_count() -> int:
    """Returns the use count of a storage with one tensor over it. In some versions of torch, the storage's Python
    object counts, too. Returns -1 if torch does not provide the count.
    """
    tensor = torch.empty(1)
    address = tensor.untyped_storage()._cdata
    return -1 if _use_count is None else int(_use_count(address))


_SOLE_USE_COUNT = _sole_use_count()


class Copied:
    """A batch whose copy is queued.

    Attributes:
        batch: The batch on the device.
        nbytes: Its size on the device in bytes.
        made: Its memory on the device, as in `Move`.
        host: The objects on the host that the device may still read.
        started: The event recorded before the copy.
        done: The event recorded after the copy.
        loans: Its memory on the device as loans; None before its delivery.
    """

    # `_Failed` also has this attribute, which holds its error.
    error = None
    __slots__ = ("batch", "done", "host", "loans", "made", "nbytes", "started")

    def __init__(self, move: Move, batch: Any, host: Any, started: Any, done: Any) -> None:
        self.batch = batch
        self.made, self.nbytes = move.made, move.nbytes
        self.host: Any = (host, move.read)
        self.started, self.done = started, done
        self.loans: list[_Loan] | None = None


class _Source:
    """The memory on the host that a copy reads, kept until the event after the copy.

    Attributes:
        done: The event after the copy; None if the copy failed, until the event is recorded.
        host: The objects that the copy reads.
        delivery: None if the batch was not delivered. Otherwise the event before the copy, the event after all work
            that was queued in the program's stream at the delivery, and the batch's size in bytes.
    """

    __slots__ = ("delivery", "done", "host")

    def __init__(self, done: Any, host: Any, delivery: tuple[Any, Any, int] | None = None) -> None:
        self.done, self.host, self.delivery = done, host, delivery


class _Loan:
    """A storage that was delivered. ``streams`` are the streams that may read it."""

    __slots__ = ("address", "alias", "number", "streams")

    def __init__(self, address: int, alias: torch.Tensor, number: int, stream: Any) -> None:
        self.address, self.alias, self.number = address, alias, number
        self.streams = [stream]

    def is_dropped(self) -> bool:
        """Returns True if the alias is the last tensor over the storage. Returns False if torch does not provide the
        use count; the storage is then left to torch's allocator."""
        return _use_count is not None and bool(_use_count(self.address) == _SOLE_USE_COUNT)


class _Retired:
    """Storages of a batch that the program has dropped, with the events after their last use, by stream."""

    __slots__ = ("aliases", "events", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.events: dict[Any, Any] = {}
        self.aliases: list[torch.Tensor] = []


class Lane:
    """The copies to one device that one prefetcher makes.

    A caller holds ``lock`` while it uses any method except `drop` and `close`, and calls `close_waiting` afterwards. An
    error from a signal handler or from the device may end any method early; the method can then be called again.

    Args:
        streams: The streams of the device.
        depth: Number of batches that are copied ahead.
    """

    def __init__(self, streams: Streams, depth: int) -> None:
        self.streams, self.depth = streams, depth
        # Reentrant, because a signal handler may raise an error between the acquisition and the body of `with`.
        self.lock = threading.RLock()
        # True while a call runs, even if a signal handler or the garbage collector has interrupted it.
        self.is_busy = False
        self.delivered = 0
        self.transfers = Transfers()
        self._pid = os.getpid()
        self._lent: list[_Loan] = []
        self._retired: deque[_Retired] = deque()
        self._sources: deque[_Source] = deque()
        # Batches that iterators abandoned while the lane was in use.
        self._dropped: deque[Copied] = deque()
        # Functions that end loops that were closed while the lane was in use.
        self._closers: deque[Callable[[], None]] = deque()
        # This comes last: `__del__` uses all other attributes even if this fails.
        self.stream = streams.make()

    # Functions that `__del__` calls. While the interpreter exits, the names of this module may be None.
    _getpid = staticmethod(os.getpid)
    _is_finalizing = staticmethod(sys.is_finalizing)

    @staticmethod
    def leak(*things: Any, keep: Any = ctypes.pythonapi.Py_IncRef, pointer: Any = ctypes.py_object) -> None:
        """Keeps objects alive until the process ends, even after all modules are torn down."""
        keep(pointer(things))

    @property
    def is_forked(self) -> bool:
        """True in a forked child, which must neither use nor free objects of the device."""
        return self._getpid() != self._pid

    @property
    def is_usable(self) -> bool:
        """False in a forked child and while the interpreter exits: the device must be left alone."""
        return not self.is_forked and not self._is_finalizing()

    def copy(self, host: Any, checks_pinning: bool = False) -> tuple[Copied, Move]:
        """Queues the copy of a batch. Returns the copy, and the `Move` that made it."""
        streams, stream = self.streams, self.stream
        move = Move(streams, checks_pinning)
        saved = streams.save()
        try:
            # A batch that is copied in inference mode may be delivered outside it, so the mode is disabled here.
            with torch.inference_mode(False), streams.using(stream):
                started = streams.record(stream, timed=True)
                batch = move(host)
                done = streams.record(stream, timed=True)
                return Copied(move, batch, host, started, done), move
        except BaseException:
            # Parts of the copy may be in progress. Recording the event may have failed, so it is recorded later.
            self._sources.append(_Source(None, (host, move.read)))
            # A signal handler may have raised an error between the change of the stream and the body of `with`.
            streams.restore(saved)
            # If `to` changes the object itself, the object keeps the parts that were moved, and the next call finds
            # them on the device.
            self._lent += self._loans(move.made, streams.current())
            raise

    def lend(self, copied: Copied) -> None:
        """Makes the calling thread's stream wait for the copy, and tracks the memory of the copy from now on."""
        streams = self.streams
        stream = streams.current()
        reached = streams.record(stream, timed=True)
        streams.wait(stream, copied.done)
        if copied.loans is None:
            loans = self._loans(copied.made, stream)
            source = _Source(copied.done, copied.host, (copied.started, reached, copied.nbytes))
            # Atomic for signal handlers.
            self._lent += loans
            self._sources += (source,)
            copied.loans, copied.made, copied.host = loans, {}, None
            self.delivered += 1
            return
        for loan in copied.loans:
            _add_once(loan.streams, stream)

    def _loans(self, memory: dict[int, torch.Tensor], stream: Any) -> list[_Loan]:
        """Returns loans of memory to a stream, numbered as the next batch to be delivered."""
        return [_Loan(address, alias, self.delivered, stream) for address, alias in memory.items()]

    def sweep(self) -> None:
        """Releases memory that the device no longer uses."""
        streams = self.streams
        self._forget_dropped()
        while self._sources and streams.is_done(self._event_of(self._sources[0])):
            self._count(self._sources.popleft())
        if len(self._sources) > 2 * self.depth + 1:
            # The program is far ahead of the device, so it must wait.
            streams.synchronize(self._event_of(self._sources[0]))
            self._count(self._sources.popleft())
        self._retire()
        while self._retired and all(map(streams.is_done, self._retired[0].events.values())):
            self._retired.popleft()
        lent_last = {loan.number for loan in self._lent if loan.number == self.delivered - 1}
        while len({retired.number for retired in self._retired}) > self.depth - len(lent_last):
            self._await_last_use(self._retired[0])
            self._retired.popleft()

    def _retire(self) -> None:
        """Retires the storages that the program has dropped since the last call, with events after their last use.
        Leaves storages that the program has kept for a long time to torch's allocator."""
        streams, current = self.streams, self.streams.current()
        kept: list[_Loan] = []
        by_batch: dict[int, _Retired] = {}
        events: dict[Any, Any] = {}
        for loan in self._lent:
            if loan.is_dropped():
                _add_once(loan.streams, current)
                retired = by_batch.setdefault(loan.number, _Retired(loan.number))
                retired.aliases.append(loan.alias)
                for stream in loan.streams:
                    if stream not in events:
                        events[stream] = streams.record(stream)
                    retired.events[stream] = events[stream]
            elif self.delivered - loan.number > self.depth + 1:
                for stream in loan.streams:
                    streams.record_stream(loan.alias, stream)
            else:
                kept.append(loan)
        retired_now = [*by_batch.values()]
        # Atomic for signal handlers: a storage is in one of the two lists.
        self._retired += retired_now
        self._lent = kept

    def _await_last_use(self, retired: _Retired) -> None:
        for event in retired.events.values():
            self.streams.wait(self.stream, event)

    def settle(self) -> None:
        """Releases all memory when a loop ends, fails or is abandoned. Waits for the copies in progress."""
        streams = self.streams
        for loan in self._lent:
            is_dropped = loan.is_dropped()
            for stream in loan.streams:
                if is_dropped:
                    streams.wait(self.stream, streams.record(stream))
                else:
                    streams.record_stream(loan.alias, stream)
        self._lent = []
        for retired in self._retired:
            self._await_last_use(retired)
        self._retired.clear()
        # The garbage collector may destroy another loop's iterator in the meantime, which adds batches to `_dropped`.
        while self._dropped or self._sources:
            self._forget_dropped()
            if self._sources:
                streams.synchronize(self._event_of(self._sources[0]))
                self._count(self._sources.popleft())

    def _event_of(self, source: _Source) -> Any:
        """Returns the event after a source's copy. For a failed copy, records the event now, which suffices because a
        stream runs its work in order."""
        if source.done is None:
            source.done = self.streams.record(self.stream)
        return source.done

    def _count(self, source: _Source) -> None:
        """Adds a finished copy to the counters, if its batch was delivered."""
        if source.delivery is None:
            return
        streams = self.streams
        started, reached, nbytes = source.delivery
        seconds = streams.seconds(started, source.done)
        # If the program's stream has not reached the delivery yet, it did not wait for this copy.
        waited = streams.seconds(reached, source.done) if streams.is_done(reached) else 0.0
        self.transfers.note_copy(nbytes, seconds, min(max(waited, 0.0), seconds))

    def _forget_dropped(self) -> None:
        while self._dropped:
            copied = self._dropped[0]
            if copied.host is not None:
                self._sources.append(_Source(copied.done, copied.host))
            # The batch was not delivered, so only the copy stream has used its memory.
            self._dropped.popleft()

    def drop(self, copied: list[Copied]) -> None:
        """Drops batches that were not delivered, and calls `settle` if the lane is not in use.

        Safe to call from a destructor: it never waits for another thread.
        """
        if not self.is_usable:
            return
        self._dropped.extend(copied)
        if not self.lock.acquire(blocking=False):
            return
        try:
            # An event recorded during a capture would become part of the graph.
            if not self.is_busy and not self.streams.is_capturing():
                try:
                    self.is_busy = True
                    self.settle()
                finally:
                    self.is_busy = False
        finally:
            self.lock.release()
        self.close_waiting()

    def close(self, closer: Callable[[], None]) -> None:
        """Calls ``closer``, which ends a loop. If the lane is in use, the current call does this at its end."""
        self._closers.append(closer)
        self.close_waiting()

    def close_waiting(self) -> None:
        """Ends the loops that were closed while the lane was in use, unless it is still in use."""
        while self._closers and self.lock.acquire(blocking=False):
            try:
                if self.is_busy:
                    return
                if self._closers:
                    self._closers.popleft()()
            finally:
                self.lock.release()

    def __del__(self) -> None:
        if self.is_forked:
            self.leak(self._lent, self._retired, self._sources, self._dropped)
        if not self.is_usable:
            return
        with contextlib.suppress(Exception):
            if not self.streams.is_capturing():
                self.settle()
                return
            # An event recorded during a capture would become part of the graph. torch's allocator waits until the
            # capture has ended.
            for loan in self._lent:
                for stream in loan.streams:
                    self.streams.record_stream(loan.alias, stream)
            for retired in self._retired:
                for stream in retired.events:
                    for alias in retired.aliases:
                        self.streams.record_stream(alias, stream)


class HostLane(Lane):
    """The lane of one loop on the CPU. It delivers each batch unchanged when the program asks for it."""

    is_forked = False

    @property
    def is_usable(self) -> bool:
        if self._is_finalizing():
            return False
        if self._getpid() != self._pid:
            # In a forked child, the thread that holds the lock or is in a call may not exist.
            self.lock, self.is_busy, self._pid = threading.RLock(), False, os.getpid()
        return True

    def __init__(self) -> None:
        super().__init__(NoStreams(torch.device("cpu")), 0)

    def copy(self, host: Any, checks_pinning: bool = False) -> tuple[Copied, Move]:
        move = Move(self.streams)
        return Copied(move, host, None, None, None), move

    def lend(self, copied: Copied) -> None:
        pass

    def sweep(self) -> None:
        self._dropped.clear()

    settle = sweep


def _add_once(streams: list[Any], stream: Any) -> None:
    if stream not in streams:
        streams.append(stream)
