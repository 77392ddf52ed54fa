"""Copies batches to a device on a stream of their own, and keeps their memory until the device is done with it.

Memory of a copy belongs to the copy stream: torch's allocator gives what is freed to the next copy at once, while the
program's stream may still read it. So each storage is *lent*: an alias keeps it.

* A lent storage that the program has dropped (its use count says so) is *retired*: an event is recorded in the streams
  that the batch was delivered to. The alias goes once the events are done; if there are too many, the copy stream waits
  for them, and the alias goes at once. Either way no copy begins before the program's work is done.
* A storage that the program keeps for longer than `depth` batches is handed over to torch's allocator with
  ``record_stream``. Only these cost the memory that ``record_stream`` is known for.
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


def _count_of_one() -> int:
    """Returns the use count of a storage with one tensor over it. Versions of torch differ in whether its object
    counts.
    """
    tensor = torch.empty(1)
    address = tensor.untyped_storage()._cdata
    return -1 if _use_count is None else int(_use_count(address))


_SOLE_USE_COUNT = _count_of_one()


class Copied:
    """A batch whose copy is queued.

    Attributes:
        batch: The batch on the device.
        made: Its memory, as in `Move`.
        host: The objects that the device may still read on the host.
        done: The event after the copy.
        loans: Its memory once it is delivered.
    """

    # As of an error in place of a batch.
    error = None
    __slots__ = ("batch", "begun", "done", "host", "loans", "made", "nbytes")

    def __init__(self, move: Move, batch: Any, host: Any, begun: Any, done: Any) -> None:
        self.batch = batch
        self.made, self.nbytes = move.made, move.nbytes
        self.host: Any = (host, move.read)
        self.begun, self.done = begun, done
        self.loans: list[_Loan] | None = None


class _Source:
    """The memory of the host that a copy reads, until the event after it.

    Attributes:
        done: The event after the copy; None if the copy failed, until the event is recorded.
        host: The objects that it reads.
        copied: Of a delivered batch: the event before the copy, the event after all work that the program's stream had
            at the delivery, and the batch's bytes.
    """

    __slots__ = ("copied", "done", "host")

    def __init__(self, done: Any, host: Any, copied: tuple[Any, Any, int] | None = None) -> None:
        self.done, self.host, self.copied = done, host, copied


class _Loan:
    """A storage that was delivered. ``streams`` are those that its readers may use."""

    __slots__ = ("address", "alias", "number", "streams")

    def __init__(self, address: int, alias: torch.Tensor, number: int, stream: Any) -> None:
        self.address, self.alias, self.number = address, alias, number
        self.streams = [stream]

    def is_dropped(self) -> bool:
        """Returns True if the alias is the last tensor over the storage. False if torch does not say: it is handed
        over."""
        return _use_count is not None and bool(_use_count(self.address) == _SOLE_USE_COUNT)


class _Retired:
    """Storages of a batch that the program has dropped, and by stream the events after its last use of them."""

    __slots__ = ("aliases", "events", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.events: dict[Any, Any] = {}
        self.aliases: list[torch.Tensor] = []


class Lane:
    """The copies of one prefetcher to one device.

    A caller holds ``lock`` while it uses any method but `drop` and `close`, and calls `close_waiting` after it. Each
    method may end early with an error of a signal handler or the device, and be called again.

    Args:
        streams: Of the device.
        depth: Number of batches that are copied ahead.
    """

    def __init__(self, streams: Streams, depth: int) -> None:
        self.streams, self.depth = streams, depth
        # Reentrant: a signal handler may raise between the lock and the body of `with`.
        self.lock = threading.RLock()
        # True if a call is under way, which a signal handler or the collector may have interrupted.
        self.is_busy = False
        self.delivered = 0
        self.transfers = Transfers()
        self._pid = os.getpid()
        self._lent: list[_Loan] = []
        self._retired: deque[_Retired] = deque()
        self._sources: deque[_Source] = deque()
        # Batches that iterators left behind while the lane was in use.
        self._dropped: deque[Copied] = deque()
        # The functions that end the loops that were closed while the lane was in use.
        self._closers: deque[Callable[[], None]] = deque()
        # Last: `__del__` uses all of the others even if this fails.
        self.stream = streams.make()

    # Functions that `__del__` calls while the interpreter exits: by then the names of this module may be None.
    _getpid = staticmethod(os.getpid)
    _is_finalizing = staticmethod(sys.is_finalizing)

    @staticmethod
    def leak(*things: Any, keep: Any = ctypes.pythonapi.Py_IncRef, pointer: Any = ctypes.py_object) -> None:
        """Keeps objects for the rest of the process, past the end of all modules."""
        keep(pointer(things))

    @property
    def is_forked(self) -> bool:
        """True in a forked child, which must neither use nor free what belongs to the device."""
        return self._getpid() != self._pid

    @property
    def is_usable(self) -> bool:
        """False in a forked child and while the interpreter exits: the device must be left alone."""
        return not self.is_forked and not self._is_finalizing()

    def copy(self, host: Any, asks_pinned: bool = False) -> tuple[Copied, Move]:
        """Queues the copy of a batch."""
        streams, stream = self.streams, self.stream
        move = Move(streams, asks_pinned)
        place = streams.place()
        try:
            # A batch that is copied ahead may be delivered outside of the caller's inference mode.
            with torch.inference_mode(False), streams.using(stream):
                begun = streams.record(stream, timed=True)
                batch = move(host)
                done = streams.record(stream, timed=True)
                return Copied(move, batch, host, begun, done), move
        except BaseException:
            # Parts of it may be under way. The event may be what has failed: it is recorded later.
            self._sources.append(_Source(None, (host, move.read)))
            # An error of a signal handler may have come between the change of the stream and the body of `with`.
            streams.restore(place)
            # An object that changes itself keeps what it has moved, and the next call finds it on the device.
            self._lent += self._loans(move.made, streams.current())
            raise

    def lend(self, copied: Copied) -> None:
        """Lets the calling thread's stream wait for the copy, and watches its memory from now on."""
        streams = self.streams
        stream = streams.current()
        reached = streams.record(stream, timed=True)
        streams.wait(stream, copied.done)
        if copied.loans is None:
            loans = self._loans(copied.made, stream)
            source = _Source(copied.done, copied.host, (copied.begun, reached, copied.nbytes))
            # Atomic for signal handlers.
            self._lent += loans
            self._sources += (source,)
            copied.loans, copied.made, copied.host = loans, {}, None
            self.delivered += 1
            return
        for loan in copied.loans:
            _add(loan.streams, stream)

    def _loans(self, memory: dict[int, torch.Tensor], stream: Any) -> list[_Loan]:
        """Returns the loans of memory that the stream may use, as parts of the next batch to be delivered."""
        return [_Loan(address, alias, self.delivered, stream) for address, alias in memory.items()]

    def sweep(self) -> None:
        """Releases the memory that the device is done with."""
        streams = self.streams
        self._forget_dropped()
        while self._sources and streams.is_done(self._event_of(self._sources[0])):
            self._count(self._sources.popleft())
        if len(self._sources) > 2 * self.depth + 1:
            # The program is far ahead of the device.
            streams.synchronize(self._event_of(self._sources[0]))
            self._count(self._sources.popleft())
        self._retire()
        while self._retired and all(map(streams.is_done, self._retired[0].events.values())):
            self._retired.popleft()
        lately = {loan.number for loan in self._lent if loan.number == self.delivered - 1}
        while len({retired.number for retired in self._retired}) > self.depth - len(lately):
            self._order(self._retired[0])
            self._retired.popleft()

    def _retire(self) -> None:
        """Records events after the last use of the storages that were dropped since the last call."""
        streams, current = self.streams, self.streams.current()
        kept: list[_Loan] = []
        by_batch: dict[int, _Retired] = {}
        events: dict[Any, Any] = {}
        for loan in self._lent:
            if loan.is_dropped():
                _add(loan.streams, current)
                retired = by_batch.setdefault(loan.number, _Retired(loan.number))
                retired.aliases.append(loan.alias)
                for stream in loan.streams:
                    if stream not in events:
                        events[stream] = streams.record(stream)
                    retired.events[stream] = events[stream]
            elif self.delivered - loan.number > self.depth + 1:
                for stream in loan.streams:
                    streams.hand_over(loan.alias, stream)
            else:
                kept.append(loan)
        retired_now = [*by_batch.values()]
        # Atomic for signal handlers: a storage is in one of the two lists.
        self._retired += retired_now
        self._lent = kept

    def _order(self, retired: _Retired) -> None:
        for event in retired.events.values():
            self.streams.wait(self.stream, event)

    def settle(self) -> None:
        """Releases everything, at the end of a loop, however it ended. Waits for the copies that are under way."""
        streams = self.streams
        for loan in self._lent:
            is_dropped = loan.is_dropped()
            for stream in loan.streams:
                if is_dropped:
                    streams.wait(self.stream, streams.record(stream))
                else:
                    streams.hand_over(loan.alias, stream)
        self._lent = []
        for retired in self._retired:
            self._order(retired)
        self._retired.clear()
        # The collector may destroy another loop's iterator meanwhile.
        while self._dropped or self._sources:
            self._forget_dropped()
            if self._sources:
                streams.synchronize(self._event_of(self._sources[0]))
                self._count(self._sources.popleft())

    def _event_of(self, source: _Source) -> Any:
        """Returns the event after a source's copy. That of a failed copy is recorded here: the stream keeps its
        order."""
        if source.done is None:
            source.done = self.streams.record(self.stream)
        return source.done

    def _count(self, source: _Source) -> None:
        """Counts a finished copy."""
        if source.copied is None:
            return
        streams = self.streams
        begun, reached, nbytes = source.copied
        seconds = streams.seconds(begun, source.done)
        # If the program's stream is not there yet, it did not wait for this copy.
        waited = streams.seconds(reached, source.done) if streams.is_done(reached) else 0.0
        self.transfers.note_copy(nbytes, seconds, min(max(waited, 0.0), seconds))

    def _forget_dropped(self) -> None:
        while self._dropped:
            copied = self._dropped[0]
            if copied.host is not None:
                self._sources.append(_Source(copied.done, copied.host))
            # Not delivered: only the copy stream has used its memory.
            self._dropped.popleft()

    def drop(self, copied: list[Copied]) -> None:
        """Drops batches that were not delivered, and settles if no call is under way.

        Safe from a destructor: it never waits for another thread.
        """
        if not self.is_usable:
            return
        self._dropped.extend(copied)
        if not self.lock.acquire(blocking=False):
            return
        try:
            # An event that is recorded during a capture would become a part of the graph.
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
        """Calls ``closer``, which ends a loop, now or at the end of the call that is under way."""
        self._closers.append(closer)
        self.close_waiting()

    def close_waiting(self) -> None:
        """Ends the loops that were closed while the lane was in use, unless it still is."""
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
            # An event that is recorded during a capture would become a part of the graph. torch's allocator waits for
            # its end.
            for loan in self._lent:
                for stream in loan.streams:
                    self.streams.hand_over(loan.alias, stream)
            for retired in self._retired:
                for stream in retired.events:
                    for alias in retired.aliases:
                        self.streams.hand_over(alias, stream)


class HostLane(Lane):
    """The lane of one loop on the CPU: it hands on each batch as it is when the program asks for it."""

    is_forked = False

    @property
    def is_usable(self) -> bool:
        if self._is_finalizing():
            return False
        if self._getpid() != self._pid:
            # A forked child: the thread that has the lock, or is in a call, may not be there.
            self.lock, self.is_busy, self._pid = threading.RLock(), False, os.getpid()
        return True

    def __init__(self) -> None:
        super().__init__(NoStreams(torch.device("cpu")), 0)

    def copy(self, host: Any, asks_pinned: bool = False) -> tuple[Copied, Move]:
        move = Move(self.streams)
        return Copied(move, host, None, None, None), move

    def lend(self, copied: Copied) -> None:
        pass

    def sweep(self) -> None:
        self._dropped.clear()

    settle = sweep


def _add(streams: list[Any], stream: Any) -> None:
    if stream not in streams:
        streams.append(stream)
