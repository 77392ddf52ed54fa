"""Starts workers on other machines, and serves there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import selectors
import socket
import time
import traceback
from collections.abc import Sequence
from typing import Any

from rustloader._core import Engine, Link, Port
from rustloader.config import REMOTE_CHECK, REMOTE_FINISH
from rustloader.remote import handshake
from rustloader.remote.context import Call, RemoteContext, Started
from rustloader.workers import main
from rustloader.workers.bootstrap import Job

# The fields of a job that are pickled together with the dataset, because they may share objects with it.
_SHARED = ("collate_fn", "init_fn", "on_error")


class StartError(RuntimeError):
    """A worker has ended in its start, or its connection has: another start may succeed."""


class RemoteProcess:
    """A worker on another machine, with the part of ``multiprocessing.Process`` that programs look at.

    Attributes:
        pid: Its process there.
        exitcode: None: nothing tells it.
        daemon: True.
    """

    exitcode: int | None = None
    daemon = True

    def __init__(self, worker_id: int, pid: int, started: Started, link: Link) -> None:
        self.worker_id, self.pid = worker_id, pid
        self._started, self._link = started, link

    @property
    def name(self) -> str:
        """A name for people."""
        return f"RemoteWorker-{self.worker_id}"

    def is_alive(self) -> bool:
        """Whether its connection is open."""
        return not self._link.has_ended

    @property
    def end(self) -> str | None:
        """Why it has ended, as far as this machine knows; None if it has left, or lives."""
        reason = self._link.reason
        return None if reason is None else self._started.failure() or reason

    def kill(self) -> None:
        """Ends it."""
        self._started.kill()

    terminate = kill

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the connection."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(REMOTE_CHECK)


class Blob:
    """The dataset, and what is pickled with it: once for all workers and their replacements."""

    def __init__(self, context: RemoteContext, dataset: Any, job: Job) -> None:
        shared = {name: getattr(job, name) for name in _SHARED}
        self.context = context
        self.reference = context.put(context.dumps((dataset, shared)))

    def job_of(self, job: Job, worker_id: int) -> bytes:
        """The job of one worker, without what is in the blob."""
        without: dict[str, Any] = dict.fromkeys(_SHARED)
        own = dataclasses.replace(job.of_worker(worker_id), **without, unblock=[], sigterm_seconds=None)
        return self.context.dumps(own)


class _Starting:
    """A worker between its launch and the end of its handshake."""

    def __init__(self, blob: Blob, worker_id: int, generation: int) -> None:
        address = blob.context.address()
        self.worker_id, self.token = worker_id, handshake.new_token()
        self.listener = socket.create_server((address, 0))
        self.connection: socket.socket | None = None
        self.pid = 0
        try:
            port = self.listener.getsockname()[1]
            call = Call(address, port, self.token, worker_id, generation)
            self.started = blob.context.launch(blob.reference, call)
        except BaseException:
            self.listener.close()
            raise

    def accept(self, job: bytes, deadline: float) -> socket.socket | None:
        """Takes a connection, and sends the job if it is the worker's; None for a stranger."""
        connection, _ = self.listener.accept()
        try:
            pid = handshake.is_expected(connection, self.token, self.worker_id, deadline)
            if pid is None:
                connection.close()
                return None
            handshake.send_answer(connection, True, job, deadline)
        except BaseException:
            connection.close()
            raise
        self.connection, self.pid = connection, pid
        self.listener.close()
        return connection

    def abandon(self) -> None:
        """Ends the worker, and its connection."""
        self.listener.close()
        if self.connection is not None:
            self.connection.close()
        self.started.kill()


def start(engine: Engine, blob: Blob, worker_ids: Sequence[int], job: Job) -> list[RemoteProcess]:
    """Starts workers at the same time, and hands their connections to the engine. After an error none of them runs.

    Raises:
        StartError: A worker has ended, or its connection.
        RuntimeError: A worker has other versions, cannot read the dataset, or does not within the context's limit.
    """
    deadline = time.monotonic() + blob.context.start_seconds
    starting: list[_Starting] = []
    ready: list[RemoteProcess] = []
    slots = engine.ring_slots
    try:
        for worker_id in worker_ids:
            starting.append(_Starting(blob, worker_id, job.generation))
        _await(starting, {it.worker_id: _framed(slots, blob.job_of(job, it.worker_id)) for it in starting}, deadline)
        for it in starting:
            assert it.connection is not None
            it.connection.settimeout(None)
            link = engine.attached(it.worker_id, it.connection.detach(), it.pid)
            ready.append(RemoteProcess(it.worker_id, it.pid, it.started, link))
    except BaseException:
        for it in starting:
            it.abandon()
        raise
    return ready


def _framed(slots: int, job: bytes) -> bytes:
    return slots.to_bytes(4, "little") + job


def _await(starting: list[_Starting], jobs: dict[int, bytes], deadline: float) -> None:
    """Waits until all workers have connected and read the dataset."""
    with selectors.DefaultSelector() as selector:
        for it in starting:
            selector.register(it.listener, selectors.EVENT_READ, it)
        while selector.get_map():
            for key, _ in selector.select(REMOTE_CHECK):
                it = key.data
                try:
                    if it.connection is None:
                        # A stranger leaves the listener as it is.
                        connection = it.accept(jobs[it.worker_id], deadline)
                        if connection is not None:
                            selector.unregister(key.fileobj)
                            selector.register(connection, selectors.EVENT_READ, it)
                    else:
                        handshake.receive_answer(it.connection, deadline)
                        selector.unregister(key.fileobj)
                except handshake.HandshakeError as error:
                    raise RuntimeError(_refusal(it, str(error))) from None
                except OSError as error:
                    raise StartError(_refusal(it, it.started.failure() or str(error))) from None
            _check([it for it in starting if any(key.data is it for key in selector.get_map().values())], deadline)


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
            reason = (
                f"it has not connected within the limit of its start; {it.started.waits_for()}. A slow start needs a "
                "larger RUSTLOADER_REMOTE_START_SECONDS"
            )
            raise RuntimeError(_refusal(it, reason))


def serve(blob: bytes, call: Call, seconds: float) -> None:
    """Runs a worker in this process, until the main process ends it or is gone.

    Args:
        blob: What ``Blob`` has pickled.
        call: How to connect.
        seconds: Seconds that the handshake may take.
    """
    deadline = time.monotonic() + seconds
    connection = handshake.connect(call.address, call.port, call.token, call.worker_id, os.getpid(), deadline)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        framed = handshake.receive_answer(connection, deadline)
        try:
            job: Job = pickle.loads(framed[4:])
            dataset, shared = pickle.loads(blob)
        except Exception:
            text = f"it cannot read the dataset or its functions:\n{traceback.format_exc()}"
            handshake.send_answer(connection, False, text.encode(), deadline)
            raise
        job = dataclasses.replace(job, **shared)
        handshake.send_answer(connection, True, b"", deadline)
        connection.settimeout(None)
        stack.pop_all()
    port = Port.remote(connection.detach(), int.from_bytes(framed[:4], "little"), pickle.loads)
    try:
        main.serve(port, dataset, job, call.worker_id)
    finally:
        port.finish(REMOTE_FINISH)
