"""Starts workers on other machines, and serves there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from rustloader._core import Engine, Link, Port
from rustloader.remote import handshake
from rustloader.remote.context import Call, RemoteContext, Started
from rustloader.remote.packing import packing
from rustloader.settings.limits import REMOTE_CHECK, REMOTE_FINISH, STATUS_AFTER
from rustloader.system.cleanup import quietly
from rustloader.workers import arguments, by_name, main
from rustloader.workers.bootstrap import Job

# The fields of a job that are pickled together with the dataset, because they may share objects with it.
_SHARED = ("collate_fn", "init_fn", "config")
# Before a job: slots of a ring and bytes of a region of the engine's arena.
_SIZES = struct.Struct("<IQ")
# Connections to one worker's listener that may prove themselves at a time. The others wait.
_AT_ONCE = 16


class StartError(RuntimeError):
    """Raised if a worker, or its connection, has ended during the start: another start may succeed."""


class RemoteProcess:
    """A worker on another machine, with the part of ``multiprocessing.Process`` that programs look at.

    Attributes:
        pid: Its process there.
        exitcode: None: it is unknown.
        daemon: True.
    """

    exitcode: int | None = None
    daemon = True

    def __init__(self, worker_id: int, pid: int, started: Started, link: Link) -> None:
        self.worker_id, self.pid = worker_id, pid
        self._started, self._link = started, link
        # The reason why it had ended before it was killed: after that, the cluster reports the kill.
        self._reason_before_kill: str | None = None

    @property
    def name(self) -> str:
        """A name for people."""
        return f"RemoteWorker-{self.worker_id}"

    def is_alive(self) -> bool:
        """Returns True if its connection is open."""
        return not self._link.has_ended

    @property
    def end(self) -> str | None:
        """The reason why it has ended, as far as this machine knows; None if it has left, or lives."""
        return None if self._link.reason is None else self._reason_known()

    def _reason_known(self) -> str | None:
        return self._reason_before_kill or self._started.failure() or self._link.reason

    def why_died(self) -> str | None:
        """Returns the reason why it has died. The cluster knows more than the connection, but only a little later."""
        deadline = time.monotonic() + STATUS_AFTER
        while (reason := self._reason_before_kill or self._started.failure()) is None and time.monotonic() < deadline:
            time.sleep(REMOTE_CHECK)
        return reason or self._link.reason

    def kill(self) -> None:
        """Ends it."""
        if not self.is_alive():
            self._reason_before_kill = self._reason_known()
        self._started.kill()

    terminate = kill

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the connection."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(REMOTE_CHECK)


class Blob:
    """The pickle of the dataset and of the other arguments that all workers and their replacements share."""

    def __init__(self, context: RemoteContext, dataset: Any, job: Job) -> None:
        shared = {name: getattr(job, name) for name in _SHARED}
        self.context = context
        with arguments.naming(), packing():
            pickled = context.dumps(arguments.marked(dataset, job, shared))
        self.reference = context.put(pickled)

    def job_of(self, job: Job, worker_id: int) -> bytes:
        """Returns the job of one worker, without the parts that are in the blob."""
        without: dict[str, Any] = dict.fromkeys(_SHARED)
        own = dataclasses.replace(job.of_worker(worker_id), **without, unblock=[], sigterm_seconds=None)
        return self.context.dumps(own)


class _Starting:
    """A worker between its launch and the end of its handshake."""

    def __init__(self, blob: Blob, worker_id: int, generation: int) -> None:
        address = blob.context.address()
        self.worker_id, self.token = worker_id, handshake.new_token()
        self.listener = handshake.listen(address)
        self.connection: socket.socket | None = None
        # True once the worker has connected.
        self.is_proved = False
        # Connections that have to prove themselves, and their threads.
        self.pending: dict[socket.socket, threading.Thread] = {}
        self.pid = 0
        try:
            tcp_port = self.listener.getsockname()[1]
            call = Call(address, tcp_port, self.token, worker_id, generation)
            self.started = blob.context.launch(blob.reference, call)
        except BaseException:
            self.listener.close()
            raise

    def accept(self, job: bytes, deadline: float, report: Callable[[_News], None]) -> None:
        """Takes a connection, and lets a thread identify it: a silent stranger does not hold up the others."""
        connection, _ = self.listener.accept()
        thread = threading.Thread(target=self._greet, args=(connection, job, deadline, report), daemon=True)
        try:
            thread.start()
        except BaseException:
            connection.close()
            raise
        self.pending[connection] = thread

    def _greet(self, connection: socket.socket, job: bytes, deadline: float, report: Callable[[_News], None]) -> None:
        """Sends the job if it is the worker's, and waits until it has read everything."""
        outcome: int | Exception | None
        try:
            outcome = handshake.authenticate_worker(connection, self.token, self.worker_id, deadline)
            if outcome is not None:
                self.is_proved = True
                handshake.send_reply(connection, True, job, deadline)
                handshake.receive_reply(connection, deadline)
        except Exception as error:
            outcome = error
        report((self, connection, outcome))

    def settle(self, connection: socket.socket, pid: int) -> None:
        """Notes which connection is the worker's, and closes the others."""
        self.connection, self.pid = connection, pid
        self.close()

    def close(self) -> None:
        """Closes the listener, and the connections that have not proved themselves."""
        self.listener.close()
        for connection, thread in self.pending.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
            connection.close()
        self.pending.clear()

    def abandon(self) -> None:
        """Ends the worker, and its connection."""
        self.close()
        if self.connection is not None:
            self.connection.close()
        self.started.kill()


# The result of a thread: the pid of the worker, None for a stranger, or an error.
_News = tuple[_Starting, socket.socket, int | Exception | None]


def start(engine: Engine, blob: Blob, worker_ids: Sequence[int], job: Job) -> list[RemoteProcess]:
    """Starts workers at the same time, and hands their connections to the engine. After an error none of them runs.

    Raises:
        StartError: A worker has ended, or its connection.
        RuntimeError: A worker has other versions, cannot read the dataset, or does not within the context's limit.
    """
    deadline = time.monotonic() + blob.context.start_seconds
    starting: list[_Starting] = []
    ready: list[RemoteProcess] = []
    sizes = _SIZES.pack(engine.ring_slots, engine.region_len)
    try:
        for worker_id in worker_ids:
            starting.append(_Starting(blob, worker_id, job.generation))
        _await(starting, {it.worker_id: sizes + blob.job_of(job, it.worker_id) for it in starting}, deadline)
        for it in starting:
            assert it.connection is not None
            it.connection.settimeout(None)
            link = engine.attached(it.worker_id, it.connection.detach(), it.pid)
            ready.append(RemoteProcess(it.worker_id, it.pid, it.started, link))
    except BaseException:
        for it in starting:
            quietly(it.abandon)
        raise
    return ready


def _await(starting: list[_Starting], jobs: dict[int, bytes], deadline: float) -> None:
    """Waits until all workers have connected and read the dataset."""
    news: queue.SimpleQueue[_News] = queue.SimpleQueue()
    waiting, (bell, ringer) = [*starting], socket.socketpair()

    def report(outcome: _News) -> None:
        news.put(outcome)
        with contextlib.suppress(OSError):  # the wait is over
            ringer.send(b"1")

    with bell, ringer:
        while waiting:
            listeners = {it.listener: it for it in waiting if len(it.pending) < _AT_ONCE}
            for ready in wait([*listeners, bell], REMOTE_CHECK):
                if ready is bell:
                    bell.recv(1)
                    _settle(*news.get(), waiting)
                elif (it := listeners[ready]) in waiting:  # type: ignore[index]
                    it.accept(jobs[it.worker_id], deadline, report)
            _check(waiting, deadline)


def _settle(
    it: _Starting, connection: socket.socket, outcome: int | Exception | None, waiting: list[_Starting]
) -> None:
    """Takes the result of a thread that has identified a connection."""
    thread = it.pending.pop(connection, None)
    if thread is None:
        return  # the worker has come by another one
    thread.join()
    if isinstance(outcome, int):
        it.settle(connection, outcome)
        waiting.remove(it)
        return
    connection.close()
    if isinstance(outcome, handshake.HandshakeError):
        raise RuntimeError(_refusal(it, str(outcome))) from None
    # At the deadline, `_check` raises.
    if isinstance(outcome, OSError) and not isinstance(outcome, TimeoutError):
        raise StartError(_refusal(it, it.started.failure() or str(outcome))) from None
    if outcome is not None and not isinstance(outcome, OSError):
        raise outcome


def _refusal(it: _Starting, reason: str) -> str:
    return f"worker {it.worker_id} of a DataLoader cannot start on another machine: {reason}"


def _check(waiting: list[_Starting], deadline: float) -> None:
    """Raises if a worker has ended, or the time is over."""
    late = time.monotonic() >= deadline
    for it in waiting:
        reason = it.started.failure()
        if reason is not None:
            raise StartError(_refusal(it, reason))
        if late:
            if it.is_proved:
                reason = "it has connected, and has not read the dataset within the limit of its start"
            else:
                reason = f"it has not connected within the limit of its start; {it.started.waits_for()}"
            reason += ". A slow start needs a larger RUSTLOADER_REMOTE_START_SECONDS"
            raise RuntimeError(_refusal(it, reason))


def serve(read: Callable[[], bytes], call: Call, seconds: float) -> None:
    """Runs a worker in this process, until the main process ends it or is gone.

    Args:
        read: Returns what ``Blob`` has pickled. Nothing keeps it: it may be as large as the dataset.
        call: The parameters of the connection.
        seconds: Seconds that the handshake may take.
    """
    deadline = time.monotonic() + seconds
    connection = handshake.connect(call.address, call.port, call.token, call.worker_id, os.getpid(), deadline)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        framed = handshake.receive_reply(connection, deadline)
        try:
            job: Job = pickle.loads(framed[_SIZES.size :])
            dataset, shared = arguments.unmarked(pickle.loads(read()))
        except Exception:
            at = f", at its {name}" if (name := arguments.present()) else ""
            text = f"it cannot read the dataset or its functions{at}:\n{traceback.format_exc()}"
            handshake.send_reply(connection, False, text.encode(), deadline)
            raise
        job = dataclasses.replace(job, **shared)
        handshake.send_reply(connection, True, b"", deadline)
        connection.settimeout(None)
        stack.pop_all()
    ring_slots, region_len = _SIZES.unpack_from(framed)
    del framed
    by_name.use()
    port = Port.remote(connection.detach(), ring_slots, region_len, pickle.loads)
    try:
        main.serve(port, dataset, job, call.worker_id)
    finally:
        port.finish(REMOTE_FINISH)
