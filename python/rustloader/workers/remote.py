"""Starts workers on other machines, and runs them there."""

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

# Fields of a job that are pickled together with the dataset, because they may share objects with it.
_SHARED = ("collate_fn", "init_fn", "config")
# The header of a job: the number of slots per ring and the number of bytes per region in the engine's arena.
_SIZES = struct.Struct("<IQ")
# Maximum number of connections to one worker's listener that are authenticated at a time. The others wait.
_AT_ONCE = 16


class StartError(RuntimeError):
    """Raised if a worker or its connection ends during the start. Another start may succeed."""


class RemoteProcess:
    """A worker on another machine, with those members of ``multiprocessing.Process`` that programs use.

    Attributes:
        pid: Process ID on the other machine.
        exitcode: Always None, because it is unknown.
        daemon: Always True.
    """

    exitcode: int | None = None
    daemon = True

    def __init__(self, worker_id: int, pid: int, started: Started, link: Link) -> None:
        self.worker_id, self.pid = worker_id, pid
        self._started, self._link = started, link
        # Why the worker ended, recorded before this process kills it: afterwards the cluster reports only the kill.
        self._reason_before_kill: str | None = None

    @property
    def name(self) -> str:
        """A readable name."""
        return f"RemoteWorker-{self.worker_id}"

    def is_alive(self) -> bool:
        """Returns True if the worker's connection is open."""
        return not self._link.has_ended

    @property
    def end(self) -> str | None:
        """The reason why the worker ended, as far as this machine knows; None if it is alive or ended normally."""
        return None if self._link.reason is None else self._known_reason()

    def _known_reason(self) -> str | None:
        return self._reason_before_kill or self._started.failure() or self._link.reason

    def why_died(self) -> str | None:
        """Returns the reason why the worker died. Waits up to ``STATUS_AFTER`` seconds for the cluster's reason, which
        is more precise than the connection's."""
        deadline = time.monotonic() + STATUS_AFTER
        while (reason := self._reason_before_kill or self._started.failure()) is None and time.monotonic() < deadline:
            time.sleep(REMOTE_CHECK)
        return reason or self._link.reason

    def kill(self) -> None:
        """Kills the worker."""
        if not self.is_alive():
            self._reason_before_kill = self._known_reason()
        self._started.kill()

    terminate = kill

    def join(self, timeout: float | None = None) -> None:
        """Waits until the worker's connection has ended, for at most ``timeout`` seconds if it is given."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(REMOTE_CHECK)


class Blob:
    """The pickle of the dataset and of the other arguments that all workers and their replacements share."""

    def __init__(self, context: RemoteContext, dataset: Any, job: Job) -> None:
        shared = {name: getattr(job, name) for name in _SHARED}
        self.context = context
        with arguments.naming_argument(), packing():
            pickled = context.dumps(arguments.marked(dataset, job, shared))
        self.reference = context.put(pickled)

    def job_of(self, job: Job, worker_id: int) -> bytes:
        """Returns the job of one worker, without the parts that are in the blob."""
        removed: dict[str, Any] = dict.fromkeys(_SHARED)
        remaining = dataclasses.replace(job.of_worker(worker_id), **removed, unblock=[], sigterm_seconds=None)
        return self.context.dumps(remaining)


class _Starting:
    """A worker between its launch and the end of its handshake."""

    def __init__(self, blob: Blob, worker_id: int, generation: int) -> None:
        address = blob.context.address()
        self.worker_id, self.token = worker_id, handshake.new_token()
        self.listener = handshake.listen(address)
        self.connection: socket.socket | None = None
        # True after the worker has proved its identity.
        self.is_authenticated = False
        # Connections that are being authenticated, and their threads.
        self.pending: dict[socket.socket, threading.Thread] = {}
        self.pid = 0
        try:
            tcp_port = self.listener.getsockname()[1]
            call = Call(address, tcp_port, self.token, worker_id, generation)
            self.started = blob.context.launch(blob.reference, call)
        except BaseException:
            self.listener.close()
            raise

    def accept(self, job: bytes, deadline: float, report: Callable[[_Report], None]) -> None:
        """Accepts a connection, and has a thread authenticate it, so that a stranger that sends nothing does not delay
        the other connections."""
        connection, _ = self.listener.accept()
        thread = threading.Thread(target=self._greet, args=(connection, job, deadline, report), daemon=True)
        try:
            thread.start()
        except BaseException:
            connection.close()
            raise
        self.pending[connection] = thread

    def _greet(self, connection: socket.socket, job: bytes, deadline: float, report: Callable[[_Report], None]) -> None:
        """Authenticates a connection. If it is the worker's, sends the job and waits until the worker has read the job
        and the dataset."""
        outcome: int | Exception | None
        try:
            outcome = handshake.authenticate_worker(connection, self.token, self.worker_id, deadline)
            if outcome is not None:
                self.is_authenticated = True
                handshake.send_reply(connection, True, job, deadline)
                handshake.receive_reply(connection, deadline)
        except Exception as error:
            outcome = error
        report((self, connection, outcome))

    def settle(self, connection: socket.socket, pid: int) -> None:
        """Keeps ``connection``, which is the worker's, and closes the others."""
        self.connection, self.pid = connection, pid
        self.close()

    def close(self) -> None:
        """Closes the listener, and the connections that have not been authenticated."""
        self.listener.close()
        for connection, thread in self.pending.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
            connection.close()
        self.pending.clear()

    def abandon(self) -> None:
        """Kills the worker, and closes its connection."""
        self.close()
        if self.connection is not None:
            self.connection.close()
        self.started.kill()


# The report of a thread about a connection. The last item is the worker's pid, None for a stranger, or an error.
_Report = tuple[_Starting, socket.socket, int | Exception | None]


def start(engine: Engine, blob: Blob, worker_ids: Sequence[int], job: Job) -> list[RemoteProcess]:
    """Starts workers, all at the same time, and passes their connections to the engine. If an error is raised, none of
    them is left running.

    Raises:
        StartError: A worker or its connection has ended.
        RuntimeError: A worker runs different versions, cannot read the dataset, or is not ready within the start limit
            of the context.
    """
    deadline = time.monotonic() + blob.context.start_seconds
    starting: list[_Starting] = []
    ready: list[RemoteProcess] = []
    sizes = _SIZES.pack(engine.ring_slots, engine.region_len)
    try:
        for worker_id in worker_ids:
            starting.append(_Starting(blob, worker_id, job.generation))
        jobs = {worker_id: sizes + blob.job_of(job, worker_id) for worker_id in worker_ids}
        _await(starting, jobs, deadline)
        for worker in starting:
            assert worker.connection is not None
            worker.connection.settimeout(None)
            link = engine.attached(worker.worker_id, worker.connection.detach(), worker.pid)
            ready.append(RemoteProcess(worker.worker_id, worker.pid, worker.started, link))
    except BaseException:
        for worker in starting:
            quietly(worker.abandon)
        raise
    return ready


def _await(starting: list[_Starting], jobs: dict[int, bytes], deadline: float) -> None:
    """Waits until all workers have connected and read the dataset."""
    reports: queue.SimpleQueue[_Report] = queue.SimpleQueue()
    waiting, (wake_reader, wake_writer) = [*starting], socket.socketpair()

    def report(item: _Report) -> None:
        reports.put(item)
        with contextlib.suppress(OSError):  # the wait is over
            wake_writer.send(b"1")

    with wake_reader, wake_writer:
        while waiting:
            listeners = {worker.listener: worker for worker in waiting if len(worker.pending) < _AT_ONCE}
            for ready in wait([*listeners, wake_reader], REMOTE_CHECK):
                if ready is wake_reader:
                    wake_reader.recv(1)
                    _settle(*reports.get(), waiting)
                elif (worker := listeners[ready]) in waiting:  # type: ignore[index]
                    worker.accept(jobs[worker.worker_id], deadline, report)
            _check(waiting, deadline)


def _settle(
    worker: _Starting, connection: socket.socket, outcome: int | Exception | None, waiting: list[_Starting]
) -> None:
    """Handles the report of a thread that has checked a connection."""
    thread = worker.pending.pop(connection, None)
    if thread is None:
        return  # another connection is the worker's
    thread.join()
    if isinstance(outcome, int):
        worker.settle(connection, outcome)
        waiting.remove(worker)
        return
    connection.close()
    if isinstance(outcome, handshake.HandshakeError):
        raise RuntimeError(_refusal(worker, str(outcome))) from None
    # At the deadline, `_check` raises.
    if isinstance(outcome, OSError) and not isinstance(outcome, TimeoutError):
        raise StartError(_refusal(worker, worker.started.failure() or str(outcome))) from None
    if outcome is not None and not isinstance(outcome, OSError):
        raise outcome


def _refusal(worker: _Starting, reason: str) -> str:
    return f"worker {worker.worker_id} of a DataLoader cannot start on another machine: {reason}"


def _check(waiting: list[_Starting], deadline: float) -> None:
    """Raises an error if a worker has ended, or the deadline has passed."""
    late = time.monotonic() >= deadline
    for worker in waiting:
        reason = worker.started.failure()
        if reason is not None:
            raise StartError(_refusal(worker, reason))
        if late:
            if worker.is_authenticated:
                reason = "it has connected, but has not read the dataset within the time limit of its start"
            else:
                reason = f"it has not connected within the time limit of its start; {worker.started.waits_for()}"
            reason += ". If the start is slow, raise RUSTLOADER_REMOTE_START_SECONDS"
            raise RuntimeError(_refusal(worker, reason))


def serve(read: Callable[[], bytes], call: Call, seconds: float) -> None:
    """Runs a worker in this process until the main process ends it or is gone.

    Args:
        read: Returns the pickle that ``Blob`` made. No reference to it is kept, because it may be as large as the
            dataset.
        call: The parameters of the connection.
        seconds: Time limit of the handshake, in seconds.
    """
    deadline = time.monotonic() + seconds
    connection = handshake.connect(call.address, call.port, call.token, call.worker_id, os.getpid(), deadline)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        message = handshake.receive_reply(connection, deadline)
        try:
            job: Job = pickle.loads(message[_SIZES.size :])
            dataset, shared = arguments.unmarked(pickle.loads(read()))
        except Exception:
            where = f" (it failed at the argument {name})" if (name := arguments.current()) else ""
            text = f"it cannot read the dataset or the loader's functions{where}:\n{traceback.format_exc()}"
            handshake.send_reply(connection, False, text.encode(), deadline)
            raise
        job = dataclasses.replace(job, **shared)
        handshake.send_reply(connection, True, b"", deadline)
        connection.settimeout(None)
        stack.pop_all()
    ring_slots, region_len = _SIZES.unpack_from(message)
    del message
    by_name.use()
    port = Port.remote(connection.detach(), ring_slots, region_len, pickle.loads)
    try:
        main.serve(port, dataset, job, call.worker_id)
    finally:
        port.finish(REMOTE_FINISH)
