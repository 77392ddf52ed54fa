"""Errors for dead workers and the dead pin thread, with torch's texts."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import signal
from collections.abc import Callable
from typing import Any

from rustloader._core import Death
from rustloader.config import STATUS_AFTER
from rustloader.errors import WorkerDiedError, WorkerStalledError
from rustloader.workers import stalls


def error_of(death: Death, process: Any) -> Callable[[], WorkerDiedError]:
    """Returns a function that makes the error of a death; each call that raises it makes a new one.

    ``process`` is the worker's, or None. Programs may have closed or replaced it.
    """
    exitcode, name = death.exitcode, death.signal
    if exitcode is None:
        exitcode = _exitcode_of(process)
        if exitcode is not None and exitcode < 0:
            name = signal.strsignal(-exitcode) or f"Unknown signal {-exitcode}"
    if death.index is None:
        note = f"It was worker {death.worker_id}."
    else:
        note = f"Worker {death.worker_id} was to fetch the batch of index {stalls.index_text(death.index)}."
    kind: type[WorkerDiedError] = WorkerDiedError
    text, index = _text(death.pid, exitcode, name), death.index
    if death.stalled:
        kind, text = WorkerStalledError, stalls.text(death.worker_id, text)

    def make() -> WorkerDiedError:
        error = kind(text, worker_id=death.worker_id, pid=death.pid, exitcode=exitcode, index=index)
        error.add_note(note)
        return error

    return make


def pin_thread_error(cause: str) -> Callable[[], RuntimeError]:
    """Returns a function that makes the error of the pin thread's end."""

    def make() -> RuntimeError:
        error = RuntimeError("Pin memory thread exited unexpectedly")
        if cause:
            error.add_note(cause)
        return error

    return make


def _exitcode_of(process: Any) -> int | None:
    # Under forkserver only the fork server learns how a worker ended, and reports it a little later. join() could wait
    # without limit where a program has closed all descriptors.
    # A closed process raises ValueError, and what a program has put in its place AttributeError. Other errors come from
    # signal handlers.
    with contextlib.suppress(AttributeError, ValueError):
        multiprocessing.connection.wait([process.sentinel], STATUS_AFTER)
        exitcode: int | None = process.exitcode
        return exitcode
    return None


def _text(pid: int, exitcode: int | None, signal_name: str | None) -> str:
    if not exitcode:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
    if exitcode > 0:
        return (
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {exitcode}. "
            "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."
        )
    text = f"DataLoader worker (pid {pid}) is killed by signal: {signal_name}. "
    if exitcode == -signal.SIGBUS:
        text += (
            "It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit."
        )
    return text
